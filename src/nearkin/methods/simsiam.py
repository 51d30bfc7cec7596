"""SimSiam: predict the other view's embedding, and stop its gradient. Nothing else.

Chen, He. Exploring simple Siamese representation learning. CVPR 2021, arXiv:2011.10566.

    D(p, z) = -p.z                                    (eq. 1)
    loss = D(p1, stop(z2)) / 2 + D(p2, stop(z1)) / 2  (eq. 4)

z are the embeddings of the two views and p the predictions from them, unit vectors; no gradient
passes stop.

    online: backbone -> (Linear BN ReLU) x 2 -> Linear BN*
    predictor: Linear BN ReLU -> Linear
    BN* has neither scale nor shift

Queries: predictions from either view. Keys: the embedding of the other view.
"""

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, Method, Schedule
from nearkin.networks.branch import Branch, mlp
from nearkin.objectives import alignment, unit
from nearkin.schema import Count, DimOrZero
from nearkin.types import Batch, Encoded, Step


class SimSiam(Method[None]):
    """The prediction from one view must agree with the embedding of the other.

    The loss is the mean negative cosine, from -1 to 1. The predictor's learning rate stays at its
    peak (section 4.2). Without a predictor or without the stop-gradient the method collapses;
    the options are there to show it (tables 1 and 2).

    Args:
        dim: Embedding dimension, and width of the projector; 0 is that of the features.
        num_layers: Number of layers of the projector: 3, or 2 for small images (appendix D).
        predictor_dim: Hidden dimension of the predictor; 0 is a quarter of `dim`.
        predictor: Whether there is a predictor.
        stop_gradient: Whether gradients stop at the predicted embeddings.
    """

    # Chosen on images held out of the training part of CIFAR-10 (docs/lab.md).
    defaults = Defaults(
        optimizer="muon",
        lr=1e-2,
        augment="simsiam",
        augment_small="simsiam_cifar",
        options={"dim": 0, "num_layers": 2, "predictor_dim": 0},
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: DimOrZero = 2048,
        num_layers: Count = 3,
        predictor_dim: DimOrZero = 512,
        predictor: bool = True,
        stop_gradient: bool = True,
    ) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient
        self.online = Branch(backbone, *[dim] * num_layers, last_norm=True)
        dim = dim or self.backbone.feature_dim
        hidden = predictor_dim or max(1, dim // 4)
        self.predictor = mlp(dim, hidden, dim) if predictor else nn.Identity()

    @override
    def encode(self, batch: Batch) -> Encoded:
        z1, z2 = (self.online(view) for view in batch.views)
        p1, p2 = (unit(self.predictor(z)) for z in (z1, z2))
        if self.stop_gradient:
            z1, z2 = z1.detach(), z2.detach()
        return p1, p2, unit(z1), unit(z2)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        p1, p2, z1, z2 = encoded
        return Step((alignment(p1, z2) + alignment(p2, z1)) / 4 - 1, memo=None)

    @override
    def learning_rates(self, schedule: Schedule, /) -> Mapping[str, Schedule]:
        return {"predictor": lambda _: 1.0} if len(list(self.predictor.parameters())) else {}
