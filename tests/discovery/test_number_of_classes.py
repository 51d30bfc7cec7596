"""The number of novel classes: blobs whose number is known, rules restated, odd tables."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from sklearn.preprocessing import normalize

from nearkin.discovery import number
from nearkin.discovery.number import number_of_novel_classes
from nearkin.errors import DataError
from nearkin.types import UNKNOWN

MODES = [True, False]
RULES = {"pairs", "dispersion"}


def blobs(seed, *, disjoint, novel=5, known=12, each=60, tail=1.0, dim=16, spread=0.7):
    """Of each known class all rows are labeled, or only half of them.

    The largest class has `tail` times as many rows as the smallest.
    """
    generator = np.random.default_rng(seed)
    classes = novel + known
    sizes = each * tail ** (-np.arange(classes) / (classes - 1))
    truth = np.repeat(generator.permutation(classes), sizes.round().astype(int))
    middle = 4 * generator.normal(size=(classes, dim))
    x = middle[truth] + spread * generator.normal(size=(len(truth), dim))
    named = (truth < known) & (disjoint | (np.arange(len(truth)) % 2 == 0))
    return x.astype(np.float32), np.where(named, truth, UNKNOWN)


def task(seed=0, **shape):
    """The blobs as the rules get them, all unlabeled ones novel."""
    x, label = blobs(seed, disjoint=True, **shape)
    x, known = normalize(x), label != UNKNOWN
    return number._Task(x[~known], x[known], label[known])


@pytest.mark.parametrize("disjoint", MODES)
@pytest.mark.parametrize("novel", [3, 5, 12, 30])
def test_novel_blobs_are_counted(novel, disjoint):
    x, label = blobs(novel, disjoint=disjoint, novel=novel, each=40)
    estimate = number_of_novel_classes(x, label, disjoint=disjoint, seed=0)
    assert estimate.chosen == pytest.approx(novel, rel=0.3, abs=2)
    assert estimate.low <= novel <= estimate.high


@pytest.mark.parametrize("disjoint", MODES)
def test_unequal_classes_are_counted_like_the_known_ones_they_are_like(disjoint):
    """Pairs see fewer classes than there are, since most pairs are of the largest ones."""
    x, label = blobs(1, disjoint=disjoint, novel=10, known=12, each=120, tail=10.0)
    estimate = number_of_novel_classes(x, label, disjoint=disjoint, seed=0)
    assert estimate.chosen == pytest.approx(10, rel=0.3)
    assert estimate.low <= 10 <= estimate.high


def test_pairs_are_one_over_the_sum_of_squared_shares():
    equal, unequal = task(novel=6), task(novel=6, tail=10.0)
    assert number._pairs(equal) == pytest.approx(log(6), abs=0.15)
    size = np.array([50.0, 30, 20])
    assert number._effective(size.astype(int)) == pytest.approx(1 / (0.25 + 0.09 + 0.04))
    assert number._pairs(unequal) < number._pairs(equal)


def test_k_blobs_have_the_scatter_of_known_ones_in_k_clusters():
    """A mean square within clusters is per degree of freedom, so blobs may be of any size."""
    for each in (20, 80):
        small = task(novel=7, each=each)
        assert exp(number._dispersion(small)) == pytest.approx(7, abs=1)
        below = max(k for k, scatter in small.tried.items() if scatter > 1)
        assert below <= 7 <= min(k for k, scatter in small.tried.items() if scatter <= 1) + 1
    x = small.x
    expected = KMeans(7, n_init=5, random_state=0).fit(x).inertia_ / (len(x) - 7)
    assert number._scatter(x, 7) == pytest.approx(expected, rel=0.05)


def test_whitening_makes_known_classes_spheres_and_pulls_towards_a_sphere(monkeypatch):
    monkeypatch.setattr(number, "SPHERE", 0.0)
    scatter = task(dim=6).whitened().within()
    np.testing.assert_allclose(scatter, np.eye(6), atol=1e-4)
    monkeypatch.setattr(number, "SPHERE", 1.0)
    as_it_is = task(dim=6)
    ratio = as_it_is.whitened().within() / as_it_is.within()
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-3)


def test_images_of_known_classes_are_left_out():
    x, label = blobs(3, disjoint=True, novel=6, known=8)
    x, known = normalize(x), label != UNKNOWN
    again = known & (np.arange(len(x)) % 2 == 0)
    unlabeled = ~known | again
    mixed = number._Task(x[unlabeled], x[~unlabeled], label[~unlabeled])
    novel, share = mixed.novel()
    assert share == pytest.approx((~known).sum() / unlabeled.sum(), abs=0.05)
    left = {row.tobytes() for row in novel.x}
    assert np.mean([row.tobytes() in left for row in x[~known]]) > 0.95
    assert np.mean([row.tobytes() in left for row in x[again]]) < 0.05


@given(st.lists(st.integers(2, 12), min_size=4, max_size=9), st.booleans(), st.integers(0, 9))
def test_known_classes_are_hidden_and_two_images_of_others_stay(sizes, disjoint, seed):
    label = np.repeat(np.arange(len(sizes)), sizes)
    x = np.arange(len(label), dtype=np.float32)[:, None]
    whole = number._Task(x, x, label)
    fold, true = whole.hide(2, disjoint, np.random.default_rng(seed))
    rows, named = fold.x[:, 0].astype(int), fold.labeled[:, 0].astype(int)
    assert sorted([*rows, *named]) == list(range(len(label)))
    hidden = sorted(set(label) - set(label[named]))
    assert len(hidden) == 2
    assert true == pytest.approx(number._effective(np.array(sizes)[hidden]))
    for old, new in zip(sorted(set(label[named])), range(len(sizes)), strict=False):
        kept = (fold.label == new).sum()
        assert (label[named[fold.label == new]] == old).all()
        assert kept == (sizes[old] if disjoint else max(2, sizes[old] // 2))


def test_inequality_is_the_number_over_the_effective_number():
    size = np.tile([10, 20, 60], 400)
    assert number._inequality(size) == pytest.approx(len(size) / number._effective(size), rel=0.01)
    assert number._inequality(np.array([7, 7])) == 1


def test_a_rule_that_errs_on_hidden_classes_is_corrected_and_counts_less(monkeypatch):
    """One says twice the number; one is anywhere."""
    anywhere = iter(np.linspace(-3, 3, 9))
    rules = {
        "twice": lambda task: log(2 * len(np.unique(task.x.round(), axis=0))),
        "anywhere": lambda _: next(anywhere),
    }
    monkeypatch.setattr(number, "RULES", rules)
    centers = np.repeat(np.arange(20.0), 6)[:, None]
    novel = centers[:, 0] < 8
    found = number._corrected(
        number._Task(centers[novel], centers[~novel], centers[~novel, 0].astype(int) - 8),
        True, 1.0, np.random.default_rng(0),
    )  # fmt: skip
    assert found.estimates["twice"] == found.chosen == 8
    assert found.low < 8 < found.high


def test_only_directions_count_and_the_seed_decides():
    x, label = blobs(0, disjoint=False, each=20)
    length = np.linspace(0.01, 100, len(x), dtype=np.float32)[:, None]
    first, again, scaled, other = (
        number_of_novel_classes(features, label, disjoint=False, seed=seed)
        for features, seed in ((x, 0), (x, 0), (x * length, 0), (x, 1))
    )
    assert first == again
    assert scaled.estimates == first.estimates
    assert other.curves != first.curves or other.low != first.low


def test_of_many_images_some_are_drawn(monkeypatch):
    monkeypatch.setattr(number, "ROWS", 150)
    x, label = blobs(0, disjoint=True, novel=6, each=200)
    sizes = []
    monkeypatch.setitem(number.RULES, "pairs", lambda task: sizes.append(len(task.x)) or 0.0)
    number_of_novel_classes(x, label, disjoint=True, seed=0)
    assert max(sizes) == 150


@given(st.lists(st.integers(1, 60), max_size=9), st.integers(0, 9))
def test_labeled_images_are_drawn_evenly_from_classes_of_two_or_more(sizes, seed):
    label = np.repeat(np.arange(-1, len(sizes)), [5, *sizes])
    label = np.random.default_rng(seed).permutation(label)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number, "ROWS", 48)
        rows = number._balanced(label, np.random.default_rng(seed))
    drawn = [(label[rows] == c).sum() for c in range(len(sizes))]
    assert len(rows) == len(set(rows)) == sum(drawn) <= 48
    for count, size in zip(drawn, sizes):
        assert count != 1
        assert count == 0 if size == 1 else count == size or count >= max(drawn) - 1


@pytest.mark.parametrize("disjoint", MODES)
def test_without_two_known_classes_the_silhouette_decides(disjoint):
    x, label = blobs(4, disjoint=disjoint, novel=6, known=1)
    estimate = number_of_novel_classes(x, label, disjoint=disjoint, seed=0)
    assert estimate.estimates == {"silhouette": 6}
    assert (estimate.low, estimate.chosen, estimate.high) == (6, 6, 6)
    z = normalize(x)
    if disjoint:
        z = z[label == UNKNOWN]
        expected = silhouette_score(z, KMeans(6, n_init=20, random_state=0).fit_predict(z))
        assert dict(estimate.curves["silhouette"])[6] == pytest.approx(expected, abs=1e-3)


# Odd tables


def noise(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


ODD = {
    "four unlabeled rows": (noise(16, 5), [0] * 4 + [1] * 4 + [2] * 4 + [UNKNOWN] * 4),
    "equal rows": (np.ones((60, 70), np.float32), [0] * 10 + [1] * 10 + [UNKNOWN] * 40),
    "rows of zeros": (np.zeros((60, 3), np.float32), [0] * 10 + [1] * 10 + [UNKNOWN] * 40),
    "two known classes": (noise(90, 5), [0] * 15 + [1] * 15 + [UNKNOWN] * 60),
    "classes of two rows": (noise(90, 5), [*range(15)] * 2 + [UNKNOWN] * 60),
    "classes of one row": (noise(90, 5), [*range(30)] + [UNKNOWN] * 60),
    "half precision": (noise(90, 5).astype(np.float16), [0] * 15 + [1] * 15 + [UNKNOWN] * 60),
    "one known class": (noise(60, 5), [0] * 15 + [UNKNOWN] * 45),
    "no known class": (noise(60, 5), [UNKNOWN] * 60),
    "one feature": (noise(90, 1), [0] * 10 + [1] * 10 + [2] * 5 + [3] * 5 + [UNKNOWN] * 60),
}


@pytest.mark.parametrize("disjoint", MODES)
@pytest.mark.parametrize("name", ODD)
def test_odd_tables_have_an_answer(name, disjoint):
    x, label = ODD[name][0], np.array(ODD[name][1])
    estimate = number_of_novel_classes(x, label, disjoint=disjoint, seed=0)
    several = (np.bincount(label[label >= 0]) > 1).sum()
    assert set(estimate.estimates) == ({"silhouette"} if several < 2 else RULES)
    assert 1 <= estimate.low <= estimate.chosen <= estimate.high <= (label == UNKNOWN).sum()
    assert all(np.isfinite(value) for curve in estimate.curves.values() for _, value in curve)


def test_what_cannot_be_counted_is_said_in_a_line():
    label = np.array([0] * 5 + [1] * 5 + [UNKNOWN] * 3)
    with pytest.raises(
        DataError, match=r"^3 unlabeled images; counting classes takes at least 4$"
    ):
        number_of_novel_classes(noise(len(label), 4), label, disjoint=True, seed=0)
