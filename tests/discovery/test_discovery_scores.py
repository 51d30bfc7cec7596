"""Scores of discovered classes, against every possible naming of them."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from nearkin.discovery.scores import Scored, confusion, joint_match, novel_match
from nearkin.metrics import clusters
from nearkin.metrics.clusters import match, right
from nearkin.metrics.intervals import score_interval

PROTOCOLS = ("task-aware", "task-agnostic", "GCD")


def scored(protocol, truth, predicted, num_known=0, images="images", groups=None):
    """The scores of images that are independent unless there are groups."""
    groups = np.arange(len(truth)) if groups is None else groups
    return Scored(images, groups, seed=3).score(protocol, truth, predicted, num_known)


def quality(certainty, correct, groups=None):
    """What the scores of images are worth that are independent unless there are groups."""
    groups = np.arange(len(correct)) if groups is None else groups
    return Scored("images", groups, seed=0).quality(certainty, correct)


def values(protocol, truth, predicted, num_known=0):
    """The last word of each score's name, and its value."""
    truth, predicted = np.array(truth), np.array(predicted)
    given = scored(protocol, truth, predicted, num_known)
    return {each.name.split()[-1]: each.value for each in given}


task_aware, task_agnostic, gcd = (partial(values, protocol) for protocol in PROTOCOLS)


def best(truth, predicted):
    """The accuracy under the best match."""
    return right(truth, predicted, match(truth, predicted)).mean()


def namings(clusters, classes):
    """All one-to-one matches; a cluster may also stay without a class."""
    clusters = sorted(set(clusters))
    slots = sorted(set(classes)) + [None] * len(clusters)
    for chosen in set(itertools.permutations(slots, len(clusters))):
        yield dict(zip(clusters, chosen))


def rights(pairs, naming):
    """How many images are right under a naming."""
    return sum(naming.get(c) == y for y, c in pairs)


pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(clusters, "RESAMPLES", 3)


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [("220011", 1), ("220010", 5 / 6), ("000000", 1 / 3), ("012345", 1 / 2), ("031122", 5 / 6)],
)
def test_accuracy_under_the_best_naming_has_its_golden_values(predicted, expected):
    truth, predicted = np.array(list(map(int, "001122"))), np.array(list(map(int, predicted)))
    assert best(truth, predicted) == expected
    assert task_aware(truth, predicted)["accuracy"] == expected
    assert task_aware(truth + 4, predicted + 4, 4)["accuracy"] == expected
    assert gcd(truth, predicted, 1)["all"] == expected


def test_one_match_of_all_classes_is_stricter_than_one_for_each_part():
    truth, predicted = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 0, 0, 1])
    first_version = [best(truth[rows], predicted[rows]) for rows in (truth < 1, truth > 0)]
    assert first_version == [2 / 3, 2 / 3]
    assert gcd(truth, predicted, 1) == {"all": 0.5, "known": 2 / 3, "novel": 1 / 3}


def shares(pairs, num_known, known, novel):
    """How many of all, of known and of novel images are right, of parts that have some."""
    count = sum(y < num_known for y, _ in pairs)
    parts = {"all": (known + novel, len(pairs)), "known": (known, count)}
    parts["novel"] = (novel, len(pairs) - count)
    return pytest.approx({name: right / total for name, (right, total) in parts.items() if total})


@settings(max_examples=40)
@given(pairs, st.integers(0, 4))
def test_gcd_is_the_best_of_all_namings_and_flatters_nobody_on_novel_classes(pairs, num_known):
    truth, result = zip(*pairs)
    old = [(y, c) for y, c in pairs if y < num_known]
    best = max((rights(pairs, naming), rights(old, naming)) for naming in namings(result, truth))
    expected = shares(pairs, num_known, best[1], best[0] - best[1])
    assert gcd(truth, result, num_known) == expected


@settings(max_examples=40)
@given(pairs, st.integers(0, 4))
def test_task_agnostic_names_only_novel_clusters(pairs, num_known):
    truth, result = zip(*pairs)
    novel = [(y, c) for y, c in pairs if y >= num_known and c >= num_known]
    best = max(
        rights(novel, naming) for naming in namings([c for _, c in novel], [y for y, _ in novel])
    )
    same = sum(y == c < num_known for y, c in pairs)
    assert task_agnostic(truth, result, num_known) == shares(pairs, num_known, same, best)


@settings(max_examples=20)
@given(pairs, st.integers(0, 4), st.permutations(range(5)), st.permutations(range(5)))
def test_scores_do_not_depend_on_the_numbers_of_novel_classes(pairs, num_known, a, b):
    truth, predicted = (np.array(column) for column in zip(*pairs))
    a, b = ([c for c in order if c >= num_known] for order in (a, b))
    classes, clusters = (np.array([*range(num_known), *order]) for order in (a, b))
    renamed = np.where(predicted >= num_known, 7 * clusters[predicted], predicted)
    for of in (task_aware, task_agnostic, gcd):
        expected = pytest.approx(of(truth, predicted, num_known))
        assert of(classes[truth], renamed, num_known) == expected


