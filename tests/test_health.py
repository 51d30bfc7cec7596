"""Whether collapse is told from health: on vectors whose geometry is known."""

import math

import pytest
import torch

from nearkin.errors import DivergedError
from nearkin.training.health import collapsed, health, verdict


def normal(n, d, scale=None, shift=0.0):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    return x * (1 if scale is None else torch.tensor(scale)) + shift


def test_vectors_in_all_directions_are_healthy():
    found = health(normal(2000, 32))
    assert found["directions"] == 32
    assert found["effective_rank"] == pytest.approx(32, rel=0.05)
    assert found["feature_std"] == pytest.approx(1, rel=0.01)
    assert found["mean_cosine"] == pytest.approx(0, abs=0.01)
    assert not collapsed(found)
    assert verdict(found).startswith("healthy: the embeddings use 32 of 32 directions")


def test_vectors_in_few_directions_have_collapsed_though_they_vary():
    found = health(normal(500, 3) @ torch.linalg.qr(normal(64, 3))[0].T)
    assert found["effective_rank"] == pytest.approx(3, rel=0.1)
    assert verdict(found).startswith("collapsed: the embeddings use 3 of 64 directions")
    assert "; train longer, or try a lower learning rate" in verdict(found)


def test_vectors_around_one_point_have_collapsed_though_they_differ_in_all_directions():
    found = health(normal(500, 32, shift=2.0))
    assert found["effective_rank"] > 0.5 * found["directions"]
    assert found["mean_cosine"] == pytest.approx(4 / 5, rel=0.02)
    assert collapsed(found)


def test_equal_vectors_have_collapsed():
    found = health(torch.ones(16, 8))
    assert found["feature_std"] == pytest.approx(0, abs=1e-6)
    assert collapsed(found)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        (dict(effective_rank=5.1), True),
        (dict(effective_rank=5.2), False),
        (dict(feature_std=0.64), True),
        (dict(feature_std=0.66), False),
        (dict(mean_cosine=0.56), True),
        (dict(mean_cosine=0.54), False),
        (dict(mean_cosine=-0.9), False),
        (dict(effective_rank=math.nan), True),
    ],
)
def test_any_one_sign_is_enough(change, expected):
    sound = dict(effective_rank=30.0, directions=64.0, feature_std=0.98, mean_cosine=0.02)
    assert collapsed(sound | change) is expected


def test_small_batches_are_measured_by_the_directions_they_can_use():
    assert health(normal(8, 128))["directions"] == 8
    assert not collapsed(health(normal(64, 128)))


def test_the_length_of_embeddings_says_nothing():
    x = normal(100, 8)
    lengths = torch.linspace(0.1, 9, 100)[:, None]
    assert health(x * lengths) == pytest.approx(health(x), rel=1e-4, abs=1e-5)


def test_half_precision_embeddings_are_measured_too():
    assert health(normal(100, 8).bfloat16()) == pytest.approx(health(normal(100, 8)), abs=0.05)


def test_measuring_asks_for_no_gradient_and_changes_nothing():
    x = normal(20, 8).requires_grad_()
    before = x.detach().clone()
    health(x)
    assert torch.equal(x, before)


def test_embeddings_that_are_not_finite_have_diverged():
    x = normal(20, 8)
    x[3, 2] = math.nan
    with pytest.raises(DivergedError, match="no longer finite"):
        health(x)
