"""The spectrum of features as a predictor of accuracy without labels: RankMe, LiDAR, alpha-ReQ.

All are computed in float64 from Gram matrices, whose eigenvalues are squared singular values.
"""

from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from nearkin.errors import DataError

EPSILON: Final = 1e-7  # Added to each share of the spectrum by RankMe: that of float32
RIDGE: Final = 1e-4  # Added by LiDAR to the variance within images, in every direction
FIRST, LAST = 11, 100  # Eigenvalues, in descending order from 1, that the power law is fitted to
FEWEST: Final = 16  # The last of them at the least: fewer than six points are no fit
ROUNDING: Final = 1e-12  # Eigenvalues below this share of the largest are zero


def rankme(features: Float[Tensor, "n d"], epsilon: float = EPSILON) -> Float[Tensor, ""]:
    """Return the exponential of the entropy of the singular values of the features, not centered.

        exp(- sum_k p_k log p_k),    p_k = sigma_k / sum_j sigma_j + epsilon

    About from 1 to `min(n, d)`; 0 if all rows are zero. Garrido et al. RankMe: assessing the
    downstream performance of pretrained self-supervised representations by their rank. ICML
    2023, arXiv:2210.02885, equation 1.

    >>> f"{rankme(torch.eye(4)):.3f}"
    '4.000'
    """
    values = _eigenvalues(_gram(features.double())).sqrt()
    return _smooth_rank(values, epsilon)


def lidar(
    views: Float[Tensor, "images views d"], ridge: float = RIDGE, epsilon: float = EPSILON
) -> Float[Tensor, ""]:
    """Return how many directions tell images from each other more than their views differ.

    The smooth rank, as in `rankme`, of the eigenvalues of

        S_w^(-1/2) S_b S_w^(-1/2),    S_w = within + ridge I

    where `within` is the covariance of the views around the mean of their image, divided by
    `images (views - 1)`, and S_b that of these means, divided by `images - 1`: linear
    discriminant analysis with each image as its own class. Thilak et al. LiDAR: sensing linear
    probing performance in joint embedding SSL architectures. ICLR 2024, arXiv:2312.04000.

    Raises:
        DataError: If there are fewer than two images or two views of each.
    """
    images, count, _ = views.shape
    if images < 2 or count < 2:
        raise DataError("LiDAR needs two images or more, and two views or more of each")
    x = views.double()
    means = x.mean(dim=1)
    around = (x - means[:, None]).flatten(0, 1)
    centers = means - means.mean(dim=0)
    within = around.T @ around / (images * (count - 1))
    within.diagonal().add_(ridge)
    # S_w = L L^T: L^-1 S_b L^-T has the eigenvalues of the matrix above.
    factor = torch.linalg.cholesky(within)
    whitened = torch.linalg.solve_triangular(factor, centers.T, upper=False)
    return _smooth_rank(_eigenvalues(_gram(whitened.T)) / (images - 1), epsilon)


def alpha_req(features: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Return the exponent `a` of the power law `lambda_j ~ j^-a` of the covariance's eigenvalues.

    The slope of a straight line through `(log j, log lambda_j)`, by least squares with the
    weights `1 / j`, so that each octave counts alike; from eigenvalue 11 to eigenvalue 100, or
    half the rank where that is less. Agrawal et al. alpha-ReQ: assessing representation quality
    in self-supervised learning by measuring eigenspectrum decay. NeurIPS 2022; the
    fit is that of Stringer et al. High-dimensional geometry of population responses in visual
    cortex. Nature 2019.

    Raises:
        DataError: If fewer than 32 eigenvalues are positive.
    """
    x = features.double()
    values = _eigenvalues(_gram(x - x.mean(dim=0)))
    rank = int((values > ROUNDING * values[0]).sum())
    last = min(LAST, rank // 2)
    if last < FEWEST:
        raise DataError(
            f"alpha-ReQ needs features of rank {2 * FEWEST} or more; these have rank {rank}"
        )
    j = torch.arange(FIRST, last + 1, dtype=x.dtype, device=x.device)
    position, height, weight = j.log(), values[FIRST - 1 : last].log(), (1 / j) / (1 / j).sum()
    away = position - weight @ position
    return -(weight * away) @ height / ((weight * away) @ away)


def _gram(x: Float64[Tensor, "n d"]) -> Float64[Tensor, "side side"]:
    """Return the smaller of the two products of a matrix with itself."""
    return x.T @ x if x.shape[1] <= len(x) else x @ x.T


def _eigenvalues(symmetric: Float64[Tensor, "side side"]) -> Float64[Tensor, " side"]:
    """Return the eigenvalues, the largest first; rounding makes none of them negative."""
    values: Tensor = torch.linalg.eigvalsh(symmetric)
    return values.flip(0).clamp(min=0)


def _smooth_rank(values: Float64[Tensor, " values"], epsilon: float) -> Float64[Tensor, ""]:
    """Return the exponential of the entropy of their shares; 0 if all are zero."""
    total = values.sum()
    if total <= 0:
        return total
    entropy: Tensor = torch.special.entr(values / total + epsilon).sum()
    return entropy.exp()
