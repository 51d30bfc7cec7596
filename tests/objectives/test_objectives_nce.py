"""Contrast: golden values and theorems of finding a key among negatives, or telling it from noise."""

import math

import pytest
import torch
import torch.nn.functional as F
from restated import agree, dot, gradients, rows, vectors
from scipy.special import hyp0f1

from nearkin.objectives import in_batch, info_nce, look_up, nce, nt_xent, unit

SIX = vectors(6, 8, seed=2)

EVERY = {
    "info_nce": lambda a, b, t=0.2: info_nce(a, b, SIX.to(a.dtype), t),
    "info_nce, masked": lambda a, b, t=0.2: info_nce(a, b, a, t, torch.eye(len(a)).bool()),
    "in_batch": lambda a, b, t=0.2: in_batch(a, b, t),
    "nt_xent": lambda a, b, t=0.2: nt_xent(a, b, t),
    "nce": lambda a, b, t=0.2: nce(a, b, SIX.to(a.dtype), t, torch.tensor(50.0), 20),
}
every_objective = pytest.mark.parametrize("objective", EVERY.values(), ids=EVERY)


# Golden values: one key among negatives


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(5, 1.7917594692), (4096, 8.3180102775), (32768, 10.3972382255), (65536, 11.0903701476)],
)
def test_info_nce_of_equal_keys_is_the_logarithm_of_their_number(keys, expected):
    q = vectors(1, 8).expand(3, 8)
    agree(info_nce(q, q, q[:1].expand(keys, 8), 0.07), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("images", "expected"),
    [(1, 0.0), (2, 1.0986122887), (4, 1.9459101490), (128, 5.5412635452), (256, 6.2363695902)],
)
def test_nt_xent_of_equal_views_is_the_logarithm_of_their_number(images, expected):
    z = vectors(1, 8).expand(images, 8)
    agree(nt_xent(z, z, 0.1), expected, rtol=1e-10, atol=1e-14)
    agree(in_batch(z, z, 0.1), math.log(images), rtol=1e-12, atol=1e-14)


BASIS = torch.eye(6, dtype=torch.float64)
SIMPLEX = unit(torch.eye(4, dtype=torch.float64) - 1 / 4)
WORKED = rows((1, 0), (0, 1)), rows((0.6, 0.8), (0.8, -0.6))

ARRANGEMENTS = {
    "orthogonal negatives": (lambda: info_nce(BASIS[:1], BASIS[:1], BASIS[1:], 0.5), 0.5168135102),
    "antipodal negatives": (
        lambda: info_nce(BASIS[:1], BASIS[:1], -BASIS[[0] * 5], 0.5),
        0.0876245339,
    ),
    "orthonormal pairs": (lambda: nt_xent(BASIS[:4], BASIS[:4], 0.5), 0.5944376642),
    "orthonormal pairs, sharp": (lambda: nt_xent(BASIS[:4], BASIS[:4], 0.1), 2.7236e-4),
    "orthonormal pairs, across": (
        lambda: in_batch(BASIS[:4], BASIS[:4], 0.5),
        math.log1p(3 * math.exp(-2)),
    ),
    "simplex": (lambda: nt_xent(SIMPLEX, SIMPLEX, 0.5), 0.3484718858),
    "worked example": (lambda: nt_xent(*WORKED, 0.5), 2.0301902771),
    "worked example, soft": (lambda: nt_xent(*WORKED, 1.0), 1.4735767889),
    "worked example, across": (lambda: in_batch(*WORKED, 0.5), 1.8860240393),
    "worked example, back": (lambda: in_batch(*WORKED[::-1], 0.5), 1.8860240393),
    "mispaired": (lambda: nt_xent(BASIS[:2], BASIS[[1, 0]], 0.5), 2.2395447662),
    "a bank of orthonormal rows": (
        lambda: in_batch(*[torch.eye(100).double()] * 2, 0.07),
        6.186e-5,
    ),
}