def test_known_classes_keep_their_numbers_where_the_protocol_says_so_and_empty_parts_have_no_score():
    truth, predicted = [0, 0, 1, 1, 2, 2], [1, 1, 0, 0, 2, 2]
    assert task_agnostic(truth, predicted, 2) == {"all": 1 / 3, "known": 0, "novel": 1}
    assert gcd(truth, predicted, 2) == {"all": 1, "known": 1, "novel": 1}
    # Known images in novel clusters have no say in the task-agnostic match.
    truth, predicted = [0] * 9 + [1, 1, 2], [1] * 9 + [1, 1, 2]
    assert task_agnostic(truth, predicted, 1) == {"all": 0.25, "known": 0, "novel": 1}
    # A novel image in a known class is an error, even if it is a pure one.
    assert task_aware([1, 1, 2, 2], [0, 0, 2, 2], 1)["accuracy"] == 0.5
    for of, others in zip(PROTOCOLS, ({"NMI", "ARI"}, {"novel"}, {"novel"}), strict=True):
        assert values(of, np.zeros(0, int), np.zeros(0, int), 2) == {}
        assert values(of, [-1, -1], [0, 3], 2) == {}
        first, *rest = values(of, [3], [5], 2)
        assert (first, set(rest)) == ("accuracy" if "NMI" in others else "all", others)


def test_task_aware_scores_are_of_novel_images_and_clusterings_as_such():
    generator = np.random.default_rng(0)
    truth = generator.integers(6, size=300)
    predicted = np.where(generator.random(300) < 0.6, truth, generator.integers(2, 7, size=300))
    rows = truth >= 2
    expected = {
        "accuracy": best(truth[rows], predicted[rows]),
        "NMI": normalized_mutual_info_score(truth[rows], predicted[rows]),
        "ARI": adjusted_rand_score(truth[rows], predicted[rows]),
    }
    assert task_aware(truth, predicted, 2) == pytest.approx(expected, abs=1e-12)
    assert task_aware([0, 0, 1, 1], [5, 5, 5, 5]) == {"accuracy": 0.5, "NMI": 0, "ARI": 0}


def test_images_without_a_true_class_are_left_out_and_counted():
    truth, predicted = np.array([-1, 2, 0, 3, -1, 2]), np.array([2, 2, 0, 2, 0, 2])
    first = {}
    for of in PROTOCOLS:
        row, *_ = scored(of, truth, predicted, 1, "test images")
        first[row.name] = row.value, row.n, row.sentence.partition("errors, ")[2]
        assert "one Hungarian match" in row.sentence
        assert "images of surplus clusters are errors" in row.sentence
    how = "test images; interval: Wilson"
    left_out = f"2 without a true class left out, 4 {how}"
    known_too = f"2 without a true class left out, 1 of known classes left out, 3 {how}"
    assert first == {
        "task-aware accuracy": (2 / 3, 3, known_too),
        "task-agnostic accuracy, all": (0.75, 4, left_out),
        "GCD accuracy, all": (0.75, 4, left_out),
    }


def test_intervals_are_those_of_right_images_and_respect_groups():
    generator = np.random.default_rng(1)
    truth = generator.integers(5, size=60)
    predicted = np.where(generator.random(60) < 0.5, truth, generator.integers(5, size=60))
    row, *_ = scored("task-aware", truth, predicted)
    correct = right(truth, predicted, match(truth, predicted))
    assert (row.low, row.high) == pytest.approx(score_interval(correct * 1.0)[:2])
    twice, groups = (np.tile(each, 2) for each in (truth, np.arange(60)))
    grouped, *_ = scored("task-aware", twice, np.tile(predicted, 2), groups=groups)
    assert grouped.effective_n == pytest.approx(60, abs=3)
    truth, predicted = np.array([0] + [1, 2] * 10), np.array([0] + [1, 1, 2, 2] * 5)
    for each in scored("GCD", truth, predicted, 1):
        assert 0 <= each.low <= each.value <= each.high <= 1, each.name
        assert each.high - each.low > 0.1, each.name


def test_heavier_images_decide_a_match_and_right_are_those_in_a_cluster_of_their_class():
    labels, clusters = np.array([0, 0, 0, 1, 1]), np.array([5, 5, 6, 5, 5])
    assert match(labels, clusters) == {5: 1, 6: 0}
    assert match(labels, clusters, weight=np.array([9, 9, 9, 1, 1])) == {5: 0, 6: 1}
    labels, clusters = np.array([-7, 0, 3, 3]), np.array([10**9, -2, 5, 6])
    assert right(labels, clusters, {10**9: -7, 5: 3}).tolist() == [True, False, True, False]
    assert right(labels[:0], clusters[:0], {}).tolist() == []


