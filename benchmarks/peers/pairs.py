"""Make the runs that docs/results.md compares: nearkin beside lightly, one core each.

    python -m benchmarks peers --data FOLDER [--out runs/peers] [--minutes 60]

FOLDER has cifar10.npz and fashion_mnist.npz. Makes what is missing in docs/results/peers.jsonl,
pair after pair, and appends the rows of a pair when both are done; the same command goes on. A run
that had less than nine tenths of its core is refused, with its partner, and made again by the next
call; `--clock cpu` gives every run its budget in seconds of the CPU instead, for a machine that is
shared. Linux, two cores or more.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from benchmarks.peers.plan import BASELINES, EPOCHS, METHODS, SECONDS, Pair, Run, plan, rows
from benchmarks.shared.options import Option
from benchmarks.shared.rows import ROOT, Row

REFUSED = 3  # exit status of `side.py`
FILES: Final = {"cifar10": "cifar10.npz", "fashion": "fashion_mnist.npz"}
OPTIONS: Final = (
    Option("methods", [*METHODS, *BASELINES], "those to compare", quick=["pixels", "simclr"]),
    Option("out", "runs/peers", "where runs are kept; a temporary folder if empty", quick=""),
    Option("results", "docs/results/peers.jsonl", "rows; in OUT if empty", quick=""),
    Option("seconds", SECONDS, "budget of a run", quick=2.0),
    Option("epochs", EPOCHS, "of runs at equal epochs", quick=1),
    Option("clock", "wall", "that budgets are of", choices=("wall", "cpu"), quick="cpu"),
    Option("minutes", 0.0, "begin no pair after; 0: no limit"),
    Option("most", 0, "pairs of this call; 0: all", quick=2),
)


@dataclass(frozen=True)
class Where:
    """Files, and the clock."""

    out: Path
    results: Path
    data: Mapping[str, Path]
    clock: str
    until: float  # in seconds of the clock of `time.time`

    def folder(self, run: Run) -> Path:
        """Where a run keeps its row when it is done."""
        return self.out / run.name


@contextlib.contextmanager
def started(run: Run, core: int, where: Where) -> Iterator[subprocess.Popen[str]]:
    """Start a run on a core; it waits for a line once its data are in memory."""
    folder = where.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.peers.side", json.dumps(asdict(run))]
    words = [
        *command,
        where.data[run.data],
        folder,
        "--clock",
        where.clock,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with (
        (folder / "log.txt").open("a", encoding="utf-8") as log,
        subprocess.Popen(
            [str(word) for word in words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        os.sched_setaffinity(process.pid, {core})
        try:
            yield process
        finally:
            process.kill()  # where this program was interrupted; else it has ended


def pipe(stream: IO[str] | None) -> IO[str]:
    """Return one end of a process that was started with pipes."""
    assert stream is not None
    return stream


def make(pair: Pair, cores: Sequence[int], where: Where) -> list[int]:
    """Make the runs of a pair that are not done, at the same time; return their exit statuses."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(run, core, where))
            for run, core in zip(pair, cores, strict=False)
            if not (where.folder(run) / "row.json").exists()
        ]
        # One that has failed says nothing. All are waited for before the first may go.
        for process in [each for each in processes if pipe(each.stdout).readline()]:
            pipe(process.stdin).write("go\n")
            pipe(process.stdin).flush()
        return [process.wait() for process in processes]


def keep(pair: Pair, where: Where) -> list[dict[str, Any]]:
    """Append the rows of a pair to the results; return them."""
    lines = [(where.folder(run) / "row.json").read_text(encoding="utf-8") for run in pair]
    where.results.parent.mkdir(parents=True, exist_ok=True)
    with where.results.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
    return [json.loads(line) for line in lines]


def finish(pair: Pair, cores: Sequence[int], where: Where) -> list[dict[str, Any]]:
    """Make a pair; return its rows, or nothing if it is refused."""
    statuses = make(pair, cores, where)
    if set(statuses) <= {0}:
        return keep(pair, where)
    if REFUSED in statuses:
        for run in pair:
            shutil.rmtree(where.folder(run))
        print(f"refused, the cores were shared: {pair[0].name} and its partner", flush=True)
    else:
        logs = ", ".join(str(where.folder(run) / "log.txt") for run in pair)
        raise SystemExit(f"a run has failed; see {logs}")
    return []


def shown(kept: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Yield the row of a pair, or of each baseline; none of a pair that was refused."""
    if not kept:
        return
    errors = {row["side"]: 1 - row["knn"] for row in kept}
    if "baseline" in errors:
        yield from (Row(row["name"], 1 - row["knn"], "kNN error") for row in kept)
        return
    own, other = errors["nearkin"], errors["lightly"]
    name = kept[0]["name"].removesuffix("-nearkin")
    yield Row(name, own, "kNN error", "lightly", other, other / own)


def made_up(folder: Path) -> Path:
    """Save random images of four classes."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 128), ("test", 40)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 4
    np.savez(folder / "random.npz", **arrays)
    return folder / "random.npz"


def where_of(options: Namespace, stack: contextlib.ExitStack) -> Where:
    """Return the files of a command line; random images stand for data that are not named."""
    out = Path(options.out or stack.enter_context(tempfile.TemporaryDirectory()))
    results = ROOT / options.results if options.results else out / "rows.jsonl"
    if options.data:
        paths = {name: Path(options.data) / file for name, file in FILES.items()}
        data = {name: path for name, path in paths.items() if path.exists()}
    elif options.results:
        raise SystemExit("name the folder of cifar10.npz and fashion_mnist.npz by --data")
    else:
        data = {"cifar10": made_up(out)}
    until = time.time() + 60 * options.minutes if options.minutes else math.inf
    return Where(out, results, data, options.clock, until)


def missing(options: Namespace, where: Where) -> Iterator[Pair]:
    """Yield the pairs that are asked for and have no rows; without lightly, baselines alone."""
    methods = options.methods
    if not find_spec("lightly"):
        print("lightly is not installed: baselines alone", file=sys.stderr)
        methods = [name for name in methods if name in BASELINES]
    done = {row["name"] for row in rows(where.results)}
    for pair in plan(options.seconds, options.epochs):
        run = pair[-1]
        chosen = run.data in where.data and any(each.method in methods for each in pair)
        if chosen and run.name not in done:
            yield pair


def run(options: Namespace) -> Iterator[Row]:
    """Make the pairs that are missing, as long as the time lasts."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("a pair takes two cores, and there is one")
    with contextlib.ExitStack() as stack:
        where = where_of(options, stack)
        for number, pair in enumerate(missing(options, where), 1):
            # Each side has either core in turn.
            yield from shown(finish(pair, cores[:2] if pair[-1].seed % 2 else cores[1::-1], where))
            if time.time() > where.until or number == options.most:
                break
