"""Two processes do what one does, batch norm and memories included, for every method.

Real processes over gloo, in double precision: what is left is the order of additions. The negative
controls break what makes it so, one thing at a time, and must be noticed.
"""

import math
from pathlib import Path

import pytest
import torch
from small import as_double, batch_for, in_group, run, shard, small, spawn
from torch.nn.modules.batchnorm import _BatchNorm

import nearkin.distributed
import nearkin.training.loop
from nearkin.methods import METHODS
from nearkin.training import checkpoint

STEPS, HALF = 8, 4
CLOSE = 1e-9
"""Relative difference allowed over the parameters and memories of a method, as one vector."""

every_method = pytest.mark.parametrize("name", METHODS)


def without_gradient(monkey):
    backward = nearkin.distributed.ranks._Gather.backward
    monkey.setattr(
        nearkin.distributed.ranks._Gather,
        "backward",
        staticmethod(lambda ctx, *grads: torch.zeros_like(backward(ctx, *grads))),
    )


def with_local_batch_norm(monkey):
    monkey.setattr(nearkin.training.loop, "normalize_in_groups", lambda *_, **__: None)


def in_reverse_order(monkey):
    """Memories are written in another order than the batch has."""
    enqueue = nearkin.memory.Queue.enqueue
    monkey.setattr(
        nearkin.memory.Queue,
        "enqueue",
        lambda queue, keys, index: enqueue(queue, keys.roll(8, 0), index.roll(8)),
    )


CONTROLS = {
    "gather without gradient": (without_gradient, "simclr"),
    "local batch norm": (with_local_batch_norm, "byol"),
    "local batch norm in memories": (with_local_batch_norm, "nnclr"),
    "wrong order in the queue": (in_reverse_order, "moco"),
}


def train(method, name, rank=0, world=1, **options):
    def batches(name, step):
        return as_double(shard(batch_for(name, step), rank, world))

    return run(method.double(), name, total=STEPS, batches=batches, **options)


def train_on_rank(rank: int, world: int, out: str) -> None:
    with in_group(rank, world, f"{out}/rendezvous"):
        for name in METHODS:
            method = small(name)
            if rank:  # ranks need not start alike
                for tensor in method.state_dict().values():
                    tensor.add_(1)
            losses, optimizer = train(method, name, rank, world, until=HALF)
            if rank == 0:
                checkpoint.save(Path(out, name, "half of two"), HALF, method, optimizer)
            more, _ = train(method, name, rank, world, until=STEPS, start=(HALF, optimizer))
            torch.save((losses + more, method.state_dict()), f"{out}/{name}/two-{rank}.pt")
            method = small(name)
            train(method, name, rank, world, until=STEPS, folder=Path(out, name, "half of one"))
            torch.save(method.state_dict(), f"{out}/{name}/one-then-two-{rank}.pt")
        for control, (sabotage, name) in CONTROLS.items():
            with pytest.MonkeyPatch.context() as monkey:
                sabotage(monkey)
                method = small(name)
                train(method, name, rank, world, until=5)
                torch.save(method.state_dict(), f"{out}/{control}-{rank}.pt")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Every method trained by one process, and by the same two processes, started once."""
    folder = tmp_path_factory.mktemp("two")
    for name in METHODS:
        method = small(name)
        losses, optimizer = train(method, name, until=HALF)
        checkpoint.save(folder / name / "half of one", HALF, method, optimizer)
        more, _ = train(method, name, until=STEPS, start=(HALF, optimizer))
        torch.save((losses + more, method.state_dict()), folder / name / "one.pt")
    spawn(train_on_rank, 2, str(folder))
    return folder


def difference(state, expected) -> float:
    """Relative, over all numbers of a method; infinite where what is counted differs."""
    assert state.keys() == expected.keys()
    pairs = [(state[key], expected[key]) for key in expected]
    if any(not torch.equal(a, b) for a, b in pairs if not a.is_floating_point()):
        return math.inf
    a, b = (
        torch.cat([x.flatten() for x in side if x.is_floating_point()]) for side in zip(*pairs)
    )
    return float((a - b).norm() / b.norm())


@every_method
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_do_what_one_does(name, rank, out):
    losses, state = torch.load(out / name / f"two-{rank}.pt")
    expected_losses, expected = torch.load(out / name / "one.pt")
    assert losses == pytest.approx(expected_losses, rel=CLOSE)
    assert difference(state, expected) <= CLOSE


@every_method
def test_two_processes_go_on_from_where_one_stopped(name, out):
    _, expected = torch.load(out / name / "one.pt")
    for rank in (0, 1):
        state = torch.load(out / name / f"one-then-two-{rank}.pt")
        assert difference(state, expected) <= CLOSE


@every_method
def test_one_process_goes_on_from_where_two_stopped(name, out):
    _, expected = torch.load(out / name / "one.pt")
    method = small(name)
    train(method, name, until=STEPS, folder=out / name / "half of two")
    assert difference(method.state_dict(), expected) <= CLOSE


@pytest.mark.parametrize("control", CONTROLS)
def test_what_makes_processes_differ_is_noticed(control, out):
    name = CONTROLS[control][1]
    alone = small(name)
    train(alone, name, until=5)
    state = torch.load(out / f"{control}-0.pt")
    assert difference(state, alone.state_dict()) > 1e3 * CLOSE


def test_methods_here_have_batch_norm():
    for name in METHODS:
        assert any(isinstance(module, _BatchNorm) for module in small(name).modules()), name
