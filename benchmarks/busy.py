"""`nearkin train` and `nearkin evaluate` beside processes that compute without a pause.

    python benchmarks/busy.py [--rounds 3] [--cpus 2] [--others 2,4] [--images 1200] [--epochs 3]
        [--spinning]

Each command runs alone and beside others of the same priority, all on the first `--cpus` CPUs, in
turns; by the clock, imports included. The median of each is compared with that alone. With
`--spinning`, the commands also run with threads that spin while they wait, as without nearkin's
own setting of OMP_WAIT_POLICY and OPENBLAS_THREAD_TIMEOUT. Nothing else may run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from turns import show, turns

SIDE, CLASSES = 32, 10
SPINNING = {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_THREAD_TIMEOUT": "26"}  # 26: its default


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
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def run(words: list[str], others: int, changed: dict[str, str]) -> None:
    """Run a command of nearkin beside so many processes."""
    kept = {name: value for name, value in os.environ.items() if name not in SPINNING}
    command = [sys.executable, "-m", "nearkin", *words]
    with beside(others):
        subprocess.run(command, env=kept | changed, check=True, stdout=subprocess.DEVNULL)


def ways(words: list[str], others: list[int], spinning: bool) -> dict[str, Callable[[], None]]:
    """Return the variants of a command, the first of which is alone."""
    kinds = {"": {}, ", spinning": SPINNING} if spinning else {"": {}}
    return {
        (f"beside {count}" if count else "alone") + kind: partial(run, words, count, changed)
        for kind, changed in kinds.items()
        for count in [0, *others]
    }


def main() -> None:
    """Measure both commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--others", default="2,4")
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--spinning", action="store_true")
    options = parser.parse_args()
    others = [int(count) for count in options.others.split(",")]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])
    with tempfile.TemporaryDirectory() as name:
        data, out = Path(name) / "data.npz", Path(name) / "run"
        write_images(data, options.images)
        train = ["train", str(data), "--epochs", str(options.epochs), "-o", str(out), "-q"]
        commands = {"train": [*train, "--overwrite"], "evaluate": ["evaluate", str(out), "--json"]}
        run(commands["train"], 0, {})
        for verb, words in commands.items():
            print(f"nearkin {verb}, {options.images} images, {options.cpus} CPUs", flush=True)
            show(turns(ways(words, others, options.spinning), options.rounds), "alone")


if __name__ == "__main__":
    main()
