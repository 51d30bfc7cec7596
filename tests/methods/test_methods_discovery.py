"""What comes before classes are discovered, RotNet and Supervised, and SimGCD, which finds them.

Losses are restated view by view.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import confusion_matrix
from small import BATCH, SIDE, assert_same_gradient, batch_for, double_at, double_for, run, small
from torch import nn

from nearkin.errors import UsageError
from nearkin.methods.rotnet import RotNet
from nearkin.networks.branch import Backbone
from nearkin.run.options import checked_options
from nearkin.types import UNLABELED, Batch


def cross_entropy(logits, target):
    """Of one row."""
    return torch.logsumexp(logits, 0) - logits[target]


def mean(values):
    return sum(values) / len(values)


# RotNet


def test_four_turns_of_a_image_of_four_pixels_have_the_golden_loss():
    """Counter-clockwise, 1 2 / 3 4 has 1, then 2, 4 and 3 at its upper left, which is all that is read."""
    method = RotNet(Backbone(nn.Flatten(), 12)).double()
    with torch.no_grad():
        method.turns.weight.zero_()[:, 0] = torch.arange(4.0)
        method.turns.bias.zero_()
    view = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double().expand(1, 3, 2, 2)
    loss = method(Batch((view,), torch.tensor([0]), torch.tensor([UNLABELED])), 0.5).loss
    sums = [math.log(sum(math.exp(k * pixel) for k in range(4))) for pixel in (1, 2, 4, 3)]
    expected = mean(sums) - mean([turn * pixel for turn, pixel in enumerate((1, 2, 4, 3))])
    assert loss.item() == pytest.approx(expected)
    assert expected == pytest.approx(2.9137, abs=1e-4)


def test_rotnet_is_the_cross_entropy_of_all_turns_of_all_images_in_one_pass():
    method, batch = small("rotnet").double().train(), double_for("rotnet")
    turns = [view.rot90(turn, (1, 2)) for turn in range(4) for view in batch.views[0]]
    logits = method.turns(method.online(torch.stack(turns)))
    total = mean([cross_entropy(row, i // BATCH) for i, row in enumerate(logits)])
    assert_same_gradient(method(batch, 0.5).loss, total, method)


def test_rotnet_learns_to_tell_how_images_are_turned():
    method = small("rotnet")
    run(method, "rotnet", total=60, until=60, batches=lambda n, s: batch_for(n, s % 4))
    view = batch_for("rotnet", 1).views[0]
    with torch.no_grad():
        for turn in range(4):
            predicted = method.turns(method.eval().backbone(view.rot90(turn, (2, 3)))).argmax(1)
            assert (predicted == turn).float().mean() > 0.9


# Supervised


def test_supervised_is_the_mean_cross_entropy_of_labeled_images():
    method, batch = small("supervised").double().train(), double_for("supervised")
    logits = method.known(method.online(batch.views[0]))
    known = [i for i in range(BATCH) if batch.label[i] != UNLABELED]
    assert 0 < len(known) < BATCH
    expected = mean([cross_entropy(logits[i], batch.label[i]) for i in known])
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


def test_a_batch_without_labels_teaches_supervised_nothing():
    for num_images in (1, BATCH):
        method, batch = small("supervised").double().eval(), double_at(0, 1)
        loss = method(batch.map(lambda x, n=num_images: x[:n]), 0.5).loss
        loss.backward()
        assert loss == 0, num_images
        assert all((p.grad == 0).all() for p in method.parameters()), num_images


def restated(method, batch, progress):
    """Each term as a sum over views; targets are constants."""
    falling = min(progress / 0.15, 1)
    sharp = (1 - falling) * 0.07 + falling * 0.04
    features = torch.cat([method.backbone(view) for view in batch.views])
    h = [F.normalize(x, dim=0) for x in features]
    z = [F.normalize(x, dim=0) for x in method.online.projector(features)]
    n = len(batch.label)
    prototypes = [F.normalize(w, dim=0) for w in method.heads.weight]
    cosines = [torch.stack([w @ x for w in prototypes]) for x in h]
    student = [(row / method.temperature).softmax(0) for row in cosines]
    teacher = [(row / sharp).softmax(0).detach() for row in cosines]
    label = batch.label.tolist() * 2
    known = [i for i in range(2 * n) if label[i] != UNLABELED]
    average = mean(student)

    def find(i, positives, among, t):
        """Minus the mean logarithm of the share of each positive."""
        total = sum((z[i] @ z[a] / t).exp() for a in among if a != i)
        return -mean([((z[i] @ z[p] / t).exp() / total).log() for p in positives])

    def same(i):
        return [p for p in known if p != i and label[p] == label[i]]

    u, v = method.contrast_temperature, method.sup_temperature
    every, other = range(2 * n), [(i + n) % (2 * n) for i in range(2 * n)]
    return {
        "distill": mean([-(teacher[other[i]] * student[i].log()).sum() for i in every]),
        "entropy": -(average * average.log()).sum(),
        "classify": mean([-student[i][label[i]].log() for i in known]),
        "contrast": mean([find(i, [other[i]], every, u) for i in every]),
        "class_contrast": mean([find(i, same(i), known, v) for i in known]),
    }


@pytest.mark.parametrize("progress", [0.05, 0.6])
def test_simgcd_is_the_papers_term_by_term_and_so_is_its_gradient(progress):
    options = dict(sup_weight=0.3, entropy_weight=1.7, contrast_temperature=0.4)
    method, batch = small("simgcd", **options).double().eval(), double_for("simgcd")
    result, expected = method(batch, progress), restated(method, batch, progress)
    assert set(result.metrics) == set(expected)
    for name, term in expected.items():
        torch.testing.assert_close(result.metrics[name], term.detach())
    total = 0.7 * (expected["contrast"] + expected["distill"] - 1.7 * expected["entropy"])
    total = total + 0.3 * (expected["class_contrast"] + expected["classify"])
    assert_same_gradient(result.loss, total, method)


def test_no_gradient_reaches_the_targets():
    """So that of the logits of a view is its prediction less the target, which is the other's."""
    method = small("simgcd", sup_weight=0.0, entropy_weight=0.0).double()
    classified = []
    method.heads.register_forward_hook(lambda *call: classified.append(call[-1]))
    unlabeled = replace(double_for("simgcd"), label=torch.full((BATCH,), UNLABELED))
    loss = method(unlabeled, 0.075).loss  # of its terms, only `l_dist` reads the classifier
    (logits,) = classified
    (gradient,) = torch.autograd.grad(loss, logits)
    sharpened = (logits * 0.1 / 0.055).softmax(1).roll(BATCH, 0)
    torch.testing.assert_close(gradient, (logits.softmax(1) - sharpened) / (2 * BATCH))


