"""One temperature makes the largest probability as large as it is often right."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn.datasets import load_digits

from nearkin.classifier.calibration import (
    SHRINKAGE,
    Calibration,
    calibrated,
    calibration_error,
    fit_calibration,
)
from nearkin.metrics import probe
from nearkin.metrics.probe import held_out_logits, train_probe
from nearkin.types import UNLABELED


def softmaxes(n, classes=6, *, scale=1.0, seed=0):
    return softmax(scale * np.random.default_rng(seed).normal(size=(n, classes)), axis=1)


def as_often_right_as_promised(p, seed=1):
    return np.random.default_rng(seed).random(len(p)) < p.max(axis=1)


def heated(row, temperature):
    powers = [p ** (1 / temperature) for p in row]
    return [power / sum(powers) for power in powers]


def log_loss(p, correct, temperature):
    largest = [max(heated(row, temperature)) for row in p.tolist()]
    likelihood = [s if right else 1 - s for s, right in zip(largest, correct)]
    return -sum(math.log(max(x, 1e-12)) for x in likelihood) / len(p)


def fit(p, correct):
    """The calibration where it is known only whether the most probable class is right."""
    correct = np.asarray(correct)
    target = np.where(correct, p.argmax(axis=1), UNLABELED)
    return fit_calibration(p, target, np.arange(len(p)))


def at(temperature):
    return Calibration(temperature, num_images=1, error_before=0.0, error_after=0.0)


def test_probabilities_are_raised_to_a_power_and_scaled():
    p = softmaxes(20)
    for temperature in (0.05, 0.3, 1.0, 4.0, 20.0):
        expected = [heated(row, temperature) for row in p.tolist()]
        np.testing.assert_allclose(calibrated(p, at(temperature)), expected, atol=1e-12)


@given(temperature=st.floats(0.05, 20), scale=st.floats(0.1, 30), seed=st.integers(0, 99))
def test_rows_sum_to_one_and_classes_keep_their_order(temperature, scale, seed):
    p = softmaxes(8, scale=scale, seed=seed)
    q = calibrated(p, at(temperature))
    np.testing.assert_allclose(q.sum(axis=1), 1)
    np.testing.assert_array_equal(q.argmax(axis=1), p.argmax(axis=1))
    in_order = np.take_along_axis(q, p.argsort(axis=1), axis=1)
    assert (np.diff(in_order, axis=1) >= 0).all()


def test_an_impossible_class_stays_impossible_and_what_no_temperature_changes_has_one():
    p = np.array([[0.0, 0.7, 0.3], [0.0, 1.0, 0.0]], dtype=np.float32)
    q = calibrated(p, at(20.0))
    assert q[0].min() == 0
    assert 0.3 < q[0, 2] < q[0, 1]
    np.testing.assert_array_equal(q[1], [0, 1, 0])
    certain = np.eye(3)[[0, 1, 2, 0]]
    fitted = fit(certain, np.array([True, False, True, True]))
    assert fitted == Calibration(1.0, num_images=4, error_before=0.25, error_after=0.25)
    assert fit(np.ones((2, 1)), np.array([True, True])).temperature == 1


def test_the_temperature_undoes_what_made_probabilities_too_sharp_or_too_flat():
    """And leaves alone what is calibrated."""
    honest = softmaxes(20_000)
    correct = as_often_right_as_promised(honest)
    fitted = fit(honest, correct)
    assert fitted.temperature == pytest.approx(1, abs=0.05)
    assert fitted.num_images == 20_000
    assert fitted.error_before < 0.02
    for sharpness in (0.25, 4.0):
        fitted = fit(calibrated(honest, at(1 / sharpness)), correct)
        assert fitted.temperature == pytest.approx(sharpness, rel=0.05)
        assert fitted.error_after < 0.02 < 0.1 < fitted.error_before


def drawn_loss(p, correct, temperature):
    """The sum of log-losses, of one image more that is of any class, and of a prior around 1."""
    more = -np.mean([math.log(x) for row in p.tolist() for x in heated(row, temperature)])
    prior = SHRINKAGE * math.log(temperature) ** 2 / 2
    return len(p) * log_loss(p, correct, temperature) + more + prior


def test_no_temperature_has_a_smaller_loss():
    for seed, share in enumerate((0.2, 0.3, 0.4)):
        p = softmaxes(40, scale=3, seed=seed)
        correct = np.random.default_rng(seed).random(40) < share
        assert fit(p, correct).temperature > 1
        least = drawn_loss(p, correct, fit(p, correct).temperature)
        losses = [drawn_loss(p, correct, t) for t in np.geomspace(0.0501, 19.9, 100)]
        assert least <= min(losses) + 1e-4


def test_all_right_is_cold_and_all_wrong_is_hot_the_more_so_the_more_images():
    def temperature(count, right):
        return fit(softmaxes(count), np.full(count, right)).temperature

    assert 0.05 < temperature(3000, True) < temperature(30, True) < 1
    assert 1 < temperature(30, False) < temperature(3000, False) < 20


def test_one_image_is_enough():
    for right, error in ((True, 0.4), (False, 0.6)):
        fitted = fit(np.array([[0.6, 0.3, 0.1]]), np.array([right]))
        assert fitted.temperature == 1
        assert fitted.error_before == pytest.approx(error)
        assert math.isfinite(fitted.error_after)


def true_loss(p, target):
    return -np.log(p[np.arange(len(target)), target]).mean()


def drawn_classes(p, seed):
    return (np.random.default_rng(seed).random((len(p), 1)) > p.cumsum(axis=1)).sum(axis=1)


@pytest.mark.parametrize("n", [10, 100])
def test_few_images_of_a_calibrated_classifier_change_little(n):
    """New images lose by the temperature at most some thousandths, on average of 40 draws."""
    new = softmaxes(2_000, scale=2, seed=999)
    truth, losses = drawn_classes(new, 998), []
    for seed in range(40):
        p = softmaxes(n, scale=2, seed=seed)
        fitted = fit_calibration(p, drawn_classes(p, seed + 60), np.arange(n))
        losses.append(true_loss(calibrated(new, fitted), truth))
    assert np.mean(losses) < true_loss(new, truth) + 0.005


def test_true_classes_undo_what_made_probabilities_too_sharp_or_too_flat_and_no_more():
    p = np.full((30, 3), 0.05) + 0.85 * np.eye(3)[np.arange(30) % 3]
    assert fit_calibration(p, np.arange(30) % 3, np.arange(30)).temperature > 0.5
    assert fit_calibration(p[:1], np.array([1]), np.arange(1)).temperature == 1
    honest = softmaxes(5_000)
    truth, groups = drawn_classes(honest, 1), np.arange(len(honest))
    for sharpness in (0.25, 4.0):
        fitted = fit_calibration(calibrated(honest, at(1 / sharpness)), truth, groups)
        assert fitted.temperature == pytest.approx(sharpness, rel=0.05)


def test_images_of_one_group_do_not_vouch_for_each_other():
    """Bursts of an image, of a classifier that is calibrated, ask for another temperature."""
    changed = {True: 0, False: 0}
    for seed in range(20):
        p, group = softmaxes(12, scale=2, seed=seed), np.repeat(np.arange(12), 10)
        truth = drawn_classes(p, seed + 60)[group]
        for together in changed:
            groups = group if together else np.arange(120)
            changed[together] += fit_calibration(p[group], truth, groups).temperature != 1
    assert changed[True] <= 5
    assert changed[False] >= 15
    assert fit_calibration(p[group], truth, group).num_images == 120


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, 300])
def test_a_linear_probe_has_no_more_loss_on_new_images(n, monkeypatch):
    """On average of several subsets of digits, and less where there are few."""
    monkeypatch.setattr(probe, "STEPS", 50)
    x, y = load_digits(return_X_y=True)
    changes = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(x))
        features = torch.from_numpy(x[order]).float()
        labels, truth = y[order[:n]], y[order[n:]]
        learned = train_probe(features[:n], labels, seed=seed)
        held_out = held_out_logits(features[:n], labels, learned.choice, seed=seed)
        assert len(held_out.rows) == n
        held_out_p = softmax(held_out.logits, axis=1)
        fitted = fit_calibration(held_out_p, held_out.target, held_out.rows)
        weight, bias = learned.layer()
        logits = features[n:] @ weight.T + bias
        p = softmax(logits.double().numpy(), axis=1).clip(1e-12)
        changes.append(true_loss(calibrated(p, fitted).clip(1e-12), truth) - true_loss(p, truth))
    assert np.mean(changes) < (0 if n == 100 else 1e-12)  # of many, the temperature stays 1


def test_the_error_is_the_mean_distance_over_ten_bins():
    rng = np.random.default_rng(3)
    score, correct = rng.random(200), rng.random(200) < 0.6
    order = score.argsort()
    bins = [order[start : start + 20] for start in range(0, 200, 20)]
    distances = [abs(score[b].mean() - correct[b].mean()) for b in bins]
    assert calibration_error(score, correct) == pytest.approx(sum(distances) / 10)


@given(seed=st.integers(0, 99), n=st.integers(1, 50))
def test_the_error_does_not_depend_on_the_order_of_the_images(seed, n):
    rng = np.random.default_rng(seed)
    score, correct = rng.choice([0.5, 0.9, 1.0], size=n), rng.random(n) < 0.5
    shuffled = rng.permutation(n)
    error = calibration_error(score, correct)
    assert error == pytest.approx(calibration_error(score[shuffled], correct[shuffled]))
    assert 0 <= error <= 1
