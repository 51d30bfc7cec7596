"""What holds of every method. A new method is checked here by being named in METHODS."""

import copy
import pkgutil
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from small import NUM_IMAGES, SMALL, as_double, batch_at, shard, small, without_batch_norm
from torch import nn
from torch.utils._pytree import tree_leaves

import nearkin.methods
from nearkin.distributed import process_group
from nearkin.errors import DivergedError
from nearkin.methods import METHODS
from nearkin.training import checkpoint
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer
from nearkin.training.schedules import warmup_cosine

every_method = pytest.mark.parametrize("name", METHODS)


def views(name, step):
    return batch_at(step, num_views=METHODS[name].num_views)


def run(method, name, *, until=6, total=6, folder=None, batches=views):
    """Train and return the losses and the optimizer; continue from a folder of checkpoints."""
    optimizer = build_optimizer(method, name="sgd", lr=0.05, weight_decay=1e-4)
    start = 0 if folder is None else checkpoint.load(folder, method, optimizer).step
    losses = []
    for done, found in steps(
        method,
        optimizer,
        (batches(name, step) for step in range(start, total)),
        start=start,
        total=total,
        schedule=warmup_cosine(0.1),
        seed=3,
    ):
        losses.append(found.loss.item())
        if done == until:
            break
    return losses, optimizer


def assert_same_state(a, b, **tolerance):
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(
            a[key], b[key], msg=lambda m, key=key: f"{key}: {m}", **tolerance
        )


def memories(state):
    return {k: v for k, v in state.items() if "running_" not in k and "num_batches" not in k}


def test_every_module_of_methods_is_in_the_catalogue_and_in_these_tests():
    modules = {module.name for module in pkgutil.iter_modules(nearkin.methods.__path__)}
    assert modules == set(METHODS) == set(SMALL)


@every_method
def test_forward_writes_nothing_but_batch_norm_statistics(name):
    method = small(name)
    run(method, name, until=2)  # or online and target are still equal
    before = copy.deepcopy(memories(method.state_dict()))
    method(views(name, 0), progress=0.5)
    assert_same_state(memories(method.state_dict()), before, rtol=0, atol=0)


@every_method
def test_what_is_remembered_has_no_gradient(name):
    found = small(name).train()(views(name, 0), progress=0.5)
    assert found.loss.requires_grad
    assert found.loss.ndim == 0
    remembered = [x for x in tree_leaves((found.memo, dict(found.metrics))) if x is not None]
    assert not any(tensor.requires_grad for tensor in remembered)


@every_method
def test_every_trained_parameter_gets_a_gradient_and_no_other(name):
    method = small(name).train()
    method(views(name, 0), progress=0.5).loss.backward()
    for parameter_name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name


@every_method
def test_resuming_changes_nothing(name, tmp_path: Path):
    whole = small(name)
    losses, _ = run(whole, name)
    first = small(name)
    early, optimizer = run(first, name, until=3)
    checkpoint.save(tmp_path, 3, first, optimizer)
    second = small(name)
    for tensor in second.state_dict().values():
        tensor.zero_()
    late, _ = run(second, name, folder=tmp_path)
    assert early + late == losses
    assert_same_state(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


@every_method
def test_it_learns(name):
    losses, _ = run(small(name), name, total=60, until=60, batches=lambda n, s: views(n, s % 4))
    assert sum(losses[-5:]) < sum(losses[:5])


@every_method
def test_a_loss_that_is_not_finite_stops_before_anything_is_written(name):
    method = small(name)
    poisoned = views(name, 0)
    poisoned.views[0][0, 0, 0, 0] = float("nan")
    before = copy.deepcopy(memories(method.state_dict()))
    with pytest.raises(DivergedError, match="step 0"):
        run(method, name, batches=lambda *_: poisoned)
    assert_same_state(memories(method.state_dict()), before, rtol=0, atol=0)


@every_method
def test_labels_do_not_change_one_bit(name):
    def labelled(n, step):
        batch = views(n, step)
        batch.label.copy_(batch.index % 3)
        return batch

    plain, with_labels = small(name), small(name)
    run(plain, name)
    run(with_labels, name, batches=labelled)
    assert_same_state(with_labels.state_dict(), plain.state_dict(), rtol=0, atol=0)


def train_on_rank(rank: int, world: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with process_group(
        "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=world
    ):
        for name in METHODS:
            method = without_batch_norm(small(name))
            if rank:  # ranks need not start alike
                for tensor in method.state_dict().values():
                    tensor.add_(1)
            losses, _ = run(
                method, name, batches=lambda n, s: as_double(shard(views(n, s), rank, world))
            )
            torch.save((losses, method.state_dict()), f"{out}/{name}-{rank}.pt")


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory):
    """Every method trained by the same two processes; they are started once."""
    out = tmp_path_factory.mktemp("two")
    mp.spawn(train_on_rank, args=(2, str(out)), nprocs=2)
    return out


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@every_method
def test_two_processes_do_what_one_does(name, trained_by_two, double):
    alone = without_batch_norm(small(name))
    losses, _ = run(alone, name, batches=lambda n, s: as_double(views(n, s)))
    for rank in (0, 1):
        other_losses, state = torch.load(trained_by_two / f"{name}-{rank}.pt")
        assert other_losses == pytest.approx(losses, rel=1e-9)
        assert_same_state(state, alone.state_dict(), rtol=1e-9, atol=1e-12)


def with_conv(name):
    """The method around a small convolutional network, for bfloat16."""
    torch.manual_seed(1)
    body = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    from nearkin.networks.backbone import Backbone

    return METHODS[name](Backbone(body, 24), **SMALL[name])


@every_method
def test_under_bfloat16_objectives_and_memories_keep_float32(name):
    method = with_conv(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        found = method(views(name, 0), progress=0.5)
    assert found.loss.dtype == torch.float32
    floating = [x for x in tree_leaves(found.memo) if x is not None and x.is_floating_point()]
    assert all(tensor.dtype == torch.float32 for tensor in floating)


@every_method
def test_the_state_is_all_there_is(name):
    """No tensor hides outside of the parameters and buffers that a checkpoint holds."""
    method = small(name)
    run(method, name, until=3)
    saved = {tensor.data_ptr() for tensor in method.state_dict(keep_vars=True).values()}
    for module in method.modules():
        for attribute in vars(module).values():
            held = attribute if isinstance(attribute, list | tuple) else [attribute]
            assert all(x.data_ptr() in saved for x in held if isinstance(x, torch.Tensor))


def test_memories_hold_the_images_of_the_data():
    method = small("moco_memory_bank")
    assert len(method.bank.keys) == NUM_IMAGES
