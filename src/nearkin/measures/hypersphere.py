"""The two things contrast asks for, measured on the unit sphere (Wang & Isola 2020)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.measures.neighbors import held_at_once
from nearkin.objectives import unit


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
    z, n, start = unit(features), len(features), 0
    if n < 2:
        return z.new_zeros(())
    length = z.square().sum(dim=1)  # 1, or 0 for a row of zeros
    total = []
    rows = max(1, held_at_once(z.device) // n)
    for chunk, own in zip(*(x.split(rows) for x in (z, length)), strict=True):
        distance = (own[:, None] + length - 2 * chunk @ z.T).clamp(min=0)
        distance.diagonal(offset=start).fill_(torch.inf)
        total.append(torch.logsumexp(-2 * distance.flatten(), dim=0))
        start += len(chunk)
    return torch.logsumexp(torch.stack(total), dim=0) - math.log(n * (n - 1))
