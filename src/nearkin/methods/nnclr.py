"""NNCLR: the nearest neighbor of an embedding as its positive.

Dwibedi, Aytar, Tompson, Sermanet, Zisserman. With a little help from my friends:
nearest-neighbor contrastive learning of visual representations. ICCV 2021, arXiv:2104.14548.

    NN(z) = argmin_k |z - k|, over the support set
    rows(z, p) = mean_i -log exp(NN(z_i).p_i / t) / sum_j exp(NN(z_i).p_j / t)
    cols(z, p) = mean_i -log exp(NN(z_i).p_i / t) / sum_j exp(NN(z_j).p_i / t)

    views:  loss = (rows(z1, p2) + rows(z2, p1)) / 2, as in solo-learn and lightly
    rowcol: loss = (rows(z1, p2) + cols(z1, p2)) / 2
    both:   the mean of all four

z are the embeddings of the two views and p the predictions from them, unit vectors; t is
`temperature`. With `loss` nt_xent, rows(z, p) is eq. 1 of SimCLR, with NN(z) and p for the views.

    online: backbone -> (Linear BN ReLU) x 2 -> Linear BN*
    predictor: Linear BN ReLU -> Linear
    BN* has neither scale nor shift

Queries: nearest neighbors of embeddings of one view. Keys: predictions from the other view, of
the whole batch.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from nearkin.errors import UsageError
from nearkin.memory import KeyUpdate, Queue, same_image_mask
from nearkin.method import Defaults, Method
from nearkin.metrics.neighbors import nearest
from nearkin.networks.branch import Branch, mlp
from nearkin.objectives import full_precision, in_batch, nt_xent, unit
from nearkin.schema import Count, Dim, DimOrZero, QueueSize, Temperature
from nearkin.types import Batch, Encoded, Step


class NNCLR(Method[KeyUpdate]):
    """The nearest neighbor of one view must find the other view's prediction in the batch.

    Neighbors come from a support set of earlier embeddings. An image's own older entry is never
    its neighbor, if it is masked.

    Args:
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        num_layers: Number of layers of the projector; lightly has 2 for CIFAR-10.
        affine: Whether its last batch norm has scale and shift, as in solo-learn and lightly.
        predictor_dim: Hidden dimension of the predictor; 0 is that of the features.
        predictor: Whether there is a predictor.
        support_size: Number of earlier embeddings in the support set.
        mask_own: Whether an image's own older entries are left out; other code keeps them.
        num_neighbors: Number of nearest neighbors to draw one from (table 6b).
        loss: `cross_view`, where neighbors look for predictions only, or lightly's `nt_xent`,
            where each of both looks for its partner among all others of both.
        symmetric: Both `views` as queries, as in solo-learn and lightly; one view along rows and
            columns of its matrix (`rowcol`), as in the paper's text; or `both`.
        temperature: Softmax temperature.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=4e-3,
        augment="byol",
        augment_small="simsiam_cifar",
        options={"temperature": 0.2, "hidden_dim": 0, "predictor_dim": 0},
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 256,
        hidden_dim: DimOrZero = 2048,
        num_layers: Count = 3,
        affine: bool = False,
        predictor_dim: DimOrZero = 4096,
        predictor: bool = True,
        support_size: QueueSize = 98_304,
        mask_own: bool = True,
        num_neighbors: Count = 1,
        loss: Literal["cross_view", "nt_xent"] = "cross_view",
        symmetric: Literal["views", "rowcol", "both"] = "views",
        temperature: Temperature = 0.1,
    ) -> None:
        super().__init__()
        if num_neighbors > support_size:
            raise UsageError(
                f"--num-neighbors {num_neighbors} is more than --support-size {support_size}"
            )
        if mask_own and support_size == 1:
            raise UsageError(
                "--support-size 1 has no neighbor for the image whose entry it is; give 2 or "
                "more, or --mask-own false"
            )
        self.mask_own = mask_own
        self.num_neighbors = num_neighbors
        self.contrast = in_batch if loss == "cross_view" else nt_xent
        self.symmetric = symmetric
        self.temperature = temperature
        sizes = *(hidden_dim,) * (num_layers - 1), dim
        self.online = Branch(backbone, *sizes, last_norm=True, affine=affine)
        hidden = predictor_dim or self.backbone.feature_dim
        self.predictor = mlp(dim, hidden, dim) if predictor else nn.Identity()
        self.support_set = Queue(support_size, dim)

    @override
    def encode(self, batch: Batch) -> Encoded:
        z1, z2 = (self.online(view) for view in batch.views)
        p1, p2 = (unit(self.predictor(z)) for z in (z1, z2))
        z1, z2 = unit(z1.detach()), unit(z2.detach())
        neighbors = [self.neighbors(z, batch.index) for z in (z1, z2)]
        return z1, p1, p2, *neighbors

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        z1, p1, p2, neighbors1, neighbors2 = encoded
        loss = self.match(self.draw(neighbors1), p2)
        if self.symmetric != "rowcol":
            loss = (loss + self.match(self.draw(neighbors2), p1)) / 2
        return Step(loss, memo=KeyUpdate(batch.index, z1))

    @override
    def commit(self, memo: KeyUpdate, progress: float, /) -> None:
        """The embeddings of first views enter the support set."""
        self.support_set.enqueue(memo.keys, memo.images)

    @torch.no_grad()
    @full_precision
    def neighbors(
        self, z: Float[Tensor, "batch dim"], index: Int[Tensor, " batch"]
    ) -> Int[Tensor, "batch neighbors"]:
        """Return the nearest entries of the support set, -1 where there are no more."""
        own = same_image_mask(index, self.support_set.index) if self.mask_own else None
        similarity, entries = nearest(self.support_set.keys, z, self.num_neighbors, ignored=own)
        return entries.where(similarity.isfinite(), -1)

    def draw(self, neighbors: Int[Tensor, "batch neighbors"]) -> Float[Tensor, "batch dim"]:
        """Return one neighbor of each image, drawn at random."""
        count = (neighbors >= 0).sum(dim=1, keepdim=True)
        drawn = (torch.rand(len(neighbors), 1, device=neighbors.device) * count).long()
        return self.support_set.keys[neighbors.gather(1, drawn).squeeze(1)]

    def match(
        self, neighbor: Float[Tensor, "batch dim"], p: Float[Tensor, "batch dim"]
    ) -> Float[Tensor, ""]:
        """Find predictions from neighbors and, along the columns, the reverse (eq. 3)."""
        loss = self.contrast(neighbor, p, self.temperature)
        if self.symmetric == "views":
            return loss
        return torch.add(loss, self.contrast(p, neighbor, self.temperature)) / 2
