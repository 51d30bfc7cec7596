"""Matching queries against a dictionary of keys: the shared half of the one equation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.objectives.precision import full_precision


@full_precision
def look_up(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "keys dim"],
    temperature: float,
    own: Float[Tensor, "batch dim"] | None = None,
) -> Float[Tensor, "batch matches"]:
    """Logits of each query against a dictionary, after its `own` key if it has one.

    >>> query, keys = torch.eye(2), torch.tensor([[0.0, 1.0]])
    >>> look_up(query, keys, temperature=0.5, own=query)
    tensor([[2., 0.],
            [2., 2.]])
    """
    logits = query @ keys.T
    if own is not None:
        logits = torch.cat([(query * own).sum(dim=1, keepdim=True), logits], dim=1)
    return logits / temperature


def infonce_from_lse(
    positive: Float[Tensor, " batch"], total: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Cross-entropy of finding the positive among negatives of this `masked_logsumexp`; the mean.

    With `d = total - positive` it is `log(1 + exp(d))`. A softmax over all of them would
    subtract two numbers that agree in every digit once the positive wins by far.
    """
    behind = total - positive
    return torch.logaddexp(behind, torch.zeros_like(behind)).mean()


def masked_logsumexp(
    logits: Float[Tensor, "batch keys"], ignored: Bool[Tensor, "batch keys"] | None = None
) -> Float[Tensor, " batch"]:
    """The logarithm of the sum of the exponentials of all logits that are not ignored."""
    if ignored is not None:
        # Not -inf: where nothing is left, its logsumexp has no gradient.
        logits = logits.masked_fill(ignored, torch.finfo(logits.dtype).min / 2)
    return logits.logsumexp(dim=1)