def confused(truth, predicted, mapping):
    """The confusion of classes that are called by their numbers."""
    names = list(map(str, range(10)))
    return confusion(truth, predicted, mapping, names, names)


def test_the_confusion_has_matched_clusters_on_its_diagonal_and_other_classes_last():
    truth = np.array([0, 0, 0, 4, 4, 3, 3, 3, -1])
    predicted = np.array([0, 0, 2, 1, 0, 2, 2, 5, 0])
    table = confused(truth, predicted, joint_match(truth, predicted, 1))
    assert table.num_matched == 3
    assert (table.true, table.predicted) == (tuple("034"), tuple("0215"))
    assert table.dense().tolist() == [[2, 1, 0, 0], [0, 2, 0, 1], [1, 0, 1, 0]]
    truth, predicted = np.array([2, 2, 3, 4, 4]), np.array([7, 7, 7, 6, 6])
    table = confused(truth, predicted, novel_match(truth, predicted, 2))
    assert table.num_matched == 2  # known classes that no image is of are not listed
    assert (table.true, table.predicted) == (tuple("243"), tuple("76"))
    assert table.dense().tolist() == [[2, 0], [0, 2], [1, 0]]


def test_a_match_without_a_common_image_is_not_shown():
    truth, predicted = np.array([0, 0, 1]), np.array([3, 3, 3])
    crossed = np.array([0, 1, 1, 1]), np.array([5, 5, 6, 6])
    for table, matched in (
        (confused(truth, predicted, {3: 1, 9: 0}), {"3": "1"}),
        (confused(*crossed, {5: 0, 6: 1}), {"5": "0", "6": "1"}),
        (confused(truth, predicted, {9: 0}), {}),
    ):
        count = table.num_matched
        assert dict(zip(table.predicted[:count], table.true[:count], strict=True)) == matched


@settings(max_examples=20)
@given(pairs, st.integers(0, 4))
def test_the_diagonal_of_the_confusion_is_the_accuracy(pairs, num_known):
    truth, predicted = (np.array(column) for column in zip(*pairs))
    for of, matched in ((gcd, joint_match), (task_agnostic, novel_match)):
        table = confused(truth, predicted, matched(truth, predicted, num_known))
        count = table.dense()
        assert count.sum() == len(truth)
        accuracy = count.diagonal()[: table.num_matched].sum() / len(truth)
        assert accuracy == pytest.approx(of(truth, predicted, num_known)["all"])
        sizes = [np.count_nonzero(truth == int(label)) for label in table.true]
        assert count.sum(axis=1).tolist() == sizes
    none = truth[:0]
    table = confused(none, none, joint_match(none, none, 3))
    assert (table.true, table.predicted, table.num_matched) == ((), (), 0)


def test_the_worth_of_scores_is_their_calibration_error_and_how_often_they_order_two_images():
    rng = np.random.default_rng(0)
    certainty, groups = rng.integers(5, 11, 60) / 10, np.arange(60) // 2
    correct = rng.random(60) < certainty
    ece, auroc = quality(certainty, correct, groups)
    binned = sum(
        abs((certainty[own] - correct[own]).sum())
        for own in (certainty == c for c in np.unique(certainty))
    )
    assert ece.value == pytest.approx(binned / 60)  # six values, a bin each
    pairs = [
        1.0 if right > wrong else 0.5 if right == wrong else 0.0
        for right in certainty[correct] for wrong in certainty[~correct]
    ]  # fmt: skip
    assert auroc.value == pytest.approx(np.mean(pairs))
    assert (ece.name, auroc.name) == ("ECE of the score", "AUROC of the score")
    for each in (ece, auroc):
        assert 0 <= each.low < each.value < each.high <= 1
    same = quality(certainty, np.ones(60, bool))
    assert [each.name for each in same] == ["ECE of the score"]  # none is wrong
    assert quality(certainty[:0], correct[:0]) == []


def test_the_worth_of_scores_is_not_certain_where_all_draws_are_alike():
    """By the rule of three: of images or, for an order of two kinds, of the rarer kind."""
    certainty, correct = np.repeat([0.9, 0.2], [10, 30]), np.repeat([True, False], [10, 30])
    _, auroc = quality(certainty, correct)
    assert (auroc.value, auroc.high) == (1, 1)
    assert auroc.low == pytest.approx(1 - 3 / 10)
    _, grouped = quality(certainty, correct, np.arange(40) // 5)
    assert grouped.low == 0  # two groups are right
    for groups, count in ((None, 40), (np.repeat(np.arange(20), np.tile([1, 3], 10)), 20)):
        (ece,) = quality(np.full(40, 0.7), correct | True, groups)
        assert (ece.low, ece.high) == pytest.approx((0.3 - 3 / count, 0.3 + 3 / count))
    (ece,) = quality(np.full(8, 0.7), np.ones(8, bool), np.zeros(8, int))
    assert (ece.low, ece.high) == (0, 1)
