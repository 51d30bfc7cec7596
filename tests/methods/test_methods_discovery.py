"""What comes before classes are discovered, RotNet and Supervised, and SimGCD, which finds them.

Losses are restated view by view. Golden values are worked out by hand.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import confusion_matrix
from small import BATCH, SIDE, as_double, batch_at, batch_for, run, small
from torch import nn

from nearkin.errors import UsageError
from nearkin.methods.rotnet import RotNet
from nearkin.methods.simgcd import SimGCD
from nearkin.methods.supervised import Supervised
from nearkin.networks.branch import Backbone
from nearkin.objectives import classify, mean_entropy, nt_xent, sup_con
from nearkin.run.settings import checked_options
from nearkin.types import UNKNOWN, Batch

TERMS = ["distill", "entropy", "classify", "contrast", "class_contrast"]


def at(name, step=0):
    return as_double(batch_for(name, step))


def one_of(batch, rows):
    return Batch(tuple(view[rows] for view in batch.views), batch.index[rows], batch.label[rows])


def reads(*views, label):
    """Images that are these numbers, in each view."""
    images = tuple(torch.tensor(view).double().view(len(label), 3, -1, 1) for view in views)
    return Batch(images, torch.arange(len(label)), torch.tensor(label))


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
    loss = method(Batch((view,), torch.tensor([0]), torch.tensor([UNKNOWN])), 0.5).loss
    expected = mean(
        [
            math.log(sum(math.exp(k * pixel) for k in range(4))) - turn * pixel
            for turn, pixel in enumerate((1, 2, 4, 3))
        ]
    )
    assert loss.item() == pytest.approx(expected)
    assert expected == pytest.approx(2.9137, abs=1e-4)


def test_rotnet_is_the_cross_entropy_of_all_turns_of_all_images_in_one_pass():
    method, batch = small("rotnet").double().train(), at("rotnet")
    turns = [view.rot90(turn, (1, 2)) for turn in range(4) for view in batch.views[0]]
    logits = method.turns(method.online(torch.stack(turns)))
    total = mean([cross_entropy(row, i // BATCH) for i, row in enumerate(logits)])
    loss, parameters = method(batch, 0.5).loss, list(method.parameters())
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(total, parameters)
    )


def test_a_network_that_cannot_tell_turns_apart_loses_the_logarithm_of_four():
    method = small("rotnet").double()
    nn.init.zeros_(method.turns.weight)
    nn.init.zeros_(method.turns.bias)
    assert method(at("rotnet"), 0.5).loss.item() == pytest.approx(math.log(4))


def test_images_that_are_turned_before_change_nothing_where_the_head_turns_with_them():
    method, batch = small("rotnet").double(), at("rotnet")
    before = method(batch, 0.5).loss
    with torch.no_grad():
        for parameter in method.turns.parameters():
            parameter.copy_(parameter.roll(-1, 0))
    turned = replace(batch, views=(batch.views[0].rot90(1, (2, 3)),))
    torch.testing.assert_close(method(turned, 0.5).loss, before)


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
    method, batch = small("supervised").double().train(), at("supervised")
    logits = method.known(method.online(batch.views[0]))
    known = [i for i in range(BATCH) if batch.label[i] != UNKNOWN]
    assert 0 < len(known) < BATCH
    expected = mean([cross_entropy(logits[i], batch.label[i]) for i in known])
    torch.testing.assert_close(method(batch, 0.5).loss, expected)


def test_images_without_a_label_count_for_nothing():
    """Statistics of a batch aside, no bit changes, of the loss or of a gradient."""
    outcomes = []
    for size in (0.0, 1.0):
        method, batch = small("supervised").eval(), batch_for("supervised", 0)
        batch.views[0][batch.label == UNKNOWN] += size
        loss = method(batch, 0.5).loss
        outcomes.append([loss, *torch.autograd.grad(loss, list(method.parameters()))])
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("num_images", [1, BATCH])
def test_a_batch_without_labels_teaches_supervised_nothing(num_images):
    method, batch = small("supervised").double().eval(), as_double(batch_at(0, 1))
    loss = method(one_of(batch, slice(num_images)), 0.5).loss
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in method.parameters())


def test_known_classes_alike_lose_the_logarithm_of_their_number():
    method = Supervised(Backbone(nn.Flatten(), 6), num_known_classes=5).double()
    nn.init.zeros_(method.known.weight)
    nn.init.zeros_(method.known.bias)
    loss = method(reads([[1.0] * 6] * 3, label=[4, UNKNOWN, 2]), 0.5).loss
    assert loss.item() == pytest.approx(math.log(5))


# SimGCD, term by term


def restated(method, batch, progress):
    """Each term as a sum over views; targets are constants."""
    first, last = method.sharp_temperatures
    falling = min(progress / method.sharp_until, 1)
    sharp = (1 - falling) * first + falling * last
    h = [F.normalize(x, dim=0) for view in batch.views for x in method.backbone(view)]
    z = [F.normalize(x, dim=0) for x in method.online.projector(torch.stack(h_of(method, batch)))]
    n = len(batch.label)
    prototypes = [F.normalize(w, dim=0) for w in method.heads.weight]
    cosines = [torch.stack([w @ x for w in prototypes]) for x in h]
    student = [(row / method.temperature).softmax(0) for row in cosines]
    teacher = [(row / sharp).softmax(0).detach() for row in cosines]
    label = batch.label.tolist() * 2
    known = [i for i in range(2 * n) if label[i] != UNKNOWN]
    average = mean(student)

    def find(i, positives, among, t):
        """Minus the mean logarithm of the share of each positive."""
        total = sum((z[i] @ z[a] / t).exp() for a in among if a != i)
        return -mean([((z[i] @ z[p] / t).exp() / total).log() for p in positives])

    def same(i):
        return [p for p in known if p != i and label[p] == label[i]]

    u, v = method.contrast_temperature, method.sup_temperature
    return {
        "distill": mean(
            [-(teacher[(i + n) % (2 * n)] * student[i].log()).sum() for i in range(2 * n)]
        ),
        "entropy": -(average * average.log()).sum(),
        "classify": mean([-student[i][label[i]].log() for i in known]),
        "contrast": mean([find(i, [(i + n) % (2 * n)], range(2 * n), u) for i in range(2 * n)]),
        "class_contrast": mean([find(i, same(i), known, v) for i in known]),
    }


def h_of(method, batch):
    return [x for view in batch.views for x in method.backbone(view)]


@pytest.mark.parametrize("progress", [0.05, 0.6])
def test_simgcd_is_the_papers_term_by_term_and_so_is_its_gradient(progress):
    options = dict(sup_weight=0.3, entropy_weight=1.7, contrast_temperature=0.4)
    method, batch = small("simgcd", **options).double().eval(), at("simgcd")
    result, expected = method(batch, progress), restated(method, batch, progress)
    assert set(result.metrics) == set(expected) == set(TERMS)
    for name, term in expected.items():
        torch.testing.assert_close(result.metrics[name], term.detach())
    total = 0.7 * (expected["contrast"] + expected["distill"] - 1.7 * expected["entropy"])
    total = total + 0.3 * (expected["class_contrast"] + expected["classify"])
    torch.testing.assert_close(result.loss, total)
    parameters = list(method.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(result.loss, parameters), torch.autograd.grad(total, parameters)
    )


def test_no_gradient_reaches_the_targets():
    """So that of the logits of a view is its prediction less the target, which is the other's."""
    method = small("simgcd", sup_weight=0.0, entropy_weight=0.0).double()
    classified = []
    method.heads.register_forward_hook(lambda *call: classified.append(call[-1]))
    unlabeled = replace(at("simgcd"), label=torch.full((BATCH,), UNKNOWN))
    loss = method(unlabeled, 0.075).loss  # of its terms, only `l_dist` reads the classifier
    (logits,) = classified
    (gradient,) = torch.autograd.grad(loss, logits)
    sharpened = (logits * 0.1 / 0.055).softmax(1).roll(BATCH, 0)
    torch.testing.assert_close(gradient, (logits.softmax(1) - sharpened) / (2 * BATCH))


