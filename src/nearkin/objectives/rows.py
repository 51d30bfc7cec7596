"""The mean over the rows of a batch, and the one place where those rows can be divided."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

Means = TypeVar("Means", Tensor, tuple[Tensor, ...])
Mean = Callable[[Callable[[slice], Any], int], Any]


_mean: ContextVar[Mean | None] = ContextVar("mean", default=None)


def mean_over_rows(term: Callable[[slice], Means], rows: int) -> Means:
    """Return the mean of a term over the rows of a batch: `term(slice(None))`.

    Several processes that hold the same batch compute a part of the rows each, in `dividing_rows`.

    Args:
        term: From a slice of the rows to the mean over these rows; it may read all other rows.
            It must not draw random numbers, as processes would go on from different states.
        rows: Number of rows of the batch.
    """
    mean = _mean.get()
    if mean is None:
        return term(slice(None))
    with dividing_rows(None):  # within a term the rows are divided already
        means: Means = mean(term, rows)
    return means


@contextmanager
def dividing_rows(mean: Mean | None) -> Iterator[None]:
    """Let `mean` compute every `mean_over_rows` of a `with` block."""
    token = _mean.set(mean)
    try:
        yield
    finally:
        _mean.reset(token)
