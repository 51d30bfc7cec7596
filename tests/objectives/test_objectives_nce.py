"""Contrast: golden values and theorems of finding a key among negatives, or telling it from noise."""

import math
from itertools import product

import pytest
import torch
from restated import agree, gradients, rows, vectors

from nearkin.objectives import (
    in_batch,
    info_nce,
    nce,
    nt_xent,
    relational_distillation,
    sup_con,
    unit,
)
from nearkin.types import UNLABELED

SIX = vectors(6, 8, seed=2)

EVERY = {
    "info_nce": lambda a, b, t=0.2: info_nce(a, b, SIX.to(a.dtype), t),
    "info_nce, masked": lambda a, b, t=0.2: info_nce(a, b, a, t, torch.eye(len(a)).bool()),
    "in_batch": lambda a, b, t=0.2: in_batch(a, b, t),
    "nt_xent": lambda a, b, t=0.2: nt_xent(a, b, t),
    "nce": lambda a, b, t=0.2: nce(a, b, SIX.to(a.dtype), t, torch.tensor(50.0), 20),
}
every_objective = pytest.mark.parametrize("objective", EVERY.values(), ids=EVERY)


def test_what_is_all_alike_costs_the_logarithm_of_its_number():
    z = vectors(1, 8)
    for keys, expected in [(5, 1.7917594692), (4096, 8.3180102775), (65536, 11.0903701476)]:
        agree(info_nce(z, z, z.expand(keys, 8), 0.07), expected, rtol=1e-10)
    for images, expected in [(1, 0.0), (2, 1.0986122887), (4, 1.9459101490), (128, 5.5412635452)]:
        views = z.expand(images, 8)
        agree(nt_xent(views, views, 0.1), expected, rtol=1e-10, atol=1e-14)
        agree(in_batch(views, views, 0.1), math.log(images), rtol=1e-12, atol=1e-14)


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


def test_an_arrangement_has_the_golden_value():
    for name, (loss, expected) in ARRANGEMENTS.items():
        digits = 1e-10 if expected > 0.01 else 1e-8  # as many as are known
        assert loss().item() == pytest.approx(expected, rel=0, abs=digits), name


def test_nce_of_an_untrained_network_is_the_golden_value():
    """P = 1 / n everywhere: log(1 + m) + m log(1 + 1 / m), the same for every n."""
    query, key, other = torch.eye(3, dtype=torch.float64)[:, None]
    for m, expected in [(1, 1.3862943611), (10, 3.3509970708), (4096, 9.3178882271)]:
        for n in (10, 1000):
            normalizer = torch.tensor(n, dtype=torch.float64)
            loss = nce(query, key, other.expand(m, 3), 0.07, normalizer, n)
            agree(loss, expected, rtol=1e-10)


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
        assert info_nce(query, key, negatives[:0], 0.01) == 0


@pytest.mark.parametrize("objective", [nt_xent, in_batch])
def test_a_batch_of_one_has_nothing_to_learn_from_its_own_views(objective):
    a, b = vectors(1, 8), vectors(1, 8, seed=1)
    assert objective(a, b, 0.1) == 0
    grads = gradients(lambda a, b: objective(a, b, 0.1), [a, b])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@every_objective
def test_a_small_temperature_keeps_everything_finite(objective):
    """Also where embeddings are all alike, all zero, or each is opposite to its key."""
    starts = vectors(4, 8), vectors(1, 8).expand(4, 8), torch.zeros(4, 8)
    for z, sign, dtype in product(starts, (1, -1), (torch.float32, torch.float64, torch.bfloat16)):
        loss = lambda z, sign=sign: objective(z, sign * z, 0.01)
        assert loss(z.to(dtype)).isfinite()
        assert gradients(loss, [z.to(dtype)])[0].isfinite().all()


def test_a_positive_that_wins_by_far_leaves_digits_even_in_float32():
    """Logits and cross_entropy lose all of them at .05."""
    for t in (0.1, 0.05, 0.03):
        query = torch.eye(6)[:1].requires_grad_()
        loss = info_nce(query, torch.eye(6)[:1], torch.eye(6)[1:], t)
        rest = 5 * math.exp(-1 / t)
        assert loss.item() == pytest.approx(math.log1p(rest), rel=1e-4)
        loss.backward()
        assert query.grad[0, 1].item() == pytest.approx(rest / 5 / (1 + rest) / t, rel=1e-4)


def test_sup_con_of_two_classes_of_one_and_of_no_image_has_the_golden_values():
    """Two images at right angles, in two views each: e + 2 is all there is besides oneself."""
    z, log_sum = torch.eye(2).double(), math.log(math.e + 2)
    for label, expected in (((0, 1), log_sum - 1), ((5, 5), log_sum - 1 / 3)):
        agree(sup_con(z, z, torch.tensor(label), 1.0), expected, rtol=1e-12)
    for label in ((), (UNLABELED, UNLABELED)):
        some = z[: len(label)]
        assert sup_con(some, some, torch.tensor(label, dtype=torch.long), 0.07) == 0


def test_a_teacher_that_is_sure_of_itself_gives_the_golden_value():
    """log(1 + 2 exp(-1 / 0.2)), as its own vector is at right angles to the others."""
    own, others = rows((1, 0, 0)), rows((0, 1, 0), (0, 0, 1))
    expected = math.log1p(2 * math.exp(-5))
    agree(relational_distillation(own, own, others, 0.2, 0.01), expected, rtol=1e-12)


def test_only_the_student_learns_also_from_a_large_dictionary_and_a_cold_teacher():
    student, teacher, keys = (vectors(n, 8, n).float().requires_grad_() for n in (3, 3, 500))
    loss = relational_distillation(student, teacher, keys, 0.001, 0.001)
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()
    assert teacher.grad is keys.grad is None
