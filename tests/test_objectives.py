"""Objectives against their papers' equations, restated as plain sums over Python numbers."""

import itertools
import math
import random

import pytest
import torch
from torch.autograd import gradcheck

from nearkin.objectives import in_batch, info_nce, look_up, nt_xent, unit

SHAPES = range(40)
"""Seeds of random shapes, temperatures and vectors."""


# The papers, spelled out


def dot(u, v):
    return math.fsum(a * b for a, b in zip(u, v))


def mismatch(query, key, others, temperature):
    """-log of the key's softmax among the key and the others, without cancellation."""
    best = dot(query, key)
    return math.log1p(math.fsum(math.exp((dot(query, k) - best) / temperature) for k in others))


def mean(values):
    return math.fsum(values) / len(values)


def slow_info_nce(query, key, negatives, temperature, same=None):
    """He et al. 2020, equation 1, where `same` are not negatives."""
    same = same or [[False] * len(negatives)] * len(query)
    return mean(
        [
            mismatch(q, k, [n for n, own in zip(negatives, row) if not own], temperature)
            for q, k, row in zip(query, key, same)
        ]
    )


def slow_in_batch(query, key, temperature):
    """The same where the negatives are the other keys of the batch."""
    losses = []
    for i in range(len(query)):
        others = [key[j] for j in range(len(key)) if j != i]
        losses.append(mismatch(query[i], key[i], others, temperature))
    return mean(losses)


def slow_nt_xent(a, b, temperature):
    """Chen et al. 2020, equation 1 and algorithm 1: views 2k and 2k + 1 are of one image."""
    z = list(itertools.chain.from_iterable(zip(a, b)))
    losses = []
    for i in range(len(z)):
        partner = i + 1 if i % 2 == 0 else i - 1
        others = [z[k] for k in range(len(z)) if k not in (i, partner)]
        losses.append(mismatch(z[i], z[partner], others, temperature))
    return mean(losses)


# Random cases


