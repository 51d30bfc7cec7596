"""Ranks: what several processes tell each other while they train.

Every rank runs its own images through the networks and calls `gather`; from there on every
rank holds the whole batch and has the same loss, so no other code mentions ranks. A loss that is
a mean over rows need not be computed by all of them: see `mean_over_rows`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported in a group, it would keep that group's threads alive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is; the first, 0, is the one that writes files and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def share(rows: int) -> slice:
    """Which of so many rows are this rank's: those of a batch that it loads and encodes.

    >>> share(256)
    slice(0, 256, None)
    """
    own, ranks = rank(), world_size()
    return slice(own * rows // ranks, (own + 1) * rows // ranks)


def part(groups: int) -> int:
    """Which of `groups` groups of consecutive processes this one belongs to."""
    return rank() * groups // world_size()


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension, with gradients summed back over the ranks."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        own = grad.new_empty(len(grad) // world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad)
        return own


def gather(x: Tensor) -> Tensor:
    """The rows of every rank, in rank order. Differentiable; the identity on one process."""
    gathered: Tensor = x if world_size() == 1 else _Gather.apply(x)
    return gathered


class _MeanOverRanks(torch.autograd.Function):
    """The mean over the ranks, whose gradients reach each rank's own number undivided.

    `gather` adds gradients up and DDP takes their mean, as where every rank has the whole loss.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / world_size()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


def mean_over_rows(term: Callable[[slice], Any], rows: int) -> Any:
    """Return the mean of a term over rows that every rank holds; each rank computes its share.

    Losses and gradients are those of `term(slice(None))`: see `nearkin.objectives.rows`. Where
    rows are fewer than ranks, all ranks compute all of them.
    """
    ranks = world_size()
    if ranks == 1 or rows < ranks:
        return term(slice(None))
    own = share(rows)
    weight = ranks * (own.stop - own.start) / rows  # 1, unless shares differ by a row
    means = term(own)
    if isinstance(means, Tensor):
        return _MeanOverRanks.apply(means * weight)
    return tuple(_MeanOverRanks.apply(mean * weight) for mean in means)


def all_reduce_max(number: int) -> int:
    """The largest of a number that each rank has, such as that of a signal."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def broadcast_bytes(content: bytes) -> bytes:
    """What the first rank has; the others' own is not looked at."""
    if world_size() == 1:
        return content
    size = torch.tensor(len(content))
    dist.broadcast(size, src=0)
    sent = bytearray(content) if rank() == 0 else bytearray(int(size))
    if sent:
        dist.broadcast(torch.frombuffer(sent, dtype=torch.uint8), src=0)
    return bytes(sent)


def is_sharded(module: nn.Module) -> bool:
    """Whether it is divided among the ranks, and averages gradients by itself."""
    return hasattr(module, "unshard")  # to import its class takes half a second


def wrap(module: nn.Module) -> nn.Module:
    """Start every rank from the state of the first, and average gradients from then on.

    Buffers are not synchronized again: ranks write the same rows, so they stay equal.
    """
    if world_size() == 1 or is_sharded(module):
        return module
    same_state(module)
    return DistributedDataParallel(module, **_NO_BUFFER_SYNC)


def same_state(module: nn.Module) -> None:
    """Give every rank the state of the first."""
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)


# torch 2.15 renames the option that keeps DDP from copying the first rank's buffers each step.
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)
