"""Methods that match views to prototypes: SwAV (Caron et al. 2020), DINO (Caron et al. 2021)."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from restated import sinkhorn
from small import BATCH, SMALL, assert_same_gradient, double_at, double_for, run, small
from torch import nn

from nearkin.methods import METHODS
from nearkin.networks.branch import Backbone
from nearkin.types import Batch


def multi_crop(step):
    """Two large views and three small ones."""
    batch = double_at(step, num_views=5)
    small_ones = tuple(view[..., :5, 1:6] for view in batch.views[2:])
    return Batch(batch.views[:2] + small_ones, batch.index, batch.label)


def convolutional(name, **options):
    """The method around a network that takes views of any size, after two steps of training."""
    torch.manual_seed(1)
    body = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    method = METHODS[name](Backbone(body, 24), **SMALL[name] | options).double()
    run(method, name, start=(4, None), until=6, total=10, batches=lambda _, step: multi_crop(step))
    return method


def through(network, views):
    """Embeddings of unit length: the backbone sees views by their size, the projector all at once.

    So do SwAV's `forward` and DINO's `MultiCropWrapper`.
    """
    parts = [torch.cat(part) for part in (views[:2], views[2:]) if part]
    features = torch.cat([network.backbone(part) for part in parts])
    return [F.normalize(z) for z in network.projector(features).chunk(len(views))]


def swapped(scores, codes, temperature):
    """The mean over every code i of a large view, and over every other view j, of -q_i log p_j."""
    losses = [
        -(codes[i] * (scores[j] / temperature).log_softmax(dim=1)).sum(dim=1).mean()
        for i, j in itertools.product(range(2), range(len(scores)))
        if i != j
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("name", "scaled_again"),  # which may change the last digit of float32, where they start
    [("swav", 1e-7), ("dino", 0.0)],
)
def test_prototypes_stay_as_they_are_until_they_are_released(name, scaled_again):
    """Ten steps, of which three are within the first .3 of training."""
    method, optimizer = small(name, freeze_until=0.3).double(), None
    moved = []
    for step in range(6):
        before = {n: p.clone() for n, p in method.named_parameters() if "prototypes" in n}
        how = dict(until=step + 1, total=10, start=(step, optimizer), batches=double_for)
        _, optimizer = run(method, name, **how)
        now = dict(method.named_parameters())
        moved.append(any((now[n] - p).abs().max() > scaled_again for n, p in before.items()))
    assert moved == [False] * 3 + [True] * 3


# SwAV


def swav_loss(method, batch, help=None):
    """Section 3, with codes that are constants. `help` are the rows of the queue that count."""
    scores = [z @ method.prototypes.T for z in through(method.online, batch.views)]
    codes = []
    for i in range(2):
        rows = scores[i]
        if help is not None:
            rows = torch.cat([rows, help[:, i] @ method.prototypes.T])
        codes.append(rows.new_tensor(sinkhorn(rows.tolist(), 0.05, 3))[:BATCH])
    return swapped(scores, codes, 0.1)


def earlier(method, batch):
    """Earlier images, both views apart: those in the queue, but not in the batch."""
    queue = method.queue
    count = [int(image) >= 0 and image not in batch.index for image in queue.index]
    return queue.keys[torch.tensor(count)].unflatten(1, (2, -1))


def trained_swav():
    """After two steps, with 32 of 40 places in the queue filled."""
    method = small("swav", queue_size=40).double()
    run(method, "swav", start=(4, None), until=6, total=10, batches=double_for)
    return method


def test_the_queue_balances_codes_with_earlier_images_that_are_not_in_the_batch():
    """But not before its time; neither empty places count, nor what images of the batch left."""
    method, batch = trained_swav().eval(), double_at(0)
    rows = earlier(method, batch)
    assert 0 < len(rows) < int(method.queue.filled.sum()) < 40
    for progress, balancing in ((0.29, None), (0.3, rows)):
        expected = swav_loss(method, batch, balancing)
        torch.testing.assert_close(method(batch, progress).loss, expected)
    assert not torch.isclose(method(batch, 0.3).loss, method(batch, 0.29).loss, rtol=1e-6)
    method = small("swav").double().eval()  # with an empty one
    assert torch.equal(method(batch, 0.3).loss, method(batch, 0.29).loss)


def test_gradients_reach_prototypes_and_views_and_no_code():
    method, batch = trained_swav(), double_at(0)
    expected = swav_loss(method, batch, earlier(method, batch))
    assert_same_gradient(method(batch, 0.5).loss, expected, method)


def test_every_code_is_predicted_from_every_other_view():
    method, batch = convolutional("swav"), multi_crop(0)
    torch.testing.assert_close(method(batch, 0.0).loss, swav_loss(method, batch))


def test_prototypes_have_length_one_after_every_step():
    method, optimizer = small("swav").double(), None
    for step in range(8):
        how = dict(until=step + 1, total=8, start=(step, optimizer), batches=double_for)
        _, optimizer = run(method, "swav", **how)
        lengths = method.prototypes.norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-14)


def test_the_queue_takes_both_large_views_side_by_side_after_the_step():
    method, batch = small("swav").double().eval(), double_at(0)
    step = method(batch, 0.5)
    assert not method.queue.filled.any()
    method.commit(step.memo, 0.5)
    z1, z2 = through(method.online, batch.views)
    torch.testing.assert_close(method.queue.keys[:BATCH], torch.cat([z1, z2], dim=1).detach())
    assert method.queue.index[:BATCH].tolist() == batch.index.tolist()


# DINO


def dino_loss(method, batch, temperature):
    """Equation 3 and algorithm 1. The target sees the large views only."""

    def answer(network, prototypes, views):
        return [z @ F.normalize(prototypes.weight).T for z in through(network, views)]

    with torch.no_grad():
        answers = answer(method.target, method.target_prototypes, batch.views[:2])
        codes = [((a - method.center) / temperature).softmax(dim=1) for a in answers]
    scores = answer(method.online, method.prototypes, batch.views)
    return swapped(scores, codes, 0.1), torch.cat(answers).mean(dim=0)


@pytest.mark.parametrize(
    ("progress", "temperature"), [(0.0, 0.04), (0.15, 0.055), (0.3, 0.07), (1.0, 0.07)]
)
def test_every_view_predicts_the_centered_and_sharpened_answer_to_each_other_large_one(
    progress, temperature
):
    """The target's temperature rises in a line over the first .3 of training."""
    method, batch = convolutional("dino"), multi_crop(0)
    result, (expected, mean) = method(batch, progress), dino_loss(method, batch, temperature)
    assert method.sharpness(progress) == pytest.approx(temperature)
    assert small("dino", warmup_until=0.0).sharpness(progress) == 0.07  # its last
    torch.testing.assert_close(result.memo, mean)
    assert_same_gradient(result.loss, expected, method)


def test_the_center_is_a_moving_average_of_the_targets_answers():
    """Equation 4, over the answers to both large views."""
    method = small("dino", center_momentum=0.8).double()
    expected = torch.zeros(12, dtype=torch.float64)
    for step in range(4):
        _, mean = dino_loss(method, double_at(step), 0.07)
        method.commit(method(double_at(step), 0.5).memo, 0.5)
        expected = 0.8 * expected + 0.2 * mean
        torch.testing.assert_close(method.center, expected)
    assert expected.abs().max() > 1e-3


def test_the_target_has_prototypes_of_its_own_that_follow():
    method = small("dino", momentum=0.9).double()
    with torch.no_grad():
        method.prototypes.weight.normal_()
    before = method.target_prototypes.weight.clone()
    method.commit(method(double_at(0), 0.0).memo, 0.0)
    moved = 0.9 * before + 0.1 * method.prototypes.weight
    torch.testing.assert_close(method.target_prototypes.weight, moved)
