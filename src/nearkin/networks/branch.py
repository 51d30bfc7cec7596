"""A backbone with a projector on top, and the projectors the papers use."""

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from nearkin.distributed import world_size
from nearkin.errors import UsageError
from nearkin.networks.backbone import Backbone
from nearkin.networks.batch_norm import normalize_by_chunk, one_pass


class Branch(nn.Module):
    """A backbone and the projector on top of it. Gives embeddings in full precision."""

    chunk_size: int = 0
    """Rows that training shows it at a time, by `in_chunks`; 0 means all."""

    def __init__(self, backbone: Backbone, projector: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch dim"]:
        embedding = self._run(lambda rows: self.projector(self.backbone(rows)), images)
        return embedding.to(torch.promote_types(embedding.dtype, torch.float32))

    def features(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        """What the projector is given, as the backbone computes it."""
        return self._run(self.backbone, images)

    def _run(self, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        if not self.chunk_size or not self.training:
            return network(images)
        if len(images) % self.chunk_size:
            raise UsageError(f"{len(images)} rows are not chunks of {self.chunk_size} each")
        with one_pass(self):
            chunks = images.split(self.chunk_size)
            found = [checkpoint(network, rows, use_reentrant=False) for rows in chunks]
        return torch.cat(found)


def in_chunks(network: nn.Module, size: int, batch_size: int) -> None:
    """Train every branch inside `size` images at a time: the memory of a small batch.

    Embeddings of all chunks are together before any loss sees them, and activations are computed
    again, chunk by chunk, for the gradients. So gradients are those of the whole batch, with
    batch statistics taken over each chunk (Gao et al. 2021, arXiv:2101.06983). Momentum branches
    run in chunks too; predictors and heads do not.

    Args:
        network: Changed in place, once: a method. State and names stay as they are.
        size: Consecutive rows of the batch in a chunk. A chunk holds one view, by one process.
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
