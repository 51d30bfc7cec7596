"""Make the runs that docs/results.md compares: nearkin beside lightly, one core each.

    python benchmarks/reproduce/pairs.py OUT --cifar10 cifar10.npz --fashion fashion_mnist.npz

Makes what is missing in docs/results/peers.jsonl, pair after pair, and appends the rows of a pair
when both are done. With `--minutes`, the last pair stops in time and leaves checkpoints in OUT, so
that the same command continues it. A run that had less than nine tenths of its core is refused,
with its partner, and made again by the next call; `--clock cpu` gives every run its budget in
seconds of the CPU instead, for a machine that is shared. Linux, two cores or more.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final

from plan import EPOCHS, FLOORS, METHODS, SECONDS, Pair, Run, plan, rows

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE.parents[1] / "docs" / "results" / "peers.jsonl"
PAUSED, REFUSED = 75, 3  # exit status of `side.py`


@dataclass(frozen=True)
class Where:
    """Files, and the clock."""

    out: Path
    results: Path
    data: Mapping[str, Path]
    clock: str
    until: float  # in seconds of the clock of `time.time`

    def folder(self, run: Run) -> Path:
        """Where a run keeps its checkpoint, and its row when it is done."""
        return self.out / run.name


@contextlib.contextmanager
def started(run: Run, core: int, where: Where) -> Iterator[subprocess.Popen[str]]:
    """Start a run on a core; it waits for a line once its data are in memory."""
    folder = where.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, HERE / "side.py", json.dumps(asdict(run)), where.data[run.data]]
    words = [*command, folder, "--clock", where.clock, "--until", where.until]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
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


def keep(pair: Pair, where: Where) -> None:
    """Append the rows of a pair to the results."""
    lines = [(where.folder(run) / "row.json").read_text(encoding="utf-8") for run in pair]
    where.results.parent.mkdir(parents=True, exist_ok=True)
    with where.results.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
    for row in map(json.loads, lines):
        print(f"{row['name']}: kNN {row['knn']:.3f}", flush=True)


def finish(pair: Pair, cores: Sequence[int], where: Where) -> bool:
    """Make a pair; return whether to go on with the next one."""
    statuses = make(pair, cores, where)
    if REFUSED in statuses:
        for run in pair:
            shutil.rmtree(where.folder(run))
        print(f"refused, the cores were shared: {pair[0].name} and its partner", flush=True)
    elif set(statuses) <= {0}:
        keep(pair, where)
    elif set(statuses) <= {0, PAUSED}:
        print(f"paused: {pair[0].name} and its partner; call again", flush=True)
    else:
        logs = ", ".join(str(where.folder(run) / "log.txt") for run in pair)
        sys.exit(f"a run has failed; see {logs}")
    return time.time() < where.until


def main() -> None:
    """Make the pairs that are missing, as long as the time lasts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--fashion", type=Path)
    parser.add_argument("--method", nargs="*", default=[*METHODS, *FLOORS])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="budget of a run")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of runs at equal epochs")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="length of this piece")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("a pair takes two cores, and there is one")
    if not find_spec("lightly"):
        parser.error("lightly is not installed; pip install lightly")
    given = {"cifar10": options.cifar10, "fashion": options.fashion}
    data = {name: path for name, path in given.items() if path}
    until = time.time() + 60 * options.minutes
    where = Where(options.out, options.results, data, options.clock, until)
    done = {row["name"] for row in rows(where.results)}
    for pair in plan(options.seconds, options.epochs):
        run = pair[-1]
        chosen = run.data in data and any(each.method in options.method for each in pair)
        if run.name in done or not chosen:
            continue
        # Each side has either core in turn.
        if not finish(pair, cores[:2] if run.seed % 2 else cores[1::-1], where):
            break


if __name__ == "__main__":
    main()
