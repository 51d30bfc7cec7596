"""Retrieval and few-shot: against scikit-learn, plain restatements and facts known in advance."""

import numpy as np
import pytest
import torch
from builders import normal
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestCentroid

from nearkin.metrics import neighbors
from nearkin.metrics.fewshot import centered, draw_shots, predict_few_shot
from nearkin.metrics.retrieval import retrieve
from nearkin.objectives import unit


def labels(n, classes, seed=0):
    return np.random.default_rng(seed).integers(classes, size=n)


def test_average_precision_is_that_of_scikit_learn(monkeypatch):
    bank, queries, y, truth = normal(60, 4), normal(9, 4, seed=1), labels(60, 3), labels(9, 3)
    cosine = (unit(queries) @ unit(bank).T).numpy()
    expected = [average_precision_score(y == t, row) for t, row in zip(truth, cosine)]
    for similarities in (1, 10**6):  # row by row, or as a whole
        monkeypatch.setitem(neighbors.SIMILARITIES, "cpu", similarities)
        result = retrieve(bank, y, queries, truth)
        assert result.rows.tolist() == list(range(9))
        assert result.average_precision == pytest.approx(expected, abs=1e-6)
        assert result.first_correct.tolist() == (y[cosine.argmax(axis=1)] == truth).tolist()


def test_precision_at_r_stops_at_the_number_of_relevant_images():
    bank, queries, y, truth = normal(40, 3), normal(12, 3, seed=1), labels(40, 4), labels(12, 4)
    order = (unit(queries) @ unit(bank).T).numpy().argsort(axis=1)[:, ::-1]
    expected = []
    for row, own in zip(order, truth):
        relevant = (y[row] == own)[: (y == own).sum()]
        precision = relevant.cumsum() / np.arange(1, len(relevant) + 1)
        expected.append((precision * relevant).sum() / len(relevant))
    result = retrieve(bank, y, queries, truth)
    assert result.average_precision_at_r == pytest.approx(expected)
    assert (result.average_precision_at_r <= result.average_precision + 1e-12).all()


def test_ties_do_not_depend_on_the_order_and_queries_without_a_relevant_image_are_not_scored():
    bank = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    y, query = np.array([0, 1, 1, 1]), torch.tensor([[1.0, 0.1]])
    values = [
        retrieve(bank[order], y[order], query, np.array([0])).average_precision[0]
        for order in (np.array([0, 1, 2, 3]), np.array([3, 2, 1, 0]))
    ]
    assert values == pytest.approx([1 / 3, 1 / 3])  # the last of three equals
    whole = average_precision_score(y == 0, [1, 1, 0, 1])
    assert values[0] == pytest.approx(whole)
    result = retrieve(normal(5, 2), np.zeros(5, int), normal(3, 2), np.array([0, 7, 0]))
    assert result.rows.tolist() == [0, 2]
    empty = retrieve(normal(5, 2), np.zeros(5, int), normal(1, 2), np.array([7]))
    assert len(empty.rows) == len(empty.average_precision) == 0


def test_images_of_the_own_group_are_not_ranked():
    bank, y, groups = normal(30, 3), labels(30, 3), np.arange(30) // 2
    queries, truth, own = bank[:8] + 0.01, y[:8], groups[:8]
    result = retrieve(bank, y, queries, truth, bank_groups=groups, query_groups=own)
    for place, row in enumerate(result.rows):
        others = torch.from_numpy(np.flatnonzero(groups != own[row]))
        alone = retrieve(bank[others], y[others], queries[row][None], truth[row][None])
        for name in ("average_precision", "average_precision_at_r"):
            expected = pytest.approx(getattr(alone, name)[0])
            assert getattr(result, name)[place] == expected


def test_so_many_images_of_each_class_are_drawn_equally_often_and_more_contain_fewer():
    y = np.repeat([0, 1, 2], [20, 3, 7])
    few, more = (draw_shots(y, shots, 0, 4) for shots in (2, 5))
    assert np.bincount(y[few]).tolist() == [2, 2, 2]
    assert np.bincount(y[more]).tolist() == [5, 3, 5]  # a class gives what it has
    assert set(few) < set(more)
    assert draw_shots(y, 2, 0, 4).tolist() == few.tolist()
    others = {tuple(draw_shots(y, 2, seed, draw)) for seed in range(3) for draw in range(3)}
    assert len(others) == 9
    y = np.repeat([0, 1], [10, 30])
    counts = np.zeros(40)
    for draw in range(600):
        counts[draw_shots(y, 3, 7, draw)] += 1
    assert counts[:10] / 600 == pytest.approx(0.3, abs=0.08)
    assert counts[10:] / 600 == pytest.approx(0.1, abs=0.05)


def test_the_classifiers_are_those_of_scikit_learn():
    y = labels(60, 4)
    x = unit(3 * normal(4, 8, seed=5)[torch.from_numpy(y)] + normal(60, 8))
    queries, target = unit(normal(200, 8, seed=1)), torch.from_numpy(y)
    predicted = predict_few_shot(x, target, 4, queries)
    expected = NearestCentroid().fit(x, y).predict(queries)
    assert predicted["class mean"].tolist() == expected.tolist()
    reference = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(x, y).predict(queries)
    assert (predicted["logistic"].numpy() == reference).mean() > 0.98


def test_features_are_unit_vectors_around_the_mean():
    x = normal(30, 5) + 4
    z = centered(x, x.mean(dim=0))
    assert torch.allclose(z.norm(dim=1), torch.ones(30))
    assert torch.allclose(centered(2 * x, 2 * x.mean(dim=0)), z, atol=1e-6)