@pytest.mark.parametrize(("loss", "expected"), ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_an_arrangement_has_the_golden_value(loss, expected):
    agree(loss(), expected, rtol=0, atol=1e-10 if expected > 0.01 else 1e-8)  # as many digits


def test_info_nce_over_a_bank_is_the_softmax_over_all_images():
    """InstDisc's equation 2: each image's own row is its positive."""
    query, keys = vectors(10, 8), vectors(100, 8, seed=1)
    expected = F.cross_entropy(query @ keys.T / 0.07, torch.arange(10))
    own = torch.eye(10, 100, dtype=torch.bool)
    agree(info_nce(query, keys[:10], keys, 0.07, own), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_below_the_simplex(seed):
    z = vectors(4, 5, seed)
    assert nt_xent(z, z, 0.5) > 0.3484718858


@pytest.mark.parametrize("t", [0.07, 0.5])
def test_the_official_sum_of_simclr_is_twice_the_mean(t):
    """Cross-entropies over [ab, aa] and [ba, bb], a view with itself put out of reach."""
    a, b = vectors(5, 8), vectors(5, 8, seed=1)
    itself = 1e9 * torch.eye(5, dtype=torch.float64)
    both = [
        F.cross_entropy(torch.cat([x @ y.T, x @ x.T - itself], dim=1) / t, torch.arange(5))
        for x, y in ((a, b), (b, a))
    ]
    agree(2 * nt_xent(a, b, t), sum(both).item(), rtol=1e-12)


@pytest.mark.parametrize(
    ("t", "expected"), [(0.07, 2.208652), (0.1, 1.476184), (0.2, 1.102503), (0.5, 1.015746)]
)
def test_random_negatives_cost_what_the_sphere_says(t, expected):
    """With E = 0F1(; d/2; 1 / 4 t^2) the mean of exp(s / t), the loss is log(1 + K E e^(-s+ / t)).

    The mean of exp(s / t) over 4,096 negatives deviates by 3 % at t = .07, and less at others; over
    64 queries by an eighth of it: .02 is five deviations.
    """
    mean = hyp0f1(64, 1 / (4 * t * t))
    assert mean == pytest.approx(expected, abs=1e-6)
    query, negatives = vectors(64, 128), vectors(4096, 128, seed=1)
    along = (negatives[:64] * query).sum(dim=1, keepdim=True)
    key = unit(negatives[:64] - along * query)  # at right angles
    agree(info_nce(query, key, negatives, t), math.log1p(4096 * mean), rtol=0, atol=0.02)
    agree(look_up(query, negatives, t).exp().mean(), mean, rtol=0.02)


# Golden values: one key and noise


@pytest.mark.parametrize(
    ("m", "expected"),
    [(1, 1.3862943611), (10, 3.3509970708), (512, 7.2393005524), (4096, 9.3178882271)],
)
def test_nce_of_an_untrained_network_is_the_golden_value(m, expected):
    """P = 1 / n everywhere: log(1 + m) + m log(1 + 1 / m), the same for every n."""
    query, key, other = torch.eye(3, dtype=torch.float64)[:, None]
    for n in (10, 1000):
        normalizer = torch.tensor(n, dtype=torch.float64)
        agree(nce(query, key, other.expand(m, 3), 0.07, normalizer, n), expected, rtol=1e-10)


def test_nce_of_even_odds_is_the_golden_value():
    """P = m / n makes h = 1/2 of every key: (1 + m) log 2."""
    query, key, other = torch.eye(3, dtype=torch.float64)[:, None]
    normalizer = torch.tensor(1000 / 16, dtype=torch.float64)
    loss = nce(query, key, other.expand(16, 3), 0.07, normalizer, 1000)
    agree(loss, 17 * math.log(2), rtol=1e-12)
    agree(loss, 11.7835, rtol=1e-5)


GOLDEN_ERRORS = {1: 0.373, 10: 0.114, 100: 0.0158, 1000: 0.00164, 100_000: 1.6e-5}


def expected_errors(bank, query, t):
    """How far NCE's expected gradient is from softmax's, relatively, for several sizes of noise.

    The loss is a sum over the noise and its draws are even, so that the expectation over m draws is
    the mean over all rows j of the loss with row j drawn m times: m times row j's share.
    """
    scores = bank @ query / t
    normalizer = scores.exp().sum()
    softmax = ((scores.exp() / normalizer) @ bank - bank[0]) / t
    errors = {}
    for m in GOLDEN_ERRORS:
        leaf = query.clone().requires_grad_()
        losses = [
            nce(leaf[None], bank[:1], row.expand(m, len(query)), t, normalizer, len(bank))
            for row in bank
        ]
        (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), leaf)
        errors[m] = ((gradient - softmax).norm() / softmax.norm()).item()
    return errors


def test_the_expected_gradient_of_nce_tends_to_that_of_softmax():
    """As 1 / m. The golden errors are of unknown vectors: ours are of the same order."""
    errors = expected_errors(vectors(20, 8), vectors(1, 8, seed=1)[0], 0.5)
    for m, golden in GOLDEN_ERRORS.items():
        assert golden / 3 < errors[m] < 3 * golden
    assert errors[100_000] * 100_000 == pytest.approx(errors[1000] * 1000, rel=0.02)


# Gradients


@pytest.mark.parametrize("seed", range(10))
def test_the_gradient_of_a_query_is_the_softmax_mean_of_the_keys_less_its_own(seed):
    """With p the softmax over key and negatives: (sum_j p_j k_j - k+) / (temperature batch)."""
    query, key, negatives, t = vectors(7, 9, seed), vectors(7, 9, 100), vectors(20, 9, 200), 0.1
    gradient, *_ = gradients(lambda *x: info_nce(*x, t), [query, key, negatives])
    for q, own, result in zip(query.tolist(), key.tolist(), gradient):
        keys = [own, *negatives.tolist()]
        weights = [math.exp(dot(q, k) / t) for k in keys]
        expected = [
            (dot(weights, column) / math.fsum(weights) - own[d]) / (t * len(query))
            for d, column in enumerate(zip(*keys))
        ]
        agree(result, expected, rtol=1e-10, atol=1e-12)


@every_objective
def test_the_gradient_of_an_embedding_is_orthogonal_to_it(objective):
    a, b = 3 * vectors(5, 8), 4 * vectors(5, 8, seed=1)
    for x, gradient in zip((a, b), gradients(lambda a, b: objective(unit(a), unit(b)), [a, b])):
        assert gradient.norm() > 1e-3
        assert (x * gradient).sum(1).abs().max() < 1e-14


def test_a_view_is_no_candidate_for_itself():
    """Beside its key a query meets only a distant negative: itself, it would find at once."""
    a = vectors(2, 8)
    negative = -a[:1]
    loss = nt_xent(torch.cat([a[:1], negative]), torch.cat([a[:1], negative]), 0.01)
    assert 0 <= loss < 1e-80


def test_the_keys_of_a_batch_learn_too():
    """The end-to-end dictionary: what a queue cannot give back."""
    _, to_keys = gradients(lambda q, k: in_batch(q, k, 0.2), [vectors(5, 8), vectors(5, 8, 1)])
    assert (to_keys.norm(dim=1) > 1e-3).all()


# Properties


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_negatives_changes_nothing(seed):
    query, key, negatives = vectors(5, 8, seed), vectors(5, 8, 100), vectors(20, 8, 200)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(20, generator=generator)
    same = torch.rand(5, 20, generator=generator) < 0.2
    loss = info_nce(query, key, negatives[order], 0.1, same[:, order])
    agree(loss, info_nce(query, key, negatives, 0.1, same), rtol=1e-12)
    constant = torch.tensor(300.0)
    loss = nce(query, key, negatives[order], 0.1, constant, 100)
    agree(loss, nce(query, key, negatives, 0.1, constant, 100), rtol=1e-12)


@every_objective
def test_the_order_of_images_changes_nothing(objective):
    a, b = vectors(9, 8), vectors(9, 8, seed=1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    agree(objective(a[order], b[order]), objective(a, b), rtol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_mean_over_small_batches_is_the_mean_of_all_if_negatives_are_not_of_the_batch(name):
    a, b = vectors(8, 8), vectors(8, 8, seed=1)
    halves = (EVERY[name](a[:4], b[:4]) + EVERY[name](a[4:], b[4:])) / 2
    difference = (halves - EVERY[name](a, b)).abs()
    assert difference < 1e-12 if name in ("info_nce", "nce") else difference > 0.1


@pytest.mark.parametrize("constant", [-30.0, 7.0])
def test_a_constant_in_all_logits_changes_nothing(constant):
    """One more dimension, 1 in each query and the constant in each key, adds it to each product."""
    query, key, negatives = vectors(5, 8), vectors(5, 8, seed=1), vectors(6, 8, seed=2)
    raised = [F.pad(query, (0, 1), value=1.0)]
    raised += [F.pad(x, (0, 1), value=constant) for x in (key, negatives)]
    agree(info_nce(*raised, 0.5), info_nce(query, key, negatives, 0.5), rtol=1e-12)
    agree(in_batch(*raised[:2], 0.5), in_batch(query, key, 0.5), rtol=1e-12)


def test_nt_xent_does_not_know_which_view_is_first():
    a, b = vectors(9, 8), vectors(9, 8, seed=1)
    agree(nt_xent(b, a, 0.2), nt_xent(a, b, 0.2), rtol=1e-12)


def test_in_batch_knows_which_view_asks_unless_similarities_are_symmetric():
    """NNCLR's rows and columns: softmax over either side of one matrix."""
    a, b = vectors(5, 8), vectors(5, 8, seed=1)
    assert (in_batch(a, b, 0.07) - in_batch(b, a, 0.07)).abs() > 0.01
    symmetric = [torch.eye(5, dtype=torch.float64), a @ a.T]
    agree(in_batch(*symmetric, 0.2), in_batch(*symmetric[::-1], 0.2), rtol=1e-12)


def test_nt_xent_is_the_mean_of_info_nce_over_all_views():
    a, b = vectors(5, 8), vectors(5, 8, seed=1)
    views, partners = torch.cat([a, b]), torch.cat([b, a])
    same_image = torch.eye(5, dtype=torch.bool).repeat(2, 2)
    agree(nt_xent(a, b, 0.3), info_nce(views, partners, views, 0.3, same_image), rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("t", [0.05, 1.0])
def test_info_nce_stays_within_its_bounds_and_grows_with_every_negative(t, seed):
    query, key, negatives = vectors(5, 8, seed), vectors(5, 8, 100), vectors(30, 8, 200)
    values = [info_nce(query, key, negatives[:n], t).item() for n in range(31)]
    assert values[0] == 0
    assert values == sorted(values)
    assert values[-1] <= math.log(31) + 2 / t


def test_contrast_falls_as_the_query_nears_its_key():
    angles = torch.linspace(math.pi, 0, 20, dtype=torch.float64)
    queries = torch.stack([angles.cos(), angles.sin()], dim=1)
    key, other, normalizer = rows((1, 0)), rows((-1, 0)), torch.tensor(9.0)
    for objective in (info_nce, lambda *x: nce(*x, normalizer, 5)):
        values = [objective(q[None], key, other, 0.5).item() for q in queries]
        assert values == sorted(values, reverse=True)
        assert values[0] > values[-1] + 1


def test_a_high_temperature_makes_every_key_equally_likely():
    query, key, negatives = vectors(5, 8), vectors(5, 8, seed=1), vectors(9, 8, seed=2)
    agree(info_nce(query, key, negatives, 1e9), math.log(10), rtol=1e-6)


def test_a_low_temperature_leaves_nothing_to_learn_once_the_key_is_nearest():
    query, negatives = vectors(5, 8), vectors(9, 8, seed=2)
    values = [info_nce(query, query, negatives, t).item() for t in (1.0, 0.1, 0.01, 0.001)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1e-80


# Masks


def test_a_masked_entry_has_no_effect_and_no_gradient_at_all():
    query, key = vectors(4, 8).requires_grad_(), vectors(4, 8, seed=1)
    same = torch.zeros(4, 6, dtype=torch.bool)
    same[:, 2] = True
    outcomes = []
    for seed in range(5):
        negatives = vectors(6, 8, seed=2)
        negatives[2] = query[0].detach() if seed == 0 else vectors(1, 8, seed=seed)[0]
        negatives.requires_grad_()
        loss = info_nce(query, key, negatives, 0.01, same)
        to_query, to_negatives = torch.autograd.grad(loss, [query, negatives])
        assert torch.equal(to_negatives[2], torch.zeros(8, dtype=torch.float64))
        outcomes.append(torch.cat([loss[None], to_query.flatten()]).detach())
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


def test_a_query_without_any_negative_has_nothing_to_learn():
    negatives, every = vectors(6, 8, seed=2), torch.ones(1, 6, dtype=torch.bool)
    for key in (vectors(1, 8, seed=1), -vectors(1, 8)):  # even if the key is opposite
        query = vectors(1, 8).requires_grad_()
        loss = info_nce(query, key, negatives, 0.01, every)
        loss.backward()
        assert loss == 0
        assert torch.equal(query.grad, torch.zeros_like(query))


# Extremes


@pytest.mark.parametrize("objective", [nt_xent, in_batch])
def test_a_batch_of_one_has_nothing_to_learn_from_its_own_views(objective):
    a, b = vectors(1, 8), vectors(1, 8, seed=1)
    assert objective(a, b, 0.1) == 0
    grads = gradients(lambda a, b: objective(a, b, 0.1), [a, b])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@every_objective
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_small_temperature_keeps_everything_finite(objective, sign, dtype):
    """Also where embeddings are all alike, all zero, or each is opposite to its key."""
    for start in (vectors(4, 8), vectors(1, 8).expand(4, 8), torch.zeros(4, 8)):
        z = start.to(dtype)
        value = objective(z, sign * z, 0.01)
        assert value.isfinite()
        assert all(
            g.isfinite().all() for g in gradients(lambda z: objective(z, sign * z, 0.01), [z])
        )


@pytest.mark.parametrize("temperature", [0.1, 0.05, 0.03])
def test_a_positive_that_wins_by_far_leaves_digits_even_in_float32(temperature):
    """Logits and cross_entropy lose all of them at .05."""
    queries = torch.eye(6, dtype=torch.float32)[:1].requires_grad_()
    loss = info_nce(queries, torch.eye(6)[:1], torch.eye(6)[1:], temperature)
    expected = math.log1p(5 * math.exp(-1 / temperature))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    loss.backward()
    share = math.exp(-1 / temperature) / (1 + 5 * math.exp(-1 / temperature))
    assert queries.grad[0, 1].item() == pytest.approx(share / temperature, rel=1e-4)
