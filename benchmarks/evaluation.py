"""Seconds and memory of each protocol of `nearkin evaluate`.

    python -m benchmarks evaluation [--train 10000] [--test 10000] [--dim 384]

Features are Gaussian clusters of 100 classes, so no image is read and no network runs: what
is added by these is forward passes, whose number each protocol states (docs/evaluation.md). Every
protocol is measured in a process of its own; memory is its peak above that after all imports and
after the features were made.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from benchmarks.shared.memory import Cost, alone, measured
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.choices import Protocol
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_tables
from nearkin.evaluation.metrics import geometry_rows
from nearkin.evaluation.protocols import ENTRIES

CLASSES = 100
OTHERS = ("attentive", "labelfree")
"""Protocols that need images and a network, or are the sum of others."""
OF_TABLES: Final = [name for name in ENTRIES if name not in OTHERS]
OPTIONS: Final = (
    Option("train", 10_000, "images of the bank", quick=400),
    Option("test", 10_000, "images to classify", quick=200),
    Option("dim", 384, "features", quick=32),
    Option("protocols", OF_TABLES, "to measure", quick=OF_TABLES[:2]),
)


def features(train: int, test: int, dim: int) -> list[Embeddings]:
    """Make training and test embeddings, each with a second view of some images."""
    rng = np.random.default_rng(0)
    scale = np.arange(1, dim + 1, dtype=np.float32) ** -0.5
    centers = rng.standard_normal((CLASSES, dim), np.float32) * scale
    tables = []
    for n in (train, test):
        labels = rng.integers(CLASSES, size=n)
        vectors = centers[labels] + 2 * scale * rng.standard_normal((n, dim), np.float32)
        rows = geometry_rows(n)
        noise = 0.2 * scale * rng.standard_normal((len(rows), dim), np.float32)
        view = Embeddings(vectors[rows] + noise, labels[rows], rows=rows)
        tables.append(Embeddings(vectors, labels, second_view=view))
    return tables


def protocol(name: Protocol, train: int, test: int, dim: int) -> Cost[None]:
    """Measure one protocol."""
    first, second = features(train, test, dim)

    def evaluate() -> None:
        evaluate_tables({"encoder": (first, second)}, seed=0, protocol=[name])

    return measured(evaluate)


def rows_of(case: str, cost: Cost[Any]) -> Iterator[Row]:
    """Yield the row of the time and that of the memory."""
    yield Row(case, cost.seconds, more={"cpu_seconds": cost.cpu_seconds})
    yield Row(case, cost.megabytes, "MB")


def run(options: Namespace) -> Iterator[Row]:
    """Measure the protocols."""
    sizes = options.train, options.test, options.dim
    for name in options.protocols:
        yield from rows_of(name, alone(protocol, name, *sizes).result)
