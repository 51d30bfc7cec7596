"""MoCo's end-to-end baseline: keys come from the batch, and gradients reach them.

He, Fan, Wu, Xie, Girshick. Momentum contrast for unsupervised visual representation learning.
CVPR 2020, arXiv:1911.05722, figure 2a.

    loss = mean_i -log exp(q_i.k_i / t) / sum_j exp(q_i.k_j / t)  (eq. 1)

q_i and k_i are the embeddings of the two views of image i; t is `temperature`.

    queries, keys: backbone -> Linear ReLU -> Linear

Queries: online embeddings of view 1. Keys: embeddings of view 2.
"""

import copy
from typing import Literal

from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch, shuffle_bn
from nearkin.objectives import in_batch, unit
from nearkin.schema import Dim, DimOrZero, NumGroups, Temperature
from nearkin.types import Batch, Encoded, Step


class MoCoEndToEnd(Method[None]):
    """The query must find its key among the keys of its own batch.

    Batch statistics are taken over groups, with keys shuffled between them, as in MoCo.

    Args:
        dim: Embedding dimension.
        projector: `linear` as in MoCo v1, or `mlp` as in v2.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        key_encoder: Network of the keys: the `same` as that of the queries, a `separate` one,
            trained as well, or a projector of its own on a `shared_backbone`.
        bn_groups: Number of groups of the batch with batch statistics of their own.
        temperature: Softmax temperature.
    """

    defaults = Defaults(augment="moco_v2", augment_small="moco_cifar")
    health_bounds = HealthBounds(min_rank=0.1)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 128,
        projector: Literal["linear", "mlp"] = "mlp",
        hidden_dim: DimOrZero = 0,
        key_encoder: Literal["same", "separate", "shared_backbone"] = "same",
        bn_groups: NumGroups = 8,
        temperature: Temperature = 0.2,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        hidden = (hidden_dim,) if projector == "mlp" else ()
        self.online = Branch(backbone, *hidden, dim, norm=False, bn_groups=bn_groups)
        shared = {"same": self.online, "shared_backbone": self.backbone, "separate": None}
        module = shared[key_encoder]
        self.key_branch = copy.deepcopy(self.online, {id(module): module})  # of all but that

    @override
    def encode(self, batch: Batch) -> Encoded:
        x1, x2 = batch.views
        return unit(self.online(x1)), unit(shuffle_bn(self.key_branch, x2))

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        q, k = encoded
        return Step(in_batch(q, k, self.temperature), memo=None)
