"""A split is decided by names and seed alone, and divides no group."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.data.duplicates import Duplicates, pairs_of
from nearkin.data.opening import open_images
from nearkin.data.split import has_test_split, split_images
from nearkin.errors import DataError


def samples(count, labels=None, groups=None, splits=None):
    """Tiny images with these labels, groups and sides."""
    images = open_images(np.zeros((count, 2, 2), np.uint8))
    changes = {"labels": labels, "groups": groups}
    arrays = {k: np.asarray(v, np.int64) for k, v in changes.items() if v is not None}
    return replace(images, **arrays, **({} if splits is None else {"splits": np.array(splits)}))


def split_rows(images, share, seed):
    """The rows to train on and those to score, if no image is a duplicate of another."""
    groups = pairs_of(images.groups)[:, 1]
    split = split_images(images, share, seed, found=Duplicates(groups, groups, 0, 0))
    return split.train_rows, split.test_rows


@settings(max_examples=60)
@given(
    groups=st.lists(st.integers(0, 12), min_size=1, max_size=60),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**40),
)
def test_both_sides_together_are_everything_and_no_group_is_divided(groups, share, seed):
    images = samples(len(groups), groups=groups)
    if len(set(groups)) == 1:
        with pytest.raises(DataError, match="cannot be divided"):
            split_rows(images, share, seed)
        return
    train, test = split_rows(images, share, seed)
    assert sorted([*train, *test]) == list(range(len(groups)))
    for side in (train, test):
        assert len(side)
        assert (np.diff(side) > 0).all()
    assert not set(images.groups[train]) & set(images.groups[test])


@settings(max_examples=40)
@given(
    labels=st.lists(st.integers(-1, 3), min_size=2, max_size=40),
    other=st.randoms(use_true_random=False),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_labels_have_no_say(labels, other, share, seed):
    permuted = other.sample(labels, len(labels))
    divided = [split_rows(samples(len(labels), y), share, seed) for y in (None, labels, permuted)]
    for sides in divided[1:]:
        assert all(map(np.array_equal, sides, divided[0]))


def test_a_group_that_is_larger_than_what_is_held_out_trains_if_another_can_be_held_out():
    one_large = samples(1000, groups=[0] * 900 + list(range(900, 1000)))
    both_large = samples(100, groups=[0] * 60 + [60] * 40)
    for seed in range(10):
        train, test = split_rows(one_large, 0.2, seed)
        assert set(range(900)) <= set(train)
        assert 1 <= len(test) < 50  # of the 100 others, .2 with a deviation of .04
        train, test = split_rows(both_large, 0.1, seed)
        assert (len(train), len(test)) == (60, 40)  # the smaller of two that are too large


def test_the_seed_decides_and_nothing_else():
    images = samples(500)
    first, again, other = (split_rows(images, 0.3, seed)[1] for seed in (1, 1, 2))
    assert (first == again).all()
    assert 0.15 < np.isin(other, first).mean() < 0.45  # .3 if the two are independent
    assert {*first} < {*split_rows(images, 0.5, 1)[1]}  # a larger share only adds
    _, test = split_rows(samples(4000), 0.2, seed=0)
    assert abs(len(test) - 800) < 126  # five deviations of a binomial of mean 800


@pytest.fixture(scope="module")
def images():
    return samples(100)


@settings(max_examples=30)
@given(subset=st.sets(st.integers(0, 99), min_size=50), seed=st.integers(0, 99))
def test_a_image_stays_on_its_side_when_others_come_or_go(images, subset, seed):
    rows = np.array(sorted(subset))
    _, test = split_rows(images, 0.3, seed)
    _, fewer = split_rows(images.subset(rows), 0.3, seed)
    assert set(rows[fewer]) == set(test) & subset


def test_what_the_data_say_counts_more():
    images = samples(6, splits=["train", "test", "", "test", "train", ""])
    train, test = split_rows(images, 0.5, seed=0)
    assert has_test_split(images)
    assert test.tolist() == [1, 3]
    assert train.tolist() == [0, 2, 4, 5]
    expected = split_rows(samples(100), 0.3, 5)[1].tolist()
    for side in ("train", "test"):  # alone, it says nothing
        images = samples(100, splits=[side] * 100)
        assert not has_test_split(images)
        assert split_rows(images, 0.3, 5)[1].tolist() == expected
