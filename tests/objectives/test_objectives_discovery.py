"""Novel class discovery: golden values and theorems of its terms.

The small case of most of them: two queries (1, 0) beside a queue, whose similarities to both are .6,
0, -.6 and -1.
"""

import itertools
import math

import pytest
import restated
import torch
from hypothesis import given
from hypothesis import strategies as st
from restated import agree, gradients, lists, rows, vectors

from nearkin.objectives import (
    class_targets,
    classify,
    close,
    closest,
    consistency,
    look_up,
    mean_entropy,
    mixed_negatives,
    neighborhood_targets,
    pairwise_bce,
    ramp,
    same_ranks,
    soft_match,
    unit,
)

QUERY, KEY = rows((1, 0), (1, 0)), rows((0.8, 0.6), (-0.6, 0.8))
QUEUE = rows((0.6, 0.8), (0, 1), (-0.6, 0.8), (-1, 0))
THIRDS = rows(1 / 3, 2 / 3)


def neighborhood(query, key, queue, t, k, *, official=False, own_weight=0.2):
    logits = look_up(query, queue, t, own=key)
    usable = torch.ones(len(query), len(queue), dtype=torch.bool)
    options = dict(own_weight=own_weight, num_neighbors=k, own_competes=official)
    return soft_match(logits, neighborhood_targets(logits.detach(), usable, **options))


def supervised(query, key, queue, t, label, labels):
    logits = look_up(query, queue, t, own=key)
    usable = torch.ones(len(query), len(queue), dtype=torch.bool)
    return soft_match(logits, class_targets(logits, label, labels, usable))


@pytest.mark.parametrize(
    ("rows_of", "t", "official", "expected"),
    [
        ([0], 1.0, False, 1.3858002),
        ([0], 1.0, True, 0.6714801),  # .4 of the weight is lost
        ([1], 1.0, False, 1.3357322),
        ([1], 1.0, True, 1.3357322),  # its own key is not among the nearest two
        ([0, 1], 1.0, False, 1.3607663),
        ([0, 1], 1.0, True, 1.0036062),
        ([0, 1], 0.05, False, 8.8090782),
        ([0, 1], 0.05, True, 5.6054482),
    ],
)
def test_the_neighborhood_of_the_small_case_is_the_golden_value(rows_of, t, official, expected):
    result = neighborhood(QUERY[rows_of], KEY[rows_of], QUEUE, t, 2, official=official)
    agree(result, expected, rtol=0, atol=2e-7)  # they are known to single precision


def test_the_supervised_small_case_is_the_golden_value():
    """An entry without a class, -1, is never a positive."""
    label, labels = torch.tensor([0, 1]), torch.tensor([0, 1, 0, -1])
    agree(supervised(QUERY, KEY, QUEUE, 1.0, label, labels), 1.6374329, rtol=0, atol=1e-7)


def targets(logits, usable=None, **options):
    usable = torch.ones_like(logits[:, 1:]).bool() if usable is None else usable
    return neighborhood_targets(logits, usable, **dict(own_weight=0.2) | options)


def test_official_targets_are_those_of_the_authors_code():
    """Which lose a neighbor's weight where the own key is among the nearest."""
    for k in (1, 3, 7, 11):
        logits = vectors(5, 12, seed=k)
        target = targets(logits, own_weight=0.25, num_neighbors=k, own_competes=True)
        expected = [restated.official_targets(row, 0.25, k) for row in logits.tolist()]
        agree(target, expected, rtol=1e-12)


def test_without_a_neighbor_the_own_key_takes_all_unless_it_competes():
    """Then all but its weight is lost, as in the authors' code."""
    logits, usable = vectors(2, 5, seed=1), torch.zeros(2, 4, dtype=torch.bool)
    own = torch.eye(5)[:1].expand(2, -1)
    for competes, weight in ((False, 1.0), (True, 0.25)):
        target = targets(logits, usable, own_weight=0.25, num_neighbors=3, own_competes=competes)
        agree(target, (weight * own).tolist(), rtol=1e-12)


@pytest.mark.parametrize("k", [1, 5, 19])
def test_of_equally_near_neighbors_any_will_do(k):
    """Duplicates in the queue, and more neighbors than entries: the loss is that of the paper."""
    query, key = vectors(3, 5, seed=k), vectors(3, 5, seed=k + 100)
    queue = vectors(4, 5, seed=k + 200).repeat(3, 1)
    expected = [
        restated.neighborhood_loss(own, others, 0.25, k)
        for own, *others in look_up(query, queue, 0.2, own=key).tolist()
    ]
    result = neighborhood(query, key, queue, 0.2, k, own_weight=0.25)
    agree(result, restated.mean(expected), rtol=1e-12)


