"""K-means with labeled rows, against its definition, all partitions, and scikit-learn."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.preprocessing import normalize

from nearkin.errors import DataError
from nearkin.metrics.kmeans import _descend, _Rows, compact, constrained_kmeans
from nearkin.types import UNLABELED


def blobs(classes, each, dim=8, spread=0.5, seed=0):
    generator = np.random.default_rng(seed)
    truth = np.repeat(np.arange(classes), each)
    middle = 4 * generator.normal(size=(classes, dim))
    return middle[truth] + spread * generator.normal(size=(len(truth), dim)), truth


def squared(x, centers):
    return ((x[:, None] - centers) ** 2).sum(axis=2)


def within(x, cluster):
    """What is left around the means of the clusters."""
    own = [x[cluster == c] for c in set(cluster.tolist())]
    return sum(np.square(rows - rows.mean(axis=0)).sum() for rows in own)


@st.composite
def problems(draw):
    """Few rows on a small grid, so that many are equal or as far from two centers."""
    n, dim = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    places = st.lists(st.integers(-2, 2), min_size=n * dim, max_size=n * dim)
    x = np.array(draw(places), dtype=np.float64).reshape(n, dim)
    label = np.array(draw(st.lists(st.integers(UNLABELED, 3), min_size=n, max_size=n)))
    least = max(1, label.max() + 1)
    return x, label, draw(st.integers(least, least + 5)), draw(st.integers(0, 3))


@given(problems())
def test_whatever_the_rows_the_clustering_is_what_it_says(problem):
    x, label, k, seed = problem
    clustering = constrained_kmeans(x, label, k, seed=seed, n_init=2)
    cluster, unlabeled = clustering.cluster, label == UNLABELED
    assert (cluster[~unlabeled] == label[~unlabeled]).all()
    assert set(cluster) <= set(range(k))
    assert clustering.centers.shape == (k, x.shape[1])
    assert np.isfinite(clustering.centers).all()
    for c in set(cluster.tolist()):
        np.testing.assert_allclose(clustering.centers[c], x[cluster == c].mean(axis=0), atol=1e-12)
    assert clustering.inertia == pytest.approx(within(x, cluster), abs=1e-9)
    distance = squared(x, clustering.centers)
    own = distance[np.arange(len(x)), cluster]
    assert (own <= distance.min(axis=1) + 1e-9)[unlabeled].all()
    if set(cluster) < set(range(k)):  # nobody was left to start an empty cluster
        assert own[unlabeled].max(initial=0) < 1e-9


def best_of_all(x, label, k):
    free = np.flatnonzero(label == UNLABELED)
    cluster, least = label.copy(), np.inf
    for choice in itertools.product(range(k), repeat=len(free)):
        cluster[free] = choice
        least = min(least, within(x, cluster))
    return least


def test_of_all_partitions_of_a_few_rows_none_is_better():
    """Where what starts at the means of labeled rows can get there."""
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(9, 2))
        x[:2] = [[3, 0], [3, 1]]
        label = np.array([0, 0] + [UNLABELED] * 7)
        clustering = constrained_kmeans(x, label, 3, seed=0, n_init=30)
        assert clustering.inertia == pytest.approx(best_of_all(x, label, 3))


def test_without_free_clusters_rows_go_to_the_nearest_class_mean_until_none_moves():
    x, truth = blobs(4, each=40, spread=4.0)
    label = np.where(np.arange(160) % 5 == 0, truth, UNLABELED)
    cluster, before = label.copy(), None
    while before is None or (before != cluster).any():
        before = cluster.copy()
        centers = np.array([x[before == c].mean(axis=0) for c in range(4)])
        cluster = np.where(label == UNLABELED, squared(x, centers).argmin(axis=1), label)
    assert (cluster != truth).any()
    clustering = constrained_kmeans(x, label, 4, seed=0)
    assert clustering.cluster.tolist() == cluster.tolist()
    np.testing.assert_allclose(clustering.centers, centers)


def test_without_labels_it_is_as_good_as_scikit_learn():
    for spread in (0.5, 3.0):
        x, _ = blobs(12, each=30, spread=spread)
        clustering = constrained_kmeans(x, np.full(len(x), UNLABELED), 12, seed=0)
        expected = KMeans(12, n_init=10, random_state=0).fit(x).inertia_
        assert clustering.inertia <= expected * 1.005


def test_an_empty_cluster_starts_anew_at_the_row_farthest_from_its_center():
    x = np.array([[0.0], [1.0], [9.0], [20.0]])
    rows = _Rows(x, np.array([UNLABELED, UNLABELED, UNLABELED, 1]), 3)
    clustering = _descend(rows, np.array([[0.0], [500.0], [900.0]]), max_iter=1)
    assert clustering.cluster.tolist() == [0, 0, 2, 1]  # a labeled row is farther, but stays
    assert clustering.centers.tolist() == [[0.5], [20.0], [9.0]]
    rows = _Rows(np.array([[0.0], [1.0], [7.0], [100.0]]), np.full(4, UNLABELED), 3)
    clustering = _descend(rows, np.array([[0.0], [500.0], [900.0]]), max_iter=50)
    assert clustering.cluster.tolist() == [0, 0, 2, 1]
    assert clustering.inertia == 0.5
    rows = _Rows(np.array([[0.0], [0.0], [4.0]]), np.array([UNLABELED, UNLABELED, 1]), 3)
    clustering = _descend(rows, np.array([[1.0], [4.0], [7.0]]), max_iter=50)
    assert clustering.cluster.tolist() == [0, 0, 1]  # there was no row for the last
    assert clustering.centers.tolist() == [[0.0], [4.0], [7.0]]


def test_a_class_without_rows_is_a_free_cluster_and_equal_rows_stay_together():
    x, truth = blobs(3, each=20)
    label = np.where(truth == 1, UNLABELED, truth)
    assert constrained_kmeans(x, label, 3, seed=0).cluster.tolist() == truth.tolist()
    for value, labeled in ((0.0, 3), (0.1, 0), (0.1, 40), (1e6, 3)):
        label = np.where(np.arange(40) < labeled, np.arange(40) % 3, UNLABELED)
        clustering = constrained_kmeans(np.full((40, 5), value), label, 7, seed=0)
        np.testing.assert_allclose(clustering.centers, value)
        assert len(set(clustering.cluster[label == UNLABELED])) == (labeled < 40)
        assert clustering.inertia == pytest.approx(0, abs=1e-6)


def test_the_start_with_the_least_inertia_wins_and_the_seed_decides_where_it_is():
    x, label = blobs(1, each=200)[0], np.full(200, UNLABELED)
    some = [constrained_kmeans(x, label, 15, seed=3, n_init=s).inertia for s in (1, 2, 4, 8, 16)]
    assert some == sorted(some, reverse=True)
    assert some[-1] < some[0]
    first, again, other = (constrained_kmeans(x, label, 15, seed=s, n_init=1) for s in (3, 3, 1))
    assert first.cluster.tolist() == again.cluster.tolist()
    assert some[0] == first.inertia == again.inertia != other.inertia


def test_precision_and_what_all_rows_share_change_no_cluster():
    x, truth = blobs(6, each=30)
    label = np.where((truth < 2) & (np.arange(180) % 3 == 0), truth, UNLABELED)
    plain = constrained_kmeans(x, label, 6, seed=0)
    for dtype in (np.float16, np.float32, np.float64):
        narrow = constrained_kmeans(x.astype(dtype), label, 6, seed=0)
        assert narrow.cluster.tolist() == plain.cluster.tolist()
    far = constrained_kmeans((x + 3e4).astype(np.float32), label, 6, seed=0)
    assert far.cluster.tolist() == plain.cluster.tolist()
    np.testing.assert_allclose(far.centers, plain.centers + 3e4, rtol=1e-6)


def test_what_cannot_be_clustered_is_said_in_a_line():
    for rows, k, message in (
        (0, 3, "no rows to cluster; k-means needs at least one"),
        (4, 2, "2 clusters for 3 labeled classes; ask for 3 or more"),
        (1, 0, "0 clusters for 0 labeled classes; ask for 1 or more"),
    ):
        label = np.array([UNLABELED, 0, 2, 1])[:rows]
        with pytest.raises(DataError, match=f"^{message}$"):
            constrained_kmeans(np.zeros((rows, 2)), label, k, seed=0)


def test_compact_features_have_length_one_and_their_principal_components():
    for rows in (40, 90, 110):
        x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(0))
        narrow, wide = compact(x[:, :64]), compact(7 * x)
        np.testing.assert_allclose(narrow, normalize(x[:, :64].numpy()), atol=1e-6)
        expected = PCA(min(rows, 64)).fit_transform(normalize(x.numpy()))
        assert wide.shape == (rows, min(rows, 64))
        np.testing.assert_allclose(squared(wide, wide), squared(expected, expected), atol=1e-5)
