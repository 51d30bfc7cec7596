"""Geometry of features on the unit sphere: alignment, uniformity (Wang & Isola 2020), rank."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.metrics.neighbors import held_at_once
from nearkin.objectives import unit
from nearkin.objectives.fused import blocks


def alignment(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Mean squared distance between the unit features of two views: 0 if alike, at most 4.

    Wang & Isola 2020, section 4.1.1, with their exponent of 2.
    """
    return (unit(a) - unit(b)).square().sum(dim=1).mean()


def uniformity(features: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Logarithm of the mean of `exp(-2 distance^2)` over all pairs of different rows.

    0 if all unit features are one point, and for a single row; at the least -8 and near -4 when
    they are spread evenly over a sphere of many dimensions. Wang & Isola 2020, section 4.1.2,
    with their `t` of 2. Exact, in O(n^2 d) time and little memory.

    >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # one pair, at distance 2
    tensor(-8.)
    """
    z, n = unit(features), len(features)
    if n < 2:
        return z.new_zeros(())
    length = z.square().sum(dim=1)  # 1, or 0 for a row of zeros
    total = []
    for x in blocks(n, max(1, held_at_once(z.device) // n)):
        distance = (length[x, None] + length - 2 * z[x] @ z.T).clamp(min=0)
        distance.diagonal(offset=x.start).fill_(torch.inf)
        total.append(torch.logsumexp(-2 * distance.flatten(), dim=0))
    return torch.logsumexp(torch.stack(total), dim=0) - math.log(n * (n - 1))


def effective_rank(features: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return the exponential of the entropy of the singular values of the centered features.

    Between 1 and `min(n - 1, d)`; 0 if all rows are alike. Roy & Vetterli 2007, section 2;
    RankMe (Garrido et al. 2023, equation 1) without the mean, which tells no image from another.

    >>> effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    tensor(2.)
    """
    x = features.float()
    spread = x - x.mean(dim=0)
    # Rounding sets the mean of equal rows apart from them, which would look like one dimension.
    if spread.norm() <= 8 * torch.finfo(x.dtype).eps * x.norm():
        return x.new_zeros(())
    values = torch.linalg.svdvals(spread)
    entropy: Tensor = torch.special.entr(values / values.sum()).sum()
    return entropy.exp()


def feature_std(features: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Mean standard deviation per dimension of the unit features, times the square root of `d`.

    1 if they point in all directions alike, 0 if in one (Chen & He 2021, section 4.1).
    """
    z = unit(features)
    return z.std(dim=0, correction=0).mean() * math.sqrt(z.shape[1])


def mean_cosine(features: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Mean cosine similarity of two different rows; 0 if there is only one.

    >>> mean_cosine(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    tensor(0.3333)
    """
    n = len(features)
    z = unit(features.float())
    itself = z.square().sum()
    others = z.sum(dim=0).square().sum() - itself  # all pairs but those, in O(n d)
    return others / max(n * (n - 1), 1)
