"""What holds of every method. A new method is checked here by being named in METHODS."""

import pkgutil

import pytest
import torch
from small import NUM_IMAGES, SMALL, assert_same_state, batch_at, batch_for, run, small

import nearkin.methods
from nearkin.methods import METHODS
from nearkin.objectives import unit
from nearkin.testing import check_method
from nearkin.training.loop import gradients
from nearkin.types import UNLABELED


def test_every_module_of_methods_is_in_the_catalogue_and_in_these_tests():
    modules = {module.name for module in pkgutil.iter_modules(nearkin.methods.__path__)}
    assert modules == set(METHODS) == set(SMALL)


@pytest.mark.parametrize("name", METHODS)
def test_it_keeps_the_laws(name):
    check_method(METHODS[name], **SMALL[name])


OF_FOUR = {
    name: type(
        f"{cls.__name__}OfFour",
        (cls,),
        {"views": ("strong", "strong", "small", "small"), "__module__": __name__},
    )
    for name, cls in METHODS.items()
    if cls.more_views
}
globals().update({cls.__name__: cls for cls in OF_FOUR.values()})  # for other processes to find


@pytest.mark.parametrize("name", OF_FOUR)
def test_it_keeps_the_laws_with_four_views(name):
    check_method(OF_FOUR[name], **SMALL[name])


def test_the_generator_of_the_caller_is_left_as_it_is():
    method = small("nnclr")
    before = torch.get_rng_state()
    run(method, "nnclr", until=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", METHODS)
def test_its_loss_is_computed_in_single_precision_whatever_that_of_the_networks(name):
    """NCL's class probabilities had three digits: those near 1 had no gradient."""
    method, batch = small(name), batch_for(name, 3)
    run(method, name, until=3)  # memories hold images
    halves = [x.detach().bfloat16() if x.is_floating_point() else x for x in method.encode(batch)]
    singles = [x.float() if x.is_floating_point() else x for x in halves]
    results = []
    for autocast, encoded in ((True, halves), (False, singles)):
        method.encode = lambda _, encoded=encoded: encoded
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = method(batch, 0.9).loss
        if loss.requires_grad:
            method.zero_grad()
            loss.backward()
        results.append({"loss": loss, **gradients(method)})
    assert loss.dtype == torch.float32
    assert_same_state(*results)


@torch.no_grad()
def likeness(method):
    """Mean cosine between two views of one image, less that between images."""
    first, second = (unit(method.eval().online(view)) for view in batch_at(1).views)
    cosines = first @ second.T
    return float(cosines.diagonal().mean() - cosines.mean())


ALONE = [name for name, cls in METHODS.items() if not (cls.uses_labels or cls.uses_teacher)]


@pytest.mark.parametrize("name", sorted(set(ALONE) - {"rotnet"}))
def test_it_learns(name):
    """Views of an image come closer to each other than to those of other images.

    To RotNet all images are one that stands upright; what students learn, test_methods_distillation.py asks.
    Losses need not fall: targets move, and centering raises the entropy of DINO's.
    """
    method = small(name)
    before = likeness(method)
    run(method, name, total=60, until=60, batches=lambda n, s: batch_for(n, s % 4))
    assert likeness(method) > before + 0.1


@pytest.mark.parametrize("name", ["ncl", "supervised"])
def test_it_learns_what_labels_say(name):
    """Known classes here are drawn by lot: what they share is their label alone.

    SimGCD and UNO are asked for known and novel classes, in their own files.
    """
    method, batch = small(name), batch_for(name, 1)
    run(method, name, total=60, until=60, batches=lambda n, s: batch_for(n, s % 4))
    known = batch.label != UNLABELED
    head = method.known if hasattr(method, "known") else method.heads
    with torch.no_grad():  # known classes come first
        predicted = head(method.eval().backbone(batch.views[0]))[:, :3].argmax(1)
    assert (predicted == batch.label)[known].float().mean() > 0.8


def test_memories_hold_the_images_of_the_data():
    assert len(small("moco_memory_bank").bank.keys) == NUM_IMAGES
