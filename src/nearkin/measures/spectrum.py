"""How many dimensions features really use, and whether they have collapsed."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.objectives import unit


def effective_rank(features: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """The exponential of the entropy of the singular values of the centered features.

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
