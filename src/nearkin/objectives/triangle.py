"""Sums over all pairs of views by blocks of a triangle, and never a matrix of all pairs."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.objectives.precision import first_derivative

ROWS: Final = 512
"""Rows of a block that a processor's cache takes. From half of them on blocks are faster."""

REACH: Final = 0.4
"""Share of a number format's exponents that logits may use: sums and gradients stay normal."""


def pays(a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"], temperature: float) -> bool:
    """Whether `log_total` is faster than the plain form, and its exponentials are all normal.

    In single precision temperatures below 0.028 are too low for unit vectors. Other devices than
    the processor would have to be waited for, to know.
    """
    if a.device.type != "cpu" or 2 * len(a) < ROWS or a.dtype != b.dtype:
        return False
    longest = max(x.detach().square().sum(dim=1).amax().item() for x in (a, b))
    return longest / temperature < REACH * math.log(torch.finfo(a.dtype).max)


def log_total(
    a: Float[Tensor, "batch dim"],
    b: Float[Tensor, "batch dim"],
    temperature: float,
    *,
    partners: bool,
) -> Float[Tensor, " views"]:
    """For each view `log sum exp(similarity / temperature)` over all views but itself.

    Similarities are symmetric: half of the blocks are enough, and the backward pass computes
    them again. It has no second derivative, and none of `torch.func`.

    Args:
        a: One view of each image.
        b: The other view.
        temperature: Divides the similarities.
        partners: Whether the other view of the same image counts.
    """
    total: Tensor = _LogTotal.apply(torch.cat([a, b]), temperature, partners)
    return total


class _LogTotal(torch.autograd.Function):
    """Logarithms of the sums, and the sums kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float, partners: bool) -> Tensor:
        total = z.new_zeros(len(z))
        for x, y, own in _blocks(z, partners):
            block = _exponentials(z[x], z[y], temperature, own)
            total[x] += block.sum(dim=1)
            if x != y:
                total[y] += block.sum(dim=0)
        ctx.temperature, ctx.partners = temperature, partners
        ctx.save_for_backward(z, total)
        return total.log()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, total = ctx.saved_tensors
        share, slope = grad / (ctx.temperature * total), torch.zeros_like(z)
        for x, y, own in _blocks(z, ctx.partners):
            block = _exponentials(z[x], z[y], ctx.temperature, own)
            block.mul_(share[x, None] + share[y])  # a pair is in the sums of both
            slope[x].addmm_(block, z[y])
            if x != y:
                slope[y].addmm_(block.T, z[x])
        return slope, None, None


def _blocks(z: Tensor, partners: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Rows and columns of the blocks, and whether the pairs on the diagonal do not count."""
    half = len(z) // 2
    starts = range(0, half, ROWS)
    views = [[slice(s, min(s + ROWS, half)) for s in starts]]
    views.append([slice(s.start + half, s.stop + half) for s in views[0]])
    parts = enumerate(itertools.chain(*views))
    for (i, x), (j, y) in itertools.combinations_with_replacement(parts, 2):
        yield x, y, i == j or (j - i == len(starts) and not partners)


def _exponentials(x: Tensor, y: Tensor, temperature: float, own: bool) -> Tensor:
    """Of the logits of a block, zero where they do not count."""
    found = ((x / temperature) @ y.T).exp_()
    return found.fill_diagonal_(0) if own else found
