"""ReSSL (Zheng et al., NeurIPS 2021, arXiv:2107.09282): views agree on how similar images are."""

import torch

from nearkin.memory import KeyUpdate, Queue
from nearkin.method import Defaults, Method
from nearkin.networks.branch import Backbone, Branch, ema_update, frozen_copy
from nearkin.objectives import look_up, soft_match, unit
from nearkin.schema import Dim, DimOrZero, Momentum, QueueSize, Temperature
from nearkin.types import Batch, Encoded, Step


class ReSSL(Method[KeyUpdate]):
    """A strong view must be as similar to earlier images as a weak view is.

    Args:
        backbone: Network to train, from images to features.
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        queue_size: How many embeddings of earlier images are kept.
        momentum: EMA coefficient of the target.
        temperature: Divides the similarities of the strong view.
        target_temperature: Divides those of the weak view; smaller, so that they are sharper.
    """

    views = ("weak", "strong")
    defaults = Defaults(augment="moco_v2", augment_small="moco_cifar")

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: Dim = 128,
        hidden_dim: DimOrZero = 512,
        queue_size: QueueSize = 4096,
        momentum: Momentum = 0.99,
        temperature: Temperature = 0.1,
        target_temperature: Temperature = 0.04,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.temperature = temperature
        self.target_temperature = target_temperature
        self.online = Branch(backbone, hidden_dim, dim)
        self.target = frozen_copy(self.online)
        self.queue = Queue(queue_size, dim)

    def encode(self, batch: Batch) -> Encoded:
        weak, strong = batch.views
        with torch.no_grad():
            key = unit(self.target(weak))
        return unit(self.online(strong)), key

    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        query, key = encoded
        logits = look_up(query, self.queue.keys, self.temperature)
        relations = look_up(key, self.queue.keys, self.target_temperature).softmax(dim=1)
        return Step(soft_match(logits, relations), memo=KeyUpdate(batch.index, key))

    @torch.no_grad()
    def commit(self, memo: KeyUpdate, progress: float) -> None:
        ema_update(self.target, self.online, self.momentum)
        self.queue.enqueue(memo.keys, memo.images)
