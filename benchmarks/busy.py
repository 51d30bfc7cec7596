"""`nearkin train` and `nearkin evaluate` beside processes that compute without a pause.

    python -m benchmarks busy [--cpus 2] [--others 2 4] [--images 1200] [--epochs 3] [--spinning]

Each command runs alone and beside others of the same priority, all on the first `--cpus` CPUs, in
turns; by the clock, imports included. A ratio is the time beside others over that alone. With
`--spinning`, the commands also run with threads that spin while they wait, as without nearkin's
own setting of OMP_WAIT_POLICY and OPENBLAS_THREAD_TIMEOUT. Nothing else may run.
"""

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import against_all, turns

SIDE, CLASSES = 32, 10
SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_THREAD_TIMEOUT": "26"}  # 26: its default
OPTIONS: Final = (
    Option("cpus", 2, "CPUs for all of it"),
    Option("others", [2, 4], "numbers of busy processes", quick=[1]),
    Option("images", 1200, "in the data", quick=64),
    Option("epochs", 3, "of the training", quick=1),
    Option("spinning", False, "also with threads that spin"),
)


def write_images(path: Path, num_images: int) -> None:
    """Write noise around an image per class."""
    generator = np.random.default_rng(0)
    labels = np.arange(num_images) % CLASSES
    centers = generator.normal(128, 16, (CLASSES, SIDE, SIDE, 3))
    pixels = centers[labels] + generator.normal(0, 48, (num_images, SIDE, SIDE, 3))
    np.savez(path, x=pixels.clip(0, 255).astype(np.uint8), y=labels)


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep so many processes busy for the length of a `with` block."""
    code = "print(flush=True)\nwhile True: pass"
    loop = [sys.executable, "-c", code]
    started = [subprocess.Popen(loop, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def command(words: list[str], others: int, changed: dict[str, str]) -> None:
    """Run a command of nearkin beside so many processes."""
    kept = {name: value for name, value in os.environ.items() if name not in SPINNING}
    whole = [sys.executable, "-m", "nearkin", *words]
    with beside(others):
        subprocess.run(whole, env=kept | changed, check=True, stdout=subprocess.DEVNULL)


def ways(words: list[str], others: list[int], spinning: bool) -> dict[str, Callable[[], None]]:
    """Return the variants of a command, the first of which is alone."""
    kinds = {"": {}, ", spinning": SPINNING} if spinning else {"": {}}
    return {
        (f"beside {count}" if count else "alone") + kind: partial(command, words, count, changed)
        for kind, changed in kinds.items()
        for count in [0, *others]
    }


def run(options: Namespace) -> Iterator[Row]:
    """Measure both commands."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[: options.cpus])
    try:
        with tempfile.TemporaryDirectory() as name:
            data, out = Path(name) / "data.npz", Path(name) / "run"
            write_images(data, options.images)
            train = ["train", str(data), "--epochs", str(options.epochs), "-o", str(out), "-q"]
            train += ["--overwrite"]
            command(train, 0, {})
            for words in (train, ["evaluate", str(out), "--json"]):
                every = ways(words, options.others, options.spinning)
                yield from against_all(words[0], turns(every, options.rounds), "alone")
    finally:
        os.sched_setaffinity(0, before)