def test_ranks_are_counted_to_the_last_one_under_autocast():
    """In bfloat16, 299 common features of 300 would be as many as all."""
    features = torch.stack([torch.arange(301), torch.arange(301).flip(0)]).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert same_ranks(features, 300).tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_similarity_equal_to_the_threshold_is_not_above_it(dtype):
    features = rows((1, 0), (0.6, 0.8)).to(dtype)
    assert not close(features, 0.6)[0, 1]
    assert close(features, 0.599999)[0, 1]
    features = rows((0, 0), (0, 0), (1, 0)).to(dtype)  # of which the first two are like none
    assert close(features, 0.95).tolist() == [[False] * 3, [False] * 3, [False, False, True]]


@pytest.mark.parametrize("seed", [0, 7, 16, 25, 39])
def test_pairs_are_the_papers_whatever_the_length_of_features(seed):
    size, dim = 1 + seed % 17, 1 + seed % 33
    features = vectors(size, dim, seed).abs() * torch.arange(1, size + 1)[:, None]
    features[-1] = 2 * features[0]
    for threshold in (0.5, 0.95):
        expected = restated.close(features.tolist(), threshold)
        assert close(features, threshold).tolist() == expected
        assert close(1e20 * features.float(), threshold).tolist() == expected
    top = 1 + seed % dim
    assert same_ranks(features, top).tolist() == restated.same_ranks(features.tolist(), top)
    assert torch.equal(same_ranks(features.exp(), top), same_ranks(features, top))


def pairs_of(same):
    """The pairs that are held to be of one class; the matrix has two mirrored halves."""
    assert torch.equal(same, same.T)
    assert same.diagonal().all()
    return {(i, j) for i, j in same.nonzero().tolist() if i < j}


@pytest.mark.parametrize("size", [0, 1, 8])
def test_at_rate_zero_no_pair_is_closest_and_at_rate_one_all_are(size):
    features = vectors(size, 3) if size else torch.zeros(0, 3)
    assert torch.equal(closest(features, 0.0), torch.eye(size).bool())
    assert torch.equal(closest(features, 1.0), torch.ones(size, size).bool())
    assert closest(torch.ones(5, 4), 0.1).all()  # equal ones are all in, unless none is asked for
    assert torch.equal(closest(torch.zeros(5, 4), 0.04), torch.eye(5).bool())


@given(st.integers(0, 30), st.integers(2, 40), st.floats(0, 1), st.booleans())
def test_the_closest_pairs_are_the_most_similar_and_as_many_as_asked(seed, size, rate, double):
    features = vectors(size, 5, seed) * torch.arange(1, size + 1)[:, None]
    features = features if double else features.float()
    chosen, unit_rows = (
        pairs_of(closest(features, rate)),
        map(restated.normalized, lists(features)),
    )
    pairs = itertools.combinations(enumerate(unit_rows), 2)
    alike = {(i, j): restated.dot(a, b) for (i, a), (j, b) in pairs}
    assert len(chosen) == round(rate * len(alike))
    others = [cosine for pair, cosine in alike.items() if pair not in chosen]
    assert min((alike[pair] for pair in chosen), default=1) >= max(others, default=-1) - 1e-6


def test_equally_close_pairs_are_all_in_or_all_out():
    """Three of six pairs have a cosine of 1, three of 0."""
    features = rows((1, 0), (0, 2), (4, 0), (1, 0))
    ones = {(0, 2), (0, 3), (2, 3)}
    expected = [set(), *[ones] * 3, *[ones | {(0, 1), (1, 2), (1, 3)}] * 3]
    assert [pairs_of(closest(features, count / 6)) for count in range(7)] == expected


P, Q = rows((0.9, 0.1), (0.2, 0.8)), rows((0.7, 0.3), (0.4, 0.6))


def test_pairwise_bce_of_the_small_case_is_the_golden_value():
    """Of P Q^T = [[.66, .42], [.38, .56]]; of even probabilities; of perfect clusters, almost 0."""
    agree(pairwise_bce(P, Q, torch.eye(2).bool()), 0.5045242, rtol=0, atol=2e-7)
    sure = torch.eye(3).double()[[0, 0, 1, 2]]
    same, even = sure @ sure.T == 1, torch.full((4, 3), 1 / 3, dtype=torch.float64)
    agree(pairwise_bce(even, even, same), 0.6653951, rtol=0, atol=2e-7)
    agree(pairwise_bce(sure, sure, same), -1e-7, rtol=1e-6)


