"""InstDisc's parametric baseline: every image is its own class, with weights of its own.

Wu, Xiong, Yu, Lin. Unsupervised feature learning via non-parametric instance discrimination.
CVPR 2018, arXiv:1805.01978, eq. 1 and table 1. A class per image comes from Dosovitskiy, Fischer,
Springenberg, Riedmiller, Brox. Discriminative unsupervised feature learning with exemplar
convolutional neural networks. 2014, arXiv:1406.6909.

    loss = -log exp(w_i.v / t) / sum_j exp(w_j.v / t)  (eq. 1)

v is the embedding of image i, a unit vector, and w_j are learned, of any length; t is
`temperature`.

    backbone -> Linear -> unit length

Queries: online embeddings. Keys: learned weights, a vector per image.
"""

import torch
from torch import nn
from typing_extensions import override

from nearkin.memory import same_image_mask
from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import info_nce, unit
from nearkin.schema import Dim, Temperature
from nearkin.types import Batch, Encoded, Step


class InstDiscParametric(Method[None]):
    """The embedding must be told apart by a weight vector that is learned for its image.

    Args:
        num_images: Number of training images, each of which has a weight vector.
        dim: Embedding dimension.
        temperature: Softmax temperature; the weights have any length.
    """

    defaults = Defaults(augment="moco_v1", augment_small="moco_cifar")
    health_bounds = HealthBounds(min_rank=0.11)
    views = ("strong",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_images: int,
        dim: Dim = 128,
        temperature: Temperature = 1.0,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.online = Branch(backbone, dim)
        self.weights = nn.Parameter(unit(torch.randn(num_images, dim)))

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        query, index = unit(encoded[0]), batch.index
        own = same_image_mask(index, torch.arange(len(self.weights), device=index.device))
        key = self.weights[index]
        return Step(info_nce(query, key, self.weights, self.temperature, own), memo=None)
