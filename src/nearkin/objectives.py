"""The objectives, as pure functions of unit vectors.

Nearly all of them are one equation. A query is matched against a dictionary of keys, and the
loss is the cross-entropy between that match and what it should have been:

    loss(q) = - sum_j  target_j  log softmax_j( q . k_j / temperature )

They differ in where the keys come from (the batch, a queue, a memory bank, prototypes) and in
the target (one key, several neighbors, a soft assignment). `look_up` is the shared half.
Nothing here knows about networks, memories or processes, and everything here computes in at
least float32, whatever precision the networks around it use.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def full_precision(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a function with autocast off and its half-precision tensors widened to float32.

    Similarities divided by a small temperature lose their digits in bfloat16, and the largest
    of them decides the gradient.
    """

    def widen(x: object) -> object:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if half else x  # type: ignore[attr-defined]

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            wide = {name: widen(x) for name, x in kwargs.items()}
            return function(*map(widen, args), **wide)  # type: ignore[arg-type]

    return run


@full_precision
def unit(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Scale each vector to length one.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return F.normalize(x, dim=-1)


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


def tell_apart(
    positive: Float[Tensor, " batch"],
    negatives: Float[Tensor, "batch keys"],
    ignored: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of finding the positive among the negatives, from logits; the mean.

    With `d = logsumexp(negatives) - positive` it is `log(1 + exp(d))`. A softmax over all of
    them would subtract two numbers that agree in every digit once the positive wins by far.
    """
    if ignored is not None:
        # Not -inf: where nothing is left, its logsumexp has no gradient.
        negatives = negatives.masked_fill(ignored, torch.finfo(negatives.dtype).min / 2)
    behind = negatives.logsumexp(dim=1) - positive
    return torch.logaddexp(behind, torch.zeros_like(behind)).mean()


@full_precision
def info_nce(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "keys dim"],
    temperature: float,
    same: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, ""]:
    """Find the query's own key among shared negatives (He et al. 2020, eq. 1).

    Args:
        query: Unit vectors.
        key: The positive of each query.
        negatives: A dictionary shared by all queries.
        temperature: Divides the similarities; above 0.
        same: Which negatives show the query's own image. They are left out: an older key of
            the same image is not a negative.

    Returns:
        The mean over the queries, between 0 and `log(1 + keys) + 2 / temperature`.

    >>> q = unit(torch.tensor([[1.0, 0.0]]))
    >>> info_nce(q, q, -q, temperature=1.0)  # log(1 + exp(-2))
    tensor(0.1269)
    """
    positive = (query * key).sum(dim=1) / temperature
    return tell_apart(positive, look_up(query, negatives, temperature), same)


@full_precision
def in_batch(
    query: Float[Tensor, "batch dim"], key: Float[Tensor, "batch dim"], temperature: float
) -> Float[Tensor, ""]:
    """Find the query's own key among the keys of the batch (He et al. 2020, figure 2a).

    The cross-view InfoNCE: `N` terms, one direction, no negatives from the query's own view.

    >>> in_batch(torch.eye(2), torch.eye(2), temperature=1.0)  # log(1 + exp(-1))
    tensor(0.3133)
    """
    logits = look_up(query, key, temperature)
    own = torch.eye(len(query), dtype=torch.bool, device=query.device)
    return tell_apart(logits.diagonal(), logits, own)


@full_precision
def nt_xent(
    a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"], temperature: float
) -> Float[Tensor, ""]:
    """Find each view's other view among all 2N - 1 others (Chen et al. 2020, eq. 1).

    The mean over the 2N views; `log(2N - 1)` where all embeddings are alike.

    >>> nt_xent(torch.eye(2), torch.eye(2), temperature=1.0)  # log(1 + 2 exp(-1))
    tensor(0.5514)
    """
    z = torch.cat([a, b])
    positive = (a * b).sum(dim=1).repeat(2) / temperature
    own = torch.eye(len(a), dtype=torch.bool, device=z.device).repeat(2, 2)  # itself and partner
    return tell_apart(positive, look_up(z, z, temperature), own)
