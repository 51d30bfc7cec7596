"""MoCo v3: contrast with a momentum encoder, within one large batch and without a queue.

Chen, Xie, He. An empirical study of training self-supervised vision transformers.
ICCV 2021, arXiv:2104.02057.

    ctr(q, k) = mean_i -log exp(q_i.k_i / t) / sum_j exp(q_i.k_j / t)
    loss = 2 t (ctr(q1, k2) + ctr(q2, k1))  (algorithm 1)
    target <- m target + (1 - m) online

q are predictions from the two views and k the target's embeddings of them; t is `temperature`,
and m rises from `momentum` to one.

    online: backbone -> Linear BN ReLU -> Linear BN*
    predictor: Linear BN ReLU -> Linear
    target: backbone -> Linear BN ReLU -> Linear BN*
    BN* has neither scale nor shift

Queries: predictions from either view. Keys: the target's embeddings of the other view, of the
whole batch.
"""

import torch
from torch import nn
from typing_extensions import override

from nearkin.method import Defaults, Method, half_cosine
from nearkin.networks.branch import Branch, ema_update, freeze_first_convolution, frozen_copy, mlp
from nearkin.objectives import in_batch, unit
from nearkin.schema import Count, Dim, DimOrZero, Momentum, Temperature
from nearkin.types import Batch, Encoded, Step


class MoCoV3(Method[None]):
    """The prediction from one view must find the target's key of the other in the batch.

    The loss is the sum over both directions, times twice the temperature (algorithm 1).

    Args:
        dim: Embedding dimension.
        hidden_dim: Hidden dimension of projector and predictor; 0 is that of the features.
        num_layers: Number of layers of the projector; the paper has 3 with vision transformers.
        predictor_norm: Whether the predictor ends on a batch norm, as with vision transformers.
        frozen_patches: Whether the first convolution, which is a vision transformer's projection
            of patches, keeps its random weights (section 4.2).
        momentum: EMA coefficient of the target at the first step; it rises to 1.
        temperature: Softmax temperature.
    """

    defaults = Defaults(
        augment="moco_v3",
        augment_small="asymmetric_cifar",
        options={"temperature": 0.2, "hidden_dim": 1024},
    )

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: Dim = 256,
        hidden_dim: DimOrZero = 4096,
        num_layers: Count = 2,
        predictor_norm: bool = False,
        frozen_patches: bool = False,
        momentum: Momentum = 0.99,
        temperature: Temperature = 1.0,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        self.temperature = temperature
        self.online = Branch(backbone, *(hidden_dim,) * (num_layers - 1), dim, last_norm=True)
        if frozen_patches:
            freeze_first_convolution(self.backbone)
        self.target = frozen_copy(self.online)
        hidden = hidden_dim or self.backbone.feature_dim
        self.predictor = mlp(dim, hidden, dim, last_norm=predictor_norm)

    @override
    def encode(self, batch: Batch) -> Encoded:
        q1, q2 = (unit(self.predictor(self.online(view))) for view in batch.views)
        with torch.no_grad():
            k1, k2 = (unit(self.target(view)) for view in batch.views)
        return q1, q2, k1, k2

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        q1, q2, k1, k2 = encoded
        loss = torch.add(in_batch(q1, k2, self.temperature), in_batch(q2, k1, self.temperature))
        return Step(2 * self.temperature * loss, memo=None)

    @override
    def commit(self, memo: None, progress: float, /) -> None:
        """The target moves towards the online network."""
        ema_update(self.target, self.online, half_cosine(self.momentum, 1.0)(progress))
