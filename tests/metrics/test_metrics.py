"""The measures, against plain restatements of their definitions and facts known in advance."""

import itertools
import math

import numpy as np
import pytest
import torch
from builders import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from small import Observed

from nearkin.errors import DataError
from nearkin.metrics import neighbors
from nearkin.metrics.clusters import (
    adjusted_rand_index,
    contingency,
    match,
    normalized_mutual_information,
    right,
)
from nearkin.metrics.geometry import (
    alignment,
    effective_rank,
    feature_std,
    mean_cosine,
    uniformity,
)
from nearkin.metrics.neighbors import nearest, neighbor_agreement, predict_without, tally
from nearkin.objectives import unit


def cosine(x, y):
    dot, lengths = sum(a * b for a, b in zip(x, y)), math.hypot(*x) * math.hypot(*y)
    return dot / lengths if lengths else 0.0


def plain_nearest(bank, query, k, leave_out=None):
    order = sorted(
        (-cosine(row, query), i) for i, row in enumerate(bank.tolist()) if i != leave_out
    )
    return [i for _, i in order[:k]]


def vote(bank, labels, queries, *, k, temperature, num_classes, exclude_self=False):
    """The scores of the classes, by the nearest of the bank."""
    similarity, index = nearest(bank, queries, k, exclude_self=exclude_self)
    voters = torch.from_numpy(labels)[index]
    return tally(similarity, voters, temperature=temperature, num_classes=num_classes)


def plain_vote(bank, labels, query, k, temperature, num_classes):
    scores = [0.0] * num_classes
    for i in plain_nearest(bank, query, k):
        scores[labels[i]] += math.exp(cosine(bank[i].tolist(), query) / temperature)
    return [score / sum(scores) for score in scores]


def test_neighbors_are_those_of_a_plain_search(monkeypatch):
    monkeypatch.setitem(neighbors.SIMILARITIES, "cpu", 100)  # several chunks
    bank, queries = normal(30, 5), normal(11, 5, seed=1)
    for k in (1, 3, 40):
        similarity, index = nearest(bank, queries, k)
        assert index.tolist() == [plain_nearest(bank, q, k) for q in queries.tolist()]
        for row, q, ids in zip(similarity.tolist(), queries.tolist(), index.tolist()):
            assert row == pytest.approx([cosine(bank[i].tolist(), q) for i in ids], abs=1e-6)


def test_no_row_is_its_own_neighbor_whatever_the_chunks(monkeypatch):
    bank = normal(17, 4)
    expected = [plain_nearest(bank, q, 5, i) for i, q in enumerate(bank.tolist())]
    for similarities in (1, 17, 100, 10**6):
        monkeypatch.setitem(neighbors.SIMILARITIES, "cpu", similarities)
        _, index = nearest(bank, bank, 5, exclude_self=True)
        assert index.tolist() == expected
    with pytest.raises(DataError, match="no image to compare with"):
        nearest(normal(1, 3), normal(1, 3), 5, exclude_self=True)


def test_equal_neighbors_come_in_the_order_of_the_bank_in_rows_of_any_length():
    bank = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]).repeat(500, 1)
    _, index = nearest(bank, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 7)
    assert index.tolist() == [[1, 2, 4, 5, 7, 8, 10], [0, 3, 6, 9, 12, 15, 18]]
    rows = [(777, 1), (1000, 3), (4999, 19), (700, 20), (9, 9)]
    for (bank, k), values in itertools.product(rows, (1, 2, 10, 10**6)):
        generator = torch.Generator().manual_seed(bank)
        similarity = torch.randint(values, (9, bank), generator=generator).float()
        similarity[0] = -torch.inf
        similarity[1, :-2] = -torch.inf  # after all whole runs
        expected = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        result, index = neighbors._largest(similarity, k)
        assert torch.equal(index, expected), (bank, k, values)
        assert torch.equal(result, similarity.gather(1, expected))


