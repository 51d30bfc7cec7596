"""Barlow Twins: what two views share should not be redundant.

Zbontar, Jing, Misra, LeCun, Deny. Barlow Twins: self-supervised learning via redundancy
reduction. ICML 2021, arXiv:2103.03230.

    C_ij = mean_n a_ni b_nj                                       (eq. 2)
    loss = sum_i (1 - C_ii)^2 + lambda sum_i sum_{j != i} C_ij^2  (eq. 1)

a and b are the embeddings of the two views, each dimension standardized over the batch; lambda
is `off_diagonal`.

    backbone -> (Linear BN ReLU) x 2 -> Linear

Queries: the dimensions of view 1. Keys: the dimensions of view 2.
"""

from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import barlow_twins
from nearkin.schema import Count, Dim, Factor, Weight
from nearkin.types import Batch, Encoded, Step


class BarlowTwins(Method[None]):
    """The cross-correlation of the two views' embeddings must be the identity.

    Args:
        dim: Embedding dimension, and width of the projector.
        num_layers: Number of layers of the projector.
        off_diagonal: Weight of the correlations of different dimensions.
        scale: Factor of the loss, which is a sum over the matrix. The official code for ImageNet
            has 0.024 as part of its learning rates.
    """

    defaults = Defaults(
        augment="byol", augment_small="asymmetric_cifar", options={"dim": 1024, "scale": 0.1}
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 8192,
        num_layers: Count = 3,
        off_diagonal: Weight = 0.0051,
        scale: Factor = 1.0,
    ) -> None:
        super().__init__()
        self.off_diagonal = off_diagonal
        self.scale = scale
        self.online = Branch(backbone, *[dim] * num_layers)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        z1, z2 = encoded
        return Step(self.scale * barlow_twins(z1, z2, self.off_diagonal), memo=None)
