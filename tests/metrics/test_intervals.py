"""Intervals of shares, means and differences, against their definitions."""

from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

from nearkin.metrics.intervals import (
    balanced_interval,
    crossed_interval,
    design_effect,
    effective_number,
    jackknife,
    paired_interval,
    score_interval,
    tango,
    wilson,
)

CHI2 = 3.841458820694124  # 95 % of a chi-squared law with one degree of freedom


def outcomes(both, gained, lost, neither=0):
    new = np.repeat([True, True, False, False], [both, gained, lost, neither])
    old = np.repeat([True, False, True, False], [both, gained, lost, neither])
    return new, old


def paired_difference(new, old, **more):
    """The difference, and the ends of its interval."""
    low, high, _ = paired_interval(new & ~old, old & ~new, **more)
    return (float(new.mean() - old.mean()) if len(new) else 0.0), low, high


def test_the_ends_of_wilsons_interval_lie_at_the_quantile_of_the_score_test():
    for share, total in ((0.0, 12.0), (0.75, 60.0), (0.4, 61.7)):
        for end in wilson(share, total):
            if 0 < end < 1:
                z = abs(share - end) / (end * (1 - end) / total) ** 0.5
                assert z == pytest.approx(1.959964, abs=1e-4)
    assert wilson(0.0, 0.0) == (0.0, 1.0)
    assert wilson(1.0, 10.0) == pytest.approx((10 / (10 + CHI2), 1))  # never of width zero
    assert wilson(0.0, 10.0) == pytest.approx((0, CHI2 / (10 + CHI2)))


def test_near_one_the_outer_end_is_that_of_the_binomial_law():
    """Brown, Cai & DasGupta 2001: with one error of n, 1 - high is .05 of a binomial law."""
    for n in (10, 200):
        low, high = wilson(1 - 1 / n, float(n))
        assert 1 - high**n == pytest.approx(0.05)
        z = abs(1 - 1 / n - low) / (low * (1 - low) / n) ** 0.5
        assert z == pytest.approx(1.959964, abs=1e-4)


def test_a_score_of_right_and_wrong_images_has_wilsons_interval_and_steadier_ones_a_shorter():
    right = np.arange(40) < 28
    low, high, n = score_interval(right * 1.0)
    assert n == pytest.approx(40)
    assert (low, high) == pytest.approx(wilson(0.7, 40.0))
    assert score_interval(np.ones(5))[:2] == pytest.approx(wilson(1.0, 5.0))
    halved = np.where(right, 0.9, 0.7 - 0.2 * 28 / 12)  # the same mean, a smaller spread
    assert score_interval(halved).effective_n > 60


