"""Rows that stand for others: against brute force, and by what their papers promise."""

import numpy as np
import torch

from nearkin.metrics import selection
from nearkin.metrics.selection import keep_one, least_certain, typical
from nearkin.objectives import unit


def one_by_one(x, threshold):
    """What `keep_one` promises, row by row, in float64."""
    cosine = (x.double() @ x.double().T).numpy()
    kept = []
    place = np.arange(len(x))
    for row in range(len(x)):
        copies = [one for one in kept if cosine[row, one] >= threshold]
        place[row] = min(copies, default=row)
        kept += [row] * (not copies)
    return place, cosine[np.arange(len(x)), place]


def test_copies_are_those_of_the_first_kept_row_in_blocks_of_any_size(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows = unit(torch.randn(60, 3, generator=generator)).repeat(2, 1)
    x = rows[torch.randperm(120, generator=generator)]
    cases = (1, 0.9), (25, 0.3), (25, 1.0), (400, -0.5), (400, 0.9), (2**22, 0.3)
    for held, threshold in cases:
        monkeypatch.setattr(selection, "held_at_once", lambda _, held=held: held)
        place, cosine = keep_one(x, threshold)
        wanted, wanted_cosine = one_by_one(x, threshold - 1e-6)
        assert place.tolist() == wanted.tolist(), (held, threshold)
        np.testing.assert_allclose(cosine, wanted_cosine.clip(max=1), atol=1e-6)


def test_a_chain_is_not_one_cluster_and_no_two_kept_rows_are_copies():
    angle = torch.linspace(0, 6, 400)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    place, cosine = keep_one(x, threshold=0.99)
    kept = np.unique(place)
    assert (cosine >= 0.99 - 1e-6).all()  # a connected component would hold the whole circle
    assert (np.triu((x[kept] @ x[kept].T).numpy(), 1) < 0.99).all()
    assert len(kept) > 15


def clusters(sizes, seed=0):
    """Rows in clusters around the axes, the first row of each at its center."""
    rng = np.random.default_rng(seed)
    label = np.repeat(np.arange(len(sizes)), sizes)
    x = np.eye(len(sizes))[label] + 0.1 * rng.standard_normal((len(label), len(sizes)))
    starts = np.cumsum([0, *sizes[:-1]])
    x[starts] = np.eye(len(sizes))
    return torch.tensor(x, dtype=torch.float32), label, starts


def test_typical_rows_are_of_each_cluster_the_largest_first_and_the_least_certain_come_in_turn():
    x, label, starts = clusters([40, 10, 30, 20])
    order = typical(x, np.zeros(0, np.int64), 4, seed=0)
    assert label[order[:4]].tolist() == [0, 2, 3, 1]
    assert sorted(order.tolist()) == list(range(100))
    from_middle = torch.linalg.vector_norm(unit(x) - unit(x[starts])[label], dim=1)
    middle = from_middle[order[:4].copy()].numpy()
    usual = np.array([from_middle[label == of].median().item() for of in label[order[:4]]])
    assert (middle < usual).all()
    loose = torch.tensor([[1, 0.9], [1, 0.8], [1, 1.3], [1, 1.0], [1, 0.2], [1, -0.9]])
    distance = torch.cdist(unit(loose), unit(loose)).sum(dim=1)  # of one cluster, the middle
    assert typical(loose, np.zeros(0, np.int64), 1, seed=0)[0] == distance.argmin()
    labeled = np.flatnonzero(label == 0)[:1]  # clusters with labels come last
    order = typical(x, labeled, 3, seed=0)
    assert label[order[:3]].tolist() == [2, 3, 1]
    assert not np.isin(labeled, order).any()
    margin = np.array([0.1, 0.2, 0.3, 0.05, 0.9])
    assert least_certain(margin, np.array([0, 0, 0, 1, 2])).tolist() == [3, 0, 4, 1, 2]


def test_typical_rows_are_each_there_once_of_equal_ones_too_and_the_same_again():
    x, _, _ = clusters([20, 20, 20])
    labeled = np.array([0, 5, 59])
    order, again = (typical(x, labeled, 10, seed=3) for _ in range(2))
    assert order.tolist() == again.tolist()
    assert sorted(order.tolist()) == sorted({*range(60)} - {*labeled.tolist()})
    every = typical(torch.ones(7, 2), np.zeros(0, np.int64), 7, seed=0)
    assert sorted(every.tolist()) == list(range(7))


def test_of_a_single_row_that_one_is_typical():
    one = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    assert typical(one, np.zeros(0, np.int64), 1, seed=0).tolist() == [0]
