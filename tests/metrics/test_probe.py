"""The linear probe: scikit-learn's classifier, its strength chosen on held-out images."""

import numpy as np
import pytest
import torch
from builders import normal
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.utils.flop_counter import FlopCounterMode
from types_checked import unchecked

from nearkin.metrics import probe
from nearkin.metrics.intervals import paired_interval
from nearkin.metrics.probe import STRENGTHS, fit_path, log_loss, train_probe
from nearkin.objectives import unit


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Types are checked in test_attentive.py; here it would be thousands of times."""
    with unchecked():
        yield


@pytest.fixture(scope="module")
def table():
    """Centered pixels of real handwritten digits, and their classes: 1437 to learn from, 360."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1437], order[1437:]
    x = unit(torch.from_numpy(pixels - pixels[train].mean(axis=0)).float())
    return x[train], labels[train], x[test], labels[test]


@pytest.mark.parametrize(("strength", "closeness"), [(1e-3, 0.001), (0.1, 0.01), (10.0, 0.1)])
def test_the_linear_classifier_is_that_of_scikit_learn(table, strength, closeness):
    bank, labels, queries, truth = table
    mean, std = bank.mean(0), bank.std(0).clamp(min=1e-3)
    x, test = (bank - mean) / std, (queries - mean) / std
    weight, bias, _ = fit_path(x, torch.from_numpy(labels), 10, [strength])[-1]
    reference = LogisticRegression(C=strength, max_iter=3000, tol=1e-6).fit(x, labels)
    answers, expected = (test @ weight + bias).argmax(dim=1).numpy(), reference.predict(test)
    assert (answers == expected).mean() > 0.98
    assert (answers == truth).mean() == pytest.approx((expected == truth).mean(), abs=0.01)
    expected = torch.from_numpy(reference.coef_.T).float()
    assert (weight - expected).abs().max() < closeness * expected.abs().max()


def test_a_few_steps_find_the_optimum_of_correlated_features(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 64)) * np.arange(1.0, 65) ** -1.5  # 500 times as wide as narrow
    x = (x @ np.linalg.qr(rng.normal(size=(64, 64)))[0]).astype(np.float32)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    y = (x @ rng.normal(size=(64, 4)) + rng.normal(size=(800, 4))).argmax(axis=1)

    def loss(weight, bias, strength):
        total = log_loss(x @ weight + bias, y) + np.square(weight).sum() / (2 * strength * len(x))
        return float(total)

    monkeypatch.setattr("nearkin.metrics.probe.STEPS", 40)
    for strength in (0.1, 10.0):
        reference = LogisticRegression(C=strength, max_iter=10_000, tol=1e-7).fit(x, y)
        best = loss(reference.coef_.T, reference.intercept_, strength)
        weight, bias, _ = fit_path(torch.from_numpy(x), torch.from_numpy(y), 4, [strength])[0]
        assert loss(weight.numpy(), bias.numpy(), strength) == pytest.approx(best, abs=1e-5)


def test_of_fewer_images_than_features_the_classifier_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 100)).astype(np.float32), np.arange(30) % 3
    weight, bias, _ = fit_path(torch.from_numpy(x), torch.from_numpy(y), 3, [1.0])[0]
    reference = LogisticRegression(C=1.0, max_iter=3000, tol=1e-7).fit(x, y)
    np.testing.assert_allclose(weight.numpy(), reference.coef_.T, atol=1e-3)
    np.testing.assert_allclose(bias.numpy(), reference.intercept_, atol=1e-3)