def test_targets_grow_sharper_at_first():
    for until, *cases in (
        (0.15, (0.0, 0.07), (0.075, 0.055), (0.15, 0.04), (1.0, 0.04)),
        (0.0, (0.0, 0.04)),
    ):
        method = small("simgcd", sharp_until=until)
        for progress, expected in cases:
            assert method.sharpness(progress) == pytest.approx(expected), (until, progress)


@pytest.mark.parametrize("num_known", [0, 1, BATCH - 1, BATCH])
def test_terms_of_labels_that_are_not_there_are_zero_and_all_is_finite(num_known):
    method, batch = small("simgcd").double().train(), double_for("simgcd")
    label = torch.where(torch.arange(BATCH) < num_known, torch.arange(BATCH) % 3, UNLABELED)
    step = method(replace(batch, label=label), 0.5)
    assert (step.metrics["classify"] == 0) == (num_known == 0)
    assert (step.metrics["class_contrast"].abs() < 1e-12) == (num_known < 2)
    step.loss.backward()
    values = [step.loss, *step.metrics.values(), *(p.grad for p in method.parameters())]
    assert all(value.isfinite().all() for value in values)


@pytest.mark.parametrize("name", ["rotnet", "supervised", "simgcd"])
@pytest.mark.parametrize("label", [UNLABELED, 2])
def test_one_image_is_enough(name, label):
    method, batch = small(name).eval(), batch_for(name, 0).map(lambda x: x[[0]])
    loss = method(replace(batch, label=torch.tensor([label])), 0.5).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in method.parameters())


def test_a_weight_that_would_turn_a_term_around_is_refused():
    for weight in ("-0.1", "1.1"):
        with pytest.raises(UsageError, match="sup_weight"):
            checked_options("simgcd", {"sup_weight": weight})


def grouped(step):
    """Views of six groups of images. Half of those in the first three have a label."""
    g = torch.Generator().manual_seed(step)
    centers = torch.randn(6, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    index, group = torch.arange(48), torch.arange(48) % 6
    views = tuple(centers[group] + torch.randn(48, 3, SIDE, SIDE, generator=g) for _ in range(2))
    return Batch(views, index, torch.where((group < 3) & (index < 24), group, UNLABELED))


def test_unlabeled_images_of_known_and_of_novel_classes_are_told_apart():
    """Each novel group has a class of its own, and known ones keep their number."""
    method, batch = small("simgcd"), grouped(1000)
    run(method, "simgcd", total=100, until=100, batches=lambda _, step: grouped(step))
    with torch.no_grad():
        predicted = method.heads(method.eval().backbone(batch.views[0])).argmax(1)
    free = batch.label == UNLABELED
    counts = confusion_matrix(batch.index[free] % 6, predicted[free], labels=range(6))
    known, novel = counts[:3, :3], counts[3:, 3:]
    right = known.trace() + novel[linear_sum_assignment(-novel)].sum()
    assert right / counts.sum() > 0.9
