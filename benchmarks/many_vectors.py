"""Time and memory of `nearkin evaluate` on many vectors, by one process and by two.

    python benchmarks/many_vectors.py OUT [--train 1000000] [--test 10000] [--processes 1 2]

Vectors of 384 numbers, Gaussian clusters of 100 classes, are written to OUT as `nearkin embed`
writes them, unless they are there. Then the first are the bank of kNN and what the probe learns
from, and last they are clustered themselves. Printed at each measure: CPU seconds of the main
process, and its own memory (RssAnon): pages of mapped files, which the system takes back at need,
are not counted. The last line of each has the CPU seconds of all processes, and the largest peak.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

CLASSES, DIM, SHARD = 100, 384, 65_536
SPREAD = 2.5  # Of the images of a class, in the units that classes differ by


def make(path: Path, count: int, seed: int) -> None:
    """Write vectors as parts."""
    import numpy as np

    from nearkin.evaluation.embeddings import Embeddings
    from nearkin.evaluation.table import Note, PartFolder

    folder = PartFolder.claim(path, Note("", f"synthetic {seed}", count, SHARD))
    centers = np.random.default_rng(99).standard_normal((CLASSES, DIM), np.float32)
    names = [f"class{number:03}" for number in range(CLASSES)]
    for number in folder.missing():
        rng, rows = np.random.default_rng((seed, number)), folder._rows(number)
        labels = rng.integers(CLASSES, size=len(rows))
        noise = SPREAD * rng.standard_normal((len(rows), DIM), np.float32)
        part = Embeddings(
            centers[labels] + noise,
            labels,
            paths=[f"{row:09}.jpg" for row in rows.tolist()],
            classes=names,
            splits=np.full(len(rows), ""),
        )
        folder.write(number, part.normalized())


def own_memory(pid: str) -> float:
    """Megabytes that a process shares with no file and no other process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class Steps:
    """Prints the CPU seconds of the main process at each measure."""

    def __init__(self) -> None:
        self.text = ""

    def info(self, text: str) -> None:
        """Print a log line."""
        print(f"    {text}", flush=True)

    def progress(self, done: int, total: int, text: str) -> None:
        """Print a new step."""
        del done, total
        if text != self.text:
            self.text = text
            print(
                f"    {time.process_time():7.1f} s  {own_memory('self'):6.0f} MB  {text}",
                flush=True,
            )


def evaluated(command: list[str]) -> None:
    """Run a command, and print its seconds, its CPU seconds and its peak of memory."""
    start, before = time.perf_counter(), sum(os.times()[2:4])
    process, ended, peaks = subprocess.Popen(command), Event(), [0.0]

    def watch() -> None:
        while not ended.wait(0.1):
            for child in (str(process.pid), *children(process.pid)):
                try:
                    peaks.append(own_memory(child))
                except (OSError, StopIteration):  # it has just ended
                    continue

    thread = Thread(target=watch)
    thread.start()
    code = process.wait()
    ended.set()
    thread.join()
    seconds, cpu = time.perf_counter() - start, sum(os.times()[2:4]) - before
    peak = f"peak {max(peaks):.0f} MB, exit code {code}"
    print(f"  {seconds:.0f} s, {cpu:.0f} s of CPU, {peak}", flush=True)


def children(pid: int) -> list[str]:
    """Processes that a process has started."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return []


def one(vectors: str, train: str, processes: int) -> None:
    """Evaluate in this process, and in others that it starts."""
    import nearkin
    import nearkin.commands.evaluate  # with all that it takes

    print(f"    after imports {own_memory('self'):.0f} MB")
    evaluation = nearkin.evaluate(
        vectors, train=train or None, devices=processes, device="cpu", reporter=Steps()
    )
    for line in evaluation.lines()[1:]:
        print(f"    {line}")


def main() -> None:
    """Make vectors, and evaluate them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--train", type=int, default=1_000_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", nargs=3)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], args.one[1], int(args.one[2]))
        return
    train, test = args.out / f"train-{args.train}", args.out / f"test-{args.test}"
    for path, count, seed in ((train, args.train, 0), (test, args.test, 1)):
        make(path, count, seed)
    for processes in args.processes:
        for vectors, bank in ((test, train), (train, "")):
            print(f"{vectors.name}, --train {bank}, {processes} processes", flush=True)
            more = ["--one", str(vectors), str(bank), str(processes)]
            evaluated([sys.executable, __file__, *more])


if __name__ == "__main__":
    main()
