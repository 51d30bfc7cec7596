"""Novel class discovery: golden values and theorems of its terms.

The small case of most of them: two queries (1, 0) beside a queue, whose similarities to both are .6,
0, -.6 and -1.
"""

import itertools
import math

import pytest
import restated
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from restated import agree, gradients, lists, rows, vectors

from nearkin.objectives import (
    class_targets,
    close,
    closest,
    consistency,
    info_nce,
    look_up,
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


# Golden values of neighborhoods


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


@pytest.mark.parametrize(("size", "expected"), [(9, 2.302585093), (99, math.log(100))])
def test_a_neighborhood_of_equal_similarities_is_the_logarithm_of_all(size, expected):
    query = vectors(1, 6).expand(3, 6)
    agree(neighborhood(query, query, query[:1].expand(size, 6), 0.05, 4), expected, rtol=1e-7)


def test_the_toy_of_an_orthonormal_queue_has_the_golden_values():
    """log(2 e^2 + 5) - 2 with all weight on the own key; a third of it on each of three without."""
    q, queue = torch.eye(4).double()[:1], torch.eye(4).double()[[0, 1, 2, 3, 1, 2]]
    agree(neighborhood(q, q, queue, 0.5, 1, own_weight=1.0), 0.9845758, rtol=1e-7)
    loss = supervised(q, q, queue, 0.5, torch.tensor([3]), torch.tensor([3, 3, 0, 1, 2, -1]))
    agree(loss, 1.651242, rtol=1e-6)


def test_the_supervised_small_case_is_the_golden_value():
    """An entry without a class, -1, is never a positive."""
    label, labels = torch.tensor([0, 1]), torch.tensor([0, 1, 0, -1])
    agree(supervised(QUERY, KEY, QUEUE, 1.0, label, labels), 1.6374329, rtol=0, atol=1e-7)


# Targets


def targets(logits, usable=None, **options):
    usable = torch.ones_like(logits[:, 1:]).bool() if usable is None else usable
    return neighborhood_targets(logits, usable, **dict(own_weight=0.2) | options)


@pytest.mark.parametrize(("k", "mass"), [(200, 0.996), (50, 0.984), (2, 0.6)])
def test_official_targets_lose_a_neighbors_weight_where_the_own_key_is_among_them(k, mass):
    logits = torch.linspace(1, -1, 402, dtype=torch.float64)[None]
    agree(targets(logits, num_neighbors=k, own_competes=True).sum(), mass, rtol=1e-7)
    agree(targets(logits, num_neighbors=k).sum(), 1.0, rtol=1e-7)
    far = logits.flip(1)
    agree(targets(far, num_neighbors=k, own_competes=True).sum(), 1.0, rtol=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_official_targets_are_those_of_the_authors_code(seed):
    logits, k = vectors(5, 12, seed), 1 + seed % 11
    target = targets(logits, own_weight=0.25, num_neighbors=k, own_competes=True)
    agree(target, [restated.official_targets(row, 0.25, k) for row in logits.tolist()], rtol=1e-12)


@given(st.integers(0, 9), st.integers(1, 12), st.floats(0, 1, width=32))
def test_targets_are_the_weight_and_even_shares_of_the_rest_on_what_may_be_a_neighbor(
    seed, k, own
):
    logits = vectors(4, 10, seed)
    usable = torch.rand(4, 9, generator=torch.Generator().manual_seed(seed)) < 0.5
    usable[0] = False
    target = targets(logits, usable, own_weight=own, num_neighbors=k)
    assert torch.equal(target[0], rows((1, *[0] * 9))[0])  # no neighbor: all on the own key
    agree(target.sum(dim=1), [1.0] * 4, rtol=1e-12)
    for row, may, found_row in zip(logits.tolist(), usable.tolist(), target.tolist()):
        best = sorted((j + 1 for j in range(9) if may[j]), key=lambda j: -row[j])[:k]
        shared = [(1 - own) / len(best) if j in best else 0.0 for j in range(1, 10)]
        assert found_row[1:] == pytest.approx(shared, abs=1e-15)
        assert found_row[0] == (own if best else 1)


def test_targets_in_double_precision_sum_to_one():
    agree(targets(vectors(4, 10), num_neighbors=3).sum(dim=1), [1.0] * 4, rtol=1e-15)


@pytest.mark.parametrize("seed", range(10))
def test_of_equally_near_neighbors_any_will_do(seed):
    """Duplicates in the queue, and more neighbors than entries: the loss is that of the paper."""
    query, key = vectors(3, 5, seed), vectors(3, 5, seed + 100)
    queue, k = vectors(4, 5, seed + 200).repeat(3, 1), 1 + 2 * seed
    expected = [
        restated.neighborhood_loss(own, others, 0.25, k)
        for own, *others in look_up(query, queue, 0.2, own=key).tolist()
    ]
    result = neighborhood(query, key, queue, 0.2, k, own_weight=0.25)
    agree(result, restated.mean(expected), rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_all_weight_on_the_own_key_is_info_nce(seed):
    query, key, queue = vectors(4, 6, seed), vectors(4, 6, seed + 100), vectors(9, 6, seed + 200)
    expected = info_nce(query, key, queue, 0.1)
    for official in (False, True):
        result = neighborhood(query, key, queue, 0.1, 3, own_weight=1.0, official=official)
        agree(result, expected, rtol=1e-12)
    ignore_progress = supervised(query, key, queue, 0.1, torch.arange(4), torch.full((9,), -1))
    agree(ignore_progress, expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_queue_and_batch_changes_nothing(seed):
    query, key, queue = vectors(6, 6, seed), vectors(6, 6, seed + 100), vectors(9, 6, seed + 200)
    generator = torch.Generator().manual_seed(seed)
    images, entries = (torch.randperm(n, generator=generator) for n in (6, 9))
    label, labels = torch.arange(6) % 3, torch.arange(9) % 4
    result = neighborhood(query[images], key[images], queue[entries], 0.1, 3)
    agree(result, neighborhood(query, key, queue, 0.1, 3), rtol=1e-12)
    result = supervised(
        query[images], key[images], queue[entries], 0.1, label[images], labels[entries]
    )
    agree(result, supervised(query, key, queue, 0.1, label, labels), rtol=1e-12)


# Pairs


def test_ranks_of_the_small_case_are_the_golden_ones():
    features = rows((9, 8, 7, 1, 0), (7, 9, 8, 0, 1), (9, 1, 8, 7, 0))
    expected = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool()
    assert torch.equal(same_ranks(features, 3), expected)


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


@pytest.mark.parametrize("seed", range(40))
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


def test_a_feature_of_zero_is_like_none():
    features = rows((0, 0), (0, 0), (1, 0))
    assert close(features, 0.95).tolist() == [[False] * 3, [False] * 3, [False, False, True]]


def pairs_of(same):
    """The pairs that are held to be of one class; the matrix has two mirrored halves."""
    assert torch.equal(same, same.T)
    assert same.diagonal().all()
    return {(i, j) for i, j in same.nonzero().tolist() if i < j}


def test_the_closest_of_six_pairs_are_the_golden_ones():
    """Cosines, from above: .9988, .7415, .7071 twice, .0499 and 0."""
    features = rows((1, 0), (2, 0.1), (0, 1), (1, 1))
    order = [{(0, 1)}, {(1, 3)}, {(0, 3), (2, 3)}, {(1, 2)}, {(0, 2)}]
    for count, taken in enumerate([0, 1, 2, 3, 3, 4, 5]):
        assert pairs_of(closest(features, count / 6)) == set().union(*order[:taken])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 8])
def test_at_rate_zero_no_pair_is_closest_and_at_rate_one_all_are(size):
    features = vectors(size, 3) if size else torch.zeros(0, 3)
    assert torch.equal(closest(features, 0.0), torch.eye(size).bool())
    assert torch.equal(closest(features, 1.0), torch.ones(size, size).bool())


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


@given(st.integers(0, 30), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_rate_takes_no_pair_away(seed, few, many):
    features = vectors(9, 3, seed).round(decimals=1)  # some are equally alike
    few, many = sorted((few, many))
    assert pairs_of(closest(features, few)) <= pairs_of(closest(features, many))


def test_equally_close_pairs_are_all_in_or_all_out():
    """Three of six pairs have a cosine of 1, three of 0."""
    features = rows((1, 0), (0, 2), (4, 0), (1, 0))
    ones = {(0, 2), (0, 3), (2, 3)}
    expected = [set(), *[ones] * 3, *[ones | {(0, 1), (1, 2), (1, 3)}] * 3]
    assert [pairs_of(closest(features, count / 6)) for count in range(7)] == expected


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_pairs_of_equal_features_are_all_closest_unless_none_is(value):
    features = torch.full((5, 4), value)
    assert closest(features, 0.1).all()
    assert torch.equal(closest(features, 0.04), torch.eye(5).bool())  # of 10 pairs, that is none


@pytest.mark.parametrize("seed", range(5))
def test_the_closest_pairs_do_not_depend_on_lengths_directions_or_order(seed):
    features, rate = vectors(12, 6, seed), 0.25
    neighbors = closest(features, rate)
    rotation = torch.linalg.qr(vectors(6, 6, seed + 100)).Q
    assert torch.equal(closest(features @ rotation, rate), neighbors)
    lengths = 1.5 ** torch.arange(12)[:, None]
    assert torch.equal(closest(lengths * features, rate), neighbors)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(closest(features[order], rate), neighbors[order][:, order])


P, Q = rows((0.9, 0.1), (0.2, 0.8)), rows((0.7, 0.3), (0.4, 0.6))


def test_pairwise_bce_of_the_small_case_is_the_golden_value():
    """Of P Q^T = [[.66, .42], [.38, .56]]."""
    agree(pairwise_bce(P, Q, torch.eye(2).bool()), 0.5045242, rtol=0, atol=2e-7)


def test_pairwise_bce_of_perfect_clusters_is_zero_but_for_its_epsilon():
    p = torch.eye(3).double()[[0, 0, 1, 2]]
    agree(pairwise_bce(p, p, p @ p.T == 1), -1e-7, rtol=1e-6)


def test_pairwise_bce_of_even_probabilities_is_the_golden_value():
    label = torch.tensor([0, 0, 1, 2])
    p = torch.full((4, 3), 1 / 3, dtype=torch.float64)
    agree(pairwise_bce(p, p, label[:, None] == label), 0.6653951, rtol=0, atol=2e-7)


@pytest.mark.parametrize("alike", [True, False])
def test_pairwise_bce_of_a_certain_mistake_is_finite(alike):
    """-log(1e-7), about 16.1, for one class taken for two, and two for one."""
    a, b = rows((1, 0)), rows((0, 1) if alike else (1, 0))
    agree(pairwise_bce(a, b, torch.tensor([[alike]])), -math.log(1e-7), rtol=1e-12)
    agree(pairwise_bce(a, b, torch.tensor([[not alike]])), 0.0, rtol=0, atol=2e-7)


@pytest.mark.parametrize("seed", range(5))
def test_heads_may_be_permuted_and_views_exchanged_with_the_pairs(seed):
    a, b = (5 * vectors(6, 4, seed)).softmax(1), (5 * vectors(6, 4, seed + 100)).softmax(1)
    same = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)) < 0.3
    heads = torch.tensor([2, 0, 3, 1])
    loss = pairwise_bce(a, b, same)
    agree(pairwise_bce(a[:, heads], b[:, heads], same), loss, rtol=1e-13)
    agree(pairwise_bce(b, a, same.T), loss, rtol=1e-13)
    assert (pairwise_bce(b, a, same) - loss).abs() > 1e-4
    agree(consistency(a[:, heads], b[:, heads]), consistency(a, b), rtol=1e-13)
    agree(consistency(b, a), consistency(a, b), rtol=1e-13)


def test_pairwise_bce_of_half_precision_probabilities_is_finite():
    p = torch.tensor([[6.3, 0.0]]).bfloat16().softmax(dim=1)
    assert pairwise_bce(p, p, torch.zeros(1, 1).bool()).isfinite()


# Consistency and its ramp


def test_consistency_of_the_small_case_is_the_golden_value():
    agree(consistency(P, Q), 0.04, rtol=1e-12)
    assert consistency(P, P) == 0


@pytest.mark.parametrize(
    ("weight", "until", "at", "expected"),
    [
        *[(50.0, 150.0, 0.0, 0.33690), (50.0, 150.0, 75.0, 14.32524), (50.0, 150.0, 150.0, 50.0)],
        *[(5.0, 50.0, 0.0, 0.033690), (5.0, 50.0, 25.0, 1.432524), (5.0, 50.0, 50.0, 5.0)],
        *[(1.0, 50.0, 0.0, 0.0067379), (1.0, 50.0, 10.0, 0.0407622), (1.0, 50.0, 60.0, 1.0)],
        (1.0, 0.0, 0.0, 1.0),
    ],
)
def test_the_ramp_has_the_golden_values(weight, until, at, expected):
    assert weight * ramp(at, until) == pytest.approx(expected, rel=1e-5)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_ramp_is_the_papers_and_never_falls(early, late, until):
    assert ramp(early, until) == pytest.approx(restated.ramp(early, until), rel=1e-12)
    early, late = sorted((early, late))
    assert math.exp(-5) * 0.999999 <= ramp(early, until) <= ramp(late, until) <= 1


# Hard negatives


def test_hard_negatives_of_the_small_case_have_the_golden_values():
    """Official targets with one neighbor, of weight .8, beside .2 on the own key."""
    query, key = rows((1, 0)), rows((0.8, 0.6))
    novel, known = rows((1, 0), (0.6, 0.8), (0, 1), (-1, 0)), rows((0.8, -0.6), (0, -1))
    easy, drawn = torch.tensor([[3]]), torch.tensor([[[0]]])
    hard = mixed_negatives(query, novel, known, easy, drawn, THIRDS, num_hard=2)
    agree(hard, [[0.4472136, -0.8944272]], rtol=0, atol=1e-7)
    logits = look_up(query, novel, 1.0, own=key)
    target = targets(logits, num_neighbors=1, own_competes=True)
    agree(soft_match(logits, target), 1.1360308, rtol=0, atol=1e-7)
    target = F.pad(target, (0, 2))
    agree(soft_match(torch.cat([logits, hard], 1), target), 1.3531898, rtol=0, atol=1e-7)


def mixing(seed, uniform=False):
    """Queries, both queues, and what is mixed with what: with keys drawn twice."""
    generator = torch.Generator().manual_seed(seed)
    keys = vectors(4, 5, seed), vectors(12, 5, seed + 100), vectors(7, 5, seed + 200)
    easy = torch.randint(12, (4, 3), generator=generator)
    drawn = torch.randint(7, (4, 2, 3), generator=generator)
    mix = torch.rand(4, 2, 3, 1, generator=generator).double() if uniform else THIRDS
    return keys, easy, drawn, mix


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_hard_negatives_are_the_hardest_of_all_mixtures_built_one_by_one(seed, uniform):
    keys, easy, drawn, mix = mixing(seed, uniform)
    everything = lists([*keys, easy, drawn, mix.expand(4, 2, 3, -1)])
    for num_hard in (0, 1, 5, 12, 100):
        expected = restated.mixed_negatives(*everything, num_hard)
        negatives = mixed_negatives(*keys, easy, drawn, mix, num_hard)
        agree(negatives, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(10))
def test_hard_negatives_never_lower_the_loss(seed):
    (query, novel, known), easy, drawn, mix = mixing(seed)
    logits = look_up(query, novel, 0.1, own=vectors(4, 5, seed + 300))
    target = targets(logits, num_neighbors=3)
    losses = []
    for num_hard in range(13):
        hard = mixed_negatives(query, novel, known, easy, drawn, mix, num_hard) / 0.1
        padded = F.pad(target, (0, num_hard))
        losses.append(soft_match(torch.cat([logits, hard], 1), padded).item())
    assert losses[0] == soft_match(logits, target)
    assert losses == sorted(losses)
    assert losses[-1] > losses[0]


def left_of_opposite(angle):
    """Similarity and slopes of a key mixed, half and half, with its opposite turned by an angle."""
    key, none = torch.tensor([[math.cos(angle), math.sin(angle)]]), torch.zeros(1, 1, 1).long()
    keys = [torch.tensor([[0.0, 1.0]]), -key, torch.tensor([[1.0, 0.0]])]

    def mixed(*keys):
        return mixed_negatives(*keys, none[0], none, torch.tensor([0.5]), 1)

    return mixed(*keys).item(), gradients(lambda *keys: mixed(*keys).sum(), keys)


@pytest.mark.parametrize("angle", [0.0, 1e-5, 1e-4, 1e-3, 0.1])
def test_what_is_left_of_opposite_keys_is_finite(angle):
    similarity, slopes = left_of_opposite(angle)
    assert math.isfinite(similarity)
    assert all(slope.isfinite().all() for slope in slopes)


def test_what_is_left_of_opposite_keys_is_no_longer_than_one():
    assert abs(left_of_opposite(1e-4)[0]) <= 1


# Nothing, and next to nothing


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
