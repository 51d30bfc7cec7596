"""Two processes do what one does, batch norm and memories included, for every method.

Real processes over gloo, in double precision: what is left is the order of additions. The negative
controls break what makes it so, one thing at a time, and must be noticed.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from small import begin_elsewhere, difference, of_two_processes, run, save, shares, small
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import nearkin.distributed
import nearkin.training.loop
from nearkin.memory import Queue
from nearkin.methods import METHODS

STEPS, HALF = 4, 2
CONTROLLED = 3
"""Steps after which a control shows in memories as well."""
CLOSE = 1e-9
"""Relative difference allowed over the parameters and memories of a method, as one vector."""

every_method = pytest.mark.parametrize("name", METHODS)
pytestmark = pytest.mark.timeout(1200)  # One fixture trains every method by one process and two


def without_gradient(monkey):
    gather = nearkin.distributed.ranks._Gather
    backward = gather.backward
    zero = staticmethod(lambda ctx, *grads: torch.zeros_like(backward(ctx, *grads)))
    monkey.setattr(gather, "backward", zero)


def with_local_batch_norm(monkey):
    monkey.setattr(nearkin.training.loop, "normalize_in_groups", lambda *_, **__: None)


def in_reverse_order(monkey):
    """Memories are written in another order than the batch has."""
    enqueue = Queue.enqueue
    rolled = lambda queue, keys, index: enqueue(queue, keys.roll(8, 0), index.roll(8))
    monkey.setattr(Queue, "enqueue", rolled)


CONTROLS = {
    "gather without gradient": (without_gradient, "simclr"),
    "local batch norm": (with_local_batch_norm, "byol"),
    "local batch norm in memories": (with_local_batch_norm, "nnclr"),
    "wrong order in the queue": (in_reverse_order, "moco"),
}


def train(method, name, rank=0, world=1, **options):
    return run(method.double(), name, total=STEPS, batches=shares(rank, world), **options)


LEAVING = "simclr"


def leaving():
    """A method with a layer that it does not use, as networks keep one of their pretraining."""
    method = small(LEAVING)
    method.left = nn.Linear(2, 2)
    return method


def train_on_rank(rank: int, folder: Path) -> dict:
    """By method: losses, state, and the state of what one process had begun; states of others."""
    outcomes = {}
    for name in METHODS:
        method, continued = small(name), small(name)
        begin_elsewhere(method, rank)
        losses, optimizer = train(method, name, rank, 2, until=HALF)
        if rank == 0:
            save(folder / name / "half of two", HALF, method, optimizer)
        more, _ = train(method, name, rank, 2, until=STEPS, start=(HALF, optimizer))
        train(continued, name, rank, 2, until=STEPS, folder=folder / name / "half of one")
        outcomes[name] = losses + more, method.state_dict(), continued.state_dict()
    train(left := leaving(), LEAVING, rank, 2, until=STEPS)
    outcomes["left"] = left.state_dict()
    for control, (sabotage, name) in CONTROLS.items():
        with pytest.MonkeyPatch.context() as monkey:
            sabotage(monkey)
            method = small(name)
            train(method, name, rank, 2, until=CONTROLLED)
            outcomes[control] = method.state_dict()
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def alone(folder):
    """Losses and state of every method, trained by one process, which saves half-way."""
    outcomes = {}
    for name in METHODS:
        method = small(name)
        losses, optimizer = train(method, name, until=HALF)
        save(folder / name / "half of one", HALF, method, optimizer)
        more, _ = train(method, name, until=STEPS, start=(HALF, optimizer))
        outcomes[name] = losses + more, method.state_dict()
    return outcomes


@pytest.fixture(scope="module")
def both(folder, alone):
    """What each of two processes comes to, which train every method and are started once."""
    return of_two_processes(partial(train_on_rank, folder=folder), folder)


@every_method
def test_two_processes_do_what_one_does(name, alone, both):
    expected_losses, expected = alone[name]
    for rank, outcomes in enumerate(both):
        losses, state, _ = outcomes[name]
        assert losses == pytest.approx(expected_losses, rel=CLOSE), rank
        assert difference(state, expected) <= CLOSE, rank


@every_method
def test_either_goes_on_from_where_the_other_stopped(name, folder, alone, both):
    expected = alone[name][1]
    for rank, outcomes in enumerate(both):
        assert difference(outcomes[name][2], expected) <= CLOSE, rank
    method = small(name)
    train(method, name, until=STEPS, folder=folder / name / "half of two")
    assert difference(method.state_dict(), expected) <= CLOSE


def test_a_layer_that_is_not_used_stays_as_it_is(both):
    """Its gradient was waited for, and the second step refused."""
    begun, alone = leaving().double().state_dict(), leaving()
    train(alone, LEAVING, until=STEPS)
    for state in both:
        assert difference(state["left"], alone.state_dict()) <= CLOSE
        assert torch.equal(state["left"]["left.weight"], begun["left.weight"])


@pytest.mark.parametrize("control", CONTROLS)
def test_what_makes_processes_differ_is_noticed(control, both):
    name = CONTROLS[control][1]
    alone = small(name)
    train(alone, name, until=CONTROLLED)
    assert difference(both[0][control], alone.state_dict()) > 1e3 * CLOSE


def test_methods_here_have_batch_norm():
    for name in METHODS:
        assert any(isinstance(module, _BatchNorm) for module in small(name).modules()), name
