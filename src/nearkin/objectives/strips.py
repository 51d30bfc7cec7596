"""Finding a key among negatives strip by strip: the gradient is ready when the loss is."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.objectives.precision import first_derivative
from nearkin.objectives.products import blocks, product

SMALLEST: Final = 2**16
"""Logits from which on strips are faster than the plain form."""

STRIP: Final = {"cpu": 2**20}
"""Logits held at once: what a processor's cache takes."""

LARGE_STRIP: Final = 2**26
"""Logits held at once on other devices."""

ROWS: Final = 128
"""Least rows of a strip: products of fewer are slow."""


def pays(query: Float[Tensor, "batch dim"], keys: Float[Tensor, "keys dim"]) -> bool:
    """Whether `infonce_from_lse` is faster than the plain form."""
    return len(query) * len(keys) >= SMALLEST and query.dtype == keys.dtype


def infonce_from_lse(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "keys dim"],
    temperature: float,
    ignored: Bool[Tensor, "batch keys"] | None = None,
    *,
    own: Sequence[int] = (),
) -> Float[Tensor, ""]:
    """Cross-entropy of finding the key among the negatives; the mean.

    The loss is one number, so its gradient is known, but for a factor, as soon as a query's
    logits are: a strip of them serves both, and is gone. Derivatives of the gradient, and those
    of `torch.func`, are an error.

    Args:
        query: What looks for its key.
        key: The positive of each query.
        negatives: A dictionary shared by all queries.
        temperature: Divides the similarities.
        ignored: Which negatives do not count for a query.
        own: The negatives that do not count for the first query. For the second one, those
            after them do not, and so on.
    """
    loss: Tensor = _TellApart.apply(query, key, negatives, temperature, ignored, own)
    return loss


class _TellApart(torch.autograd.Function):
    """The loss; its slopes are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        negatives: Tensor,
        temperature: float,
        ignored: Tensor | None,
        own: Sequence[int],
    ) -> Tensor:
        inputs = (query, key, negatives)
        slopes = [
            torch.zeros_like(x) if needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        rows = max(ROWS, STRIP.get(query.device.type, LARGE_STRIP) // len(negatives))
        losses = []
        for strip in blocks(len(query), rows):
            logits = product(query[strip] / temperature, negatives.T)
            low = torch.finfo(logits.dtype).min / 2
            for column in own:
                logits.diagonal(offset=strip.start + column).fill_(low)
            if ignored is not None:
                logits.masked_fill_(ignored[strip], low)
            positive = (query[strip] * key[strip]).sum(dim=1, keepdim=True) / temperature
            most = logits.amax(dim=1, keepdim=True)
            weights = logits.sub_(most).exp_()
            total = weights.sum(dim=1, keepdim=True)
            behind = total.log() + most - positive
            pull = behind.sigmoid() / (temperature * len(query))
            _add_slopes(slopes, inputs, strip, weights, total, pull)
            losses.append(torch.logaddexp(behind, torch.zeros_like(behind)))
            del logits, weights  # before the next ones are there: they take their place
        ctx.save_for_backward(*slopes)
        return torch.cat(losses).mean()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = (None if slope is None else grad * slope for slope in ctx.saved_tensors)
        return *slopes, None, None, None


def _add_slopes(
    slopes: list[Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    strip: slice,
    weights: Tensor,
    total: Tensor,
    pull: Tensor,
) -> None:
    """A strip's share: queries move from the negatives to their keys, and these to them."""
    query, key, negatives = inputs
    to_query, to_key, to_negatives = slopes
    share = pull / total  # for the small matrices, and not for all weights
    if to_query is not None:
        to_query[strip] = product(weights, negatives).mul_(share).sub_(pull * key[strip])
    if to_key is not None:
        to_key[strip] = -pull * query[strip]
    if to_negatives is not None:
        to_negatives += product(weights.T, share * query[strip])
