"""Networks whose weights, gradients and optimizer states are divided among processes: FSDP2.

Training uses a sharded copy, which holds this process's part of every weight and gathers the
weights of one block at a time. The original network is an empty shell meanwhile: to evaluate or
save it, its weights are gathered first.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nearkin.distributed.launch import TIMEOUT
from nearkin.distributed.ranks import broadcast_state, is_sharded, rank
from nearkin.errors import UsageError

Network = TypeVar("Network", bound=nn.Module)


def shard(network: Network, optimizer: torch.optim.Optimizer, blocks: Iterable[str]) -> Network:
    """Return a copy of a network that is divided among the processes, with rank 0's weights.

    The network loses its weights to the copy until `gather_weights`; buffers are shared. The
    optimizer is changed to the weights and states of the copy. `blocks` are names of modules,
    none inside of another, whose weights are gathered when they run; all others stay gathered.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    broadcast_state(network)
    own = list(network.parameters())
    device = own[0].device
    for weight in own:
        weight.data = weight.data.contiguous()
    sharded = copy.deepcopy(network, {id(x): x for x in (*own, *network.buffers())})
    # A group of its own: torch's caches keep it for good, and its threads with it.
    group: Any = dist.new_group(timeout=TIMEOUT)
    mesh = DeviceMesh.from_group(group, device.type)
    try:
        modules: list[nn.Module] = [*map(sharded.get_submodule, blocks), sharded]
        for module in modules:
            fully_shard(module, mesh=mesh)
    except ValueError as error:  # a weight that is a single number
        raise UsageError(f"--fsdp cannot divide this network ({error}); leave it out") from error
    _move_optimizer(optimizer, dict(zip(own, sharded.parameters(), strict=True)))
    _empty(network)
    return sharded


def _move_optimizer(optimizer: torch.optim.Optimizer, shards: Mapping[Tensor, Any]) -> None:
    """Replace the weights of an optimizer by their shards, and their states by parts of them."""
    for weight, state in list(optimizer.state.items()):
        del optimizer.state[weight]
        shard = shards[weight]
        optimizer.state[shard] = {
            name: _part(value, shard) if getattr(value, "shape", None) == shard.shape else value
            for name, value in state.items()
        }
    for group in optimizer.param_groups:
        group["params"] = [shards[weight] for weight in group["params"]]


def _part(value: Tensor, shard: Any) -> Tensor:
    """Divide a tensor as a shard is, and lay it out alike: fused optimizers rely on that."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = shard.device_mesh, shard.placements
    view = distribute_tensor(value, mesh, placements, src_data_rank=None)
    return torch.empty_like(shard, dtype=value.dtype).copy_(view)


def _empty(network: nn.Module) -> None:
    for weight in network.parameters():
        weight.data = weight.new_empty(0)


@torch.no_grad()
def gather_weights(network: nn.Module, sharded: nn.Module) -> None:
    """Put the weights of a sharded copy back into its network, on rank 0.

    All processes have to call this. Nothing happens to a network that is not sharded.
    """
    if not is_sharded(sharded):
        return
    shells = dict(network.named_parameters())
    for name, shard in sharded.state_dict().items():
        if name in shells:
            weight = shard.full_tensor()
            if rank() == 0:
                shells[name].data = weight


@contextmanager
def full_weights(network: nn.Module, sharded: nn.Module) -> Iterator[None]:
    """Let rank 0 use a network with all its weights within a `with` block."""
    if not is_sharded(sharded):
        yield
        return
    gather_weights(network, sharded)
    try:
        yield
    finally:
        _empty(network)


def full_state(state: Any) -> Any:
    """Return a state with every sharded tensor gathered, on rank 0; others get empty ones.

    All processes have to call this.
    """
    if hasattr(state, "full_tensor"):  # a shard, whose class takes long to import
        whole = state.full_tensor()
        return whole.cpu() if rank() == 0 else whole.new_empty(0)
    if isinstance(state, dict):
        gathered = copy.copy(state)  # a state dictionary also notes versions
        gathered.update((key, full_state(value)) for key, value in state.items())
        return gathered
    return state
