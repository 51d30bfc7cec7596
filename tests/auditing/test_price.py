"""What accuracy owes to leaks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearkin.auditing.data import Audited
from nearkin.auditing.price import price
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import linear_probe, predict

CPU = torch.device("cpu")


def split(seed, n=600, leaked=60, dim=8):
    """Two classes that hardly differ; some test images are training images, with their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    x = rng.normal(size=(n, dim)) + 0.5 * np.eye(2, dim)[labels]
    is_test = np.arange(n) >= n * 2 // 3
    groups = np.arange(n)
    rows, copies = np.arange(leaked), np.flatnonzero(is_test)[:leaked]
    x[copies], labels[copies], groups[copies] = x[rows], labels[rows], groups[rows]
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    splits = np.where(is_test, "test", "train")
    audited = Audited(Embeddings(x, labels, classes=("a", "b"), splits=splits))
    cosine = (x[is_test] @ x[~is_test].T).max(axis=1)
    return audited, groups, cosine, is_test


def test_it_is_the_accuracy_without_linked_training_images_on_the_same_test_images():
    audited, groups, cosine, is_test = split(0)
    found = price(audited, groups, cosine, seed=0, device=CPU)
    x, labels = map(torch.from_numpy, (audited.embeddings.vectors, audited.embeddings.labels))
    rest = ~is_test & ~np.isin(groups, groups[is_test])
    truth = labels[is_test].numpy()
    right = [
        predict(x[bank], labels[bank].numpy(), x[is_test]) == truth for bank in (~is_test, rest)
    ]
    knn = found.owed[0]
    assert found.linked == 60
    assert (knn.first, knn.second) == (right[0].mean(), right[1].mean())
    assert 0 < knn.low < knn.value  # copies vote for their own label
    assert found.every[0].value == knn.first
    clean = ~np.isin(groups[is_test], groups[~is_test])
    assert found.clean[0].value == pytest.approx(right[0][clean].mean())
    assert sum(point.n for point in found.curve) == is_test.sum()
    nearest = found.curve[0]
    rows = np.argsort(-cosine, kind="stable")[: nearest.n]
    assert nearest.distance == pytest.approx(1 - cosine[rows].mean())
    assert nearest.values[0] == pytest.approx(right[0][rows].mean())


def test_without_leaks_there_is_none_and_without_others_nothing_to_learn_from():
    audited, _, cosine, _ = split(0, leaked=0)
    found = price(audited, np.arange(len(audited)), cosine, seed=0, device=CPU)
    assert (found.linked, found.owed, found.clean) == (0, (), ())
    with pytest.raises(UsageError, match="400 of 400 training images share a group"):
        price(audited, np.zeros(len(audited), np.int64), cosine, seed=0, device=CPU)
    unlabeled = Audited(audited.embeddings.unlabeled())
    assert price(unlabeled, np.arange(len(audited)), cosine, seed=0, device=CPU) is None


def test_where_each_test_image_shares_a_group_nothing_is_said_of_those_that_do_not():
    audited, _, cosine, is_test = split(0, leaked=0)
    groups = np.where(is_test, 0, np.arange(len(audited)))  # that of the first training image
    found = price(audited, groups, cosine, seed=0, device=CPU)
    assert (found.linked, found.clean, len(found.owed)) == (1, (), 2)
    assert [row[2] for row in found.rows()] == ["-", "-"]
    labels = np.where(is_test & (np.arange(600) > 500), -1, audited.embeddings.labels)
    some = Audited(replace(audited.embeddings, labels=labels))
    groups = np.where(is_test & (labels >= 0), 0, np.arange(len(audited)))
    assert price(some, groups, cosine, seed=0, device=CPU).clean == ()


def test_of_many_training_images_the_linear_probe_learns_from_one_draw(monkeypatch):
    monkeypatch.setattr("nearkin.auditing.price.FITTED", 200)
    audited, groups, cosine, is_test = split(0)
    found = price(audited, groups, cosine, seed=3, device=CPU)
    knn, probe = found.every
    assert (knn.protocol["training images"], probe.protocol["training images"]) == (400, 200)
    drawn = np.random.default_rng(3).permutation(400) < 200
    train, test = (audited.embeddings.subset(np.flatnonzero(rows)) for rows in (~is_test, is_test))
    for known, accuracy in ((groups[~is_test] >= 0, "first"), (np.arange(400) >= 60, "second")):
        fitted = train.subset(np.flatnonzero(drawn & known))
        assert getattr(found.owed[1], accuracy) == linear_probe(fitted, test, seed=3).value
