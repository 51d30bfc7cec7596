"""A backbone with a projector on top, the papers' projectors, and momentum encoders."""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from nearkin.distributed import world_size
from nearkin.errors import UsageError
from nearkin.networks.backbone import Backbone
from nearkin.networks.batch_norm import accumulate_statistics, normalize_by_chunk

Module = TypeVar("Module", bound=nn.Module)


class Branch(nn.Module):
    """A backbone and the projector on top of it. Gives embeddings in full precision."""

    chunk_size: int = 0
    """Rows that training computes at a time, by `set_chunk_size`; 0 means all."""

    def __init__(self, backbone: Backbone, projector: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch dim"]:
        embedding = self._run(lambda rows: self.projector(self.backbone(rows)), images)
        return embedding.to(torch.promote_types(embedding.dtype, torch.float32))

    def features(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        """Return the features of the backbone, without the projector."""
        return self._run(self.backbone, images)

    def _run(self, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        if not self.chunk_size or not self.training:
            return network(images)
        if len(images) % self.chunk_size:
            raise UsageError(f"{len(images)} rows are not chunks of {self.chunk_size} each")
        with accumulate_statistics(self):
            chunks = images.split(self.chunk_size)
            return torch.cat([checkpoint(network, rows, use_reentrant=False) for rows in chunks])


def mlp(
    *sizes: int,
    norm: bool = True,
    last_norm: bool = False,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return linear layers with an activation between them, batch-normalized if `norm`.

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


def frozen_copy(module: Module) -> Module:
    """Return a copy that no gradient reaches: the start of a momentum encoder."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Move the target's parameters towards the online ones (He et al. 2020, eq. 2).

    `t <- m t + (1 - m) o`. Parameters only: batch-norm statistics are the target's own, as in the
    papers' code.
    """
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1 - momentum)


def cosine_to_one(momentum: float, progress: float) -> float:
    """Return a momentum that rises along half a cosine to 1: the target slows to a halt.

    Grill et al. 2020, section 3.2: `1 - (1 - momentum) (cos(pi k / K) + 1) / 2` at step k of K.

    >>> [cosine_to_one(0.5, progress) for progress in (0.0, 0.5, 1.0)]
    [0.5, 0.75, 1.0]
    """
    return 1 - (1 - momentum) * (math.cos(math.pi * progress) + 1) / 2


def run_by_size(
    network: Callable[[Tensor], Tensor], views: Sequence[Tensor]
) -> list[Float[Tensor, "batch dim"]]:
    """Run a network on each view; consecutive views of one size go through it together.

    They share batch statistics then, as in the official code of SwAV and DINO.
    """
    groups = [list(group) for _, group in groupby(views, key=lambda view: view.shape[-2:])]
    return [z for group in groups for z in network(torch.cat(group)).chunk(len(group))]


def set_chunk_size(network: nn.Module, size: int, batch_size: int) -> None:
    """Let every branch inside compute `size` images at a time: the memory of a small batch.

    The loss sees the embeddings of all chunks at once, and activations are computed again chunk by
    chunk for the gradients. Gradients are those of the whole batch, with batch statistics over
    each chunk (Gao et al. 2021, arXiv:2101.06983). Momentum encoders run in chunks too; predictors
    and heads do not.

    Args:
        network: Usually a method. Changed in place, once; state and names stay as they are.
        size: Consecutive rows of a chunk. A chunk holds one view, of one process.
        batch_size: Images in the batch of all processes.

    Raises:
        UsageError: If a process's share of the batch does not consist of whole chunks, or batch
            statistics are over other groups already.
    """
    if size < 2 or batch_size % (size * world_size()):
        raise UsageError(
            f"chunks of {size} images do not divide a batch of {batch_size} over {world_size()} "
            "processes evenly; choose a size that does, of 2 or more"
        )
    for branch in network.modules():
        if isinstance(branch, Branch):
            normalize_by_chunk(branch, batch_size // size)
            branch.chunk_size = size
