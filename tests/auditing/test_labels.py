"""Labels that contradict neighbors or duplicates."""

import numpy as np
import pytest
import torch

from nearkin.auditing import labels as module
from nearkin.auditing.labels import Voters, _best_margin, _doubtful, check_labels
from nearkin.evaluation.embeddings import Embeddings
from nearkin.metrics.neighbors import nearest, tally


def classes(n=300, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    x = 2 * np.eye(3, 10)[labels] + 0.6 * rng.normal(size=(n, 10))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels, rng


def test_wrong_labels_are_found_with_the_class_that_is_right():
    x, truth, rng = classes()
    wrong = rng.random(len(x)) < 0.08
    labels = np.where(wrong, (truth + 1) % 3, truth)
    every = np.arange(len(x))
    check = check_labels(Embeddings(x, labels, classes=("a", "b", "c")), every, every, 0)
    doubted = {doubt.row: doubt.other for doubt in check.doubts}
    assert len(doubted.keys() & set(np.flatnonzero(wrong))) >= 0.7 * wrong.sum()
    assert np.mean([wrong[row] for row in doubted]) >= 0.9
    assert all(doubted[row] == truth[row] for row in doubted if wrong[row])
    assert check.recall >= 0.6
    # Labels that are wrong already count as right: of these and the planted, about 5 of 13.
    assert 0.2 <= check.precision[0] <= 0.7


def test_confident_is_who_has_the_votes_that_images_of_that_label_usually_have():
    rng = np.random.default_rng(0)
    votes, labels = rng.dirichlet(np.ones(4), 50), rng.integers(0, 4, 50)
    usual = [votes[labels == c, c].mean() for c in range(4)]
    best, margin = _doubtful(votes.__getitem__, labels, 4)
    for row in range(50):
        sure = [c for c in range(4) if votes[row, c] >= usual[c]]
        winner = max(sure, key=lambda c: votes[row, c], default=labels[row])
        expected = votes[row, winner] - votes[row, labels[row]] if winner != labels[row] else 0
        assert np.isclose(margin[row], max(0, expected))
        assert margin[row] == 0 or best[row] == winner


def test_votes_for_many_classes_are_counted_some_images_at_a_time(monkeypatch):
    x, labels, rng = classes()
    labels = np.where(rng.random(300) < 0.08, (labels + 1) % 3, labels)
    of, every, sizes = Embeddings(x, labels, classes=("a", "b", "c")), np.arange(300), list[int]()
    expected = check_labels(of, every, every, 0)

    def noting(*given, **named):
        scores = tally(*given, **named)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(module, "tally", noting)
    monkeypatch.setattr(module, "TALLIED", 100)
    assert check_labels(of, every, every, 0) == expected
    assert 0 < max(sizes) <= 100


def test_the_margin_is_that_of_the_best_f1():
    wrong = np.array([True, True, False, True, False, False])
    score = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.0])
    assert _best_margin(wrong, score) == 0.6  # F1 6/7; at .8 it is 4/5


@pytest.mark.parametrize("voting", [np.arange(60), np.arange(0, 60, 2)])
def test_images_of_one_group_do_not_vote_for_each_other(voting):
    x, labels, _ = classes(60)
    groups = np.arange(60) // 6 * 6
    votes = Voters.of(torch.from_numpy(x), groups, voting).votes(labels, 3)
    _, index = nearest(torch.from_numpy(x), torch.from_numpy(x), 59, exclude_self=True)
    similarity = x @ x.T
    for row in range(60):
        others = [int(n) for n in index[row] if groups[n] != groups[row] and n in voting][:20]
        weights = np.exp(similarity[row, others] / 0.07)
        share = [weights[labels[others] == c].sum() / weights.sum() for c in range(3)]
        assert np.allclose(votes[row], share, atol=1e-4)


def test_duplicates_with_two_labels_are_named_together():
    x, labels, _ = classes(90)
    labels, duplicates = labels.copy(), np.arange(90)
    labels[1], duplicates[1] = 2, 0
    check = check_labels(Embeddings(x, labels, classes=("a", "b", "c")), duplicates, duplicates, 0)
    pairs = {d.row: (d.duplicate, d.other) for d in check.doubts if d.duplicate >= 0}
    assert pairs == {0: (1, 2), 1: (0, 0)}
    one = Embeddings(x, np.zeros(90, np.int64), classes=("a",))
    assert check_labels(one, duplicates, duplicates, 0) is None