@pytest.mark.parametrize(
    ("until", "progress", "expected"),
    [
        (0.15, 0.0, 0.07),
        (0.15, 0.075, 0.055),
        (0.15, 0.15, 0.04),
        (0.15, 1.0, 0.04),
        (0.0, 0.0, 0.04),
    ],
)
def test_targets_grow_sharper_at_first(until, progress, expected):
    result = small("simgcd", sharp_until=until).sharpness(progress)
    assert result == pytest.approx(expected)


def test_views_of_simgcd_share_their_batch_statistics():
    method, batch = small("simgcd").double().train(), at("simgcd")
    moved = replace(batch, views=(batch.views[0], batch.views[1] + 1))
    assert abs(method(moved, 0.5).loss - method(batch, 0.5).loss) > 0.01


def test_the_projector_has_three_layers_with_gelu_and_no_norm():
    layers = list(small("simgcd").online.projector)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.GELU] * 2 + [nn.Linear]
    assert [layer.out_features for layer in layers[::2]] == [16, 16, 8]


# SimGCD, golden values


def reader(**options):
    """One whose features are the numbers of the image, with two known and two novel classes."""
    options = dict(num_known_classes=2, num_novel_classes=2, dim=3, hidden_dim=4) | options
    torch.manual_seed(0)
    return SimGCD(Backbone(nn.Flatten(), 6), **options).double()


