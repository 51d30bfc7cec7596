"""Supervised: learn the known classes, and nothing else.

The second stage of Han, Rebuffi, Ehrhardt, Vedaldi, Zisserman. Automatically discovering and
learning new visual categories with ranking statistics. ICLR 2020, arXiv:2002.05714, and the
reference for all that is learned without labels.

    loss = -log softmax_class(W h + b)

h are the features of an image that has a label; images without one count for nothing.

    backbone -> Linear

Queries: features of labeled images. Keys: learned weights, a vector per known class.
"""

from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import classify
from nearkin.types import Batch, Encoded, Step


class Supervised(Method[None]):
    """The features must tell the known classes apart.

    Args:
        num_known_classes: Number of known classes, which have labels.
    """

    defaults = Defaults(augment="ncl", augment_small="ncl_cifar")
    health_bounds = HealthBounds(min_rank=0.17, min_std=0.3, max_cosine=0.81)
    views = ("strong",)
    uses_labels = True

    def __init__(self, backbone: nn.Module, *, num_known_classes: int) -> None:
        super().__init__()
        self.online = Branch(backbone)
        self.known = nn.Linear(self.backbone.feature_dim, num_known_classes)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        (h,) = encoded
        return Step(classify(self.known(h), batch.label), memo=None)
