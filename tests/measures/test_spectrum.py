"""RankMe, LiDAR and alpha-ReQ against their equations restated, and facts known in advance."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from builders import normal

from nearkin.errors import DataError
from nearkin.measures.geometry import effective_rank
from nearkin.measures.spectrum import alpha_req, lidar, rankme


def smooth_rank(values, epsilon):
    shares = [value / sum(values) + epsilon for value in values]
    return math.exp(-sum(p * math.log(p) for p in shares))


def test_rankme_is_the_entropy_of_the_singular_values():
    for shape in ((50, 6), (6, 50)):
        x = normal(*shape) * torch.linspace(0.1, 3, shape[1]) + 2
        values = np.linalg.svd(x.double().numpy(), compute_uv=False)
        assert float(rankme(x)) == pytest.approx(smooth_rank(values, 1e-7), rel=1e-9)
        assert float(rankme(1000 * x)) == pytest.approx(smooth_rank(values, 1e-7), rel=1e-6)
    assert float(rankme(torch.zeros(5, 3))) == 0


def test_rankme_sees_the_mean_and_the_effective_rank_does_not():
    # A large mean is one direction with nearly all of the spectrum: this is where RankMe misleads.
    x = normal(500, 16)
    assert float(rankme(x + 100)) < 4
    assert float(effective_rank(x + 100)) == pytest.approx(float(effective_rank(x)), rel=1e-3)


def lidar_restated(views, ridge, epsilon):
    x = views.double().numpy()
    n, q, d = x.shape
    within, between, mean = np.zeros((d, d)), np.zeros((d, d)), x.mean(axis=(0, 1))
    for image in x:
        center = image.mean(axis=0)
        between += np.outer(center - mean, center - mean) / (n - 1)
        for view in image:
            within += np.outer(view - center, view - center) / (n * (q - 1))
    values = scipy.linalg.eigh(between, within + ridge * np.eye(d), eigvals_only=True)
    return smooth_rank([max(value, 0) for value in values if value > 1e-12], epsilon)


def test_lidar_is_the_rank_of_a_generalized_eigenvalue_problem():
    for images in (30, 4):  # more than features, or fewer
        views = normal(images, 1, 7) * torch.linspace(0.5, 4, 7)
        views = views + 0.3 * normal(images, 5, 7, seed=1)
        expected = lidar_restated(views, 1e-4, 1e-7)
        assert float(lidar(views)) == pytest.approx(expected, rel=1e-5)
        assert float(lidar(views)) < min(7, images - 1) + 1e-3
    for shape in ((1, 5, 3), (5, 1, 3)):
        with pytest.raises(DataError, match="two images or more, and two views"):
            lidar(normal(*shape))


def features_with_spectrum(values, n=400):
    """Rows whose covariance has exactly these eigenvalues, up to a common factor."""
    left = normal(n, len(values)).double()
    left = torch.linalg.qr(left - left.mean(dim=0)).Q
    right = torch.linalg.qr(normal(len(values), len(values), seed=1).double()).Q
    return left * torch.tensor(values, dtype=torch.float64).sqrt() @ right


def test_alpha_req_recovers_the_exponent_of_a_power_law_of_enough_of_a_spectrum():
    for exponent in (0.0, 0.5, 1.0, 2.5):
        x = features_with_spectrum([j**-exponent for j in range(1, 129)])
        assert float(alpha_req(x)) == pytest.approx(exponent, abs=1e-6)
        assert float(alpha_req(7 * x + 3)) == pytest.approx(exponent, abs=1e-6)
    with pytest.raises(DataError, match="rank 32 or more; these have rank 31"):
        alpha_req(features_with_spectrum([1.0] * 31))
    assert float(alpha_req(features_with_spectrum([1.0] * 32))) == pytest.approx(0, abs=1e-6)


def test_alpha_req_is_the_weighted_fit_from_eigenvalue_11_to_half_the_rank():
    x = normal(300, 60) * torch.linspace(3, 0.2, 60)
    values = np.linalg.eigvalsh(np.cov(x.double().numpy().T))[::-1]
    j = np.arange(11, 31)
    slope = np.polyfit(np.log(j), np.log(values[j - 1]), 1, w=np.sqrt(1 / j))[0]
    assert float(alpha_req(x)) == pytest.approx(-slope, rel=1e-9)