def test_prototypes_all_alike_lose_the_logarithm_of_the_number_of_classes():
    method = reader()
    nn.init.ones_(method.heads.weight)
    pixels = torch.rand(3, 6).tolist()
    metrics = method(reads(pixels, pixels, label=[0, UNKNOWN, 1]), 0.5).metrics
    for name in ("distill", "entropy", "classify"):
        assert metrics[name].item() == pytest.approx(math.log(4))


def test_an_image_on_its_prototype_has_the_golden_values():
    """One image of class 0, whose other view is of class 1; prototypes are at right angles."""
    method = reader(temperature=1.0, first_sharp_temperature=0.5, sharp_temperature=0.5)
    with torch.no_grad():
        method.heads.weight.copy_(torch.eye(4, 6))
    batch = reads([[2.0, 0, 0, 0, 0, 0]], [[0, 3.0, 0, 0, 0, 0]], label=[0])
    metrics = {name: value.item() for name, value in method(batch, 0.0).metrics.items()}
    e, total = math.e, math.log(math.e + 3)
    sure = e**2 / (e**2 + 3)  # of its class, in the target
    mixed, rest = (e + 1) / (2 * e + 6), 1 / (e + 3)
    assert metrics == pytest.approx(
        {
            "distill": total - (1 - sure) / 3,  # -log P is total - 1 for one class, else total
            "entropy": -2 * (mixed * math.log(mixed) + rest * math.log(rest)),
            "classify": total - 0.5,
            "contrast": 0.0,  # there is nothing to tell the view from
            "class_contrast": 0.0,
        }
    )


# SimGCD, who is in the batch


@pytest.mark.parametrize("num_known", [0, 1, BATCH - 1, BATCH])
def test_terms_of_labels_that_are_not_there_are_zero_and_all_is_finite(num_known):
    method, batch = small("simgcd").double().train(), at("simgcd")
    label = torch.where(torch.arange(BATCH) < num_known, torch.arange(BATCH) % 3, UNKNOWN)
    step = method(replace(batch, label=label), 0.5)
    assert (step.metrics["classify"] == 0) == (num_known == 0)
    assert (step.metrics["class_contrast"].abs() < 1e-12) == (num_known < 2)
    step.loss.backward()
    values = [step.loss, *step.metrics.values(), *(p.grad for p in method.parameters())]
    assert all(value.isfinite().all() for value in values)


@pytest.mark.parametrize("name", ["rotnet", "supervised", "simgcd"])
@pytest.mark.parametrize("label", [UNKNOWN, 2])
def test_one_image_is_enough(name, label):
    method, batch = small(name).eval(), one_of(batch_for(name, 0), [0])
    loss = method(replace(batch, label=torch.tensor([label])), 0.5).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in method.parameters())


def test_features_that_are_all_zero_leave_everything_finite():
    method = reader()
    step = method(reads([[0.0] * 6] * 2, [[0.0] * 6] * 2, label=[1, UNKNOWN]), 0.5)
    step.loss.backward()
    assert step.loss.isfinite()
    assert all(p.grad.isfinite().all() for p in method.parameters())


def test_labels_say_nothing_to_the_terms_of_all_images():
    method, batch = small("simgcd").double().eval(), at("simgcd")
    taught = method(batch, 0.5).metrics
    free = method(replace(batch, label=torch.full_like(batch.label, UNKNOWN)), 0.5).metrics
    changed = {name for name in TERMS if not torch.equal(taught[name], free[name])}
    assert changed == {"classify", "class_contrast"}


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_weight_of_labels_leaves_the_rest_to_all_other_terms(weight):
    method, batch = small("simgcd", sup_weight=weight).double().eval(), at("simgcd")
    step = method(batch, 0.5)
    m = step.metrics
    free = m["contrast"] + m["distill"] - 2 * m["entropy"]
    expected = m["class_contrast"] + m["classify"] if weight else free
    torch.testing.assert_close(step.loss.detach(), expected)


@pytest.mark.parametrize("weight", ["-0.1", "1.1"])
def test_a_weight_that_would_turn_a_term_around_is_refused(weight):
    with pytest.raises(UsageError, match="--sup-weight"):
        checked_options("simgcd", {"sup_weight": weight})


# What has no order


