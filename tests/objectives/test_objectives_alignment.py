"""Agreement of two views: golden values and theorems, and the unit vectors it is measured on."""

import math

import pytest
import restated
import torch
from hypothesis import given
from hypothesis import strategies as st
from restated import agree, gradients, lists, rows, vectors
from torch.autograd.functional import jacobian

from nearkin.objectives import alignment, barlow_twins, unit, vicreg

SHORTEST = 1e-6
"""The documented length below which a vector has no direction to speak of."""

directions = st.lists(st.floats(-1, 1), min_size=2, max_size=9).filter(
    lambda v: math.hypot(*v) > 0.1
)


def single(direction, exponent):
    return torch.tensor(direction) * 10.0**exponent


# Unit vectors


@given(directions, st.integers(-5, 37))
def test_a_unit_vector_has_length_one_and_points_the_same_way(direction, exponent):
    x = single(direction, exponent)
    agree(unit(x), restated.normalized(x.tolist()), rtol=1e-5, atol=1e-6)


@given(directions, st.integers(-40, -8))
def test_a_vector_too_short_to_have_a_direction_stays_short_and_keeps_its_sign(
    direction, exponent
):
    x = single(direction, exponent)
    agree(unit(x), (x.double() / SHORTEST).tolist(), rtol=1e-5, atol=1e-30)
    assert unit(x).norm() < 1


@given(directions, st.integers(-40, 37))
def test_the_gradient_of_a_unit_vector_is_one_over_its_length_and_bounded(direction, exponent):
    x = single(direction, exponent)
    slope = torch.linalg.matrix_norm(jacobian(unit, x).double(), 2).item()
    length = math.hypot(*x.tolist())
    assert slope == pytest.approx(1 / max(length, SHORTEST), rel=1e-4)
    assert slope < 1.0001e6


@pytest.mark.parametrize("seed", range(40))
def test_the_gradient_of_a_unit_vector_is_its_slope_and_orthogonal_to_it(seed):
    x = vectors(1 + seed % 17, 2 + seed % 32, seed)
    restated.agree_in_slope(unit, lambda x: [restated.normalized(v) for v in x], [x], seed)
    (gradient,) = gradients(lambda x: (unit(x) * vectors(*x.shape, seed=99)).sum(), [100 * x])
    assert (x * gradient).sum(dim=1).abs().max() < 1e-15


@pytest.mark.parametrize("x", [(3.0, 0.0, 0.0), (0.0, -2.0, 1e-5), (0.5,)])
def test_the_gradient_of_a_unit_vector_along_an_axis_is_orthogonal_to_it(x):
    (gradient,) = gradients(lambda x: unit(x)[x.abs().argmax()], [torch.tensor(x)])
    assert (torch.tensor(x) * gradient).sum().abs() < 1e-6


def test_the_zero_vector_stays_zero_and_its_gradient_bounded():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.zeros(2, 3, dtype=dtype)
        assert torch.equal(unit(x).double(), torch.zeros(2, 3).double())
        (gradient,) = gradients(lambda x: unit(x)[:, 0].sum(), [x.float()])
        assert (gradient.norm(dim=1) <= 1.0001 / SHORTEST).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden_and_spoils_no_other(bad):
    z = unit(torch.tensor([[3.0, 4.0], [bad, 1.0]]))
    agree(z[0], [0.6, 0.8], rtol=1e-6)
    assert z[1].isnan().any()


@pytest.mark.parametrize(("dtype", "length"), [(torch.float16, 1e4), (torch.bfloat16, 1e37)])
def test_long_vectors_in_half_precision_have_unit_length(dtype, length):
    """Their squares overflow."""
    agree(unit(length * torch.tensor([3.0, -4.0]).to(dtype)), [0.6, -0.8], rtol=2**-8)


def test_every_leading_shape_is_of_vectors():
    x = 5 * vectors(12, 4)
    assert torch.equal(unit(x.view(3, 2, 2, 4)).view(12, 4), unit(x))
    assert torch.equal(unit(x[3]), unit(x)[3])
    assert unit(x[:0]).shape == (0, 4)


# Alignment, of BYOL and SimSiam


def byol(prediction, target):
    return alignment(unit(prediction), unit(target))


