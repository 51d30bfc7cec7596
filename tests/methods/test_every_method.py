"""What holds of every method. A new method is checked here by being named in METHODS."""

import copy
import pkgutil
from pathlib import Path

import pytest
import torch
from small import NUM_IMAGES, SMALL, assert_same_state, batch_at, batch_for, run, small
from torch import nn
from torch.utils._pytree import tree_leaves

import nearkin.methods
from nearkin.errors import DivergedError
from nearkin.methods import METHODS
from nearkin.objectives import unit
from nearkin.training import checkpoint
from nearkin.types import UNKNOWN

every_method = pytest.mark.parametrize("name", METHODS)


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
    method(batch_for(name, 0), progress=0.5)
    assert_same_state(memories(method.state_dict()), before, rtol=0, atol=0)


@every_method
def test_what_is_remembered_has_no_gradient(name):
    found = small(name).train()(batch_for(name, 0), progress=0.5)
    assert found.loss.requires_grad
    assert found.loss.ndim == 0
    remembered = [x for x in tree_leaves((found.memo, dict(found.metrics))) if x is not None]
    assert not any(tensor.requires_grad for tensor in remembered)


@every_method
def test_every_trained_parameter_gets_a_gradient_and_no_other(name):
    method = small(name).train()
    method(batch_for(name, 0), progress=0.5).loss.backward()
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


@torch.no_grad()
def likeness(method):
    """Mean cosine between two views of one image, less that between images."""
    first, second = (unit(method.eval().online(view)) for view in batch_at(1).views)
    cosines = first @ second.T
    return float(cosines.diagonal().mean() - cosines.mean())


@every_method
def test_what_others_have_drawn_changes_nothing(name):
    """Draws depend on the step alone, and the state of the caller's generator is left as it is."""
    states = []
    for seed in (5, 6):
        method = small(name)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        run(method, name, until=3)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(method.state_dict())
    assert_same_state(*states, rtol=0, atol=0)


LABEL_FREE = [name for name, cls in METHODS.items() if not cls.uses_labels]
label_free = pytest.mark.parametrize("name", LABEL_FREE)


@pytest.mark.parametrize("name", sorted(set(LABEL_FREE) - {"rotnet"}))
def test_it_learns(name):
    """Views of an image come closer to each other than to those of other images.

    To RotNet all images are one that stands upright. Losses need not fall: targets move, and centering raises the entropy of DINO's.
    """
    method = small(name)
    before = likeness(method)
    run(method, name, total=60, until=60, batches=lambda n, s: batch_for(n, s % 4))
    assert likeness(method) > before + 0.1


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(LABEL_FREE)))
def test_it_learns_what_labels_say(name):
    """Known classes here are drawn by lot: what they share is their label alone."""
    method = small(name)
    run(method, name, total=60, until=60, batches=lambda n, s: batch_for(n, s % 4))
    batch = batch_for(name, 1)
    known = batch.label != UNKNOWN
    head = method.known if hasattr(method, "known") else method.heads
    with torch.no_grad():  # known classes come first
        found = head(method.eval().backbone(batch.views[0]))[:, :3].argmax(1)
    assert (found == batch.label)[known].float().mean() > 0.8


@every_method
def test_a_loss_that_is_not_finite_stops_before_anything_is_written(name):
    method = small(name)
    poisoned = batch_for(name, 0)
    poisoned.views[0][0, 0, 0, 0] = float("nan")
    before = copy.deepcopy(memories(method.state_dict()))
    with pytest.raises(DivergedError, match="step 0"):
        run(method, name, batches=lambda *_: poisoned)
    assert_same_state(memories(method.state_dict()), before, rtol=0, atol=0)


@label_free
def test_labels_do_not_change_one_bit(name):
    def labelled(n, step):
        batch = batch_for(n, step)
        batch.label.copy_(batch.index % 3)
        return batch

    plain, with_labels = small(name), small(name)
    run(plain, name)
    run(with_labels, name, batches=labelled)
    assert_same_state(with_labels.state_dict(), plain.state_dict(), rtol=0, atol=0)


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
        found = method(batch_for(name, 0), progress=0.5)
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