def test_a_path_of_strengths_ends_where_each_strength_alone_does_and_the_probe_repeats_itself(
    table,
):
    x, y = table[0][:200], torch.from_numpy(table[1][:200])
    for strength, fitted in zip((0.01, 0.1, 1.0), fit_path(x, y, 10, (0.01, 0.1, 1.0))):
        for result, alone in zip(fitted[:2], fit_path(x, y, 10, [strength])[0][:2], strict=True):
            assert torch.allclose(result, alone, atol=0.02)
    first, second = (train_probe(table[0][:100], table[1][:100], seed=3) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert first.choice == second.choice


def test_the_strength_is_one_that_suits_the_data():
    truth = np.arange(400) % 2
    signal = torch.from_numpy(truth)[:, None] + 0.1 * normal(400, 1)
    assert train_probe(signal, truth, seed=0).predict(signal[:4]).tolist() == [0, 1, 0, 1]
    noisy = torch.cat([0.5 * signal, normal(400, 300)], dim=1)
    flipped = np.where(np.random.default_rng(0).random(400) < 0.3, 1 - truth, truth)
    assert (
        train_probe(noisy, flipped, seed=0).choice.strength <= 0.1
    )  # weak regularization overfits


def test_copies_of_an_image_in_one_group_do_not_vouch_for_each_other():
    truth = np.arange(200) % 2
    flipped = np.where(np.random.default_rng(0).random(200) < 0.3, 1 - truth, truth)
    x = torch.cat([torch.from_numpy(truth)[:, None].float(), normal(200, 300)], dim=1)
    copies, labels, groups = x.repeat(4, 1), np.tile(flipped, 4), np.tile(np.arange(200), 4)
    by_heart, apart = (train_probe(copies, labels, seed=0, groups=g) for g in (None, groups))
    assert apart.choice.strength < by_heart.choice.strength


def test_features_that_are_constant_or_of_any_scale_do_not_disturb_the_probe(table):
    bank, labels, queries, _ = table

    def distorted(x):
        return torch.cat([1000 * x + 5, torch.full((len(x), 1), 7.7)], dim=1)

    plain = train_probe(bank[:200], labels[:200], seed=0).predict(queries)
    probe = train_probe(distorted(bank[:200]), labels[:200], seed=0)
    assert (probe.predict(distorted(queries)) == plain).mean() > 0.98


def test_choosing_with_some_of_the_images_still_learns_from_all(table, monkeypatch):
    bank, labels, queries, truth = table
    monkeypatch.setattr(probe, "MOST", 300)
    trained = train_probe(bank, labels, seed=0)
    assert trained.choice.images == 300
    x = (bank - trained.mean) / trained.std
    weight, *_ = fit_path(x, torch.from_numpy(labels), 10, [trained.choice.strength])[0]
    assert torch.equal(weight, trained.weight)
    assert (trained.predict(queries) == truth).mean() > 0.93
    assert trained.converged


def test_of_many_classes_some_choose_each_with_several_images(monkeypatch):
    """One image of each of many classes could not choose, and 40 of 200 classes can."""
    monkeypatch.setattr(probe, "MOST", 200)
    monkeypatch.setattr(probe, "MOST_CLASSES", 40)
    labels = np.arange(1000) % 200
    x = normal(200, 16, seed=4)[torch.from_numpy(labels)] + 0.5 * normal(1000, 16)
    trained = train_probe(x, labels, seed=0)
    assert trained.choice.images == 200
    assert len(trained.classes) == 200
    assert (trained.predict(x) == labels).mean() > 0.9


def test_what_was_chosen_is_said_with_its_images_and_the_end_of_the_grid():
    labels = np.arange(40) % 2
    pure = torch.from_numpy(labels)[:, None].float().repeat(1, 3) + 0.01 * normal(40, 3)
    said = train_probe(pure, labels, seed=0).choice.described()
    assert said == {
        "C": STRENGTHS[-1],
        "at": "the end of its grid",
        "held-out training images chose it": 40,
    }
    alone = train_probe(torch.eye(3), np.arange(3), seed=0).choice
    assert alone.described() == {"C": 1.0, "held-out training images to choose it": 0}
    assert "at" not in probe.Choice(STRENGTHS[-1], 10).described()  # of another grid


def test_wide_features_keep_2048_components(monkeypatch):
    monkeypatch.setattr(probe, "WIDEST", 20)
    labels = np.arange(60) % 3
    x = normal(60, 50, seed=1)
    x[:, :3] += 4 * torch.eye(3)[torch.from_numpy(labels)]
    wide = train_probe(x, labels, seed=0)
    assert wide.basis.shape == (50, 20)
    few = train_probe(x[:15], labels[:15], seed=0)  # which span fewer dimensions in any case
    assert few.basis is None
    assert (wide.predict(x) == labels).mean() > 0.9


def test_features_out_of_memory_are_reduced_once_and_not_in_each_step(monkeypatch):
    """The fit is that of rows in memory, and passes over wide rows do not dominate it."""
    monkeypatch.setattr(probe, "WIDEST", 100)
    labels = np.arange(600) % 3
    x = normal(600, 300, seed=1) + torch.eye(3, 300)[torch.from_numpy(labels)]
    fits, operations = [], []
    for held in (probe.HELD, 0):
        monkeypatch.setattr(probe, "HELD", held)
        with FlopCounterMode(display=False) as counter:
            fits.append(train_probe(x, labels, seed=0))
        operations.append(counter.get_total_flops())
    assert fits[0].choice == fits[1].choice
    np.testing.assert_allclose(*(fit.weight.numpy() for fit in fits), atol=1e-4)
    assert operations[1] < 4 * operations[0]


def test_more_labels_do_not_lower_the_accuracy_of_real_digits(table):
    """Beyond what 360 test images can tell."""
    bank, labels, queries, truth = table
    before = np.zeros(len(truth), bool)
    for each in (1, 10, 100):
        rows = np.concatenate([np.flatnonzero(labels == c)[:each] for c in range(10)])
        trained = train_probe(bank[torch.from_numpy(rows)], labels[rows], seed=0)
        correct = trained.predict(queries) == truth
        assert paired_interval(correct & ~before, before & ~correct).high > 0, each
        before = correct
