"""Time and memory of `nearkin evaluate` on many vectors.

    python -m benchmarks many_vectors [--train 1000000] [--test 10000]

Vectors of 384 numbers, Gaussian clusters of 100 classes, are written to FOLDER (by default a
temporary one) as `nearkin embed` writes them, unless they are there. Then the first are the bank
of kNN and what the probe learns from, and last they are clustered themselves. Rows have the
seconds of a process that does all of it, its CPU seconds, and the peak memory of it and of those
that it starts: pages of mapped files, which the system takes back at need, are not counted.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np

import nearkin
import nearkin.commands.evaluate  # with all that it takes
from benchmarks.shared.memory import Watch, alone
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.shards import Note, ShardFolder

CLASSES, DIM, SHARD = 100, 384, 65_536
SPREAD = 2.5  # Of the images of a class, in the units that classes differ by
OPTIONS: Final = (
    Option("train", 1_000_000, "vectors of the bank", quick=2000),
    Option("test", 10_000, "vectors to classify", quick=500),
    Option("folder", "", "where vectors are kept"),
)


def make(path: Path, count: int, seed: int) -> None:
    """Write vectors as parts."""
    folder = ShardFolder.claim(path, Note("", f"synthetic {seed}", count, SHARD))
    centers = np.random.default_rng(99).standard_normal((CLASSES, DIM), np.float32)
    names = [f"class{number:03}" for number in range(CLASSES)]
    for number in folder.missing():
        rng, start = np.random.default_rng((seed, number)), number * SHARD
        rows = np.arange(start, min(count, start + SHARD))
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


def evaluated(vectors: Path, train: Path | None) -> tuple[float, list[str]]:
    """Evaluate; return the rise of the memory and what is measured."""
    with Watch() as memory:
        found = nearkin.evaluate(vectors, bank=train, device="cpu")
    return memory.megabytes - memory.before, list(found.lines()[1:])


def run(options: Namespace) -> Iterator[Row]:
    """Make vectors, and evaluate them."""
    kept = nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory()
    with kept as folder:
        train, test = (
            Path(folder) / f"{name}-{getattr(options, name)}" for name in ("train", "test")
        )
        for path, count, seed in ((train, options.train, 0), (test, options.test, 1)):
            make(path, count, seed)
        for vectors, bank in ((test, train), (train, None)):
            cost = alone(evaluated, vectors, bank)
            megabytes, lines = cost.result
            more = {"bank": bank.name if bank else "", "cpu_seconds": cost.cpu_seconds}
            yield Row(vectors.name, cost.seconds, more=more | {"found": lines})
            yield Row(vectors.name, megabytes, "MB")
