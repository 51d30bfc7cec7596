"""UNO: one cross-entropy over known and novel classes, with balanced codes for the novel ones.

Fini, Sangineto, Lathuiliere, Zhong, Nabi, Ricci. A unified objective for novel class discovery.
ICCV 2021, arXiv:2108.08536.

    loss = -mean y_i.log softmax([a_j, b_j] / t)  (eq. 3)
    y_i  = [class, 0] of a labeled image, [0, q_i] of another one  (eq. 4)
    q_i  = codes of b_i that use every novel class equally  (eq. 5)

Views i and j are of one image. a are cosines of its features with prototypes of known classes, b
those of an embedding with prototypes of novel classes. Codes are made by Sinkhorn-Knopp over the
unlabeled images of a batch, and t is `temperature`. Several heads have a projector and novel
prototypes each, and as many have several times the classes; the loss is their mean.

    known: backbone -> unit length -> prototypes
    novel: backbone -> Linear BN ReLU -> Linear -> unit length -> prototypes

Queries: features and embeddings of all views. Keys: prototypes of all classes.
"""

from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.networks.heads import MultiHead, Prototypes, projected_prototypes
from nearkin.objectives import sinkhorn, swapped_match, unit
from nearkin.schema import Count, CountOrZero, Dim, DimOrZero, Softness, Temperature
from nearkin.types import UNLABELED, Batch, Encoded, Step

Losses = Float[Tensor, " heads"]
NEWEST: Final = 0.01  # Share of the newest loss in the average by which a head is chosen


class UNO(Method[Losses]):
    """A view's class must be that of the other view: its label or, without one, a balanced code.

    Images without a label are taken to be of novel classes. Either part of a batch may be empty.
    The head with the least loss is the classifier.

    Args:
        num_known_classes: Number of known classes, which have labels.
        num_novel_classes: Number of novel classes.
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of the projectors; 0 is that of the features.
        num_heads: Number of heads, and of those with more classes.
        overclustering: How many times as many novel classes these have; 0 for no such heads. The
            official scripts have 10 for CIFAR-10, and 5 or 3 for CIFAR-100.
        epsilon: Softness of the codes (Sinkhorn's regularization).
        num_iterations: Number of Sinkhorn-Knopp iterations.
        temperature: Softmax temperature.
    """

    defaults = Defaults(augment="ncl", augment_small="ncl_cifar")
    health_bounds = HealthBounds(min_rank=0.02, min_std=0.35, max_cosine=0.74)
    uses_labels = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_known_classes: int,
        num_novel_classes: Count = 5,
        dim: Dim = 256,
        hidden_dim: DimOrZero = 2048,
        num_heads: Count = 4,
        overclustering: CountOrZero = 3,
        epsilon: Softness = 0.05,
        num_iterations: Count = 3,
        temperature: Temperature = 0.1,
    ) -> None:
        super().__init__()
        self.num_known = num_known_classes
        self.sinkhorn = partial(sinkhorn, epsilon=epsilon, iterations=num_iterations)
        self.temperature = temperature
        self.online = Branch(backbone)
        sizes = self.backbone.feature_dim, hidden_dim or self.backbone.feature_dim, dim
        novel, more = num_novel_classes, overclustering * num_novel_classes
        self.heads = MultiHead(*sizes, num_known_classes, novel, num_heads, temperature)
        self.more_classes = nn.ModuleList(
            projected_prototypes(*sizes, more) for _ in range(num_heads if more else 0)
        )

    @override
    def encode(self, batch: Batch) -> Encoded:
        heads = self.heads.known, *self.heads.novel, *self.more_classes
        features = [self.online(view) for view in batch.views]
        return tuple(head(h) for head in heads for h in features)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[Losses]:
        count = len(self.views)
        known, *novel = [encoded[i : i + count] for i in range(0, len(encoded), count)]
        losses = [self.match(known, views, batch.label) for views in novel]
        used = torch.stack(losses[: len(self.heads.novel)]).detach()
        return Step(torch.stack(losses).mean(), memo=used)

    @override
    @torch.no_grad()
    def commit(self, memo: Losses, progress: float, /) -> None:
        """Prototypes return to length one, and the average losses of the heads are updated."""
        for part in self.modules():
            if isinstance(part, Prototypes):
                part.weight.copy_(unit(part.weight))
        self.heads.losses.lerp_(memo, NEWEST)

    def match(self, known: Encoded, novel: Encoded, label: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        """Match the classes of each view with the targets of the other one (eq. 3)."""
        views = [torch.cat(pair, dim=1) for pair in zip(known, novel, strict=True)]
        targets = [self.targets(cosines.detach(), label) for cosines in views]
        return swapped_match([cosines / self.temperature for cosines in views], targets)

    def targets(
        self, cosines: Float[Tensor, "n classes"], label: Int[Tensor, " n"]
    ) -> Float[Tensor, "n classes"]:
        """Labels, and codes of the images that have none (eq. 4)."""
        labeled = label != UNLABELED
        codes = self.sinkhorn(cosines[:, self.num_known :], ignored=labeled)
        own_class = label[:, None] == torch.arange(cosines.shape[1], device=label.device)
        padded = F.pad(codes, (self.num_known, 0))
        return torch.where(labeled[:, None], own_class.to(codes.dtype), padded)
