"""MoCo: a queue of keys from a slowly moving encoder.

He, Fan, Wu, Xie, Girshick. Momentum contrast for unsupervised visual representation learning.
CVPR 2020, arXiv:1911.05722. With an MLP for a projector it is v2 (arXiv:2003.04297).

    loss = -log exp(q.k+ / t) / (exp(q.k+ / t) + sum_j exp(q.k_j / t))  (eq. 1)
    target <- m target + (1 - m) online                                 (eq. 2)

q is the embedding of one view, k+ the target's of the other, and k_j are the keys in the queue
that show other images; t is `temperature`, m is `momentum`.

    online, target: backbone -> Linear ReLU -> Linear

Queries: online embeddings of view 1. Keys: the target's embedding of view 2, and the queue.
"""

from typing import Literal

import torch
from torch import nn
from typing_extensions import override

from nearkin.memory import KeyUpdate, Queue, same_image_mask
from nearkin.method import Defaults, Method
from nearkin.networks.branch import Branch, ema_update, frozen_copy, shuffle_bn
from nearkin.objectives import info_nce, unit
from nearkin.schema import Dim, DimOrZero, Momentum, NumGroups, QueueSize, Temperature
from nearkin.types import Batch, Encoded, Step


class MoCo(Method[KeyUpdate]):
    """The query must find its key, the other view, among the keys of earlier batches.

    Batch statistics are taken over groups of the batch, and keys are shuffled between the groups,
    so that statistics do not tell which key is the query's (section 3.3).

    Args:
        dim: Embedding dimension.
        projector: `linear` as in v1, or `mlp` as in v2.
        hidden_dim: Hidden dimension of the MLP; 0 is that of the features.
        queue_size: Number of negatives in the queue.
        mask_own: Whether older keys of the query's own image are left out of its negatives; the
            official code keeps them.
        momentum: EMA coefficient of the key encoder.
        symmetric: Whether both views are queries. The loss is then the mean of both directions.
        bn_groups: Number of groups of the batch with batch statistics of their own.
        temperature: Softmax temperature.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=4e-3,
        augment="moco_v2",
        augment_small="simsiam_cifar",
        options={"momentum": 0.99, "temperature": 0.1},
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 128,
        projector: Literal["linear", "mlp"] = "mlp",
        hidden_dim: DimOrZero = 0,
        queue_size: QueueSize = 65_536,
        mask_own: bool = True,
        momentum: Momentum = 0.999,
        symmetric: bool = False,
        bn_groups: NumGroups = 8,
        temperature: Temperature = 0.2,
    ) -> None:
        super().__init__()
        self.mask_own = mask_own
        self.momentum = momentum
        self.symmetric = symmetric
        self.temperature = temperature
        hidden = (hidden_dim,) if projector == "mlp" else ()
        self.online = Branch(backbone, *hidden, dim, norm=False, bn_groups=bn_groups)
        self.target = frozen_copy(self.online)
        self.queue = Queue(queue_size, dim)

    @override
    def encode(self, batch: Batch) -> Encoded:
        x1, x2 = batch.views
        pairs = [(x1, x2), (x2, x1)] if self.symmetric else [(x1, x2)]
        q = [unit(self.online(x)) for x, _ in pairs]
        with torch.no_grad():
            k = [unit(shuffle_bn(self.target, x)) for _, x in pairs]
        return *q, *k

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        pairs = len(encoded) // 2
        q, k = encoded[:pairs], encoded[pairs:]
        same = same_image_mask(batch.index, self.queue.index) if self.mask_own else None
        losses = [
            info_nce(query, key, self.queue.keys, self.temperature, same)
            for query, key in zip(q, k, strict=True)
        ]
        memo = KeyUpdate(batch.index.repeat(pairs), torch.cat(k))
        return Step(torch.stack(losses).mean(), memo)

    @override
    def commit(self, memo: KeyUpdate, progress: float, /) -> None:
        """The target moves towards the online network, and the keys enter the queue."""
        ema_update(self.target, self.online, self.momentum)
        self.queue.enqueue(memo.keys, memo.images)
