"""The sum over a long dictionary in one pass over blocks of it, and never a matrix of logits."""

from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.objectives.precision import first_derivative
from nearkin.objectives.products import blocks, in_reach, product

SMALLEST: Final = 2**19
"""Logits from which on it is faster than the plain form."""

ROWS: Final = 256
"""Queries of a block."""

KEYS: Final = 2048
"""Keys of a block: with its rows, what a processor's cache takes."""


def pays(
    query: Float[Tensor, "batch dim"], keys: Float[Tensor, "keys dim"], temperature: float
) -> bool:
    """Whether `masked_logsumexp` takes such tensors, and is faster than the plain form.

    It is not where the keys learn: their gradient would need the logits again.
    """
    if len(query) * len(keys) < SMALLEST or keys.requires_grad or query.dtype != keys.dtype:
        return False
    return in_reach(query, keys, temperature)


def masked_logsumexp(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "keys dim"],
    temperature: float,
    ignored: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, " batch"]:
    """`log sum_j exp(query . key_j / temperature)` over the keys that are not ignored.

    Softmax attention to keys that are values, too, is the gradient of that logarithm, so a block
    of exponentials serves both, and is gone (Rabe and Staats 2021, arXiv:2112.05682).

    It has no second derivative, and none of `torch.func`.
    """
    total: Tensor = _LogTotal.apply(query.contiguous(), keys.contiguous(), temperature, ignored)
    return total


class _LogTotal(torch.autograd.Function):
    """Logarithms of the sums, as functions of the queries; their slopes are kept."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, temperature: float, ignored: Tensor | None
    ) -> Tensor:
        total, slope = query.new_zeros(len(query)), torch.zeros_like(query)
        scaled = query / temperature
        for x in blocks(len(query), ROWS):
            for y in blocks(len(keys), KEYS):
                block = product(scaled[x], keys[y].T).exp_()
                if ignored is not None:
                    block.masked_fill_(ignored[x, y], 0)
                total[x] += block.sum(dim=1)
                slope[x] += product(block, keys[y])
                del block  # before the next one is there: it takes its place
        least = torch.finfo(total.dtype).tiny  # where all keys are ignored, nothing pulls
        ctx.save_for_backward(slope / (temperature * total.clamp(min=least))[:, None])
        return total.log()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grad[:, None] * slope, None, None, None
