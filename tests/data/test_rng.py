"""Stateless randomness: what a number depends on, and that it looks like chance."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nearkin.data.rng import _hash, permutation, uniform

MANY = np.arange(20_000)


def test_the_stream_never_changes():
    """Old runs resume, and old results repeat, only as long as these numbers stay."""
    drawn = uniform(1, 2, np.array([0, 3]), 1, 2)
    assert drawn.tolist() == [
        [0.17022360949517445, 0.42667917408159495],
        [0.23188666434347305, 0.36064277237680076],
    ]
    assert permutation(1, 2, 8).tolist() == [1, 3, 4, 0, 7, 6, 5, 2]


def test_splitmix64_is_the_published_one():
    """The first outputs for the seed 1234567, as its reference implementation prints them."""
    start, places = np.array([1234567], np.uint64), np.arange(3, dtype=np.uint64)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert _hash(start, places).tolist() == expected


@given(
    seed=st.integers(),
    epoch=st.integers(0, 10**6),
    index=st.lists(st.integers(0, 2**62), min_size=1, max_size=8),
    view=st.integers(0, 300),
)
def test_a_row_does_not_depend_on_its_company(seed, epoch, index, view):
    together = uniform(seed, epoch, np.array(index), view, 5)
    alone = [uniform(seed, epoch, np.array([i]), view, 5)[0] for i in index]
    assert np.array_equal(together, alone)
    assert np.array_equal(together[::-1], uniform(seed, epoch, np.array(index[::-1]), view, 5))
    assert ((together >= 0) & (together < 1)).all()
    more = uniform(seed, epoch, np.array(index), view, 40)
    assert np.array_equal(together, more[:, :5])  # asking for more leaves the first ones


def test_every_argument_changes_every_number_and_no_two_stand_in_for_each_other():
    """No two of the 6^4 small combinations share a number."""
    arguments = {"seed": 3, "epoch": 5, "index": np.arange(100), "view": 1, "count": 20}
    for changed in ("seed", "epoch", "index", "view"):
        other = arguments | {changed: arguments[changed] + 1}
        assert (uniform(**arguments) != uniform(**other)).all(), changed
    rows = [uniform(*drawn, 1) for drawn in product(range(6), range(6), [np.arange(6)], range(6))]
    assert len(np.unique(np.concatenate(rows))) == 6**4


def test_any_integer_is_a_seed():
    for seed in (-1, 2**64, 10**30, -(10**30)):
        drawn = uniform(seed, 0, MANY[:4], 0, 3)
        assert np.array_equal(drawn, uniform(seed % 2**64, 0, MANY[:4], 0, 3))
        assert (drawn != uniform(seed + 1, 0, MANY[:4], 0, 3)).all()


def test_numbers_are_uniform():
    for seed in (0, 1, 2**63):
        drawn = uniform(seed, 0, MANY, 0, 16)
        worst = min(stats.kstest(slot, "uniform").pvalue for slot in drawn.T)
        assert worst > 0.01 / 16, seed


def test_slots_views_epochs_and_neighbors_are_uncorrelated():
    """Sixteen columns of 20,000: by chance the largest of 120 correlations is about 0.02."""
    columns = np.hstack([uniform(7, e, MANY, v, 4) for e in range(2) for v in range(2)])
    correlation = np.corrcoef(columns.T) - np.eye(16)
    assert np.abs(correlation).max() < 0.03
    for slot in uniform(7, 3, MANY, 0, 4).T:
        for lag in (1, 2, 4, 256):
            assert abs(np.corrcoef(slot[:-lag], slot[lag:])[0, 1]) < 0.03, lag


def test_a_permutation_holds_every_number_once_and_differs_by_epoch_and_seed():
    for size in (0, 1, 2, 1000):
        order = permutation(5, 1, size)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(size))
    orders = [tuple(permutation(seed, epoch, 50)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    # Each of the six orders of three comes about equally often.
    orders = [tuple(permutation(0, epoch, 3)) for epoch in range(3000)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 0.01
