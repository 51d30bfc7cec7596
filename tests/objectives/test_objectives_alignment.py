"""Agreement of two views: golden values and theorems, and the unit vectors it is measured on."""

import math

import pytest
import restated
import torch
from hypothesis import given
from hypothesis import strategies as st
from restated import agree, gradients, rows, vectors
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian

from nearkin.objectives import alignment, barlow_twins, gram, sigreg, unit, vicreg

SHORTEST = 1e-6
"""The documented length below which a vector has no direction to speak of."""

directions = st.lists(st.floats(-1, 1), min_size=2, max_size=9).filter(
    lambda v: math.hypot(*v) > 0.1
)


def single(direction, exponent):
    return torch.tensor(direction) * 10.0**exponent


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


def test_a_vector_has_length_one_from_the_shortest_length_on():
    for length, expected in ((1e-8, 0.01), (0.99 * SHORTEST, 0.99), (1.01 * SHORTEST, 1.0)):
        for direction in ((1.0, 0.0), (0.6, -0.8)):
            agree(unit(length * torch.tensor(direction)).norm(), expected, rtol=1e-5)


@given(directions, st.integers(-40, 37))
def test_the_gradient_of_a_unit_vector_is_one_over_its_length_and_bounded(direction, exponent):
    x = single(direction, exponent)
    slope = torch.linalg.matrix_norm(jacobian(unit, x).double(), 2).item()
    length = math.hypot(*x.tolist())
    assert slope == pytest.approx(1 / max(length, SHORTEST), rel=1e-4)
    assert slope < 1.0001e6


@pytest.mark.parametrize("dim", [2, 9, 33])
def test_the_gradient_of_a_unit_vector_is_its_slope_and_orthogonal_to_it(dim):
    x = vectors(3, dim, seed=dim)
    assert gradcheck(unit, x.clone().requires_grad_(), eps=1e-6, atol=1e-7)
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


def byol(prediction, target):
    return alignment(unit(prediction), unit(target))


def test_alignment_divides_by_the_length_and_not_by_its_square():
    """By the square, (3, 4) would be .8 too, but (6, 8) .89."""
    for prediction in [(3, 4), (6, 8), (3e-3, 4e-3), (3e20, 4e20)]:
        agree(byol(rows(prediction), rows((1, 0))), 0.8, rtol=1e-14)


def test_a_collapsed_network_is_at_the_minimum_with_nothing_to_learn():
    z = 3 * vectors(1, 8).expand(5, 8)
    agree(byol(z, z), 0.0, rtol=0, atol=1e-15)
    assert gradients(lambda z: byol(z, z.detach()), [z])[0].abs().max() < 1e-16


def test_the_gram_loss_sees_angles_alone():
    a, b = vectors(6, 5), rows((1, 0), (1, 0), (0, 1))
    turn = torch.linalg.qr(vectors(5, 5, seed=1))[0]
    agree(gram(a @ turn, a), 0.0, rtol=0, atol=1e-28)
    agree(gram(rows((1, 0), (-1, 0)), rows((1, 0), (1, 0))), 2.0, rtol=1e-14)
    agree(gram(rows((1, 0, 0), (0, 1, 0), (0, 0, 1)), b), 2 / 9, rtol=1e-14)
    teacher = vectors(6, 3, seed=2).requires_grad_()
    gram(a.requires_grad_(), teacher).backward()
    assert teacher.grad is None


# Redundancy, of Barlow Twins

ORTHOGONAL = rows((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))
"""Four embeddings, of which all three features are uncorrelated, of mean 0 and variance 1."""

EPS = 1e-5
"""What batch normalization adds to variances: a correlation of one is 1 / (1 + EPS)."""


def test_barlow_twins_is_zero_of_uncorrelated_equal_views_and_one_a_feature_where_all_collapse():
    assert barlow_twins(ORTHOGONAL, ORTHOGONAL, 1.0) < 1e-9
    z = vectors(1, 6).expand(5, 6)
    agree(barlow_twins(z, z, 0.005), 6.0, rtol=1e-6)
    assert gradients(lambda z: barlow_twins(z, z, 0.005), [z])[0].isfinite().all()


def test_vicreg_of_a_collapsed_network_is_its_missing_spread():
    """A deviation of sqrt(.0001) falls short of one by .99; from there nothing pulls it apart."""
    z = vectors(1, 6).expand(5, 6)
    loss = lambda z: vicreg(z, z, invariance=25.0, variance=25.0, covariance=1.0)
    agree(loss(z), 25 * 0.99, rtol=1e-12)
    assert gradients(loss, [z])[0].abs().max() < 1e-10
    assert loss(rows((1,), (-1,))) == 0  # one feature has nothing to share


# Normality, of LeJEPA


def epps_pulley(x):
    """The integral over all frequencies in closed form, of one projection (Epps & Pulley 1983)."""
    pairs = math.fsum(math.exp(-((a - b) ** 2) / 2) for a in x for b in x) / len(x)
    alone = math.fsum(math.exp(-(a**2) / 4) for a in x) * math.sqrt(2)
    return math.sqrt(2 * math.pi) * (pairs - alone + len(x) / math.sqrt(3))


@pytest.mark.parametrize("x", [(0.0, 0.0), (1.0, -1.0, 0.5), (1.5, 1.5, -0.2, 0.1, -1.3)])
def test_seventeen_frequencies_give_the_whole_integral(x):
    agree(sigreg(rows(*([v] for v in x)), rows((1.0,))), epps_pulley(x), rtol=1e-4)


def test_sigreg_is_least_of_normal_samples_and_falls_towards_them():
    """Of quantiles of the normal distribution hardly anything is left; all else is far above."""
    q = torch.special.ndtri((torch.arange(200).double() + 0.5) / 200)[:, None]
    one = rows((1.0,))
    assert sigreg(q, one) < 0.01
    for other in (0 * q, 2 * q, q / 2, q + 1, q.sign(), q.square() - 1):
        assert sigreg(other, one) > 2
    collapsed = 1e-3 * q
    (slope,) = gradients(lambda z: sigreg(z, one), [collapsed])
    assert sigreg(collapsed - 10 * slope, one) < sigreg(collapsed, one)


def test_sigreg_is_the_mean_over_directions_and_sees_nothing_across_them():
    z, (a, b) = vectors(20, 2), rows((1.0, 0.0), (0.6, 0.8))
    whole = sigreg(z, torch.stack([a, b]))
    agree(whole, (sigreg(z, a[None]) + sigreg(z, b[None])).item() / 2, rtol=1e-12)
    assert gradients(lambda z: sigreg(z, a[None]), [z])[0][:, 1].abs().max() == 0
