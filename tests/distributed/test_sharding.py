"""Networks divided between two processes train as whole ones do, and are saved whole.

Real processes over gloo, in double precision, on networks whose layers cannot be halved evenly. The
negative controls break what makes it so, one thing at a time, and must be noticed.
"""

from pathlib import Path

import pytest
import torch
from small import SMALL, as_double, batch_for, in_group, run, shard, spawn
from torch import nn

import nearkin.distributed.sharding as sharding
import nearkin.training.optimizer as lars
from nearkin.config import TrainConfig
from nearkin.distributed import all_reduce_max, gather_weights
from nearkin.errors import DivergedError, UsageError
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone, small_resnet
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.branch import Backbone
from nearkin.training import checkpoint
from nearkin.training.fit import evaluating
from nearkin.training.optimizer import build_optimizer

STEPS, HALF = 8, 4
CASES = {
    "simclr": ("lars", 1.0),
    "moco": ("sgd", 0.05),
    "byol": ("adamw", 1e-3),
    "swav": ("sgd", 0.05),
}
CLOSE = 1e-9
"""Relative difference allowed over all numbers of a method, as one vector."""

every_case = pytest.mark.parametrize("name", CASES)


def norms_of_parts(monkey):
    ratios = lars._ratios
    monkey.setattr(
        lars,
        "_ratios",
        lambda *tensors_and_group: ratios(
            *([x.to_local() for x in part] for part in tensors_and_group[:2]), tensors_and_group[2]
        ),
    )


def without_the_optimizers_state(monkey):
    take_over = sharding._move_optimizer
    monkey.setattr(
        sharding,
        "_move_optimizer",
        lambda optimizer, parts: (optimizer.state.clear(), take_over(optimizer, parts)),
    )


CONTROLS = {
    "norms of parts": (norms_of_parts, "simclr"),
    "the optimizer's state is lost": (without_the_optimizers_state, "byol"),
}


def made(name):
    torch.manual_seed(1)
    method = METHODS[name](Backbone(small_resnet(7, (9, 11)), 11), **SMALL[name]).double()
    method = method.to(memory_format=torch.channels_last)  # as runs have it
    optimizer, lr = CASES[name]
    return method, build_optimizer(method, name=optimizer, lr=lr, weight_decay=1e-3)


def train(method, optimizer, name, until, since=0, rank=0, world=1):
    def batches(name, step):
        return as_double(shard(batch_for(name, step), rank, world))

    return run(method, name, until=until, total=STEPS, batches=batches, start=(since, optimizer))[
        0
    ]


def divided(method, optimizer):
    normalize_in_groups(method, 1)
    return sharding.shard(method, optimizer)


def bytes_here(network, optimizer) -> int:
    """In this process, that weights, gradients and the optimizer take or keep from being freed."""
    held = [*network.parameters(), *(p.grad for p in network.parameters() if p.grad is not None)]
    held += [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in held]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def resumed(name, out, rank):
    method, optimizer = made(name)
    checkpoint.load(Path(out, name), method, optimizer)
    network = divided(method, optimizer)
    train(network, optimizer, name, STEPS, HALF, rank, 2)
    gather_weights(method, network)
    return bytes_here(network, optimizer), method.state_dict()


def diverge(method, network, rank):
    """The first process finds something, of which all have to know."""
    with evaluating(method, network):
        if rank == 0:
            assert all(weight.numel() for weight in method.parameters())
            raise DivergedError("here")


def train_on_rank(rank: int, out: str) -> None:
    with in_group(rank, 2, f"{out}/rendezvous"):
        for name in CASES:
            method, optimizer = made(name)
            if rank:  # ranks need not start alike
                for tensor in method.state_dict().values():
                    tensor.add_(1)
            network = divided(method, optimizer)
            losses = train(network, optimizer, name, HALF, 0, rank, 2)
            if rank:
                checkpoint.join_save(HALF, network, optimizer)
            else:
                checkpoint.save(Path(out, name), HALF, network, optimizer)
            all_reduce_max(0)  # it is written
            losses += train(network, optimizer, name, STEPS, HALF, rank, 2)
            gather_weights(method, network)
            torch.save((losses, method.state_dict()), f"{out}/{name}-{rank}.pt")
            torch.save(resumed(name, out, rank), f"{out}/{name}-resumed-{rank}.pt")
        for control, (sabotage, name) in CONTROLS.items():
            with pytest.MonkeyPatch.context() as monkey:
                sabotage(monkey)
                torch.save(resumed(name, out, rank), f"{out}/{control}-{rank}.pt")
        with pytest.raises(DivergedError):
            diverge(method, network, rank)


def difference(state, expected) -> float:
    """Relative, over all numbers of a method."""
    assert state.keys() == expected.keys()
    a, b = (torch.cat([x[key].flatten().double() for key in expected]) for x in (state, expected))
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Some methods, trained by two processes that share their weights."""
    folder = tmp_path_factory.mktemp("sharded")
    spawn(train_on_rank, str(folder))
    return folder


@pytest.fixture(scope="module")
def alone():
    """What one process comes to: losses, bytes held, and the state."""
    outcomes = {}
    for name in CASES:
        method, optimizer = made(name)
        losses = train(method, optimizer, name, STEPS)
        outcomes[name] = losses, bytes_here(method, optimizer), method.state_dict()
    return outcomes


@every_case
def test_divided_networks_train_as_whole_ones_do(name, out, alone):
    result, state = torch.load(out / f"{name}-0.pt")
    expected, _, expected_state = alone[name]
    assert result == pytest.approx(expected, rel=CLOSE)
    assert difference(state, expected_state) <= CLOSE


@every_case
def test_resuming_gives_the_same_bits(name, out):
    _, expected = torch.load(out / f"{name}-0.pt")
    _, state = torch.load(out / f"{name}-resumed-0.pt")
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@every_case
@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_holds_its_part_weights_gradients_and_optimizer(name, rank, out, alone):
    held, _ = torch.load(out / f"{name}-resumed-{rank}.pt")
    assert held < 0.65 * alone[name][1]


@every_case
def test_one_process_goes_on_from_where_two_stopped(name, out, alone):
    method, optimizer = made(name)
    assert checkpoint.load(out / name, method, optimizer).step == HALF
    train(method, optimizer, name, STEPS, HALF)
    assert difference(method.state_dict(), alone[name][2]) <= CLOSE


@pytest.mark.parametrize("control", CONTROLS)
def test_what_makes_divided_networks_differ_is_noticed(control, out, alone):
    _, state = torch.load(out / f"{control}-0.pt")
    assert difference(state, alone[CONTROLS[control][1]][2]) > 1e3 * CLOSE


@pytest.mark.parametrize("name", ["resnet50", "timm/vit_tiny_patch16_224", "torchvision/vit_b_16"])
def test_a_small_part_a_network_is_put_together_at_a_time(name):
    with torch.device("meta"):
        network = build_backbone(name, 224)
    size = sharding._size(network)
    blocks = [sharding._size(block) for block in sharding._blocks(network, size // 16)]
    assert max(blocks) < 0.3 * size
    assert sum(blocks) > 0.9 * size


def test_a_weight_that_cannot_be_divided_is_refused(tmp_path):
    network = nn.Linear(2, 2)
    network.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD(network.parameters())
    with (
        in_group(0, 1, tmp_path / "rendezvous"),
        pytest.raises(UsageError, match="--fsdp cannot divide this network"),
    ):
        sharding.shard(network, optimizer)


def test_chunks_are_refused():
    with pytest.raises(UsageError, match="exclude each other"):
        TrainConfig(fsdp=True, chunk_size=8)
