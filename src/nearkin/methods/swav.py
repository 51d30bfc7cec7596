"""SwAV: predict one view's cluster from another's embedding.

Caron, Misra, Mairal, Goyal, Bojanowski, Joulin. Unsupervised learning of visual features by
contrasting cluster assignments. NeurIPS 2020, arXiv:2006.09882.

    code_i = Sinkhorn(z_i.c / epsilon)                   (eq. 3)
    l(j, i) = -sum_k code_ik log softmax_k(z_j.c_k / t)  (eq. 2)
    loss = mean_{i, j != i} l(j, i)                      (eq. 6)

z are the embeddings of the views and c_k the prototypes, unit vectors. View i is one of the two
large ones, and j is any; t is `temperature`.

    backbone -> Linear BN ReLU -> Linear -> unit length
    prototypes: Linear without bias

Queries: online embeddings of all views. Keys: prototypes.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from nearkin.memory import KeyUpdate, Queue, same_image_mask
from nearkin.method import Defaults, HealthBounds, Method, Schedule
from nearkin.networks.branch import Branch
from nearkin.objectives import look_up, mean_over_rows, sinkhorn, swapped_match, unit
from nearkin.schema import Count, Dim, DimOrZero, Fraction, QueueSize, Softness, Temperature
from nearkin.types import Batch, Encoded, Step


class SwAV(Method[KeyUpdate]):
    """Every view must predict the prototypes that each large view is assigned to.

    Codes are balanced over the batch and a queue of earlier embeddings, except those of the
    images that are in the batch.

    Args:
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        num_prototypes: Number of prototypes.
        queue_size: Number of earlier images that balance the codes.
        queue_from: Share of training after which the queue is used.
        freeze_until: Share of training in which the prototypes are frozen.
        epsilon: Softness of the codes (Sinkhorn's regularization).
        num_iterations: Number of Sinkhorn-Knopp iterations.
        temperature: Softmax temperature of the predictions.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=1e-2,
        augment="swav",
        augment_small="simsiam_cifar",
        options={"hidden_dim": 0, "num_prototypes": 300, "queue_size": 1024},
    )
    health_bounds = HealthBounds(min_rank=0.05, min_std=0.25, max_cosine=0.82)
    more_views = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 128,
        hidden_dim: DimOrZero = 2048,
        num_prototypes: Count = 3000,
        queue_size: QueueSize = 3840,
        queue_from: Fraction = 0.075,
        freeze_until: Fraction = 0.005,
        epsilon: Softness = 0.05,
        num_iterations: Count = 3,
        temperature: Temperature = 0.1,
    ) -> None:
        super().__init__()
        self.queue_from = queue_from
        self.freeze_until = freeze_until
        self.epsilon = epsilon
        self.num_iterations = num_iterations
        self.temperature = temperature
        self.online = Branch(backbone, hidden_dim, dim)
        self.prototypes = nn.Parameter(unit(torch.randn(num_prototypes, dim)))
        self.queue = Queue(queue_size, 2 * dim)  # an image's two large views side by side

    @override
    def encode(self, batch: Batch) -> Encoded:
        return tuple(unit(z) for z in self.online.by_size(batch.views))

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        z, index = encoded, batch.index
        large = torch.cat([view.detach() for view in z[:2]], dim=1)
        codes = self.assign(large, index, progress)

        def term(rows: slice) -> Tensor:
            scores = [look_up(view[rows], self.prototypes, self.temperature) for view in z]
            return swapped_match(scores, [code[rows] for code in codes])

        return Step(mean_over_rows(term, len(index)), memo=KeyUpdate(index, large))

    @override
    @torch.no_grad()
    def commit(self, memo: KeyUpdate, progress: float, /) -> None:
        """The prototypes return to length one, and the large views' embeddings enter the queue."""
        self.prototypes.copy_(unit(self.prototypes))
        self.queue.enqueue(memo.keys, memo.images)

    @override
    def learning_rates(self, schedule: Schedule, /) -> Mapping[str, Schedule]:
        return {"prototypes": lambda p: 0.0 if p < self.freeze_until else schedule(p)}

    @torch.no_grad()
    def assign(
        self, large: Float[Tensor, "batch views"], index: Int[Tensor, " batch"], progress: float
    ) -> list[Float[Tensor, "batch prototypes"]]:
        """Codes of both large views, balanced with the help of earlier images."""
        rows, ignored = large, None
        if progress >= self.queue_from:
            in_batch = same_image_mask(index, self.queue.index).any(dim=0)
            rows = torch.cat([large, self.queue.keys])
            ignored = F.pad(in_batch | ~self.queue.filled, (len(large), 0))
        scores = [view @ self.prototypes.T for view in rows.chunk(2, dim=1)]
        codes = [sinkhorn(score, self.epsilon, self.num_iterations, ignored) for score in scores]
        return [code[: len(large)] for code in codes]
