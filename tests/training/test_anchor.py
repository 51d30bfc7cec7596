"""The anchor of a continued training: what it adds to a loss, and that it holds."""

import copy
from dataclasses import replace

import pytest
import torch
from small import SIDE, SMALL, batch_for, small, tiny_vit

from nearkin.method import half_cosine
from nearkin.methods import METHODS
from nearkin.networks.branch import as_backbone, set_chunk_size, trained_backbones
from nearkin.objectives import gram, unit
from nearkin.training.anchor import ANCHOR, Anchor
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer


def train(method, name, weight, *, until=1, anchor=None, batches=batch_for, **how):
    anchor = anchor or Anchor.at(method, weight)
    frozen = how.get("frozen", 0.0)
    optimizer = build_optimizer(
        method, name="sgd", lr=0.1, weight_decay=0.0, separate_backbone=bool(frozen)
    )
    how = dict(start=0, total=4, schedule=half_cosine(1.0, 1.0), seed=3) | how
    fed = (batches(name, step) for step in range(until))
    return [step for _, step in steps(method, optimizer, fed, anchor=anchor, **how)]


def seen_by(method):
    """What backbones are given, and what they make of it, in the order of their calls."""
    seen = []
    for backbone in trained_backbones(method):
        backbone.register_forward_hook(lambda _, images, out: seen.append((*images, out)))
    return seen


SEPARATE = "moco_end_to_end", {"key_encoder": "separate"}  # two backbones, and both are held


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), SEPARATE])
def test_it_adds_the_distance_of_what_the_backbone_sees_from_what_its_start_does(name, options):
    method, plain = small(name, **options), small(name, **options)
    start = copy.deepcopy(method.backbone).eval()
    seen = seen_by(plain)
    (expected,) = train(plain, name, 0.0)
    before = copy.deepcopy(method.state_dict())
    (step,) = train(method, name, 5.0)
    images, features = (torch.cat(each).detach() for each in zip(*seen))
    distance = gram(unit(features), unit(start(images)))
    assert distance > 0  # statistics of the batch are not those that a network starts with
    torch.testing.assert_close(step.metrics[ANCHOR], distance)
    torch.testing.assert_close(step.loss, expected.loss + 5 * distance)
    assert step.metrics.keys() - {ANCHOR} == expected.metrics.keys()
    assert before.keys() == method.state_dict().keys()  # it is in no checkpoint
    assert not method.backbone._forward_hooks


def test_it_holds_the_features_where_they_were():
    distances = {}
    for weight in (0.0, 20.0):
        torch.manual_seed(0)
        method = METHODS["simclr"](as_backbone(tiny_vit(), SIDE), **SMALL["simclr"])
        start = copy.deepcopy(method.backbone).eval()
        train(method, "simclr", weight, until=12, total=12)
        views = torch.cat(batch_for("simclr", 20).views)
        with torch.no_grad():
            after, before = (unit(network(views)) for network in (method.backbone.eval(), start))
        distances[weight] = float(gram(after, before))
    assert distances[20.0] < distances[0.0] / 4


def test_frozen_features_have_no_distance():
    first, second = train(small("simclr"), "simclr", 5.0, until=2, total=2, frozen=0.5)
    assert first.metrics[ANCHOR] == 0 < second.metrics[ANCHOR]


def test_chunks_that_run_again_for_gradients_count_once():
    gradients = []
    for size in (0, 4):
        torch.manual_seed(0)
        method = METHODS["instdisc"](as_backbone(tiny_vit(), SIDE), **SMALL["instdisc"]).double()
        anchor = Anchor.at(method, 5.0)
        with torch.no_grad():
            for weight in method.backbone.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        if size:
            set_chunk_size(method, size, 16)
        double = lambda *of: batch_for(*of).map(lambda x: x.double() if x.ndim == 4 else x)
        train(method, "instdisc", 5.0, anchor=anchor, batches=double)
        gradients.append([weight.detach().clone() for weight in method.backbone.parameters()])
    for whole, chunked in zip(*gradients):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-10)


def test_an_anchor_without_weight_is_none():
    method = small("simclr")
    assert Anchor.at(method, 0.0) is None
    anchor = Anchor.at(method, 1.0)
    assert not any(weight.requires_grad for weight in anchor.start.parameters())
    assert replace(anchor, weight=2.0).start is anchor.start
