"""SimCLR: contrast within one large batch.

Chen, Kornblith, Norouzi, Hinton. A simple framework for contrastive learning of visual
representations. ICML 2020, arXiv:2002.05709.

    l(i, j) = -log exp(z_i.z_j / t) / sum_{k != i} exp(z_i.z_k / t)  (eq. 1)

    nt_xent:    loss = scale mean_i l(i, j), where j shows the image of i
    cross_view: loss = scale mean_i -log exp(a_i.b_i / t) / sum_j exp(a_i.b_j / t)

z are the embeddings of all 2N views of a batch, a those of first views and b those of second
ones; t is `temperature`. Of more than two views, the loss is the mean over their pairs.

    backbone -> Linear BN ReLU -> Linear

Queries: online embeddings of all views. Keys: the same, less the query itself.
"""

from itertools import combinations
from typing import Literal

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import in_batch, nt_xent, unit
from nearkin.schema import Dim, DimOrZero, Factor, Temperature
from nearkin.types import Batch, Encoded, Step


class SimCLR(Method[None]):
    """Each view must find the other view of its image among all the batch's views.

    Args:
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        last_norm: Whether the projector ends on a batch norm, as in lightly and in the official
            code, where it has no shift.
        loss: `nt_xent` (eq. 1), or `cross_view`, the form in the NNCLR paper: first views look for
            second ones, among second ones only.
        scale: Factor of the loss. The official code has 2, where it adds the means of first and of
            second views.
        temperature: Softmax temperature.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon", lr=4e-3, augment_small="simsiam_cifar", options={"temperature": 0.2}
    )
    health_bounds = HealthBounds(min_rank=0.14)
    more_views = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 128,
        hidden_dim: DimOrZero = 0,
        last_norm: bool = False,
        loss: Literal["nt_xent", "cross_view"] = "nt_xent",
        scale: Factor = 1.0,
        temperature: Temperature = 0.5,
    ) -> None:
        super().__init__()
        self.contrast = nt_xent if loss == "nt_xent" else in_batch
        self.scale = scale
        self.temperature = temperature
        self.online = Branch(backbone, hidden_dim, dim, last_norm=last_norm, affine=True)

    @override
    def encode(self, batch: Batch) -> Encoded:
        return tuple(unit(z) for z in self.online.by_size(batch.views))  # in one pass

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        pairs = [self.contrast(a, b, self.temperature) for a, b in combinations(encoded, 2)]
        return Step(self.scale * torch.stack(pairs).mean(), memo=None)