def test_one_near_neighbor_against_two_farther_ones_depends_on_the_temperature():
    def at(c, sign=1):
        return [c, sign * math.sqrt(1 - c * c)]

    bank, query = torch.tensor([at(0.9), at(0.85), at(0.85, -1)]), torch.tensor([[1.0, 0.0]])
    for t, ratio in ((0.07, 1.0214), (0.1, 0.8244)):
        scores = vote(bank, np.array([0, 1, 1]), query, k=3, temperature=t, num_classes=2)[0]
        assert float(scores[0] / scores[1]) == pytest.approx(ratio, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 12),
    temperature=st.sampled_from([0.01, 0.07, 0.5, 10.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_votes_are_those_of_a_plain_count_whatever_the_length_of_the_features(
    seed, k, temperature, scale
):
    bank, queries = normal(10, 3, seed=seed), normal(4, 3, seed=seed + 1)
    labels, how = np.random.default_rng(seed).integers(3, size=10), dict(k=k, num_classes=3)
    scores = vote(bank * scale, labels, queries / scale, temperature=temperature, **how)
    for row, query in zip(scores.tolist(), queries.tolist()):
        expected = plain_vote(bank, labels, query, k, temperature, 3)
        assert row == pytest.approx(expected, abs=1e-4)
    coldest = vote(bank, labels, queries, temperature=1e-6, **how)
    assert torch.allclose(coldest.sum(dim=1), torch.ones(4))  # finite


def test_votes_without_a_fold_are_those_of_the_nearest_that_are_left():
    """Row by row, among the `k + k // 2 + 1` nearest; the last class is in one fold alone."""
    bank, queries, k = normal(60, 4, seed=3), normal(25, 4, seed=4), 5
    labels, fold = np.arange(60) % 7, np.arange(60) // 7 % 3
    labels[fold == 1] = np.where(labels[fold == 1] == 6, 7, labels[fold == 1])
    predicted = predict_without(bank, labels, queries, fold, k=k, temperature=0.2)
    assert predicted.shape == (3, 25)
    assert (predicted == 7).any()
    cosine = unit(queries.double()) @ unit(bank.double()).T
    for left_out, query in np.ndindex(3, 25):
        near = cosine[query].argsort(descending=True)[: k + k // 2 + 1].tolist()
        voters = [row for row in near if fold[row] != left_out][:k]
        score = [0.0] * 8
        for row in voters:
            score[labels[row]] += math.exp(float(cosine[query, row]) / 0.2)
        assert int(predicted[left_out, query]) == score.index(max(score))


def test_of_many_classes_the_votes_without_a_fold_are_counted_some_queries_at_a_time(monkeypatch):
    bank, queries, labels = normal(60, 4, seed=3), normal(25, 4, seed=4), np.arange(60) % 50
    how = {"fold": np.arange(60) % 3, "k": 5, "temperature": 0.2}
    expected, sizes = predict_without(bank, labels, queries, **how), list[int]()

    def note(_operation, _given, _named, result):
        sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)

    monkeypatch.setitem(neighbors.SIMILARITIES, "cpu", 400)
    with Observed(note):
        assert torch.equal(predict_without(bank, labels, queries, **how), expected)
    assert 0 < max(sizes) <= 400  # of all queries, the votes would be 1,250


def test_without_a_fold_that_has_all_neighbors_of_a_query_the_whole_bank_votes():
    bank = torch.eye(2).repeat_interleave(6, dim=0) + 0.01 * normal(12, 2)
    labels, fold = np.repeat([1, 0], 6), np.repeat([0, 1], 6)
    predicted = predict_without(bank, labels, torch.eye(2), fold, k=2, temperature=0.1)
    assert predicted.tolist() == [[1, 0], [1, 0]]


def test_agreement_is_the_mean_overlap_of_plain_neighbor_sets():
    a, b = normal(20, 3), normal(20, 3) + 0.5 * normal(20, 3, seed=1)
    overlaps = [
        len(set(plain_nearest(a, p, 4, i)) & set(plain_nearest(b, q, 4, i))) / 4
        for i, (p, q) in enumerate(zip(a.tolist(), b.tolist()))
    ]
    assert 0.2 < sum(overlaps) / 20 < 0.9
    assert float(neighbor_agreement(a, b, 4)) == pytest.approx(sum(overlaps) / 20)
    # A rotated view agrees wholly, and an unrelated one by chance.
    a, rotation = normal(400, 8), torch.linalg.qr(normal(8, 8, seed=1)).Q
    assert float(neighbor_agreement(a, 3 * a @ rotation, 10)) > 0.999
    unrelated = float(neighbor_agreement(a, normal(400, 8, seed=2), 10))
    assert unrelated == pytest.approx(10 / 399, abs=0.01)


def test_the_effective_rank_is_the_exponential_of_the_entropy_of_the_spectrum():
    x = normal(50, 6) * torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.1])
    values = np.linalg.svd((x - x.mean(0)).double().numpy(), compute_uv=False)
    share = values / values.sum()
    expected = math.exp(-sum(p * math.log(p) for p in share))
    assert float(effective_rank(x)) == pytest.approx(expected, rel=1e-5)
    assert float(effective_rank(1000 * x)) == pytest.approx(expected, rel=1e-5)
    for rank in (1, 2, 5):  # it counts equal dimensions exactly
        corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=rank)))
        basis = torch.linalg.qr(normal(20, rank)).Q.T
        features = corners @ basis + normal(20, seed=1)  # the mean must not count
        assert float(effective_rank(features)) == pytest.approx(rank, rel=1e-4)


