"""RotNet: predict how far an image was turned.

Gidaris, Singh, Komodakis. Unsupervised representation learning by predicting image rotations.
ICLR 2018, arXiv:1803.07728.

    loss = mean_y -log softmax_y(W h_y + b)  (eq. 2 and 3)

h_y are the features of a view that was turned by y quarters, and y is 0, 1, 2 and 3.

    backbone -> Linear

Queries: features of all four turns. Keys: learned weights, a vector per turn.
"""

from typing import Final

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import classify
from nearkin.types import Batch, Encoded, Step

QUARTERS: Final = 4
"""Turns by 0, 90, 180 and 270 degrees, which move whole pixels and so leave no other trace."""


class RotNet(Method[None]):
    """The features must tell by which of four right angles an image was turned.

    All four turns of each image are in the batch, which is so four times as large. Images
    that look alike from all sides, such as textures or images from above, teach it little.
    """

    defaults = Defaults(augment="ncl", augment_small="ncl_cifar")
    health_bounds = HealthBounds(min_rank=0.2, min_std=0.26, max_cosine=0.86)
    views = ("strong",)

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.online = Branch(backbone)
        self.turns = nn.Linear(self.backbone.feature_dim, QUARTERS)

    @override
    def encode(self, batch: Batch) -> Encoded:
        turned = [torch.rot90(batch.views[0], turn, dims=(2, 3)) for turn in range(QUARTERS)]
        return self.online.by_size(turned)  # in one pass

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        turn = torch.arange(QUARTERS, device=batch.index.device)
        label = turn.repeat_interleave(len(batch.index))
        return Step(classify(self.turns(torch.cat(encoded)), label), memo=None)
