"""The number of novel classes: blobs whose number is known, rules restated, odd tables."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import adjusted_rand_score, silhouette_samples, silhouette_score
from sklearn.preprocessing import normalize

from nearkin.discovery import number
from nearkin.discovery.clusters import describe_alternative
from nearkin.discovery.number import number_of_novel_classes
from nearkin.discovery.report import alternative_table
from nearkin.types import UNLABELED

MODES = [True, False]
RULES = {"linkage", "silhouette"}


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
    return x.astype(np.float32), np.where(named, truth, UNLABELED)


def task(seed=0, *, disjoint=True, **shape):
    """The blobs as the rules get them, all unlabeled ones novel."""
    x, label = blobs(seed, disjoint=True, **shape)
    return divided(normalize(x), label, label == UNLABELED, disjoint=disjoint)


def divided(x, label, unlabeled, *, disjoint=True):
    """Rows without a label, and rows with one."""
    return number._Task(x[unlabeled], x[~unlabeled], x[:0], label[~unlabeled], disjoint)


@pytest.mark.parametrize(("novel", "each", "disjoint"), [(3, 20, False), (30, 12, True)])
def test_novel_blobs_are_counted(novel, each, disjoint):
    x, label = blobs(novel, disjoint=disjoint, novel=novel, each=each)
    estimate = number_of_novel_classes(x, label, disjoint=disjoint, seed=0)
    assert estimate.chosen == pytest.approx(novel, rel=0.3, abs=2)
    assert estimate.low <= novel <= estimate.high


def test_unequal_classes_are_counted_like_the_known_ones_they_are_like():
    """Pairs see fewer classes than there are, since most pairs are of the largest ones."""
    x, label = blobs(1, disjoint=False, novel=10, known=12, each=40, tail=10.0)
    estimate = number_of_novel_classes(x, label, disjoint=False, seed=0)
    assert estimate.chosen == pytest.approx(10, rel=0.3)
    assert estimate.low <= 10 <= estimate.high


def test_linkage_cuts_unlabeled_images_where_labeled_ones_agree_with_their_classes():
    equal = task(novel=6)
    assert exp(number._linkage(equal)) == pytest.approx(6, abs=0.1)
    trees = [AgglomerativeClustering(k, linkage="average") for k in range(2, 40)]
    clusters = [tree.fit_predict(equal.labeled) for tree in trees]
    agreement = [adjusted_rand_score(equal.label, cluster) for cluster in clusters]
    assert int(np.argmax(agreement)) + 2 == 12  # the known classes, at the height of the cut


@pytest.mark.parametrize("disjoint", MODES)
def test_the_silhouette_is_that_of_unlabeled_images_beside_the_known_ones(disjoint):
    seven = task(novel=7, disjoint=disjoint)
    rows = seven.x if disjoint else np.concatenate([seven.x, seven.labeled])
    found = KMeans(7 + 12 * (not disjoint), n_init=20, random_state=0).fit_predict(rows)
    values = silhouette_samples(rows, found)[: len(seven.x)]
    assert seven.silhouette(7) == pytest.approx(values.mean(), abs=1e-3)
    others = [seven.silhouette(k) for k in (2, 4, 6, 8, 12)]
    assert max(others) < seven.silhouette(7)


CURVES = st.lists(st.floats(0, 1), min_size=30, max_size=30)


@given(CURVES, st.integers(1, 30))
def test_the_search_tries_both_neighbors_of_the_best(values, most):
    tried = number._search(lambda k: values[k - 1], lambda t: number._best(t, 0.0, 0.0), most)
    assert all(tried[k] == values[k - 1] for k in tried)
    peak = max(tried, key=lambda k: (tried[k], -k))
    assert number._best(tried, 0.0, 0.0) == peak
    assert {max(1, peak - 1), min(most, peak + 1)} <= set(tried)


@given(CURVES, st.floats(0, 3.4), st.floats(0, 2))
def test_a_number_far_from_the_trees_needs_a_better_silhouette(values, tree, penalty):
    tried = dict(enumerate(values, start=1))
    chosen = number._best(tried, tree, penalty)
    for k, value in tried.items():
        further = (log(k) - tree) ** 2 - (log(chosen) - tree) ** 2
        assert value - tried[chosen] <= penalty * further + 1e-12
    nearest = min(tried, key=lambda k: abs(log(k) - tree))
    assert number._best(dict.fromkeys(tried, 0.5), tree, 1.0) == nearest


def test_images_of_known_classes_are_left_out():
    x, label = blobs(3, disjoint=True, novel=6, known=8)
    x, known = normalize(x), label != UNLABELED
    again = known & (np.arange(len(x)) % 2 == 0)
    unlabeled = ~known | again
    novel = divided(x, label, unlabeled, disjoint=False).searched
    left = {row.tobytes() for row in novel}
    assert np.mean([row.tobytes() in left for row in x[~known]]) > 0.95
    assert np.mean([row.tobytes() in left for row in x[again]]) < 0.05


@pytest.fixture(scope="module")
def single():
    """Four novel classes of 60 images; of ten known ones, five have one labeled image each."""
    x, truth = blobs(3, disjoint=True, novel=4, known=10)
    first = np.unique(truth, return_index=True)[1]
    rows = np.arange(len(x))
    named = np.where(truth < 5, rows % 2 == 0, np.isin(rows, first)) & (truth != UNLABELED)
    return x, np.where(named, truth, UNLABELED)


def test_images_near_the_one_labeled_image_of_a_class_are_left_out(single):
    several = number._draw(*single, 2_000, False, 0)
    assert (len(several.size), len(several.single)) == (5, 5)
    assert len(several.x) > 600
    assert len(several.searched) == pytest.approx(4 * 60, rel=0.1)


def test_classes_with_one_labeled_image_are_not_counted_as_novel(single):
    estimate = number_of_novel_classes(*single, disjoint=False, seed=0)
    assert estimate.chosen == pytest.approx(4, abs=1)
    assert estimate.high < 9


def test_linkage_counts_the_effective_number_of_clusters_and_inequality_is_what_that_lacks():
    size = np.tile([10, 20, 60], 400)
    assert number._inequality(size) == pytest.approx(len(size) / number._effective(size), rel=0.01)
    assert number._inequality(np.array([7, 7])) == 1
    size = np.array([50, 30, 20])
    assert number._effective(size) == pytest.approx(1 / (0.25 + 0.09 + 0.04))
    unequal = task(novel=6, tail=10.0)
    tree = AgglomerativeClustering(6, linkage="average").fit_predict(unequal.x)
    expected = number._effective(np.bincount(tree))
    assert exp(number._linkage(unequal)) == pytest.approx(expected, rel=0.05)
    assert expected < 5


def test_the_interval_is_wider_where_the_rules_disagree():
    sharp, blurred = task(novel=6), task(novel=6, spread=4.0)
    disagreements, width = [], []
    for each in (sharp, blurred):
        found = number._estimate(each, each.size)
        tree = number._linkage(each) + log(number._inequality(each.size))
        peak = max(found.curve, key=lambda point: point[1])[0]
        disagreements.append(abs(tree - log(peak)))
        reach = exp(np.hypot(number.ERROR, number.DOUBT * disagreements[-1]))
        assert found.low == max(1, np.floor(found.chosen / reach))
        assert found.high == np.ceil(found.chosen * reach)
        width.append(reach)
    assert disagreements[0] < 0.1 < disagreements[1]
    assert width[1] > width[0]


def test_only_directions_count_and_the_seed_decides(monkeypatch):
    monkeypatch.setattr(number, "ROWS", 80)
    x, label = blobs(0, disjoint=False, each=20)
    length = np.linspace(0.01, 100, len(x), dtype=np.float32)[:, None]
    first, again, scaled, other = (
        number_of_novel_classes(features, label, disjoint=False, seed=seed)
        for features, seed in ((x, 0), (x, 0), (x * length, 0), (x, 1))
    )
    assert first == again
    assert scaled.estimates == first.estimates
    assert other.curve != first.curve


def test_more_images_are_looked_at_where_classes_are_many(monkeypatch):
    monkeypatch.setattr(number, "ROWS", 100)
    x, label = blobs(0, disjoint=True, novel=40, known=6, each=12, dim=32)
    found = number_of_novel_classes(x, label, disjoint=True, seed=0)
    assert found.most == 100  # of 400 images; 100 would show 25, and 200 too few of each class
    assert found.chosen == pytest.approx(40, abs=1)
    monkeypatch.setattr(number, "MOST_ROWS", 100)
    assert number_of_novel_classes(x, label, disjoint=True, seed=0).most == 25
    few = number_of_novel_classes(*blobs(0, disjoint=True, each=200), disjoint=True, seed=0)
    assert few.most == 25


@given(st.lists(st.integers(1, 60), max_size=9), st.integers(0, 9))
def test_labeled_images_are_drawn_evenly_from_classes_of_two_or_more(sizes, seed):
    label = np.repeat(np.arange(-1, len(sizes)), [5, *sizes])
    label = np.random.default_rng(seed).permutation(label)
    rows = number._balanced(label, 48, np.random.default_rng(seed))
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
    assert (estimate.low, estimate.chosen, estimate.high) == (2, 6, 13)  # no tree
    z = normalize(x)
    if disjoint:
        z = z[label == UNLABELED]
        expected = silhouette_score(z, KMeans(6, n_init=20, random_state=0).fit_predict(z))
        assert dict(estimate.curve)[6] == pytest.approx(expected, abs=1e-3)


def noise(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


FEW, OTHERS = [0] * 15 + [1] * 15, [UNLABELED] * 60
ODD = {
    "four unlabeled rows": (noise(16, 5), [0] * 4 + [1] * 4 + [2] * 4 + [UNLABELED] * 4),
    "equal rows": (np.ones((90, 70), np.float32), FEW + OTHERS),
    "rows of zeros": (np.zeros((90, 3), np.float32), FEW + OTHERS),
    "two known classes": (noise(90, 5), FEW + OTHERS),
    "classes of two rows": (noise(90, 5), [*range(15)] * 2 + OTHERS),
    "classes of one row": (noise(90, 5), [*range(30), *OTHERS]),
    "half precision": (noise(90, 5).astype(np.float16), FEW + OTHERS),
    "one known class": (noise(75, 5), [0] * 15 + OTHERS),
    "no known class": (noise(60, 5), OTHERS),
    "one feature": (noise(90, 1), [0] * 10 + [1] * 10 + [2] * 5 + [3] * 5 + OTHERS),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tables_have_an_answer(name):
    x, label = ODD[name][0], np.array(ODD[name][1])
    disjoint = list(ODD).index(name) % 2 == 0
    estimate = number_of_novel_classes(x, label, disjoint=disjoint, seed=0)
    several = (np.bincount(label[label >= 0]) > 1).sum()
    assert set(estimate.estimates) == ({"silhouette"} if several < 2 else RULES)
    assert 1 <= estimate.low <= estimate.chosen <= estimate.high <= (label == UNLABELED).sum()
    assert all(np.isfinite(value) for _, value in estimate.curve)


def test_of_other_numbers_sizes_silhouettes_and_agreement_are_those_of_the_clusters():
    generator = np.random.default_rng(0)
    # Two known classes; the second novel one is empty.
    truth = np.repeat([0, 1, 2, 4], [5, 9, 20, 1])
    x = np.eye(5)[truth] + 0.2 * generator.normal(size=(len(truth), 5))
    others = [np.where(truth == 2, 3, truth), generator.permutation(truth)]
    found = describe_alternative(x, [truth, *others], num_known=2, num_novel=3, known=None)
    assert (found.novel, found.sizes) == (3, (20, 1, 0))
    values = silhouette_samples(x, truth, metric="cosine")
    of_class = [values[truth == number].mean() for number in (0, 1, 2)]
    assert found.silhouette == pytest.approx(np.mean(of_class))
    pairs = [(truth, others[0]), (truth, others[1]), others]
    assert found.seed_agreement == pytest.approx(np.mean([adjusted_rand_score(*p) for p in pairs]))
    alone = describe_alternative(x, [np.full(len(x), 2)], num_known=2, num_novel=1, known=None)
    assert (alone.silhouette, alone.seed_agreement) == (None, None)
    shown = alternative_table([found, alone], chosen=3)
    assert [row[:2] for row in shown.rows] == [("1", "35 to 35"), ("3 (the result)", "20 to 0")]
    assert {len(row) for row in shown.rows} == {len(shown.columns)}