def test_neither_views_nor_images_have_an_order():
    method, batch = small("simgcd").double().eval(), at("simgcd")
    before = method(batch, 0.1)
    for changed in (replace(batch, views=batch.views[::-1]), one_of(batch, torch.randperm(BATCH))):
        after = method(changed, 0.1)
        torch.testing.assert_close(dict(after.metrics), dict(before.metrics))
        torch.testing.assert_close(after.loss, before.loss)


def test_known_classes_come_first_and_otherwise_have_no_order():
    method, batch = small("simgcd").double().eval(), at("simgcd")
    before = method(batch, 0.1).loss
    order = torch.tensor([2, 0, 1, 5, 3, 4])  # known among known, novel among novel
    with torch.no_grad():
        method.heads.weight.copy_(method.heads.weight[order.argsort()])
    label = torch.where(batch.label == UNKNOWN, UNKNOWN, order[batch.label])
    torch.testing.assert_close(method(replace(batch, label=label), 0.1).loss, before)
    assert not torch.isclose(method(batch, 0.1).loss, before)


# What it is for


def grouped(step):
    """Views of six groups of images. Half of those in the first three have a label."""
    g = torch.Generator().manual_seed(step)
    centers = torch.randn(6, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    index = torch.arange(48)
    group = index % 6
    views = tuple(centers[group] + torch.randn(48, 3, SIDE, SIDE, generator=g) for _ in range(2))
    return Batch(views, index, torch.where((group < 3) & (index < 24), group, UNKNOWN))


def sorted_by(method):
    """How many unlabeled images of each group are given to each class."""
    run(method, "simgcd", total=100, until=100, batches=lambda _, step: grouped(step))
    batch = grouped(1000)
    with torch.no_grad():
        predicted = method.heads(method.eval().backbone(batch.views[0])).argmax(1)
    free = batch.label == UNKNOWN
    return confusion_matrix(batch.index[free] % 6, predicted[free], labels=range(6))


def test_unlabeled_images_of_known_and_of_novel_classes_are_told_apart():
    """Each novel group has a class of its own, and known ones keep their number."""
    counts = sorted_by(small("simgcd"))
    known, novel = counts[:3, :3], counts[3:, 3:]
    right = known.trace() + novel[linear_sum_assignment(-novel)].sum()
    assert right / counts.sum() > 0.9


def test_without_entropy_novel_groups_share_a_class():
    """And thus the test above can fail."""
    counts = sorted_by(small("simgcd", entropy_weight=0.0))
    assert (counts.sum(axis=0) == 0).any()


# The objectives


def test_views_of_two_classes_and_of_one_have_the_golden_values():
    """Two images at right angles, in two views each: e + 2 is all there is besides oneself."""
    z, log_sum = torch.eye(2).double(), math.log(math.e + 2)
    losses = [sup_con(z, z, torch.tensor(label), 1.0).item() for label in ((0, 1), (5, 5))]
    assert losses == pytest.approx([log_sum - 1, log_sum - 1 / 3])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("t", [0.07, 1.0])
def test_where_every_image_is_a_class_of_its_own_it_is_nt_xent(seed, t):
    g = torch.Generator().manual_seed(seed)
    a, b = (F.normalize(torch.randn(7, 5, generator=g).double()) for _ in range(2))
    torch.testing.assert_close(sup_con(a, b, torch.randperm(7), t), nt_xent(a, b, t))


def test_no_images_cost_nothing():
    z, label = torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)
    assert sup_con(z, z, label, 0.07) == 0
    assert classify(z, label) == 0


def test_cross_entropy_of_the_small_case_is_the_golden_value():
    logits = torch.tensor([[2.0, 0, 0], [7.0, 1e4, 0]]).double()
    assert classify(logits, torch.tensor([0, UNKNOWN])).item() == pytest.approx(0.2395448)


@given(st.lists(st.lists(st.floats(-30, 30), min_size=4, max_size=4), min_size=1, max_size=6))
def test_entropy_is_largest_where_all_classes_get_as_much(rows):
    """Which every row does, if each comes once in every rotation."""
    logits = torch.tensor(rows, dtype=torch.float64)
    entropy = mean_entropy(logits.softmax(1)).item()
    evened = torch.cat([logits.roll(k, 1) for k in range(4)])
    assert -1e-12 <= entropy <= math.log(4) + 1e-12
    assert mean_entropy(evened.softmax(1)).item() == pytest.approx(math.log(4))


def test_entropy_of_sure_predictions_is_that_of_their_classes():
    certain = torch.eye(3)[[0, 0, 1]].double().requires_grad_()
    entropy = mean_entropy(certain)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    assert certain.grad.isfinite().all()
    assert mean_entropy(torch.eye(3)[[1, 1]]) == 0
