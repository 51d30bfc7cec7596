"""The images that a classifier learned from tell neighbors, and what is like none of them."""

import numpy as np
import pytest
import torch
from discoveries import unit
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score

from nearkin.classifier import reference as module
from nearkin.classifier.reference import neighbors, reference_of


def pixels(classes, rows=slice(0, 40)):
    """Pixels of digits as features, and their classes."""
    x, y = load_digits(return_X_y=True)
    chosen = np.concatenate([np.flatnonzero(y == number)[rows] for number in classes])
    return torch.from_numpy(x[chosen].astype(np.float32)), y[chosen]


def of(features, cluster, num_classes, labeled=True):
    return reference_of(features, cluster, np.full(len(cluster), labeled), num_classes)


def roots(x):
    """Roots of features of digits, which are not negative, as unit vectors."""
    return unit(np.sqrt(x / np.linalg.norm(x, axis=1, keepdims=True)))


def test_the_distance_is_what_components_of_labeled_images_leave():
    """An outlier is farther than few of held-out classes, or than few of all from the tenth."""
    features, cluster = pixels(range(5))
    labeled = np.arange(len(cluster)) % 40 < 30
    reference = reference_of(features, cluster, labeled, 5)
    x, y = roots(features.double().numpy()), cluster[labeled]

    def left(rows, learned):
        pca = PCA(0.99, svd_solver="full").fit(learned)
        return np.linalg.norm(rows - pca.inverse_transform(pca.transform(rows)), axis=1)

    own = x[labeled]
    novel = np.concatenate([left(own[y == n], own[y != n]) for n in range(5)])
    assert reference.max_left == pytest.approx(np.quantile(novel, 0.95), abs=1e-4)
    rows = unit(features.double().numpy())
    cosine = rows @ rows.T
    np.fill_diagonal(cosine, -np.inf)
    nearest = 1 - np.sort(cosine, axis=1)[:, -reference.k]
    assert (reference.k, reference.max_neighbor) == (10, pytest.approx(np.quantile(nearest, 0.99)))
    distance = left(x, x[labeled])
    np.testing.assert_allclose(reference.distance(features), distance, atol=1e-4)
    outliers = (distance > reference.max_left) | (nearest > reference.max_neighbor)
    assert (reference.outliers(features) == outliers).mean() > 0.98  # as numbers are rounded
    assert outliers.any()
    for per_class, k in ((8, 7), (1, 1)):  # the smaller half of classes have no tenth
        assert of(*pixels(range(4), slice(0, per_class)), 4).k == k


def test_images_without_a_label_do_not_hide_outliers_among_them():
    """However many there are, and however alike: blank ones are."""
    features, cluster = pixels(range(8), slice(0, 60))
    blank = torch.full((200, 64), 7.0)
    learned = torch.cat([features, blank])
    labeled = np.r_[(cluster < 5) & (np.arange(len(cluster)) % 2 == 0), np.zeros(200, bool)]
    own = np.r_[cluster, np.full(200, 7)]
    reference = reference_of(learned, own, labeled, 8)
    flagged = reference.outliers(learned)
    assert flagged[-200:].all()
    assert flagged[:-200].mean() < 0.1


def test_new_images_of_the_classes_are_rarely_outliers_and_others_nearly_always():
    features, cluster = pixels(range(1, 10), slice(0, 120))
    reference = of(features, cluster, 10)

    def rate(x):
        return reference.outliers(x).mean()

    genuine, _ = pixels(range(1, 10), slice(120, None))
    transposed = genuine.reshape(-1, 8, 8).transpose(1, 2).reshape(genuine.shape)
    assert rate(genuine) < 0.1
    assert rate(transposed) > 0.9
    distance = reference.distance(torch.cat([genuine, transposed]))
    assert roc_auc_score(np.repeat([False, True], len(genuine)), distance) > 0.95
    features, cluster = pixels(range(2), slice(0, 9))  # which are too few to say anything
    few = of(features, cluster, 2)
    assert not few.outliers(-features).any()


def test_an_image_is_not_its_own_neighbor_wherever_it_comes_from():
    features, _ = pixels(range(3), slice(0, 5))
    among = neighbors(features, features, 4)
    assert among.own.tolist() == list(range(15))
    assert not (among.rows == among.own[:, None]).any()
    alone = neighbors(features, 2 * features[[7]], 4)
    assert alone.own.tolist() == [7]
    assert alone.rows[0].tolist() == among.rows[7].tolist()
    new = neighbors(features, torch.ones(1, 64), 4)
    assert new.own.tolist() == [-1]
    assert new.rows.shape == (1, 4)
    assert neighbors(features[:1], features[:1], 4).rows.shape == (1, 0)
    assert neighbors(features, features[:0], 4).rows.shape == (0, 4)


def test_of_many_images_as_many_of_each_class_are_kept_and_all_sizes(monkeypatch):
    monkeypatch.setattr(module, "BANK", 20)
    cluster = np.repeat([0, 1, 2], [3, 60, 40])
    labeled = np.arange(103) % 2 == 0
    features = torch.randn(103, 4, generator=torch.Generator().manual_seed(0))
    reference = reference_of(features, cluster, labeled, 4)
    kept = {(c, own): 0 for c in range(3) for own in (False, True)}
    for c, own in zip(reference.cluster.tolist(), reference.labeled.tolist(), strict=True):
        kept[c, own] += 1
    assert kept == {
        (0, True): 2, (1, True): 4, (2, True): 4, (0, False): 1, (1, False): 5, (2, False): 4,
    }  # fmt: skip
    assert reference.sizes.tolist() == [1, 30, 20, 0]
