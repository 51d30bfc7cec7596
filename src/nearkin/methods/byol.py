"""BYOL: predict a slowly moving copy of oneself. No negatives.

Grill et al. Bootstrap your own latent: a new approach to self-supervised learning.
NeurIPS 2020, arXiv:2006.07733.

    target <- m_k target + (1 - m_k) online    (eq. 1)
    loss = |p1 - z2|^2 + |p2 - z1|^2           (eq. 2)
    m_k = 1 - (1 - m) (cos(pi k / K) + 1) / 2  (section 3.2)

p are the online network's predictions from the two views and z the target's embeddings of them,
unit vectors; m is `momentum`, at step k of K. Further views are predicted from, and not predicted:
the loss is twice the mean over all pairs of a prediction and the target of another view.

    online: backbone -> Linear BN ReLU -> Linear
    predictor: Linear BN ReLU -> Linear
    target: backbone -> Linear BN ReLU -> Linear

Queries: predictions from either view. Keys: the target's embedding of the other view.
"""

from itertools import product

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, Method, half_cosine
from nearkin.networks.branch import Branch, ema_update, frozen_copy, mlp
from nearkin.objectives import alignment, unit
from nearkin.schema import Dim, DimOrZero, Momentum
from nearkin.types import Batch, Encoded, Step


class BYOL(Method[None]):
    """The prediction from one view must agree with the target's embedding of the other.

    The loss is the sum over both directions, from 0 to 8. The target starts as a copy of the
    online network.

    Args:
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of projector and predictor; 0 is that of the features.
        momentum: EMA coefficient of the target at the first step.
        rising_momentum: Whether it rises from there to 1.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=1e-2,
        augment="byol",
        augment_small="simsiam_cifar",
        options={"momentum": 0.97, "hidden_dim": 0},
    )
    more_views = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 256,
        hidden_dim: DimOrZero = 4096,
        momentum: Momentum = 0.996,
        rising_momentum: bool = True,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.rising_momentum = rising_momentum
        self.online = Branch(backbone, hidden_dim, dim)
        self.target = frozen_copy(self.online)
        self.predictor = mlp(dim, hidden_dim or self.backbone.feature_dim, dim)

    @override
    def encode(self, batch: Batch) -> Encoded:
        predictions = [unit(self.predictor(self.online(view))) for view in batch.views]
        with torch.no_grad():
            targets = [unit(self.target(view)) for view in batch.views[:2]]
        return *targets, *predictions

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        targets, predictions = encoded[:2], encoded[2:]
        pairs = product(enumerate(predictions), enumerate(targets))
        directions = [alignment(p, z) for (i, p), (j, z) in pairs if i != j]
        return Step(2 * torch.stack(directions).mean(), memo=None)

    @override
    def commit(self, memo: None, progress: float, /) -> None:
        """The target moves towards the online network."""
        last = 1.0 if self.rising_momentum else self.momentum
        momentum = half_cosine(self.momentum, last)(progress)
        ema_update(self.target, self.online, momentum)
