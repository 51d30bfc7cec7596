"""DINO: distill a slowly moving copy of oneself, whose answers are centered and sharp.

Caron, Touvron, Misra, Jegou, Mairal, Bojanowski, Joulin. Emerging properties in self-supervised
vision transformers. ICCV 2021, arXiv:2104.14294.

    P_i = softmax((target(x_i) - center) / t')                          (eq. 1)
    loss = mean_{i, j != i} -sum_k P_ik log softmax_k(online(x_j) / t)  (eq. 3)
    center <- c center + (1 - c) mean_i target(x_i)                     (eq. 4)
    target <- m target + (1 - m) online

The networks give cosines with their prototypes. View i is one of the two large ones, and j is
any; t is `temperature`, t' the target's, c is `center_momentum`, and m rises from `momentum` to
one.

    online, target: backbone -> (Linear GELU) x 2 -> Linear -> unit length
    prototypes: Linear without bias, a unit vector each

Queries: online embeddings of all views. Keys: prototypes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method, Schedule, half_cosine, line
from nearkin.networks.branch import Branch, ema_update, frozen_copy
from nearkin.networks.heads import CosineHead
from nearkin.objectives import mean_over_rows, swapped_match
from nearkin.schema import Count, Dim, DimOrZero, Fraction, Momentum, Temperature
from nearkin.types import Batch, Encoded, Step


class DINO(Method[Tensor]):
    """Every view must predict which prototypes the target sees in each other large view.

    The target's answers are centered, against one prototype taking all, and sharpened, against
    all being alike.

    Args:
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projector; 0 is that of the features.
        projector_norm: Whether the projector has batch norm, as with residual networks.
        num_prototypes: Number of prototypes.
        momentum: EMA coefficient of the target at the first step; it rises to 1.
        center_momentum: EMA coefficient of the center.
        freeze_until: Share of training in which the prototypes are frozen.
        warmup_until: Share of training in which the target's temperature rises.
        first_target_temperature: Softmax temperature of the target at the first step.
        target_temperature: Softmax temperature of the target after it has risen.
        temperature: Softmax temperature of the online network.
    """

    defaults = Defaults(
        augment="dino",
        options={
            "hidden_dim": 1024,
            "projector_norm": True,
            "num_prototypes": 1024,
            "momentum": 0.99,
        },
    )
    health_bounds = HealthBounds(min_rank=0.04, min_std=0.3, max_cosine=0.79)
    more_views = True
    center: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 256,
        hidden_dim: DimOrZero = 2048,
        projector_norm: bool = False,
        num_prototypes: Count = 65_536,
        momentum: Momentum = 0.996,
        center_momentum: Momentum = 0.9,
        freeze_until: Fraction = 0.01,
        warmup_until: Fraction = 0.3,
        first_target_temperature: Temperature = 0.04,
        target_temperature: Temperature = 0.07,
        temperature: Temperature = 0.1,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.center_momentum = center_momentum
        self.freeze_until = freeze_until
        self.sharpness = line(first_target_temperature, target_temperature, warmup_until)
        self.temperature = temperature
        sizes = hidden_dim, hidden_dim, dim
        self.online = Branch(backbone, *sizes, norm=projector_norm, activation=nn.GELU)
        self.prototypes = CosineHead(dim, num_prototypes, temperature=1.0)
        self.target = frozen_copy(self.online)
        self.target_prototypes = frozen_copy(self.prototypes)
        self.register_buffer("center", torch.zeros(num_prototypes))

    @override
    def encode(self, batch: Batch) -> Encoded:
        with torch.no_grad():
            large = self.target.by_size(batch.views[:2])
        return *large, *self.online.by_size(batch.views)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[Tensor]:
        large, views = encoded[:2], encoded[2:]
        temperature = self.sharpness(progress)

        def term(rows: slice) -> tuple[Tensor, Tensor]:
            scores = self.prototypes(torch.cat([z[rows] for z in views])) / self.temperature
            with torch.no_grad():
                answers = self.target_prototypes(torch.cat([z[rows] for z in large]))
                codes = ((answers - self.center) / temperature).softmax(dim=1)
            match = swapped_match(scores.chunk(len(views)), codes.chunk(len(large)))
            return match, answers.mean(dim=0)

        # One process per row: a row has as many scores as there are prototypes.
        loss, mean_answer = mean_over_rows(term, len(batch.index))
        return Step(loss, memo=mean_answer)

    @override
    def commit(self, mean_answer: Tensor, progress: float, /) -> None:
        """The target moves towards the online network, and the center towards the mean answer."""
        momentum = half_cosine(self.momentum, 1.0)(progress)
        ema_update(self.target, self.online, momentum)
        ema_update(self.target_prototypes, self.prototypes, momentum)
        self.center.lerp_(mean_answer, 1 - self.center_momentum)

    @override
    def learning_rates(self, schedule: Schedule, /) -> Mapping[str, Schedule]:
        return {"prototypes": lambda p: 0.0 if p < self.freeze_until else schedule(p)}
