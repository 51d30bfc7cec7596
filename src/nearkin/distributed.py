"""The only module that knows there may be more than one process.

Every rank runs its own images through the networks and calls `gather`; from there on every
rank holds the whole batch and computes the same loss, so no other code mentions ranks.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nearkin.errors import UsageError


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is; the first, 0, is the one that writes files and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def share(batch_size: int) -> slice:
    """The rows of a batch that are this rank's to load and encode.

    >>> share(256)
    slice(0, 256, None)
    """
    size = batch_size // world_size()
    return slice(rank() * size, (rank() + 1) * size)


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
        dist.all_reduce(grad)
        return grad.chunk(world_size())[rank()]


def gather(x: Tensor) -> Tensor:
    """The rows of every rank, in rank order. Differentiable; the identity on one process."""
    gathered: Tensor = x if world_size() == 1 else _Gather.apply(x)
    return gathered


def shuffled(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a network gives for the rows of every rank, which it is shown in a random order.

    The result is in rank order again, with gradients to the network but not to `x`. So rows do
    not share batch statistics with those that they stand beside (He et al. 2020, section 3.3).
    """
    order = torch.randperm(len(x) * world_size(), device=x.device)
    with torch.no_grad():
        own = gather(x)[order[share(len(order))]]
    return gather(network(own))[order.argsort()]


def wrap(module: nn.Module) -> nn.Module:
    """Start every rank from the state of the first, and average gradients from then on.

    Buffers are not synchronized again: ranks write the same rows, so they stay equal.
    """
    if world_size() == 1:
        return module
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)
    return DistributedDataParallel(module, **_NO_BUFFER_SYNC)


# torch 2.15 renames the option that keeps DDP from copying the first rank's buffers each step.
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


@contextmanager
def process_group(backend: str, **rendezvous: Any) -> Iterator[None]:
    """Join the other processes for the length of a `with` block."""
    dist.init_process_group(backend, **rendezvous)
    try:
        yield
        dist.barrier()  # or a rank that is done hangs up on one that is not
    finally:
        dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes this rank's GPU, Apple's, or else the processor.

    Raises:
        UsageError: If there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and torch.backends.mps.is_available():
            name = "mps"
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', rank())}"
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name} cannot be used here ({reason}); try auto") from error
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {torch.get_num_threads()} threads"


def available_cpus() -> int:
    """Processors this process may use, by affinity; what the machine has can be far more."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def native_precision(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes it natively, float32 elsewhere."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        able = torch.cpu.get_capabilities()
        native = any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    else:
        native = False
    return torch.bfloat16 if native else torch.float32
