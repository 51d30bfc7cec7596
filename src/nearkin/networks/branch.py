"""A backbone with a projector on top, and the projectors the papers use."""

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.networks.backbone import Backbone


class Branch(nn.Module):
    """A backbone and the projector on top of it. Gives embeddings in full precision."""

    def __init__(self, backbone: Backbone, projector: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch dim"]:
        embedding: Tensor = self.projector(self.backbone(images))
        return embedding.to(torch.promote_types(embedding.dtype, torch.float32))


def by_size(
    network: Callable[[Tensor], Tensor], views: Sequence[Tensor]
) -> list[Float[Tensor, "batch dim"]]:
    """What a network gives for each view; neighbors of one size go through it together.

    So they share their batch statistics, as in SwAV's code and DINO's.
    """
    together = [list(group) for _, group in groupby(views, key=lambda view: view.shape[-2:])]
    return [z for group in together for z in network(torch.cat(group)).chunk(len(group))]


def mlp(
    *sizes: int,
    norm: bool = True,
    last_norm: bool = False,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Linear layers with an activation between them, batch-normalized if `norm`.

    `last_norm` ends on a batch norm without scale or shift (Chen & He 2021).
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes[:-1]):
        layers += [nn.Linear(fan_in, fan_out, bias=not norm)]
        layers += [nn.BatchNorm1d(fan_out)] if norm else []
        layers += [activation()]
    layers += [nn.Linear(sizes[-2], sizes[-1], bias=not last_norm)]
    layers += [nn.BatchNorm1d(sizes[-1], affine=False)] if last_norm else []
    return nn.Sequential(*layers)