def vectors(rows, dim, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return unit(torch.randn(rows, dim, generator=generator, dtype=torch.float64)).to(dtype)


def case(seed):
    """Aligned pairs, shared negatives with ties among them, a mask, and a temperature."""
    draw = random.Random(seed)
    batch, dim, keys = draw.randint(1, 17), draw.randint(1, 33), draw.randint(1, 50)
    query, key = vectors(batch, dim, seed), vectors(batch, dim, seed + 1000)
    negatives = vectors(keys, dim, seed + 2000)
    negatives[draw.randrange(keys)] = key[0]
    same = torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < 0.2
    return query, key, negatives, same, draw.choice([0.05, 0.07, 0.1, 0.2, 0.5, 1.0])


def functions(seed):
    """Each objective beside its slow twin, as functions of the vectors alone."""
    query, key, negatives, same, t = case(seed)
    return {
        "info_nce": (
            lambda q, k, n: info_nce(q, k, n, t),
            lambda q, k, n: slow_info_nce(q, k, n, t),
            (query, key, negatives),
        ),
        "info_nce, masked": (
            lambda q, k, n: info_nce(q, k, n, t, same),
            lambda q, k, n: slow_info_nce(q, k, n, t, same.tolist()),
            (query, key, negatives),
        ),
        "in_batch": (
            lambda q, k: in_batch(q, k, t),
            lambda q, k: slow_in_batch(q, k, t),
            (query, key),
        ),
        "nt_xent": (
            lambda a, b: nt_xent(a, b, t),
            lambda a, b: slow_nt_xent(a, b, t),
            (query, key),
        ),
    }


NAMES = list(functions(0))
every_function = pytest.mark.parametrize("name", NAMES)


def close(found, expected, rtol, atol=0.0):
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


# Values and gradients


@every_function
@pytest.mark.parametrize("seed", SHAPES)
def test_a_value_is_the_papers(name, seed):
    fast, slow, inputs = functions(seed)[name]
    close(fast(*inputs), slow(*(x.tolist() for x in inputs)), rtol=1e-12, atol=1e-14)


@every_function
@pytest.mark.parametrize("seed", SHAPES)
def test_a_value_in_single_precision_is_the_papers(name, seed):
    fast, slow, inputs = functions(seed)[name]
    single = [x.float() for x in inputs]
    close(fast(*single), slow(*(x.tolist() for x in single)), rtol=1e-5, atol=2e-6)


@every_function
@pytest.mark.parametrize("seed", SHAPES)
def test_a_gradient_is_the_slope_of_the_papers_value(name, seed):
    fast, slow, inputs = functions(seed)[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(fast(*leaves), leaves)
    for position, gradient in enumerate(gradients):
        direction = vectors(*gradient.shape, seed=seed + 3000)

        def along(distance, position=position, direction=direction):
            moved = list(inputs)
            moved[position] = moved[position] + distance * direction
            return slow(*(x.tolist() for x in moved))

        slope = (along(1e-5) - along(-1e-5)) / 2e-5
        close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)


@every_function
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_is_the_slope_of_the_value_in_every_direction(name, seed):
    fast, _, inputs = functions(seed)[name]
    leaves = tuple(x[:, :5].clone().requires_grad_() for x in inputs)
    assert gradcheck(fast, leaves, eps=1e-6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_the_gradient_of_a_query_is_the_softmax_mean_of_the_keys_less_its_own(seed):
    """With p the softmax over key and negatives: (sum_j p_j k_j - k+) / (temperature batch)."""
    query, key, negatives, _, t = case(seed)
    leaf = query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(info_nce(leaf, key, negatives, t), leaf)
    for q, own, found in zip(query.tolist(), key.tolist(), gradient):
        keys = [own, *negatives.tolist()]
        weights = [math.exp(dot(q, k) / t) for k in keys]
        expected = [
            (dot(weights, column) / math.fsum(weights) - own[d]) / (t * len(query))
            for d, column in enumerate(zip(*keys))
        ]
        close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_look_up_gives_each_similarity_after_the_querys_own(seed):
    query, key, negatives, _, t = case(seed)
    shared = [[dot(q, n) / t for n in negatives.tolist()] for q in query.tolist()]
    own = [dot(q, k) / t for q, k in zip(query.tolist(), key.tolist())]
    close(look_up(query, negatives, t), shared, rtol=1e-12, atol=1e-13)
    expected = [[o, *row] for o, row in zip(own, shared)]
    close(look_up(query, negatives, t, own=key), expected, rtol=1e-12, atol=1e-13)


# Golden values


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(5, 1.7917594692), (4096, 8.3180102775), (32768, 10.3972382255), (65536, 11.0903701476)],
)
def test_info_nce_of_equal_keys_is_the_logarithm_of_their_number(keys, expected):
    q = vectors(3, 8)[:1].expand(3, 8)
    close(info_nce(q, q, q[:1].expand(keys, 8), 0.07), expected, rtol=1e-10)


def test_info_nce_of_orthogonal_negatives_is_the_golden_value():
    basis = torch.eye(6, dtype=torch.float64)
    close(info_nce(basis[:1], basis[:1], basis[1:], 0.5), 0.5168135102, rtol=1e-9)


def test_info_nce_of_antipodal_negatives_is_the_golden_value():
    q = vectors(1, 6)
    close(info_nce(q, q, -q.expand(5, 6), 0.5), 0.0876245339, rtol=1e-8)


@pytest.mark.parametrize(
    ("images", "expected"),
    [(1, 0.0), (2, 1.0986122887), (4, 1.9459101490), (128, 5.5412635452), (256, 6.2363695902)],
)
def test_nt_xent_of_equal_views_is_the_logarithm_of_their_number(images, expected):
    z = vectors(1, 8).expand(images, 8)
    close(nt_xent(z, z, 0.1), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("t", "expected"), [(0.5, 0.5944376642), (0.1, 2.7236e-4)])
