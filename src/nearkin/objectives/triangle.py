"""Sums over all pairs of views by blocks of a triangle, and never a matrix of all pairs."""

import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.objectives.precision import first_derivative
from nearkin.objectives.products import blocks, in_reach, product

ROWS: Final = 512
"""Rows of a block that a processor's cache takes. From half of them on blocks are faster."""


def pays(a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"], temperature: float) -> bool:
    """Whether `masked_logsumexp` takes such tensors, and is faster than the plain form."""
    if 2 * len(a) < ROWS or a.dtype != b.dtype:
        return False
    return in_reach(a, b, temperature)


def masked_logsumexp(
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
        total, scaled = z.new_zeros(len(z)), z / temperature
        for x, y, own in _blocks(z, partners):
            block = _exponentials(scaled[x], z[y], own)
            total[x] += block.sum(dim=1)
            if x != y:
                total[y] += block.sum(dim=0)
            del block  # before the next one is there: it takes its place
        ctx.temperature, ctx.partners = temperature, partners
        ctx.save_for_backward(z, total)
        return total.log()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, total = ctx.saved_tensors
        share, slope = grad / (ctx.temperature * total), torch.zeros_like(z)
        scaled = z / ctx.temperature
        for x, y, own in _blocks(z, ctx.partners):
            block = _exponentials(scaled[x], z[y], own)
            block.mul_(share[x, None] + share[y])  # a pair is in the sums of both
            slope[x] += product(block, z[y])
            if x != y:
                slope[y] += product(block.T, z[x])
            del block
        return slope, None, None


def _blocks(z: Tensor, partners: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Rows and columns of the blocks, and whether the pairs on the diagonal do not count."""
    half = len(z) // 2
    first = list(blocks(half, ROWS))
    second = [slice(rows.start + half, rows.stop + half) for rows in first]
    for (i, x), (j, y) in itertools.combinations_with_replacement(enumerate(first + second), 2):
        yield x, y, i == j or (j - i == len(first) and not partners)


def _exponentials(x: Tensor, y: Tensor, own: bool) -> Tensor:
    """Of the logits of a block, zero where they do not count."""
    found = product(x, y.T).exp_()
    return found.fill_diagonal_(0) if own else found