@pytest.mark.parametrize("alike", [True, False])
def test_pairwise_bce_of_a_certain_mistake_and_in_half_precision_is_finite(alike):
    """-log(1e-7), about 16.1, for one class taken for two, and two for one."""
    a, b = rows((1, 0)), rows((0, 1) if alike else (1, 0))
    agree(pairwise_bce(a, b, torch.tensor([[alike]])), -math.log(1e-7), rtol=1e-12)
    agree(pairwise_bce(a, b, torch.tensor([[not alike]])), 0.0, rtol=0, atol=2e-7)
    p = torch.tensor([[6.3, 0.0]]).bfloat16().softmax(dim=1)
    assert pairwise_bce(p, p, torch.zeros(1, 1).bool()).isfinite()


def test_the_ramp_has_the_golden_values():
    for weight, until, at, expected in [
        *[(50.0, 150.0, 0.0, 0.33690), (50.0, 150.0, 75.0, 14.32524), (50.0, 150.0, 150.0, 50.0)],
        *[(1.0, 50.0, 0.0, 0.0067379), (1.0, 50.0, 10.0, 0.0407622), (1.0, 50.0, 60.0, 1.0)],
        (1.0, 0.0, 0.0, 1.0),
    ]:
        assert weight * ramp(at, until) == pytest.approx(expected, rel=1e-5), (weight, until, at)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_ramp_is_the_papers_and_never_falls(early, late, until):
    assert ramp(early, until) == pytest.approx(restated.ramp(early, until), rel=1e-12)
    early, late = sorted((early, late))
    assert math.exp(-5) * 0.999999 <= ramp(early, until) <= ramp(late, until) <= 1


def test_entropy_of_sure_predictions_is_that_of_their_classes():
    certain = torch.eye(3).double()[[0, 0, 1]]
    agree(mean_entropy(certain), math.log(3) - 2 / 3 * math.log(2), rtol=1e-6)
    assert gradients(mean_entropy, [certain])[0].isfinite().all()
    assert mean_entropy(torch.eye(3)[[1, 1]]) == 0


def test_what_is_left_of_opposite_keys_is_finite_and_no_longer_than_one():
    """A key mixed, half and half, with its opposite turned by an angle."""
    none = torch.zeros(1, 1, 1).long()

    def mixed(*keys):
        return mixed_negatives(*keys, none[0], none, torch.tensor([0.5]), 1)

    for angle in (0.0, 1e-5, 1e-4, 1e-3, 0.1):
        key = torch.tensor([[math.cos(angle), math.sin(angle)]])
        keys = [torch.tensor([[0.0, 1.0]]), -key, torch.tensor([[1.0, 0.0]])]
        assert mixed(*keys).abs() <= 1, angle
        assert all(g.isfinite().all() for g in gradients(lambda *x: mixed(*x).sum(), keys)), angle


def test_no_image_costs_exactly_nothing():
    """Whichever half of a batch is empty, its terms are zero, and their gradients finite."""
    key, queue, known = torch.zeros(0, 5), vectors(8, 5).float(), vectors(3, 5, seed=1).float()
    same = close(key, 0.95)
    assert same.shape == same_ranks(key, 2).shape == (0, 0)
    label, labels = torch.zeros(0).long(), torch.zeros(8).long()
    easy, drawn = torch.zeros(0, 4).long(), torch.zeros(0, 2, 4).long()
    terms = [
        lambda q: neighborhood(q, key, queue, 0.1, 3),
        lambda q: supervised(q, key, queue, 0.1, label, labels),
        lambda q: pairwise_bce(q.softmax(1), key.softmax(1), same),
        lambda q: consistency(q.softmax(1), key.softmax(1)),
        lambda q: classify(q, label),
        lambda q: mixed_negatives(q, queue, known, easy, drawn, THIRDS.float(), 5).sum(),
    ]
    for term in terms:
        assert term(key) == 0
        assert gradients(term, [key])[0].shape == (0, 5)


def test_features_of_zero_keep_every_term_finite():
    zero, queue = torch.zeros(4, 5), torch.zeros(8, 5)
    label, labels = torch.arange(4), torch.arange(8) % 4
    easy, drawn = torch.zeros(4, 3).long(), torch.zeros(4, 2, 3).long()
    terms = [
        lambda x: neighborhood(unit(x), unit(x), queue, 0.05, 3),
        lambda x: supervised(unit(x), unit(x), queue, 0.05, label, labels),
        lambda x: pairwise_bce(x.softmax(1), x.softmax(1), close(x, 0.95)),
        lambda x: mixed_negatives(unit(x), queue, queue, easy, drawn, THIRDS.float(), 5).sum(),
    ]
    for term in terms:
        assert term(zero).isfinite()
        assert gradients(term, [zero])[0].isfinite().all()
