"""Numerics that the objectives share: full precision, and means over rows that are divided."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearkin.types import Parameters, Result, checked

Means = TypeVar("Means", Tensor, tuple[Tensor, ...])
Mean = Callable[[Callable[[slice], Any], int], Any]

_mean: ContextVar[Mean | None] = ContextVar("mean", default=None)


def full_precision(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a function with autocast off and its half-precision tensors widened to float32.

    Tensors are checked by their annotations; see `nearkin.types.checked`. There has to be one.
    Similarities divided by a small temperature lose their digits in bfloat16, and the largest
    of them decides the gradient.
    """

    def widen(x: object) -> object:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if half else x  # type: ignore[attr-defined]

    @checked
    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        devices = [x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not devices:
            raise ValueError(f"{function.__name__}: no argument is a tensor")
        with torch.autocast(devices[0], enabled=False):
            wide = {name: widen(x) for name, x in kwargs.items()}
            return function(*map(widen, args), **wide)  # type: ignore[arg-type]

    return run


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
