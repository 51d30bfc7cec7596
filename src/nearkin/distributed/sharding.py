"""Networks whose weights, gradients and optimizer states are divided among the processes: FSDP2.

What is trained is a copy that holds this process's part of every weight, and of which the parts of
one block at a time are put together while it computes. The network that it is a copy of is a
shell meanwhile: whoever wants to look at it has its weights put back first.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nearkin.distributed.launch import PATIENCE
from nearkin.distributed.ranks import all_reduce_max, is_sharded, rank, same_state
from nearkin.errors import DivergedError, UsageError

Network = TypeVar("Network", bound=nn.Module)

BLOCK: Final = 1 / 16
"""Share of all weights, about, that is put together at a time."""


def shard(network: Network, optimizer: torch.optim.Optimizer) -> Network:
    """A copy of a network that is divided among the processes, as the first of them has it.

    Args:
        network: Loses its weights to the copy, until `collect` puts them back. Buffers are shared.
        optimizer: Of its weights. From then on it is over those of the copy, and has parts of
            its state.

    Raises:
        UsageError: If a weight is a single number, which cannot be divided.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    same_state(network)
    own = list(network.parameters())
    device = own[0].device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where parts are is not told otherwise
    for weight in own:
        weight.data = weight.data.contiguous()
    divided = copy.deepcopy(network, {id(x): x for x in (*own, *network.buffers())})
    # A group of its own: torch's caches keep it for good, and its threads with it.
    group: Any = dist.new_group(timeout=PATIENCE)
    mesh = DeviceMesh.from_group(group, device.type)
    try:
        blocks: list[nn.Module] = [*_blocks(divided, int(_size(divided) * BLOCK)), divided]
        for block in blocks:
            fully_shard(block, mesh=mesh)
    except ValueError as error:
        raise UsageError(f"--fsdp cannot divide this network ({error}); leave it out") from error
    _take_over(optimizer, dict(zip(own, divided.parameters(), strict=True)))
    _empty(network)
    return divided


def _size(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def _blocks(network: nn.Module, most: int) -> Iterator[nn.Module]:
    """Members of lists, of at most so many weights, or else as small as there are."""
    listed = isinstance(network, nn.Sequential | nn.ModuleList)
    for child in network.children():
        runs = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        block = listed and runs and any(map(_size, child.children()))
        if block and _size(child) <= most:
            yield child
            continue
        smaller = list(_blocks(child, most))
        yield from smaller or ([child] if block else [])


def _take_over(optimizer: torch.optim.Optimizer, parts: Mapping[Tensor, Any]) -> None:
    """Let an optimizer go on with parts of weights, and with parts of what it knows of each."""
    for weight, found in list(optimizer.state.items()):
        del optimizer.state[weight]
        part = parts[weight]
        optimizer.state[part] = {
            name: _part_of(value, part) if getattr(value, "shape", None) == part.shape else value
            for name, value in found.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [parts[weight] for weight in group["params"]]


def _part_of(value: Tensor, part: Any) -> Tensor:
    """A tensor divided as another is, and in memory in its order: fused kernels rely on that."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = part.device_mesh, part.placements
    view = distribute_tensor(value, mesh, placements, src_data_rank=None)
    return torch.empty_like(part, dtype=value.dtype).copy_(view)


def _empty(network: nn.Module) -> None:
    for weight in network.parameters():
        weight.data = weight.new_empty(0)


@torch.no_grad()
def collect(network: nn.Module, divided: nn.Module) -> None:
    """Put the weights of a copy that `shard` has made back into its network, on the first process.

    All processes have to take part. Nothing happens to a network that was not divided.
    """
    if not is_sharded(divided):
        return
    shells = dict(network.named_parameters())
    for name, part in divided.state_dict().items():
        if name in shells:
            weight = part.full_tensor()
            if rank() == 0:
                shells[name].data = weight


@contextmanager
def whole(network: nn.Module, divided: nn.Module) -> Iterator[None]:
    """Let the first process look at a network with all its weights, within a `with` block.

    Raises:
        DivergedError: In all processes, if it is in the first.
    """
    if not is_sharded(divided):
        yield
        return
    collect(network, divided)
    try:
        yield
    except DivergedError:
        all_reduce_max(1)
        raise
    finally:
        _empty(network)
    if all_reduce_max(0):
        raise DivergedError("the first process has found numbers that are not finite")


def undivided(state: Any) -> Any:
    """A state with every part of a tensor put together. All processes have to take part."""
    if hasattr(state, "full_tensor"):  # as parts have; see `is_sharded`
        return state.full_tensor().cpu()
    if isinstance(state, dict):
        found = copy.copy(state)  # with the versions that a state dictionary notes
        found.update((key, undivided(value)) for key, value in state.items())
        return found
    return state
