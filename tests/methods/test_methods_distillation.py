"""Methods that learn from a teacher, from the papers."""

from collections import deque
from dataclasses import replace

import pytest
import restated
import torch
from small import batch_for, double_for, run, small

from nearkin.methods import METHODS
from nearkin.objectives import unit

TAUGHT = [name for name, cls in METHODS.items() if cls.uses_teacher]


def test_seed_compares_student_and_teacher_with_the_queue_and_the_teachers_own_vector():
    """Over steps in which a queue of two and a half batches wraps."""
    method = small("seed").double()
    queue = deque(method.queue.keys.tolist(), maxlen=40)
    for step in range(5):
        batch = double_for("seed", step)
        result, teacher = method(batch, 0.5), batch.teacher[0].tolist()
        student = unit(method.online(batch.views[0])).tolist()
        expected = restated.relational_distillation(student, teacher, list(queue), 0.2, 0.01)
        assert result.loss.item() == pytest.approx(expected, rel=1e-9)
        method.commit(result.memo, 0.5)
        queue.extend(teacher)
    assert torch.isin(batch.index, method.queue.index).all()


def test_feature_matching_is_the_squared_distance_of_unit_vectors():
    method, batch = small("feature_matching").double(), double_for("feature_matching")
    student = unit(method.online(batch.views[0])).tolist()
    pairs = zip(student, batch.teacher[0].tolist(), strict=True)
    expected = restated.mean([sum((a - b) ** 2 for a, b in zip(s, t)) for s, t in pairs])
    # The teacher's vectors are of length one in single precision.
    assert method(batch, 0.5).loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_student_comes_closer_to_its_teacher(name):
    method, batch = small(name), batch_for(name, 1)

    @torch.no_grad()
    def likeness():
        """How alike the similarities are that student and teacher see between images."""
        own = unit(method.eval().online(batch.views[0]))
        seen = [(z @ z.T).flatten() for z in (own, batch.teacher[0])]
        return torch.corrcoef(torch.stack(seen))[0, 1]

    before = likeness()
    run(method, name, total=60, until=60, batches=lambda n, s: batch_for(n, s % 4))
    assert likeness() > before + 0.4


@pytest.mark.parametrize("name", TAUGHT)
def test_a_batch_without_the_features_of_every_view_is_refused(name):
    batch = batch_for(name, 0)
    for teacher in ((), batch.teacher * 2):
        with pytest.raises(ValueError, match="a teacher's features of 1 views"):
            small(name)(replace(batch, teacher=teacher), 0.5)
