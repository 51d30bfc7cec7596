"""Samplers: each image as often as it should be, from seed and step alone."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin.data.samplers import (
    RUN,
    RandomBatchSampler,
    TwoStreamBatchSampler,
)
from nearkin.errors import DataError

NONE = np.zeros(0, np.int64)


def streams(num_labeled=30, num_unlabeled=50, batch_size=8, seed=3, sizes=None, **more):
    """Labeled images, of one class but for `sizes`, have even rows, unlabeled ones odd rows."""
    if sizes is None:
        sizes = [num_labeled]
    classes = np.repeat(np.arange(len(sizes)), sizes)
    labeled, unlabeled = 2 * np.arange(len(classes)), 2 * np.arange(num_unlabeled) + 1
    return TwoStreamBatchSampler(labeled, classes, unlabeled, batch_size, seed, **more)


def of(kind, rows):
    return rows[rows % 2 == (kind == "unlabeled")].tolist()


SIZES = {
    "num_labeled": st.integers(0, 40),
    "num_unlabeled": st.integers(1, 60),
    "batch_size": st.integers(2, 24),
}


def test_an_epoch_shows_every_image_at_most_once_and_the_next_in_another_order():
    order = RandomBatchSampler(num_images=43, batch_size=10, seed=0)
    epochs = [[order.rows(4 * epoch + step) for step in range(4)] for epoch in range(2)]
    orders = [np.concatenate(epoch) for epoch in epochs]
    assert all(len(set(rows.tolist())) == 40 for rows in orders)
    assert orders[0].tolist() != orders[1].tolist()
    assert [order.epoch(step) for step in (0, 3, 4)] == [0, 0, 1]


@given(step=st.integers(0, 1000), **SIZES)
def test_every_batch_has_the_same_parts_and_no_image_twice(step, **sizes):
    expected = min(sizes["batch_size"] // 2, sizes["num_labeled"])
    if sizes["num_unlabeled"] < sizes["batch_size"] - expected:
        with pytest.raises(DataError, match="do not fill"):
            streams(**sizes)
        return
    rows = streams(**sizes).rows(step)
    assert (rows.dtype, rows.shape) == (np.int64, (sizes["batch_size"],))
    assert len(of("labeled", rows)) == expected
    assert len(set(rows.tolist())) == len(rows)
    assert set(of("labeled", rows)) <= set(range(0, 2 * sizes["num_labeled"], 2))
    assert set(of("unlabeled", rows)) <= set(range(1, 2 * sizes["num_unlabeled"], 2))


def test_an_epoch_is_one_pass_over_the_unlabeled_images():
    order = streams()
    assert order.steps_per_epoch == 50 // 4
    assert [order.epoch(step) for step in (0, 11, 12, 23, 24)] == [0, 0, 1, 1, 2]
    passes = []
    for epoch in range(3):
        steps = range(12 * epoch, 12 * (epoch + 1))
        rows = [row for step in steps for row in of("unlabeled", order.rows(step))]
        assert len(set(rows)) == len(rows) == 48
        passes.append(rows)
    assert passes[0] != passes[1] != passes[2]
    assert set(passes[0]) | set(passes[1]) | set(passes[2]) == set(range(1, 100, 2))


def test_labeled_images_take_turns():
    """Of 30 in one class, four a step: after an epoch of 12 steps each came once or twice."""
    order = streams()
    for epoch in range(5):
        steps = range(12 * epoch, 12 * (epoch + 1))
        rows = [row for step in steps for row in of("labeled", order.rows(step))]
        assert set(np.unique(rows, return_counts=True)[1]) == {1, 2}
        assert len(set(rows)) == 30
    first, second = (of("labeled", order.rows(step)) for step in (0, 12))
    assert first != second
    order = streams(num_labeled=3, batch_size=16)  # too few leave their places to others
    assert (order.num_labeled, order.steps_per_epoch) == (3, 50 // 13)
    assert all(sorted(of("labeled", order.rows(step))) == [0, 2, 4] for step in range(9))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9), batch=st.integers(2, 60))
def test_each_class_has_as_many_labels_in_a_batch_as_its_images_allow(sizes, batch):
    order = streams(sizes=sizes, num_unlabeled=90, batch_size=batch)
    for step in (0, 1, 40):
        rows = np.array(of("labeled", order.rows(step)), np.int64)
        count = np.bincount(order.classes[rows // 2], minlength=len(sizes))
        assert count.sum() == order.num_labeled == len(set(rows.tolist()))
        # Whoever has fewer than another by more than one has no image left.
        fewer = count < count.max() - 1
        assert (count[fewer] == np.array(sizes)[fewer]).all()


def test_chance_decides_which_classes_have_one_label_more():
    order = streams(sizes=[5, 5, 5], num_unlabeled=900, batch_size=8)
    drawn = [order.classes[np.array(of("labeled", order.rows(step))) // 2] for step in range(200)]
    more = np.array([np.bincount(each, minlength=3) for each in drawn]).sum(axis=0)
    assert more.sum() == 800
    assert (abs(more - 800 / 3) < 30).all()  # 200 draws of one in three: deviation 6.7


def test_a_step_does_not_depend_on_the_steps_before():
    forward, order = streams(), streams()
    expected = [forward.rows(step).tolist() for step in range(40)]
    assert [order.rows(step).tolist() for step in reversed(range(40))] == expected[::-1]
    assert streams().rows(39).tolist() == expected[39]
    assert pickle.loads(pickle.dumps(forward)).rows(7).tolist() == expected[7]
    assert streams(seed=4).rows(39).tolist() != expected[39]


def test_without_labeled_images_it_is_the_usual_order():
    usual, order = RandomBatchSampler(50, 8, 3), streams(num_labeled=0)
    assert order.steps_per_epoch == usual.steps_per_epoch
    for step in range(15):
        assert order.rows(step).tolist() == (2 * usual.rows(step) + 1).tolist()
        assert order.epoch(step) == usual.epoch(step)


def test_streams_of_one_length_do_not_meet_in_the_same_pairs():
    order = streams(num_labeled=40, num_unlabeled=40, batch_size=2, seed=0)
    batches = [sorted(order.rows(step).tolist()) for step in range(400)]
    together = np.mean([high - low == 1 and low % 2 == 0 for low, high in batches])
    assert together < 0.06  # by chance 1 in 40


def test_every_process_has_its_share_of_both_streams():
    order = streams(num_labeled=30, batch_size=16)
    for parts in (2, 4):
        owned = (own for step in range(9) for own in np.split(order.rows(step), parts))
        assert all(len(of("labeled", own)) == 8 // parts for own in owned)


def test_no_unlabeled_images_are_refused_before_any_step():
    with pytest.raises(DataError, match="0 unlabeled images do not fill their 4 places"):
        TwoStreamBatchSampler(np.arange(9), np.zeros(9, np.int64), NONE, 8, 0)
    with pytest.raises(DataError, match=r"3 unlabeled images .* a batch of 8; give more"):
        streams(num_unlabeled=3)


def test_a_window_mixes_runs_of_neighbors_with_few_others():
    """A row comes between the start of its run and `window` places after its end, in any epoch."""
    for window in (1, 300, 2000):
        order = RandomBatchSampler(10_000, 100, seed=3, window=window)
        epochs = []
        for epoch in range(3):
            rows = np.concatenate([order.rows(100 * epoch + step) for step in range(100)])
            assert sorted(rows.tolist()) == list(range(10_000))
            place = np.argsort(rows)
            for run in np.split(place, range(RUN, 10_000, RUN)):
                assert run.max() - run.min() < window + RUN
            epochs.append(rows.tolist())
        assert epochs[0] != epochs[1] != epochs[2]
        again = RandomBatchSampler(10_000, 100, seed=3, window=window)
        assert again.rows(257).tolist() == order.rows(257).tolist()  # without the steps before

    # Neighbors in the data are, on average, a third of the window apart in the order.
    rows = np.concatenate(
        [RandomBatchSampler(20_000, 100, 0, 3000).rows(step) for step in range(200)]
    )
    place = np.argsort(rows)
    assert abs(np.abs(np.diff(place))[: RUN - 1].mean() / 1000 - 1) < 0.1


def in_groups(sizes, batch_size, seed=3, **more):
    """Images of as many values as there are sizes, in no order."""
    values = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return RandomBatchSampler(len(values), batch_size, seed, values=values, **more)


@given(
    sizes=st.lists(st.integers(20, 40), min_size=1, max_size=7) | st.just([1, 24, 2]),
    batch=st.integers(2, 20),
    window=st.sampled_from([0, 9]),
)
def test_batches_of_values_have_the_images_of_the_epoch_and_hardly_two_values(
    sizes, batch, window
):
    order = in_groups(sizes, batch, window=window)
    usual, per_epoch = replace(order, values=None), order.steps_per_epoch
    assert per_epoch == sum(sizes) // batch
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        batches = [order.rows(step) for step in steps]
        assert all(len(rows) == batch for rows in batches)
        shown, expected = (
            np.concatenate([each.rows(step) for step in steps]) for each in (order, usual)
        )
        assert sorted(shown.tolist()) == sorted(expected.tolist())
        # What is left over comes value by value: with each batch of two, a value is used up.
        num_values = [len({*order.values[rows]}) for rows in batches]
        assert sum(num_values) - len(batches) < len(sizes)
        full = np.bincount(order.values[expected], minlength=len(sizes)) // batch
        assert num_values.count(1) >= full.sum()
        if epoch == 0:
            assert order.num_pure == num_values.count(1)


def test_a_value_with_less_images_than_a_batch_is_seen_as_often_as_others():
    order = in_groups([50, 3, 1, 37], 16)  # 80 of 91 images fill the batches of an epoch
    times = np.zeros(91, int)
    for step in range(5 * 200):
        times[order.rows(step)] += 1
    # 200 draws of 80 in 91: deviation 4.6
    assert (abs(times - 200 * 80 / 91) < 23).all()


def test_batches_of_values_are_a_function_of_seed_and_step():
    order = in_groups([30, 20, 14], 8)
    expected = [order.rows(step).tolist() for step in range(24)]
    assert [order.rows(step).tolist() for step in reversed(range(24))] == expected[::-1]
    assert pickle.loads(pickle.dumps(order)).rows(19).tolist() == expected[19]
    assert in_groups([30, 20, 14], 8, seed=4).rows(19).tolist() != expected[19]
    assert sorted(map(sorted, expected[:8])) != sorted(map(sorted, expected[8:16]))
    others = replace(order, values=order.values[::-1].copy())
    assert others.rows(19).tolist() != expected[19]  # of values that are not kept for others


def test_values_take_turns_within_an_epoch():
    """As shuffled images complete batches; one value after the other would be learned in turn."""
    order = in_groups([400, 400], 16)
    firsts = [order.values[order.rows(step)[0]] for step in range(50)]
    changes = np.count_nonzero(np.diff(firsts))
    assert changes > 15  # of 25 by chance


def test_batches_of_values_come_from_neighbors_within_a_window():
    order = in_groups([10_000, 10_000], 100, window=300)
    for step in range(200):
        rows = order.rows(step)
        # A run and its neighbor are mixed; until there are a hundred of a value, a third may begin.
        assert len(np.unique(rows // RUN)) <= 4
