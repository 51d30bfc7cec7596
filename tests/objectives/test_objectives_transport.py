"""The equation's two halves, and soft targets for it by optimal transport: golden values, theorems."""

import pytest
import restated
import torch
from hypothesis import given
from hypothesis import strategies as st
from restated import agree, gradients, rows, vectors

from nearkin.objectives import look_up, sinkhorn, soft_match

IMAGES = rows(
    (0.9, 0.1, 0.2),
    (0.8, 0.3, 0.1),
    (0.7, 0.2, 0.4),
    (0.6, 0.5, 0.3),
    (0.9, 0.2, 0.1),
    (0.85, 0.1, 0.15),
)
"""Scores of six images, most of which prefer the first of three prototypes."""


def scores(images, prototypes, seed=0):
    """Cosine similarities of random unit vectors."""
    return vectors(images, 8, seed) @ vectors(prototypes, 8, seed + 100).T


def test_a_collapsed_network_matches_as_badly_as_chance():
    """Embeddings all alike have even codes, whatever they are alike to, and logits all equal."""
    for prototypes, expected in [(10, 2.3025850930), (3000, 8.0063675677)]:
        alike = scores(1, prototypes).expand(16, prototypes)
        code = sinkhorn(alike, 0.05, 3)
        agree(code, torch.full_like(code, 1 / prototypes), rtol=1e-9)
        agree(soft_match(torch.zeros_like(code), code), expected, rtol=1e-10)


@given(st.floats(-1e4, 1e4))
def test_a_constant_in_a_row_of_logits_changes_no_match(constant):
    logits, target = 3 * vectors(6, 4), vectors(6, 4, seed=1).square()
    raised = logits + constant * torch.arange(6.0, dtype=torch.float64)[:, None]
    agree(soft_match(raised, target), soft_match(logits, target), rtol=1e-10)


def test_the_match_of_no_image_is_exactly_zero_with_an_empty_gradient():
    loss = soft_match(torch.zeros(0, 4), torch.zeros(0, 4))
    assert loss == 0
    query = torch.zeros(0, 8)
    keys = vectors(4, 8).float()
    grads = gradients(
        lambda q, k: soft_match(look_up(q, k, 0.1), torch.zeros(0, 4)), [query, keys]
    )
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_the_golden_codes_of_two_and_of_six_images():
    pair = rows((1, 0), (0.5, 0))
    three = [[0.6223578796, 0.3776421204], [0.3774392279, 0.6225607721]]
    one = [[0.5938454850, 0.4061545150], [0.3497554091, 0.6502445910]]
    agree(sinkhorn(pair, 0.5, 3), three, rtol=0, atol=1e-10)
    agree(sinkhorn(pair, 0.5, 1), one, rtol=0, atol=2e-10)
    agree(sinkhorn(pair, 0.5, 200)[0, 0], 0.6224593312, rtol=0, atol=1e-10)
    expected = [
        [0.778391, 0.004634, 0.216975],
        [0.271690, 0.652577, 0.075733],
        [0.001199, 0.002879, 0.995923],
        [0.000125, 0.895903, 0.103971],
        [0.924456, 0.040669, 0.034875],
        [0.772241, 0.012498, 0.215261],
    ]
    codes = sinkhorn(IMAGES, 0.05, 3)
    agree(codes, expected, rtol=0, atol=1e-6)
    agree(codes.sum(dim=0), [2.7481, 1.6092, 1.6427], rtol=0, atol=1e-4)
    agree(sinkhorn(IMAGES, 0.05, 100).sum(dim=0), [2.0, 2.0, 2.0], rtol=1e-9)
    agree((IMAGES / 0.05).softmax(1).sum(dim=0), [5.88, 0.12, 0.005], rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_no_score_is_too_large(dtype):
    """exp(100 / .003) is not a number of any type."""
    for scale, epsilon in [(1, 0.05), (1, 0.003), (100, 0.05), (100, 0.003)]:
        extreme = (scale * scores(6, 4)).to(dtype)
        codes = sinkhorn(extreme, epsilon, 3)
        assert codes.isfinite().all()
        agree(codes.sum(dim=1), [1.0] * 6, rtol=1e-5)
        # A logarithm of 30,000 leaves single precision two digits after the point.
        atol = scale / epsilon * torch.finfo(codes.dtype).eps
        agree(codes, restated.sinkhorn(extreme.tolist(), epsilon, 3), rtol=0, atol=10 * atol)