def test_features_that_are_all_alike_have_rank_and_spread_zero_and_directions_drawn_alike_one():
    for value, images in itertools.product((0.0, 0.1, -1234.5), (1, 1001)):
        features = torch.full((images, 7), value)
        assert float(effective_rank(features)) == 0
        assert float(feature_std(features)) == pytest.approx(0, abs=1e-4)
        assert float(uniformity(features)) == pytest.approx(0, abs=1e-5)
    features = 5 * normal(20_000, 16)
    assert float(feature_std(features)) == pytest.approx(1, abs=0.01)
    assert float(mean_cosine(features)) == pytest.approx(0, abs=0.001)
    assert float(uniformity(features[:3000])) == pytest.approx(-3.5, abs=0.1)  # 16 dimensions


def test_mean_cosine_and_uniformity_are_those_of_all_pairs_whatever_the_chunks(monkeypatch):
    x = normal(15, 4) + 0.7
    pairs = [cosine(a, b) for a, b in itertools.combinations(x.tolist(), 2)]
    assert float(mean_cosine(x)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert float(mean_cosine(x[:1])) == 0
    x = normal(15, 4) + 0.3
    pairs = itertools.combinations(x.tolist(), 2)
    expected = math.log(np.mean([math.exp(-2 * (2 - 2 * cosine(a, b))) for a, b in pairs]))
    for similarities in (1, 40, 10**6):
        monkeypatch.setitem(neighbors.SIMILARITIES, "cpu", similarities)
        assert float(uniformity(x)) == pytest.approx(expected, abs=1e-5)


def test_alignment_goes_from_zero_for_the_same_direction_to_four_for_the_opposite():
    x = normal(10, 3)
    assert float(alignment(x, 7 * x)) == pytest.approx(0, abs=1e-6)
    assert float(alignment(x, -x)) == pytest.approx(4)
    y = normal(10, 3, seed=1)
    plain = [2 - 2 * cosine(a, b) for a, b in zip(x.tolist(), y.tolist())]
    assert float(alignment(x, y)) == pytest.approx(sum(plain) / 10, rel=1e-5)


def plain_accuracy(labels, clusters):
    """The best over all one-to-one matches, tried one by one."""
    classes, names = sorted(set(labels)), sorted(set(clusters))
    slots = classes + [None] * len(names)
    return max(
        sum(dict(zip(names, chosen))[c] == y for y, c in zip(labels, clusters)) / len(labels)
        for chosen in itertools.permutations(slots, len(names))
    )


small_clusterings = st.lists(
    st.tuples(st.sampled_from([3, 70, -5]), st.integers(0, 3)), min_size=1, max_size=14
)


@settings(max_examples=60, deadline=None)
@given(small_clusterings)
def test_cluster_accuracy_is_the_best_of_all_matches_and_nmi_and_ari_are_those_of_scikit_learn(
    pairs,
):
    labels, clusters = (np.array(column) for column in zip(*pairs))
    mapping = match(labels, clusters)
    accuracy = right(labels, clusters, mapping).mean()
    assert accuracy == pytest.approx(plain_accuracy(labels.tolist(), clusters.tolist()))
    assert len(set(mapping.values())) == len(mapping)
    assert accuracy == pytest.approx(np.mean([mapping.get(c) == y for y, c in pairs]))
    for ours, theirs in (
        (adjusted_rand_index, adjusted_rand_score),
        (normalized_mutual_information, normalized_mutual_info_score),
    ):
        table = contingency(labels, clusters)
        assert ours(table) == pytest.approx(theirs(labels, clusters), abs=1e-12)
        assert ours(contingency(labels, labels)) == pytest.approx(1, abs=1e-12)


def test_splitting_a_class_into_two_clusters_costs_the_smaller_one():
    labels, clusters = np.array([0, 0, 0, 1]), np.array([5, 5, 6, 7])
    assert right(labels, clusters, match(labels, clusters)).tolist() == [True, True, False, True]
    assert match(np.array([0, 0, 1]), np.array([4, 4, 4])) == {4: 0}
    none = np.array([], int)
    assert match(none, none) == {}
    assert right(none, none, {}).tolist() == []


def test_blocks_of_a_large_bank_have_the_neighbors_of_the_whole():
    # Whole numbers, so that products are exact and many similarities are equal.
    for bank_size in (40_000, 33_000, 16_385):
        rng = torch.Generator().manual_seed(0)
        bank = torch.randint(-2, 3, (bank_size, 3), generator=rng).float()
        bank[:, 0] += 5
        queries = bank[:: bank_size // 7]
        similarity, index = nearest(bank, queries, 50)
        cosine = unit(queries) @ unit(bank).T
        order = cosine.argsort(dim=1, descending=True, stable=True)[:, :50]
        torch.testing.assert_close(similarity, cosine.gather(1, order), rtol=0, atol=1e-6)
        assert (similarity[:, :-1] >= similarity[:, 1:]).all()
        equal = similarity[:, :-1] == similarity[:, 1:]
        assert (index[:, :-1] < index[:, 1:])[equal].all()


def test_masks_reach_every_block_of_a_large_bank_and_no_row_is_its_own_neighbor():
    bank = normal(40_000, 4)
    ignored = torch.rand(5, 40_000, generator=torch.Generator().manual_seed(0)) < 0.5
    _, index = nearest(bank, bank[:5], 30, ignored=ignored)
    assert not ignored.gather(1, index).any()
    cosine = (unit(bank[:5]) @ unit(bank).T).masked_fill(ignored, -torch.inf)
    best = cosine.topk(30, dim=1).values
    torch.testing.assert_close(cosine.gather(1, index), best, rtol=0, atol=1e-6)
    bank = normal(17_000, 4)
    _, index = nearest(bank, bank, 2, exclude_self=True)
    assert not (index == torch.arange(len(bank))[:, None]).any()
    last = (unit(bank[-3:]) @ unit(bank).T).sort(dim=1, descending=True).indices[:, 1:3]
    assert index[-3:].tolist() == last.tolist()
