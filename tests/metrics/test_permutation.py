"""The permutation test within classes: its mean over all permutations, and its level."""

from itertools import permutations, product

import numpy as np
import pytest

from nearkin.metrics.permutation import permutation_test

CLASSES = np.array([0, 1, 0, 1, 1, 0])


def test_chance_is_the_mean_over_all_permutations_within_classes():
    weights, values = np.array([3.0, -1, 2, 5, 0, 1]), np.array([1.0, 4, -2, 0, 7, 3])

    def statistic(order):
        assert (CLASSES[order] == CLASSES).all()
        return float(weights @ values[order])

    every = []
    for zeros, ones in product(permutations([0, 2, 5]), permutations([1, 3, 4])):
        order = np.empty(6, np.int64)
        order[[0, 2, 5]], order[[1, 3, 4]] = zeros, ones
        every.append(statistic(order))
    tested = permutation_test(statistic, CLASSES, np.random.default_rng(0))
    assert tested.value == statistic(np.arange(6))
    assert tested.chance == pytest.approx(np.mean(every), abs=4 * np.std(every) / 999**0.5)
    true = np.mean(np.array(every) >= tested.value)
    assert tested.p == pytest.approx(true, abs=4 * (true * (1 - true) / 999) ** 0.5 + 1e-3)


def test_the_true_order_counts_as_a_permutation():
    constant = permutation_test(lambda _: 0.5, CLASSES, np.random.default_rng(0))
    assert (constant.value, constant.chance, constant.p) == (0.5, 0.5, 1.0)
    identity, classes = np.arange(40), np.zeros(40, np.int64)

    def is_true(order):
        return float((order == identity).all())

    assert permutation_test(is_true, classes, np.random.default_rng(0)).p == 0.001


def test_what_means_nothing_is_found_as_seldom_as_the_level_says():
    p = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        classes, x, y = rng.integers(0, 3, 60), rng.normal(size=60), rng.normal(size=60)
        x, y = x + 3 * classes, y + 3 * classes  # related, through classes alone
        tested = permutation_test(lambda order, x=x, y=y: float(x @ y[order]), classes, rng)
        p.append(tested.p)
    assert np.mean(np.array(p) <= 0.05) <= 0.1  # 5 of 100 are expected
    assert 0.4 < np.mean(p) < 0.6