@pytest.mark.parametrize(("target", "expected"), [((5, 0), 0), ((0, 0.1), 2), ((-7, 0), 4)])
def test_alignment_is_zero_two_and_four_at_the_quarters_of_the_circle(target, expected):
    agree(byol(rows((3, 0)), rows(target)), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("prediction", [(3, 4), (6, 8), (3e-3, 4e-3), (3e20, 4e20)])
def test_alignment_divides_by_the_length_and_not_by_its_square(prediction):
    """By the square, (3, 4) would be .8 too, but (6, 8) .89."""
    agree(byol(rows(prediction), rows((1, 0))), 0.8, rtol=1e-14)


def test_the_gradient_of_alignment_is_the_golden_one_and_halves_as_the_length_doubles():
    target = rows((1, 0))
    for scale in (1, 2):
        (gradient,) = gradients(lambda p: byol(p, target), [scale * rows((3, 4))])
        agree(gradient, [[-0.256 / scale, 0.192 / scale]], rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_alignment_is_two_over_the_length_times_what_the_target_is_off(seed):
    """-(2 / |q|) (z - cos(q, z) q), and so orthogonal to q, over the batch."""
    q, z = 3 * vectors(4, 6, seed), vectors(4, 6, seed=seed + 100)
    (gradient,) = gradients(lambda q: byol(q, z), [q])
    cosine = (unit(q) * z).sum(dim=1, keepdim=True)
    agree(gradient, -(2 / 3) * (z - cosine * unit(q)) / 4, rtol=1e-12, atol=1e-15)
    assert (q * gradient).sum(dim=1).abs().max() < 1e-14


@given(directions, directions)
def test_alignment_is_two_more_than_twice_simsiam_and_stays_between_zero_and_four(p, z):
    p, z = ([(v + [0.0] * 9)[:9]] for v in (p, z))
    loss = byol(rows(*p), rows(*z))
    agree(loss, restated.byol(p, z), rtol=1e-12, atol=1e-14)
    agree(loss, 2 + 2 * restated.simsiam(p, z), rtol=1e-12, atol=1e-14)
    assert -1e-14 <= loss <= 4 + 1e-14


def test_the_sum_of_byol_is_four_and_four_times_simsiam():
    p1, p2, z1, z2 = (vectors(6, 5, seed) for seed in range(4))
    simsiam = sum(restated.simsiam(*lists(pair)) for pair in ((p1, z2), (p2, z1))) / 2
    agree(byol(p1, z2) + byol(p2, z1), 4 + 4 * simsiam, rtol=1e-12)


def test_a_stopped_gradient_is_half_of_the_whole_where_there_is_no_predictor():
    """And so of the same direction: without a predictor it cannot prevent collapse."""
    a, b = 2 * vectors(6, 5), vectors(6, 5, seed=1)

    def stopped(a, b):
        return (byol(a, b.detach()) + byol(b, a.detach())) / 2

    for half, whole in zip(gradients(stopped, [a, b]), gradients(byol, [a, b])):
        agree(half, whole / 2, rtol=1e-14, atol=1e-17)


def test_a_collapsed_network_is_at_the_minimum_with_nothing_to_learn():
    z = 3 * vectors(1, 8).expand(5, 8)
    agree(byol(z, z), 0.0, rtol=0, atol=1e-15)
    assert gradients(lambda z: byol(z, z.detach()), [z])[0].abs().max() < 1e-16


def test_alignment_is_the_proximal_term_up_to_its_weight():
    """Wu et al. 2018, equation 9: |v - v_old|^2 is 2 at right angles; its gradient 2 (v - v_old).

    Along the sphere, that is: what points along v, the normalization takes away.
    """
    v, old = vectors(4, 6), vectors(4, 6, seed=1)
    agree(alignment(rows((1, 0)), rows((0, 1))), 2.0, rtol=1e-15)
    (result,) = gradients(lambda v: alignment(unit(v), old), [v])
    (expected,) = gradients(lambda v: (unit(v) - old).square().sum(dim=1).mean(), [v])
    agree(result, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_alignment_is_the_same_for_every_order_and_split_of_the_batch(seed):
    p, z = vectors(8, 6, seed), vectors(8, 6, seed=seed + 100)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    agree(alignment(p[order], z[order]), alignment(p, z), rtol=1e-13)
    agree((alignment(p[:4], z[:4]) + alignment(p[4:], z[4:])) / 2, alignment(p, z), rtol=1e-13)


# Redundancy, of Barlow Twins

ORTHOGONAL = rows((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
"""Four embeddings, of which all three features are uncorrelated, of mean 0 and variance 1."""

EPS = 1e-5
"""What batch normalization adds to variances: a correlation of one is 1 / (1 + EPS)."""


def test_barlow_twins_of_uncorrelated_equal_views_is_zero():
    assert barlow_twins(ORTHOGONAL, ORTHOGONAL, 1.0) < 1e-9


@pytest.mark.parametrize("off_diagonal", [0.0, 0.005, 1.0])
def test_barlow_twins_of_opposite_views_is_four_a_feature(off_diagonal):
    agree(barlow_twins(ORTHOGONAL, -ORTHOGONAL, off_diagonal), 12.0, rtol=2 * EPS)


@pytest.mark.parametrize("off_diagonal", [0.0, 0.005, 1.0])
def test_barlow_twins_of_one_feature_many_times_is_the_weight_of_all_pairs(off_diagonal):
    z = ORTHOGONAL[:, :1].expand(4, 5)
    agree(barlow_twins(z, z, off_diagonal), off_diagonal * 20, rtol=3 * EPS, atol=1e-8)


def test_barlow_twins_of_a_collapsed_network_is_one_a_feature_and_finite():
    z = vectors(1, 6).expand(5, 6)
    agree(barlow_twins(z, z, 0.005), 6.0, rtol=1e-6)
    assert gradients(lambda z: barlow_twins(z, z, 0.005), [z])[0].isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_barlow_twins_does_not_know_scale_place_order_or_view(seed):
    a, b = vectors(9, 5, seed), vectors(9, 5, seed=seed + 100)
    loss = barlow_twins(a, b, 0.5).item()
    stretch = torch.logspace(1, 2, 5, dtype=torch.float64)  # long: the 1e-5 is for short ones
    far = barlow_twins(100 * a, 100 * b, 0.5).item()
    agree(barlow_twins(stretch * 100 * a + 7, 100 * b - 3, 0.5), far, rtol=1e-6)
    agree(barlow_twins(b, a, 0.5), loss, rtol=1e-12)
    images = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    agree(barlow_twins(a[images], b[images], 0.5), loss, rtol=1e-12)
    agree(barlow_twins(a.flip(1), b.flip(1), 0.5), loss, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_barlow_twins_of_two_images_is_of_signs(seed):
    """Standardized, two values are 1 and -1: every correlation is 1 or -1."""
    a, b = 1e3 * vectors(2, 6, seed), 1e3 * vectors(2, 6, seed=seed + 100)
    agree(
        barlow_twins(a, b, 0.0), 4.0 * ((a[0] > a[1]) != (b[0] > b[1])).sum(), rtol=1e-6, atol=1e-6
    )
    agree(barlow_twins(a, b, 1.0) - barlow_twins(a, b, 0.0), 30.0, rtol=1e-6)


# Variance, invariance and covariance, of VICReg


def test_vicreg_is_the_sum_of_its_three_terms_by_their_weights():
    a, b = vectors(9, 5), vectors(9, 5, seed=1)
    one = [
        vicreg(a, b, **dict(invariance=0.0, variance=0.0, covariance=0.0) | {name: 1.0})
        for name in ("invariance", "variance", "covariance")
    ]
    loss = vicreg(a, b, invariance=25.0, variance=24.0, covariance=3.0)
    agree(loss, 25 * one[0] + 24 * one[1] + 3 * one[2], rtol=1e-12)
    assert min(one) > 1e-3


def test_vicreg_of_spread_uncorrelated_equal_views_is_zero():
    z = 2 * ORTHOGONAL
    agree(vicreg(z, z, invariance=1.0, variance=1.0, covariance=1.0), 0.0, rtol=0, atol=1e-12)


def test_vicreg_of_a_collapsed_network_is_its_missing_spread():
    """A deviation of sqrt(.0001) falls short of one by .99; from there nothing pulls it apart."""
    z = vectors(1, 6).expand(5, 6)
    loss = lambda z: vicreg(z, z, invariance=25.0, variance=25.0, covariance=1.0)
    agree(loss(z), 25 * 0.99, rtol=1e-12)
    assert gradients(loss, [z])[0].abs().max() < 1e-10


def test_vicreg_of_one_feature_many_times_is_its_shared_variance():
    """Variance 4/3 in each of 5 features, of 2 views: 2 * (5 * 4) (4/3)^2 / 5."""
    z = ORTHOGONAL[:, :1].expand(4, 5)
    agree(vicreg(z, z, invariance=1.0, variance=1.0, covariance=1.0), 8 * 16 / 9, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_vicreg_does_not_know_place_order_or_view(seed):
    a, b = vectors(9, 5, seed), vectors(9, 5, seed=seed + 100)
    weights = dict(invariance=25.0, variance=25.0, covariance=1.0)
    loss = vicreg(a, b, **weights).item()
    images = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    for x, y in ((a + 7, b + 7), (b, a), (a[images], b[images]), (a.flip(1), b.flip(1)), (-a, -b)):
        agree(vicreg(x, y, **weights), loss, rtol=1e-12)


def test_vicreg_of_one_feature_has_nothing_to_share():
    z = rows((1,), (-1,))
    assert vicreg(z, z, invariance=25.0, variance=25.0, covariance=1.0) == 0
