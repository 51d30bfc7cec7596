"""VICReg: agree, stay spread out, share nothing between dimensions.

Bardes, Ponce, LeCun. VICReg: variance-invariance-covariance regularization for
self-supervised learning. ICLR 2022, arXiv:2105.04906.

    v(z) = mean_j max(0, 1 - sqrt(var(z_j) + 0.0001))  (eq. 1, 2)
    c(z) = sum_{i != j} cov(z_i, z_j)^2 / d            (eq. 3, 4)
    s(a, b) = mean_{n,j} (a_nj - b_nj)^2               (eq. 5)
    loss = invariance s(a, b) + variance (v(a) + v(b)) / 2
           + covariance (c(a) + c(b))                  (eq. 6)

a and b are the embeddings of the two views and z_j is dimension j of d, over the batch. As in
the official code, s is a mean over dimensions as well, and v the mean of both views. Of more than
two views, the loss is the mean over their pairs.

    backbone -> (Linear BN ReLU) x 2 -> Linear

Queries: online embeddings of view 1. Keys: the embedding of view 2.
"""

from itertools import combinations

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import vicreg
from nearkin.schema import Dim, Weight
from nearkin.types import Batch, Encoded, Step


class VICReg(Method[None]):
    """Embeddings of both views must agree, vary in every dimension, and not covary.

    Args:
        dim: Embedding dimension, and width of the projector.
        invariance: Weight of the squared difference of the views.
        variance: Weight of the hinge on the standard deviation.
        covariance: Weight of the squared covariances.
    """

    defaults = Defaults(augment="byol", augment_small="asymmetric_cifar", options={"dim": 1024})
    health_bounds = HealthBounds(min_rank=0.14, min_std=0.32, max_cosine=0.79)
    more_views = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 8192,
        invariance: Weight = 25.0,
        variance: Weight = 25.0,
        covariance: Weight = 1.0,
    ) -> None:
        super().__init__()
        self.weights = dict(invariance=invariance, variance=variance, covariance=covariance)
        self.online = Branch(backbone, dim, dim, dim)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        pairs = [vicreg(a, b, **self.weights) for a, b in combinations(encoded, 2)]
        return Step(torch.stack(pairs).mean(), memo=None)