def test_groups_whose_images_are_alike_count_as_one_image_each():
    alike = np.repeat(np.arange(30) < 21, 10)
    groups = np.repeat(np.arange(30), 10)
    low, high, n = score_interval(alike * 1.0, groups)
    assert n == pytest.approx(30, rel=0.04)
    assert (low, high) == pytest.approx(wilson(0.7, 30.0), abs=0.01)
    assert score_interval(np.ones(50), np.arange(50) // 10).effective_n == pytest.approx(5)
    assert score_interval(np.ones(50), np.arange(50)).effective_n == pytest.approx(50)
    assert effective_number(1.0, np.zeros(9, int), np.ones(9, bool)) == pytest.approx(1, abs=0.4)


def test_balanced_accuracy_is_the_mean_recall_and_five_right_images_are_not_certain():
    classes = np.repeat([0, 1, 7], [50, 5, 5])
    correct = np.arange(60) % 5 > 0
    value, interval = balanced_interval(correct, classes)
    assert value == pytest.approx(np.mean([correct[classes == c].mean() for c in (0, 1, 7)]))
    assert interval.low < value < interval.high
    assert interval.high - interval.low > np.ptp(wilson(0.8, 60.0))  # few images weigh much
    for groups in (None, np.arange(5), np.zeros(5, int)):
        value, interval = balanced_interval(np.ones(5, bool), np.array([0, 0, 1, 1, 2]), groups)
        assert value == 1
        assert interval.low < 0.7


def test_draws_add_their_variance_to_that_of_the_images():
    rng = np.random.default_rng(0)
    one = rng.random(200) < 0.8
    alike = np.repeat(one[None], 10, axis=0)
    assert crossed_interval(alike)[:2] == pytest.approx(score_interval(one * 1.0)[:2])
    skill = np.linspace(-0.3, 0.3, 10)[:, None]
    apart = rng.random((10, 200)) < 0.6 + skill
    low, high, _ = crossed_interval(apart)
    error = apart.mean(axis=1).std(ddof=1) / 10**0.5
    assert (high - low) / 2 > 1.9 * error


def test_the_effective_number_of_draws_and_images_is_that_of_their_variances():
    """One loop over draws and images, with the mean squares of a table of two ways."""
    rng = np.random.default_rng(0)
    ease, skill = rng.normal(size=30), rng.normal(size=6) * 0.5
    correct = rng.random((6, 30)) < 1 / (1 + np.exp(-ease - skill[:, None]))
    mean, rest = correct.mean(), 0.0
    for d, i in np.ndindex(6, 30):
        rest += (correct[d, i] - correct[d].mean() - correct[:, i].mean() + mean) ** 2
    of_draws = sum((row.mean() - mean) ** 2 for row in correct) / 5
    variance = (of_draws - rest / (5 * 29) / 30) / 6 * (student.ppf(0.975, 5) / 1.959964) ** 2
    images = score_interval(correct.mean(axis=0)).effective_n
    expected = 1 / (1 / images + variance / (mean * (1 - mean)))
    assert expected < 0.9 * images
    assert crossed_interval(correct).effective_n == pytest.approx(expected, rel=1e-6)


def test_a_balanced_accuracy_has_the_variance_of_its_classes():
    """Where all classes are alike and large, it is that of a mean with weights (Kish)."""
    sizes = np.array([4_000, 400, 100])
    classes = np.repeat(np.arange(3), sizes)
    correct = np.concatenate([np.arange(size) < 0.75 * size for size in sizes])
    value, interval = balanced_interval(correct, classes)
    variance = sum(0.75 * 0.25 / size for size in sizes) / 9
    assert value == 0.75
    assert interval.effective_n == pytest.approx(0.75 * 0.25 / variance, rel=0.02)


def test_few_groups_tell_less_of_a_variance_by_the_quantile_of_student():
    groups = np.arange(40) // 4
    telling = groups < 6
    expected = 40 / 1.7 * (1.959964 / student.ppf(0.975, 6)) ** 2
    assert effective_number(1.7, groups, telling) == pytest.approx(expected, rel=1e-6)


def plain_score(gained, lost, total, difference):
    """The squared score statistic, its nuisance parameter by a search for the most likely one."""

    def surprise(loss):
        cells = (gained, loss + difference), (lost, loss), (total - gained - lost, rest(loss))
        return -sum(count * log(max(chance, 1e-300)) for count, chance in cells if count)

    def rest(loss):
        return 1 - 2 * loss - difference

    bounds = max(0.0, -difference), (1 - difference) / 2
    loss = minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = total * (2 * loss + difference * (1 - difference))
    return (gained - lost - total * difference) ** 2 / variance


def test_the_ends_are_where_the_score_test_begins_to_reject():
    counts = (1, 7, 21), (14, 5, 60), (3, 0, 40), (9, 9, 25), (200, 140, 2000)
    for gained, lost, total in counts:
        for end in tango(float(gained), float(lost), float(total)):
            assert plain_score(gained, lost, total, end) == pytest.approx(CHI2, rel=1e-3)
    # Fagerland, Lydersen & Laake 2014, table 2: 1 and 7 of 21 children change
    assert tango(1.0, 7.0, 21.0) == pytest.approx((-0.517, -0.026), abs=5e-4)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_the_interval_is_around_the_difference_and_turns_with_it(both, gained, lost, neither):
    new, old = outcomes(both, gained, lost, neither)
    value, low, high = paired_difference(new, old)
    assert -1 <= low <= value + 1e-12
    assert value - 1e-12 <= high <= 1
    assert value == (pytest.approx(new.mean() - old.mean()) if len(new) else 0)
    other = paired_difference(old, new)
    assert other == pytest.approx((-value, -high, -low), abs=1e-9)


def test_it_is_sharper_than_two_intervals_where_both_err_on_the_same_images():
    new, old = outcomes(800, 40, 10, 150)
    value, low, high = paired_difference(new, old)
    assert value == pytest.approx(0.03)
    assert low > 0
    assert wilson(new.mean(), 1000.0)[0] < wilson(old.mean(), 1000.0)[1]  # these overlap
    assert high - low < 0.03


def test_classifiers_that_never_differ_leave_zero_open_and_copies_of_images_add_nothing():
    value, low, high = paired_difference(*outcomes(90, 0, 0, 10))
    assert value == 0
    assert low == pytest.approx(-high)
    assert 0.03 < high < 0.04  # z^2 / (n + z^2)
    nothing = np.zeros(0, bool)
    assert paired_difference(nothing, nothing) == (0.0, -1.0, 1.0)
    assert paired_difference(nothing, nothing, groups=np.zeros(0, int)) == (0.0, -1.0, 1.0)
    for cells, rel in (((200, 30, 12, 60), 0.02), ((48, 0, 0, 12), 1e-6)):
        new, old = outcomes(*cells)
        once, groups = paired_difference(new, old), np.repeat(np.arange(len(new)), 5)
        copied = paired_difference(np.repeat(new, 5), np.repeat(old, 5), groups=groups)
        assert copied == pytest.approx(once, rel=rel, abs=0.003)
        alone = paired_difference(np.repeat(new, 5), np.repeat(old, 5))
        assert alone[2] - alone[1] < (once[2] - once[1]) / 2
        assert paired_difference(new, old, groups=np.arange(len(new))) == once


def test_the_design_effect_is_the_ratio_of_two_variances():
    rng = np.random.default_rng(1)
    groups = rng.integers(20, size=90)
    values = rng.choice([-1.0, 0.0, 1.0], size=90) + (groups % 3 - 1)
    members = [values[groups == g] - values.mean() for g in np.unique(groups)]
    among = sum(m.sum() ** 2 for m in members) * len(members) / (len(members) - 1) / 90**2
    alone = values.var(ddof=1) / 90
    assert design_effect(values, groups) == pytest.approx(among / alone)
    assert design_effect(values, np.arange(90)) == 1
    assert design_effect(values, np.zeros(90, int)) == float("inf")  # nobody knows


def test_the_jackknife_is_that_of_the_mean_without_the_noise_of_single_images():
    """Of what all images have in common it is the plain jackknife; single flips add nothing."""
    rng = np.random.default_rng(0)
    common, n = rng.normal(size=(20, 1)), 2_000
    values = np.broadcast_to(common, (20, n))
    plain = 19 / 20 * np.square(common - common.mean()).sum()
    assert jackknife(values) == pytest.approx(plain)
    noise = rng.normal(size=(20, n))
    assert jackknife(noise) < 0.1 * 19 / n
    assert jackknife(values + noise) == pytest.approx(plain, rel=0.1)
    assert jackknife(noise[:, :1]) == 0


def test_a_further_variance_adds_to_the_squared_length_of_either_side():
    new, old = outcomes(200, 30, 12, 60)
    value, low, high = paired_difference(new, old)
    _, wider, higher = paired_difference(new, old, variance=0.02**2)
    z = 1.959963984540054
    assert (value - wider) ** 2 == pytest.approx((value - low) ** 2 + (0.02 * z) ** 2)
    assert (value - higher) ** 2 == pytest.approx((value - high) ** 2 + (0.02 * z) ** 2)
    assert paired_difference(new, old, variance=100.0)[1:] == (-1, 1)