def test_nt_xent_of_orthonormal_pairs_is_the_golden_value(t, expected):
    z = torch.eye(4, dtype=torch.float64)
    close(nt_xent(z, z, t), expected, rtol=1e-4 if t < 0.5 else 1e-9)


def test_nt_xent_of_a_simplex_is_the_golden_value():
    z = unit(torch.eye(4, dtype=torch.float64) - 1 / 4)
    close(nt_xent(z, z, 0.5), 0.3484718858, rtol=1e-9)


def test_nothing_is_below_the_simplex():
    least = 0.3484718858
    assert all(nt_xent(z, z, 0.5) > least for z in (vectors(4, 5, seed) for seed in range(50)))


WORKED = rows((1, 0), (0, 1)), rows((0.6, 0.8), (0.8, -0.6))


@pytest.mark.parametrize(("t", "expected"), [(0.5, 2.0301902771), (1.0, 1.4735767889)])
def test_nt_xent_of_the_worked_example_is_the_golden_value(t, expected):
    close(nt_xent(*WORKED, t), expected, rtol=1e-9)


def test_in_batch_of_the_worked_example_is_the_golden_value():
    a, b = WORKED
    both = (in_batch(a, b, 0.5) + in_batch(b, a, 0.5)) / 2
    close(both, 1.8860240393, rtol=1e-9)


def test_nt_xent_of_mispaired_views_is_the_golden_value():
    z = torch.eye(2, dtype=torch.float64)
    close(nt_xent(z, z.flip(0), 0.5), 2.2395447662, rtol=1e-9)


# Properties


@every_function
@pytest.mark.parametrize("seed", range(5))
def test_a_rotation_of_the_space_changes_nothing(name, seed):
    fast, _, inputs = functions(seed)[name]
    dim = inputs[0].shape[1]
    rotation, _ = torch.linalg.qr(vectors(dim, dim, seed=seed + 9))
    close(fast(*(x @ rotation for x in inputs)), fast(*inputs).item(), rtol=1e-12, atol=1e-14)


