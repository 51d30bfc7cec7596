"""Blocks of exponentials: matrix products, by the faster of the libraries torch is built with."""

import functools
import math
import platform
from collections.abc import Iterator
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

X86: Final = ("x86_64", "AMD64")

REACH: Final = 0.4
"""Share of a number format's exponents that logits may use: sums and gradients stay normal."""


def in_reach(
    a: Float[Tensor, "rows dim"], b: Float[Tensor, "columns dim"], temperature: float
) -> bool:
    """Whether exponentials of similarities, of all with all, are normal and need no shift.

    In single precision temperatures below 0.028 are too low for unit vectors. Other devices than
    the processor would have to be waited for, to know.
    """
    if a.device.type != "cpu":
        return False
    longest = max(float(torch.linalg.vector_norm(x.detach(), dim=1).amax()) for x in (a, b))
    return longest**2 / temperature < REACH * math.log(torch.finfo(a.dtype).max)


def blocks(count: int, size: int) -> Iterator[slice]:
    """So many consecutive rows, at most `size` at a time."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def product(
    a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner columns"]
) -> Float[Tensor, "rows columns"]:
    """`a @ b` without a gradient.

    On x86 torch multiplies single precision by MKL, which does not use all that processors of
    other makers can do: oneDNN, which torch has for convolutions, takes half the time there
    (docs/objectives.md).
    """
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != a.dtype or not _agrees():
        return a @ b
    if a.stride(0) == 1 != a.stride(1):  # a transposed matrix is better read as the second one
        return _multiplied(b.T, a).T
    return _multiplied(a, b.T)


def _multiplied(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "columns inner"]
) -> Float[Tensor, "rows columns"]:
    """A linear layer by oneDNN: a private operation."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


@functools.cache
def _agrees() -> bool:
    """Whether the operation is there and right: private operations are believed after a trial."""
    if platform.machine() not in X86 or not torch.backends.mkldnn.is_available():
        return False
    try:
        with torch.inference_mode():
            a, b = torch.arange(300.0).sin_().split([100, 200])
            a, b = a.view(10, 10), b.view(10, 20)
            found = torch.cat([_multiplied(a, b.T), _multiplied(b.T, a).T])
            return torch.allclose(found, torch.cat([a @ b, (b.T @ a.T).T]), rtol=1e-5, atol=1e-5)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
