"""The three rules of the papers that the number of classes is compared with: blobs, odd tables."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from sklearn.preprocessing import normalize

from nearkin.errors import DataError
from nearkin.measures.matching import cluster_accuracy
from nearkin.types import UNKNOWN

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "discovery"))
rules = importlib.import_module("rules")

pytestmark = pytest.mark.slow  # of a benchmark, whose rules are no longer part of the package

MODES = [True, False]
RULES = {"silhouette", "dtc", "gcd"}


def blobs(seed, *, disjoint, each=60, classes=11, known=6, dim=16):
    """Of each known class all rows are labeled, or only half of them."""
    generator = np.random.default_rng(seed)
    middle = 4 * generator.normal(size=(classes, dim))
    truth = np.repeat(np.arange(classes), each)
    x = middle[truth] + 0.7 * generator.normal(size=(len(truth), dim))
    named = (truth < known) & (disjoint | (np.arange(len(truth)) % 2 == 0))
    return x.astype(np.float32), np.where(named, truth, UNKNOWN)


@pytest.mark.parametrize("disjoint", MODES)
def test_five_novel_blobs_beside_six_known_ones_are_counted(disjoint):
    x, label = blobs(0, disjoint=disjoint)
    estimate = rules.three_rules(x, label, disjoint=disjoint, seed=0)
    assert estimate.estimates["silhouette"] == estimate.chosen == 5
    assert estimate.estimates["dtc"] in (5, 6, 7)
    assert estimate.estimates["gcd"] in (4, 5, 6)
    assert 3 <= estimate.low <= 5 <= estimate.high <= 7


def test_many_novel_classes_are_counted_on_a_draw_of_wide_features(monkeypatch):
    """Few known classes, mostly labeled: drawing them as often as the rest would drown it."""
    monkeypatch.setattr(rules, "ROWS", 600)
    x, label = blobs(0, disjoint=False, classes=24, known=4, dim=100, each=40)
    turn = np.arange(len(label)) % 7
    estimate = rules.three_rules(x[turn > 0], label[turn > 0], disjoint=False, seed=0, most=40)
    assert estimate.estimates == dict.fromkeys(RULES, 20)


def test_curves_are_what_the_rules_look_at():
    """Clusters this far apart are the same, whoever looks for them."""
    x, label = blobs(1, disjoint=True)
    estimate = rules.three_rules(x, label, disjoint=True, seed=0, most=9)
    curves = {name: dict(curve) for name, curve in estimate.curves.items()}
    assert set(curves) == set(estimate.estimates) == RULES
    for curve in curves.values():
        assert list(curve) == sorted(curve)
        assert {2, 4, 5, 6, 9} <= set(curve) <= set(range(2, 10))
    z = normalize(x)
    for k in (4, 5):
        new = KMeans(k, n_init=30, random_state=0).fit_predict(z[label == UNKNOWN])
        expected = silhouette_score(z[label == UNKNOWN], new)
        assert curves["silhouette"][k] == pytest.approx(expected, abs=1e-4)
    everything = KMeans(11, n_init=30, random_state=0).fit_predict(z).astype(np.int64)
    expected, _ = cluster_accuracy(label[label >= 0], everything[label >= 0])
    assert curves["gcd"][5] == expected == curves["dtc"][5] == 1
    assert curves["gcd"][2] < 1


def test_shared_classes_are_clustered_with_the_known_ones_in_place():
    x, label = blobs(1, disjoint=False)
    estimate = rules.three_rules(x, label, disjoint=False, seed=0, most=9)
    expected = silhouette_score(normalize(x), np.repeat(np.arange(11), 60))
    assert dict(estimate.curves["silhouette"])[5] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("disjoint", MODES)
def test_a_known_class_in_two_pieces_is_no_novel_class_to_the_gcd_rule(disjoint):
    """Its k-means does not know which rows belong together. There are twelve blobs."""
    x, label = blobs(2, disjoint=disjoint, classes=12, known=7)
    label = np.where(label > 0, label - 1, label)  # the second blob is of the first one's class
    trial = rules._gcd(rules._draw(x, label, disjoint, 0), 6)
    assert trial.accuracy == pytest.approx(6 / 7)
    assert trial.novel == 5


@pytest.mark.parametrize(("tiny", "expected"), [(0.01, 5), (0.19, 5), (0.21, 4)])
def test_a_tiny_cluster_is_no_class_to_the_dtc_rule(tiny, expected, monkeypatch):
    x, label = blobs(0, disjoint=True)
    sample = rules._draw(x[:-48], label[:-48], True, 0)  # a fifth of the last class is left
    monkeypatch.setattr(rules, "TINY", tiny)
    assert rules._dtc(sample, 5).novel == expected


def search(accuracy, silhouette, *, most, monkeypatch=None):
    """Of 50 labeled rows, in three repetitions that all find this for k novel classes."""

    def rule(sample, k):
        return rules._Trial(accuracy(k), 50, silhouette(k), k)

    if monkeypatch:
        monkeypatch.setattr(rules, "_dtc", rule)
    x, label = blobs(0, disjoint=True, each=2)
    return rules._Search(rule, [rules._draw(x, label, True, 0)] * 3, most)


def perfect(k):
    return 1.0


@pytest.mark.parametrize("peak", [2, 3, 17, 44, 69, 99, 100])
def test_a_peak_is_found_in_a_few_trials(peak):
    result = search(perfect, lambda k: -abs(k - peak), most=100)
    assert result.estimate() == peak
    assert {peak - 1, peak + 1} - {1, 101} <= set(result.tried)
    assert len(result.tried) < 22


def test_of_equal_silhouettes_the_smallest_number_is_the_best():
    assert search(perfect, lambda k: min(k, 5), most=9).estimate() == 5


@pytest.mark.parametrize(("correct", "expected"), [(47, 8), (46, 4)])
def test_the_silhouette_decides_among_accuracies_that_labels_cannot_tell_apart(correct, expected):
    """The interval of 50 of 50 ends at 0.929."""
    accuracy = {2: 0.5, 3: 1.0, 4: 0.98, 8: correct / 50}
    result = search(lambda k: accuracy.get(k, 0.1), float, most=9)
    assert result.estimate() == expected


def test_the_dtc_rule_goes_halfway_from_the_best_accuracy_to_the_best_silhouette(monkeypatch):
    def accuracy(k):
        return 1.0 if k == 4 else 0.2

    assert search(accuracy, lambda k: -abs(k - 9), most=12).estimate() == 4
    halfway = search(accuracy, lambda k: -abs(k - 9), most=12, monkeypatch=monkeypatch)
    assert halfway.estimate() == 7  # rather too many than too few


def test_known_classes_that_no_cluster_is_like_leave_one_novel_class_at_least():
    result = search(perfect, float, most=5)
    result.tried = {k: [trial._replace(novel=0) for trial in ts] for k, ts in result.tried.items()}
    assert result.estimate() == 1


def test_only_directions_count_and_the_seed_decides():
    x, label = blobs(0, disjoint=True, each=20)
    length = np.linspace(0.01, 100, len(x), dtype=np.float32)[:, None]
    first, again, scaled, other = (
        rules.three_rules(features, label, disjoint=True, seed=seed, most=8)
        for features, seed in ((x, 0), (x, 0), (x * length, 0), (x, 1))
    )
    assert first == again
    assert scaled.estimates == first.estimates
    assert other.curves != first.curves


def test_the_dtc_rule_fixes_some_classes_and_looks_for_the_others():
    x, label = blobs(0, disjoint=True, each=20)
    label[label != UNKNOWN] += 3  # names do not matter, not even that some are not there
    held_out = set()
    for seed in range(12):
        sample = rules._draw(x, label, True, seed)
        known, fixed = sample.label != UNKNOWN, sample.fixed != UNKNOWN
        assert sorted(set(sample.label[known])) == list(range(6))
        assert sorted(set(sample.fixed[fixed])) == list(range(4))
        assert len(set(zip(sample.label[fixed], sample.fixed[fixed]))) == 4
        held_out.add(tuple(sorted(set(sample.label[known & ~fixed]))))
    assert all(len(classes) == 2 for classes in held_out)
    assert len(held_out) > 4


@given(st.lists(st.integers(1, 60), max_size=5), st.integers(0, 300), st.integers(0, 9))
def test_a_draw_keeps_the_share_of_labeled_rows_and_all_classes(sizes, unlabeled, seed):
    """Within an eighth and a half; of classes that are cut short, as many rows each."""
    label = np.repeat(np.arange(-1, len(sizes)), [unlabeled, *sizes])
    label = np.random.default_rng(seed).permutation(label)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "ROWS", 48)
        rows = rules._rows(label, np.random.default_rng(seed)) if len(label) else label
    assert len(rows) == len(set(rows))
    drawn = [(label[rows] == c).sum() for c in range(-1, len(sizes))]
    share = min(max(sum(sizes) / max(len(label), 1), 1 / 8), 1 / 2)
    assert sum(drawn[1:]) == min(sum(sizes), int(48 * share))
    assert drawn[0] == min(unlabeled, 48 - sum(drawn[1:]))
    for count, size in zip(drawn[1:], sizes):
        assert count == size or count >= max(drawn[1:]) - 1


# Odd tables


def noise(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


ODD = {
    "four unlabeled rows": (noise(16, 5), [0] * 4 + [1] * 4 + [2] * 4 + [UNKNOWN] * 4),
    "equal rows": (np.ones((60, 70), np.float32), [0] * 10 + [1] * 10 + [UNKNOWN] * 40),
    "rows of zeros": (np.zeros((60, 3), np.float32), [0] * 10 + [1] * 10 + [UNKNOWN] * 40),
    "two known classes": (noise(90, 5), [0] * 15 + [1] * 15 + [UNKNOWN] * 60),
    "classes of one row": (noise(90, 5), [*range(30)] + [UNKNOWN] * 60),
    "half precision": (noise(90, 5).astype(np.float16), [0] * 15 + [1] * 15 + [UNKNOWN] * 60),
    "one known class": (noise(60, 5), [0] * 15 + [UNKNOWN] * 45),
    "no known class": (noise(60, 5), [UNKNOWN] * 60),
}


@pytest.mark.parametrize("disjoint", MODES)
@pytest.mark.parametrize("name", ODD)
def test_odd_tables_have_an_answer(name, disjoint):
    """With fewer than two known classes there is nobody to learn from but the silhouette."""
    x, label = ODD[name][0], np.array(ODD[name][1])
    estimate = rules.three_rules(x, label, disjoint=disjoint, seed=0)
    few = label.max() < 1
    assert set(estimate.estimates) == ({"silhouette"} if few else RULES)
    assert 1 <= estimate.low <= estimate.chosen <= estimate.high
    assert all(np.isfinite(value) for curve in estimate.curves.values() for _, value in curve)


@pytest.mark.parametrize(
    ("unlabeled", "most", "message"),
    [
        (3, None, "3 unlabeled images; counting classes takes at least 4"),
        (9, 9, "9 novel classes of 9 images; ask for 2 to 8"),
        (9, 1, "1 novel class of 9 images; ask for 2 to 8"),
    ],
)
def test_what_cannot_be_counted_is_said_in_a_line(unlabeled, most, message):
    label = np.array([0] * 5 + [1] * 5 + [UNKNOWN] * unlabeled)
    with pytest.raises(DataError) as failure:
        rules.three_rules(noise(len(label), 4), label, disjoint=True, seed=0, most=most)
    assert str(failure.value) == message
