"""MoCo's memory-bank baseline: keys are kept per image, not per encoder.

He, Fan, Wu, Xie, Girshick. Momentum contrast for unsupervised visual representation learning.
CVPR 2020, arXiv:1911.05722, figure 2b.

    loss = -log exp(q.k_i / t) / (exp(q.k_i / t) + sum_j exp(q.k_j / t))  (eq. 1)
    k_i <- unit(m k_i + (1 - m) q)

q is the embedding of image i and k_i its row of the bank; j runs over rows drawn, those of other
images; t is `temperature`, m is `momentum`.

    backbone -> Linear ReLU -> Linear

Queries: online embeddings. Keys: rows of the bank, the image's own and those drawn.
"""

from typing import Annotated, Literal

from msgspec import Meta
from torch import nn
from typing_extensions import override

from nearkin.memory import KeyUpdate, MemoryBank, same_image_mask
from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import info_nce, unit
from nearkin.schema import Dim, DimOrZero, MemorySize, Temperature, VisitMomentum
from nearkin.types import Batch, Encoded, Step


class MoCoMemoryBank(Method[KeyUpdate]):
    """The query must find its image's key among keys sampled from the bank.

    Args:
        num_images: Number of training images, which are the rows of the bank.
        dim: Embedding dimension.
        projector: `linear` as in MoCo v1, or `mlp` as in v2.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        num_negatives: Number of rows drawn per step, with replacement, shared by the batch. Draws
            of the query's own image are left out.
        momentum: EMA coefficient of a row of the bank.
        temperature: Softmax temperature.
    """

    defaults = Defaults(augment="moco_v2", augment_small="moco_cifar")
    health_bounds = HealthBounds(min_std=0.34, max_cosine=0.73)
    views = ("strong",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_images: int,
        dim: Dim = 128,
        projector: Literal["linear", "mlp"] = "mlp",
        hidden_dim: DimOrZero = 0,
        num_negatives: Annotated[int, Meta(ge=1), MemorySize(holds_batch=False)] = 65_536,
        momentum: VisitMomentum = 0.5,
        temperature: Temperature = 0.2,
    ) -> None:
        super().__init__()
        self.num_negatives = num_negatives
        self.temperature = temperature
        hidden = (hidden_dim,) if projector == "mlp" else ()
        self.online = Branch(backbone, *hidden, dim, norm=False)
        self.bank = MemoryBank(num_images, dim, momentum)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        q, index = unit(encoded[0]), batch.index
        drawn = self.bank.sample(self.num_negatives)
        k, negatives = self.bank.keys[index], self.bank.keys[drawn]
        loss = info_nce(q, k, negatives, self.temperature, same_image_mask(index, drawn))
        return Step(loss, memo=KeyUpdate(index, q.detach()))

    @override
    def commit(self, memo: KeyUpdate, progress: float, /) -> None:
        """The rows of the batch's images move towards their embeddings."""
        self.bank.write(memo.images, memo.keys)