@every_function
def test_the_length_of_an_embedding_changes_nothing(name):
    fast, _, inputs = functions(1)[name]
    found = fast(*(unit(7.3 * x) for x in inputs))
    close(found, fast(*inputs).item(), rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_negatives_changes_nothing(seed):
    query, key, negatives, same, t = case(seed)
    order = torch.randperm(len(negatives), generator=torch.Generator().manual_seed(seed))
    found = info_nce(query, key, negatives[order], t, same[:, order])
    close(found, info_nce(query, key, negatives, t, same).item(), rtol=1e-12)


@pytest.mark.parametrize("objective", [in_batch, nt_xent])
def test_the_order_of_images_changes_nothing(objective):
    a, b = vectors(9, 8), vectors(9, 8, seed=1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    close(objective(a[order], b[order], 0.2), objective(a, b, 0.2).item(), rtol=1e-12)


def test_nt_xent_does_not_know_which_view_is_first():
    a, b = vectors(9, 8), vectors(9, 8, seed=1)
    close(nt_xent(b, a, 0.2), nt_xent(a, b, 0.2).item(), rtol=1e-12)


def test_nt_xent_is_the_mean_of_info_nce_over_all_views():
    a, b = vectors(5, 8), vectors(5, 8, seed=1)
    views, partners = torch.cat([a, b]), torch.cat([b, a])
    same_image = torch.eye(5, dtype=torch.bool).repeat(2, 2)
    found = info_nce(views, partners, views, 0.3, same_image)
    close(nt_xent(a, b, 0.3), found.item(), rtol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_info_nce_stays_within_its_bounds_and_grows_with_every_negative(seed):
    query, key, negatives, _, t = case(seed)
    values = [info_nce(query, key, negatives[:n], t).item() for n in range(len(negatives) + 1)]
    assert values[0] == 0
    assert values == sorted(values)
    assert values[-1] <= math.log(1 + len(negatives)) + 2 / t


def test_info_nce_falls_as_the_query_nears_its_key():
    angles = torch.linspace(math.pi, 0, 20, dtype=torch.float64)
    queries = torch.stack([angles.cos(), angles.sin()], dim=1)
    key, negatives = rows((1, 0)), rows((-1, 0))
    values = [info_nce(q[None], key, negatives, 0.5).item() for q in queries]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_a_high_temperature_makes_every_key_equally_likely():
    query, key, negatives, _, _ = case(4)
    close(info_nce(query, key, negatives, 1e9), math.log(1 + len(negatives)), rtol=1e-6)


# Masks


def test_a_masked_entry_is_as_good_as_absent():
    query, key, negatives = vectors(4, 8), vectors(4, 8, seed=1), vectors(6, 8, seed=2)
    same = torch.zeros(4, 6, dtype=torch.bool)
    same[:, 2] = True
    rest = negatives[[0, 1, 3, 4, 5]]
    close(info_nce(query, key, negatives, 0.1, same), info_nce(query, key, rest, 0.1), rtol=1e-13)


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


def test_an_empty_mask_changes_nothing():
    query, key, negatives, same, t = case(3)
    none = torch.zeros_like(same)
    assert torch.equal(
        info_nce(query, key, negatives, t, none), info_nce(query, key, negatives, t)
    )


# Precision and extremes


def test_a_batch_of_one_has_nothing_to_learn_from_its_own_views():
    a, b = vectors(1, 8).requires_grad_(), vectors(1, 8, seed=1).requires_grad_()
    for objective in (nt_xent, in_batch):
        loss = objective(a, b, 0.1)
        gradients = torch.autograd.grad(loss, [a, b])
        assert loss == 0
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@every_function
def test_half_precision_inputs_are_computed_in_single_precision(name):
    fast, _, inputs = functions(6)[name]
    rounded = [x.bfloat16() for x in inputs]
    expected = fast(*(x.float() for x in rounded))
    with torch.autocast("cpu", torch.bfloat16):
        found = fast(*rounded)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@every_function
def test_autocast_changes_nothing_in_single_precision(name):
    fast, _, inputs = functions(6)[name]

    outcomes = []
    for enabled in (False, True):
        leaves = [x.float().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = fast(*leaves)
        outcomes.append([value, *torch.autograd.grad(value, leaves)])
    assert all(map(torch.equal, *outcomes))


@every_function
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_small_temperature_keeps_everything_finite(name, sign, dtype):
    """Also where embeddings are all alike, or each is opposite to its key."""
    own = torch.eye(4, dtype=torch.bool)
    tasks = {
        "info_nce": lambda z: info_nce(z, sign * z, z.flip(0), 0.01),
        "info_nce, masked": lambda z: info_nce(z, sign * z, z, 0.01, own),
        "in_batch": lambda z: in_batch(z, sign * z, 0.01),
        "nt_xent": lambda z: nt_xent(z, sign * z, 0.01),
    }
    for start in (vectors(4, 8), vectors(1, 8).expand(4, 8)):
        z = start.to(dtype).clone().requires_grad_()
        loss = tasks[name](z)
        loss.backward()
        assert loss.isfinite()
        assert z.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_unit_vectors_have_length_one_and_point_the_same_way(scale):
    close(unit(scale * rows((3, -4), (0, 2))), [[0.6, -0.8], [0.0, 1.0]], rtol=1e-12)


def test_the_zero_vector_stays_zero_and_finite():
    x = torch.zeros(2, 3).requires_grad_()
    z = unit(x)
    z.sum().backward()
    assert torch.equal(z, torch.zeros(2, 3))
    assert x.grad.isfinite().all()


def test_the_gradient_of_an_embedding_is_orthogonal_to_it():
    a = (3 * vectors(5, 8)).requires_grad_()
    nt_xent(unit(a), vectors(5, 8, seed=1), 0.1).backward()
    assert (a * a.grad).sum(1).abs().max() < 1e-14


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
