"""InstDisc: every image is its own class, and its weight vector is its own past embedding.

Wu, Xiong, Yu, Lin. Unsupervised feature learning via non-parametric instance discrimination.
CVPR 2018, arXiv:1805.01978.

    P(j) = exp(v_j.v / t) / Z                                        (eq. 2, 4)
    h(j) = P(j) / (P(j) + m / n)                                     (eq. 5)

    softmax: loss = -log P(i)  where Z = sum_j exp(v_j.v / t)        (eq. 3)
    nce:     loss = -log h(i) - sum_{j drawn} log(1 - h(j))          (eq. 7)
             Z = n mean_{j drawn} exp(v_j.v / t), at the first step  (eq. 8)
    both:    + lambda |v - v_i|^2                                    (eq. 9)

    v_i <- unit(b v_i + (1 - b) v)

v is the embedding of image i and v_j row j of the bank of n, of which m are drawn as noise; t is
`temperature`, lambda is `proximal_weight`, b is `momentum`.

    backbone -> Linear -> unit length

Queries: online embeddings. Keys: rows of the bank, the image's own and the noise.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.memory import KeyUpdate, MemoryBank, same_image_mask
from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.objectives import alignment, info_nce, look_up, mean_over_rows, nce, unit
from nearkin.schema import Count, Dim, Temperature, VisitMomentum, Weight
from nearkin.types import Batch, Encoded, Step

BankUpdate = tuple[KeyUpdate, Float[Tensor, ""]]
"""New keys of the bank, and the normalizer in use."""


class InstDisc(Method[BankUpdate]):
    """The embedding must be told apart by its image's entry in the memory bank.

    Args:
        num_images: Number of training images, which are the rows of the bank.
        dim: Embedding dimension.
        loss: `nce` against noise rows (eq. 7), or `softmax` over the rows of all images (eq. 2).
        num_noise: Number of noise rows drawn per step, with replacement, shared by the batch. An
            image's own row may be among them.
        momentum: EMA coefficient of a row. The official code has 0.5 where the paper has 0 and the
            proximal term.
        proximal_weight: Weight lambda of the squared distance to the row (eq. 9).
        temperature: Softmax temperature.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=4e-3,
        augment="moco_v1",
        augment_small="simsiam_cifar",
        # Few visits to few images leave the one estimate of Z by NCE far off.
        options={"loss": "softmax", "temperature": 0.1},
    )
    health_bounds = HealthBounds(min_std=0.32, max_cosine=0.77)
    views = ("strong",)
    normalizer: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_images: int,
        dim: Dim = 128,
        loss: Literal["nce", "softmax"] = "nce",
        num_noise: Count = 4096,
        momentum: VisitMomentum = 0.5,
        proximal_weight: Weight = 0.0,
        temperature: Temperature = 0.07,
    ) -> None:
        super().__init__()
        self.softmax = loss == "softmax"
        self.num_noise = num_noise
        self.proximal_weight = proximal_weight
        self.temperature = temperature
        self.online = Branch(backbone, dim)
        self.bank = MemoryBank(num_images, dim, momentum)
        self.register_buffer("normalizer", torch.zeros(()))  # zero: not yet estimated

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[BankUpdate]:
        query, index = unit(encoded[0]), batch.index
        key, bank, normalizer = self.bank.keys[index], self.bank.keys, self.normalizer
        if self.softmax:
            own = same_image_mask(index, torch.arange(len(bank), device=index.device))
            loss = info_nce(query, key, bank, self.temperature, own)
        else:
            noise = bank[self.bank.sample(self.num_noise)]
            # Once would do, but a GPU would have to be asked whether it was done.
            normalizer = torch.where(normalizer > 0, normalizer, self.estimate(query, noise))
            loss = nce(query, key, noise, self.temperature, normalizer, len(bank))
        if self.proximal_weight > 0:
            loss = loss + self.proximal_weight * alignment(query, key)
        return Step(loss, memo=(KeyUpdate(index, query.detach()), normalizer))

    @override
    def commit(self, memo: BankUpdate, progress: float, /) -> None:
        """The rows of the batch's images move towards their embeddings; Z stays as estimated."""
        update, normalizer = memo
        self.bank.write(update.images, update.keys)
        self.normalizer.copy_(normalizer)

    @torch.no_grad()
    def estimate(
        self, query: Float[Tensor, "batch dim"], noise: Float[Tensor, "noise dim"]
    ) -> Float[Tensor, ""]:
        """The normalizer by Monte Carlo: made at the first step, constant from then on (eq. 8)."""

        def mean(rows: slice) -> Tensor:
            return look_up(query[rows], noise, self.temperature).exp().mean()

        return mean_over_rows(mean, len(query)) * len(self.bank.keys)
