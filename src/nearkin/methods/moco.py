"""MoCo: a queue of keys from a slowly moving encoder.

He, Fan, Wu, Xie, Girshick. Momentum contrast for unsupervised visual representation learning.
CVPR 2020, arXiv:1911.05722. The projector is an MLP, as in v2 (arXiv:2003.04297).
"""

from typing import ClassVar

import torch
from typing_extensions import override

from nearkin.distributed import gather
from nearkin.memory import Queue, Visits, own_entries
from nearkin.method import Method
from nearkin.networks.backbone import Backbone
from nearkin.networks.branch import Branch, mlp
from nearkin.networks.momentum import follow, frozen_copy
from nearkin.objectives import info_nce, unit
from nearkin.types import Batch, Step


class MoCo(Method[Visits]):
    """The query must find its key, the other view, among the keys of earlier batches.

    Older keys of the query's own image are left out of its negatives.

    Args:
        backbone: The network to train.
        dim: Numbers in an embedding.
        hidden_dim: Width of the projector's hidden layer; 0 means that of the features.
        queue_size: How many keys are kept as negatives.
        momentum: How much of itself the key encoder keeps at each step.
        temperature: Divides the similarities.
    """

    memory_sizes: ClassVar[tuple[str, ...]] = ("queue_size",)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: int = 128,
        hidden_dim: int = 0,
        queue_size: int = 65_536,
        momentum: float = 0.999,
        temperature: float = 0.2,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.temperature = temperature
        features = backbone.feature_dim
        self.online = Branch(backbone, mlp(features, hidden_dim or features, dim, norm=False))
        self.target = frozen_copy(self.online)
        self.queue = Queue(queue_size, dim)

    @override
    def forward(self, batch: Batch, progress: float) -> Step[Visits]:
        first, second = batch.views
        query, index = gather(unit(self.online(first))), gather(batch.index)
        with torch.no_grad():
            key = gather(unit(self.target(second)))
        same = own_entries(index, self.queue.index)
        loss = info_nce(query, key, self.queue.keys, self.temperature, same)
        return Step(loss, memo=Visits(index, key))

    @override
    @torch.no_grad()
    def commit(self, visits: Visits, progress: float, /) -> None:
        follow(self.target, self.online, self.momentum)
        self.queue.enqueue(visits.keys, visits.images)
