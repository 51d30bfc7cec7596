"""Ranks: which process this is of several that train together, and what they send each other.

Every rank runs its own images through the networks. `nearkin.method.Method` gathers the results,
so every rank computes the same loss and no other code mentions ranks.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported in a group, it would keep that group's threads alive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from nearkin.errors import DivergedError, UnsavedError, UsageError

UNSET: Final = "unset RANK and WORLD_SIZE, or start all processes with torchrun or srun"
"""What to do where the environment names processes that nobody has started."""

SLURM_PORTS: Final = range(20_000, 30_000)
"""Ports of the rendezvous of processes that SLURM starts, by the numbers of their job and step."""


@dataclass(frozen=True)
class RankInfo:
    """Which process this is of those that a launcher has started."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of the machine, and number of its GPU."""


def rank_info() -> RankInfo | None:
    """Return what the environment says of this process; None if it was started alone."""
    env = {**os.environ, **slurm_env(os.environ)}
    if not (env.get("RANK") and env.get("WORLD_SIZE")):
        return None
    rank, ranks = env_number("RANK", 0, env), env_number("WORLD_SIZE", 1, env)
    here = RankInfo(rank, ranks, env_number("LOCAL_RANK", rank, env))
    return here if ranks > 1 else None


def env_number(name: str, default: int, env: Mapping[str, str] = os.environ) -> int:
    """Return the number that a launcher has written to the environment, if it has."""
    try:
        return int(env.get(name) or default)
    except ValueError as error:
        raise UsageError(f"{name} is {env[name]!r}, not a number; {UNSET}") from error


def is_main_process() -> bool:
    """Return whether this process is the one that writes files and prints."""
    here = rank_info()
    return here is None or here.rank == 0


def num_processes(devices: int) -> int:
    """Return how many processes share a batch: those of a launcher, or else `devices`."""
    here = rank_info()
    if here is None:
        return devices
    if devices not in (1, here.world_size):
        raise UsageError(
            f"--devices {devices}, but {here.world_size} processes were started; "
            "leave --devices out"
        )
    return here.world_size


def slurm_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a process that `srun` has started with others.

    Empty where torchrun has set them: `srun` may have started torchrun, once per machine.
    """
    if env.get("RANK") or int(env.get("SLURM_STEP_NUM_TASKS") or 1) == 1:
        return {}
    # n[001-004,7],m2 begins with n001
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"], count=1)
    # Steps of a job may share a machine, and so may jobs whose numbers follow each other.
    port = int(env["SLURM_JOB_ID"]) + 1009 * int(env.get("SLURM_STEP_ID", 0))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": first.partition(",")[0],
        "MASTER_PORT": str(SLURM_PORTS[port % len(SLURM_PORTS)]),
    }


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return which of them this is; rank 0 writes files and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def rows_of_rank(rows: int) -> slice:
    """Return the rows of a batch that this rank loads and encodes.

    >>> rows_of_rank(256)
    slice(0, 256, None)
    """
    ranks = world_size()
    return slice(rank() * rows // ranks, (rank() + 1) * rows // ranks)


def group_of_rank(groups: int) -> int:
    """Return which of `groups` groups of consecutive ranks this one belongs to."""
    return rank() * groups // world_size()


# Renamed in torch 2.14, which warns of the old names.
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension, with gradients summed back over the ranks."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        gathered = x.new_empty(world_size() * len(x), *x.shape[1:])
        _all_gather(gathered, x.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous()
        own = grad.new_empty(len(grad) // world_size(), *grad.shape[1:])
        _reduce_scatter(own, grad)
        return own


def gather(x: Tensor) -> Tensor:
    """Return the rows of every rank, in rank order, with gradients; `x` itself on one process.

    Images are in channels_last memory afterwards.
    """
    if world_size() == 1:
        return x
    last = x.movedim(1, -1) if x.ndim == 4 else x
    gathered: Tensor = _Gather.apply(last)
    return gathered.movedim(-1, 1) if x.ndim == 4 else gathered


def gather_all(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what `gather` gives of each; those that are alike travel in one message.

    All have as many rows. Those with gradients travel without those that have none.
    """
    if world_size() == 1:
        return tuple(tensors)
    kinds, results = [(x.dtype, x.requires_grad) for x in tensors], list(tensors)
    for alike in dict.fromkeys(kinds):
        places = [place for place, kind in enumerate(kinds) if kind == alike]
        rows = [tensors[place].reshape(len(tensors[place]), -1) for place in places]
        columns = gather(torch.cat(rows, dim=1)).split([x.shape[1] for x in rows], dim=1)
        for place, x in zip(places, columns, strict=True):
            results[place] = x.reshape(-1, *tensors[place].shape[1:])
    return tuple(results)


class _MeanOverRanks(torch.autograd.Function):
    """The mean over the ranks, whose gradients reach each rank's own number undivided.

    DDP divides gradients by the number of ranks, as where every rank has the whole loss. Each rank
    has a part of it here, so the two factors cancel.
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

    Losses and gradients are those of `term(slice(None))`: see `nearkin.objectives.numerics`. Where
    rows are fewer than ranks, all ranks compute all of them.
    """
    ranks = world_size()
    if ranks == 1 or rows < ranks:
        return term(slice(None))
    own = rows_of_rank(rows)
    weight = ranks * (own.stop - own.start) / rows  # 1, unless shares differ by a row
    means = term(own)
    return tree_map(lambda mean: _MeanOverRanks.apply(mean * weight), means)


def all_reduce_max(number: int) -> int:
    """Return the largest of a number that each rank has, such as that of a signal."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise DivergedError or UnsavedError of one rank within a `with` block on all of them."""
    try:
        yield
    except (DivergedError, UnsavedError) as error:
        all_reduce_max(error.exit_code)  # tells the others, which wait below
        raise
    code = all_reduce_max(0)
    if code == DivergedError.exit_code:
        raise DivergedError("numbers of another process of this training are not finite")
    if code:
        raise UnsavedError("another process of this training cannot write checkpoints")


def broadcast_bytes(content: bytes) -> bytes:
    """Return the content of rank 0; that of the others is ignored."""
    if world_size() == 1:
        return content
    size = torch.tensor(len(content))
    dist.broadcast(size, src=0)
    buffer = bytearray(content) if rank() == 0 else bytearray(int(size))
    if buffer:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0)
    return bytes(buffer)


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP has divided the module among the ranks."""
    return hasattr(module, "unshard")  # to import its class takes half a second


def data_parallel(module: nn.Module) -> nn.Module:
    """Start every rank from the state of rank 0, and average gradients from then on.

    Buffers are not synchronized again: ranks write the same rows, so they stay equal. The first
    step shows which weights have no gradient, such as those of a layer that a network has left.
    """
    if world_size() == 1 or is_sharded(module):
        return module
    broadcast_state(module)
    return DistributedDataParallel(module, static_graph=True, **_NO_BUFFER_SYNC)


def broadcast_state(module: nn.Module) -> None:
    """Give every rank the state of rank 0."""
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)


# torch 2.15 renames the option that keeps DDP from copying the first rank's buffers each step.
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)
