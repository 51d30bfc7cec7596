"""LeJEPA: predict the mean of the large views, with embeddings that are normally distributed.

Balestriero, LeCun. LeJEPA: provable and scalable self-supervised learning without the
heuristics. arXiv:2511.08544.

    c = mean_i z_i, where i are the two large views
    loss = (1 - w) mean_j |z_j - c|^2 / d + w mean_j SIGReg(z_j)        (alg. 2)
    SIGReg(z) = mean_a N int_t |mean_n exp(i t a.z_n) - g(t)|^2 g(t) dt (alg. 1)

z are the embeddings of the views in d dimensions, j any view, w is `weight`, a are random
directions and g(t) = exp(-t^2 / 2). SIGReg is the test of Epps and Pulley for a standard normal
distribution of the N images along each direction.

    backbone -> (Linear BN ReLU) x 2 -> Linear

Queries: online embeddings of all views. Keys: the mean embedding of the large views.
"""

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import sigreg, unit
from nearkin.schema import Count, Dim, DimOrZero, Fraction
from nearkin.types import Batch, Encoded, Step


class SIGReg(Method[None]):
    """Embeddings of all views of an image must agree, and those of images be a normal sample.

    There are no negatives, no target network and no stopped gradients. The directions are new in
    every step, and the same for all views.

    Args:
        dim: Embedding dimension.
        hidden_dim: Width of the hidden layers of the projector; 0 is that of the features.
        weight: Weight of the normal distribution; the rest is that of agreement.
        num_directions: Number of random directions of a step.
    """

    # Smaller than in the paper, and SimCLR's optimizer; not searched (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=4e-3,
        augment="lejepa",
        augment_small="simsiam_cifar",
        options={"dim": 64, "hidden_dim": 0, "num_directions": 256},
    )
    more_views = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 128,
        hidden_dim: DimOrZero = 2048,
        weight: Fraction = 0.05,
        num_directions: Count = 1024,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.num_directions = num_directions
        self.online = Branch(backbone, hidden_dim, hidden_dim, dim)

    @override
    def encode(self, batch: Batch) -> Encoded:
        return self.online.by_size(batch.views)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        z = torch.stack(encoded)
        agreement = (z - z[:2].mean(dim=0)).square().mean()
        drawn = torch.randn(self.num_directions, z.shape[2], device=z.device, dtype=z.dtype)
        directions = unit(drawn)
        spread = torch.stack([sigreg(view, directions) for view in z]).mean()
        return Step((1 - self.weight) * agreement + self.weight * spread, memo=None)
