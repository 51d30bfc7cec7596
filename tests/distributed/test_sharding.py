"""Networks divided between two processes train as whole ones do, and are saved whole.

Real processes over gloo, in double precision, on networks whose layers cannot be halved evenly. The
negative controls break what makes it so, one thing at a time, and must be noticed.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from small import SMALL, begin_elsewhere, difference, in_group, of_two_processes, run, shares
from torch import nn

import nearkin.distributed.sharding as sharding
import nearkin.training.optimizer as lars
from nearkin.config import TrainConfig
from nearkin.distributed import all_reduce_max, gather_weights
from nearkin.errors import DivergedError, UnsavedError, UsageError
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone, small_resnet
from nearkin.networks.branch import Backbone
from nearkin.run.csv_logger import CSVLogger
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger, Silent
from nearkin.training import checkpoint
from nearkin.training.checkpoint import Checkpointer, Files
from nearkin.training.fit import backbone_blocks, evaluating, sharded
from nearkin.training.optimizer import build_optimizer

STEPS, HALF = 4, 2
SGD = ("sgd", 0.05)
CASES = {"simclr": ("lars", 1.0), "moco": SGD, "byol": ("adamw", 1e-3), "swav": SGD}
CLOSE = 1e-9
"""Relative difference allowed over all numbers of a method, as one vector."""

every_case = pytest.mark.parametrize("name", CASES)


def norms_of_parts(monkey):
    ratios = lars._ratios
    local = lambda tensors: [x.to_local() for x in tensors]
    monkey.setattr(lars, "_ratios", lambda a, b, group: ratios(local(a), local(b), group))


def without_the_optimizers_state(monkey):
    take_over = sharding._move_optimizer
    emptied = lambda optimizer, parts: (optimizer.state.clear(), take_over(optimizer, parts))
    monkey.setattr(sharding, "_move_optimizer", emptied)


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
    options = dict(until=until, total=STEPS, start=(since, optimizer))
    return run(method, name, batches=shares(rank, world), **options)[0]


def divided(method, optimizer):
    return sharded(TrainConfig(fsdp=True), method, optimizer)


def bytes_here(network, optimizer) -> int:
    """In this process, that weights, gradients and the optimizer take or keep from being freed."""
    held = [*network.parameters(), *(p.grad for p in network.parameters() if p.grad is not None)]
    held += [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in held]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def resumed(name, folder, rank):
    method, optimizer = made(name)
    checkpoint.load(folder / name, method, optimizer)
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


def fill_the_disk(folder, network, optimizer, rank):
    """What the first process cannot write is a warning to it, and at last the end of all."""
    run = RunFolder(folder / "full")
    with Logger(Silent(), folder / f"{rank}.log") as log:
        written = None
        if rank == 0:
            run.path.mkdir()
            written = Files(run, CSVLogger(run.metrics, ("step",), 0), log)
            run.metrics.rename(run.path / "moved")
        checkpointer = Checkpointer(written, network, optimizer, 1, 0)
        checkpointer.after(1, requested=False, last=False)
        with pytest.raises(UnsavedError) as raised:
            checkpointer.after(2, requested=False, last=True)
    return str(raised.value), (folder / f"{rank}.log").read_text()


def train_on_rank(rank: int, folder: Path) -> dict:
    """By case: losses, state, and what resuming half-way comes to; this also by control."""
    outcomes = {}
    for name in CASES:
        method, optimizer = made(name)
        begin_elsewhere(method, rank)
        network = divided(method, optimizer)
        losses = train(network, optimizer, name, HALF, 0, rank, 2)
        state = checkpoint.state_of(HALF, network, optimizer)
        if rank == 0:
            checkpoint.save(folder / name, state)
        all_reduce_max(0)  # it is written
        losses += train(network, optimizer, name, STEPS, HALF, rank, 2)
        gather_weights(method, network)
        outcomes[name] = losses, method.state_dict(), resumed(name, folder, rank)
    for control, (sabotage, name) in CONTROLS.items():
        with pytest.MonkeyPatch.context() as monkey:
            sabotage(monkey)
            outcomes[control] = resumed(name, folder, rank)
    outcomes["full"] = fill_the_disk(folder, network, optimizer, rank)
    with pytest.raises(DivergedError):
        diverge(method, network, rank)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def both(folder):
    """What each of two processes comes to, which share their weights."""
    return of_two_processes(partial(train_on_rank, folder=folder), folder)


@pytest.fixture(scope="module")
def alone():
    """What one process comes to: losses, state, and bytes held."""
    outcomes = {}
    for name in CASES:
        method, optimizer = made(name)
        losses = train(method, optimizer, name, STEPS)
        outcomes[name] = losses, method.state_dict(), bytes_here(method, optimizer)
    return outcomes


@every_case
def test_divided_networks_train_as_whole_ones_do(name, both, alone):
    losses, state, (_, resumed_state) = both[0][name]
    expected_losses, expected, _ = alone[name]
    assert losses == pytest.approx(expected_losses, rel=CLOSE)
    assert difference(state, expected) <= CLOSE
    assert difference(resumed_state, state) == 0  # what is resumed has the same bits


@every_case
def test_each_process_holds_its_part_of_weights_gradients_and_optimizer(name, both, alone):
    for rank, outcomes in enumerate(both):
        held, _ = outcomes[name][2]
        assert held < 0.65 * alone[name][2], rank


@every_case
def test_one_process_goes_on_from_where_two_stopped(name, folder, both, alone):
    method, optimizer = made(name)
    assert checkpoint.load(folder / name, method, optimizer).step == HALF
    train(method, optimizer, name, STEPS, HALF)
    assert difference(method.state_dict(), alone[name][1]) <= CLOSE


def test_all_processes_know_of_a_checkpoint_that_cannot_be_written(both):
    (first, log), (second, nothing) = (outcomes["full"] for outcomes in both)
    assert log.count("warning: cannot write") == 1
    assert "metrics.csv (No such file or directory); make room" in first
    assert (second, nothing) == ("another process of this training cannot write checkpoints", "")


@pytest.mark.parametrize("control", CONTROLS)
def test_what_makes_divided_networks_differ_is_noticed(control, both, alone):
    _, state = both[0][control]
    assert difference(state, alone[CONTROLS[control][1]][1]) > 1e3 * CLOSE


@pytest.mark.parametrize("name", ["resnet50", "timm/vit_tiny_patch16_224", "torchvision/vit_b_16"])
def test_a_small_part_a_network_is_put_together_at_a_time(name):
    def size(module):
        return sum(weight.numel() for weight in module.parameters())

    with torch.device("meta"):
        method = METHODS["supervised"](build_backbone(name, 224), num_known_classes=2)
    blocks = [size(method.get_submodule(block)) for block in backbone_blocks(method)]
    assert max(blocks) < 0.3 * size(method)
    assert sum(blocks) > 0.9 * size(method)


def test_a_weight_that_cannot_be_divided_is_refused(tmp_path):
    network = nn.Linear(2, 2)
    network.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD(network.parameters())
    refused = pytest.raises(UsageError, match="fsdp cannot divide this network")
    with in_group(0, 1, tmp_path / "rendezvous"), refused:
        sharding.shard(network, optimizer, [])


def test_chunks_are_refused():
    with pytest.raises(UsageError, match="exclude each other"):
        TrainConfig(fsdp=True, chunk_size=8)
