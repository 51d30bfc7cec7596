"""A student's view of a dictionary beside its teacher's: golden values, theorems."""

import math

import pytest
import restated
import torch
from restated import agree, rows, vectors

from nearkin.objectives import look_up, relational_distillation


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_equations_of_the_paper(seed):
    student, teacher, keys = (vectors(n, 8, seed + 100 * i) for i, n in enumerate((5, 5, 11)))
    expected = restated.relational_distillation(
        student.tolist(), teacher.tolist(), keys.tolist(), 0.2, 0.05
    )
    agree(relational_distillation(student, teacher, keys, 0.2, 0.05), expected, rtol=1e-12)


def test_the_golden_value():
    """A teacher that is sure of itself: log(1 + 2 exp(-1 / 0.2)), as its own vector is 1 from it."""
    own, others = rows((1, 0, 0)), rows((0, 1, 0), (0, 0, 1))
    expected = math.log1p(2 * math.exp(-5))
    agree(relational_distillation(own, own, others, 0.2, 0.01), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_least_where_the_student_sees_what_the_teacher_sees(seed):
    """At the same temperature, the loss of the teacher itself is the entropy of its softmax."""
    teacher, keys = vectors(6, 8, seed), vectors(20, 8, seed + 100)
    seen = look_up(teacher, keys, 0.1, teacher).softmax(dim=1)
    entropy = -(seen * seen.log()).sum(dim=1).mean().item()
    agree(relational_distillation(teacher, teacher, keys, 0.1, 0.1), entropy, rtol=1e-12)
    other = vectors(6, 8, seed + 200)
    assert relational_distillation(other, teacher, keys, 0.1, 0.1) > entropy + 1e-3


def test_only_the_student_learns():
    student, teacher, keys = (
        vectors(n, 8, seed).requires_grad_() for seed, n in enumerate((4, 4, 9))
    )
    relational_distillation(student, teacher, keys, 0.2, 0.01).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert keys.grad is None


def test_a_large_dictionary_and_a_cold_teacher_stay_finite():
    student, teacher = vectors(3, 8, 0).float(), vectors(3, 8, 1).float()
    loss = relational_distillation(student, teacher, vectors(500, 8, 2).float(), 0.001, 0.001)
    assert torch.isfinite(loss)
