"""Agreement of views without negatives, and what keeps it from being trivial."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nearkin.objectives.numerics import full_precision, mean_over_rows


@full_precision
def alignment(
    prediction: Float[Tensor, "batch dim"], target: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """Squared distance between unit vectors, `2 - 2 p.z` (Grill et al. 2020, eq. 2).

    The mean over the batch: 0 where they agree, 2 at right angles, 4 where they are opposite.

    >>> alignment(torch.eye(2), torch.eye(2))
    tensor(0.)
    """
    return (2 - 2 * (prediction * target).sum(dim=1)).mean()


@full_precision
def gram(
    student: Float[Tensor, "batch dim"], teacher: Float[Tensor, "batch _"]
) -> Float[Tensor, ""]:
    """Keep the similarities of a batch as a teacher sees them, `mean (s_i.s_j - t_i.t_j)^2`.

    The Gram loss of DINOv3 (Simeoni et al. 2025, arXiv:2508.10104, section 4.2), of images instead
    of patches: the mean over all pairs. Both may have dimensions, and turns, of their own.

    Returns:
        0 where all cosines agree, 4 at most. No gradient reaches the teacher.

    >>> a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> gram(a, b)  # of four pairs, two differ by 1
    tensor(0.5000)
    """
    teacher = teacher.detach()

    def term(rows: slice) -> Tensor:
        return F.mse_loss(student[rows] @ student.T, teacher[rows] @ teacher.T)

    return mean_over_rows(term, len(student))


@full_precision
def barlow_twins(
    a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"], off_diagonal: float
) -> Float[Tensor, ""]:
    """Make the cross-correlation of two views the identity (Zbontar et al. 2021, eq. 1 and 2).

    Args:
        a: Embeddings of one view, of any length.
        b: Embeddings of the other.
        off_diagonal: The weight lambda of what different dimensions share.

    Returns:
        A sum over the entries of the matrix, not a mean.

    >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    >>> barlow_twins(z, z, off_diagonal=0.5)  # both dimensions are one: 0.5 (1 + 1)
    tensor(1.0000)
    """
    a, b = (F.batch_norm(z, None, None, training=True) for z in (a, b))  # standardized
    correlation = a.T @ b / len(a)
    own = correlation.diagonal()
    shared = correlation.square().sum() - own.square().sum()
    return (1 - own).square().sum() + off_diagonal * shared


@full_precision
def vicreg(
    a: Float[Tensor, "batch dim"],
    b: Float[Tensor, "batch dim"],
    *,
    invariance: float,
    variance: float,
    covariance: float,
) -> Float[Tensor, ""]:
    """Agree, keep a spread of at least one, share nothing (Bardes et al. 2022, eq. 1 to 6).

    Args:
        a: Embeddings of one view, of any length.
        b: Embeddings of the other.
        invariance: Weight of the mean squared difference (eq. 5), over all numbers.
        variance: Weight of the hinge on the standard deviation, `max(0, 1 - S)` (eq. 1), the mean
            of both views, as in the official code; the paper adds them.
        covariance: Weight of the squared covariances of different dimensions (eq. 3 and 4).

    >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    >>> vicreg(z, z, invariance=25.0, variance=25.0, covariance=1.0)  # 2 (2 2^2) / 2
    tensor(8.)
    """
    hinge = torch.add(_hinge(a), _hinge(b)) / 2
    shared = torch.add(_covariance(a), _covariance(b))
    return invariance * F.mse_loss(a, b) + variance * hinge + covariance * shared


def _hinge(z: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """How far the standard deviation falls short of one, over the dimensions."""
    return F.relu(1 - (z.var(dim=0) + 1e-4).sqrt()).mean()


def _covariance(z: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
    """Squared covariances of different dimensions, per dimension."""
    centered = z - z.mean(dim=0)
    covariance = centered.T @ centered / (len(z) - 1)  # `cov` would ask a GPU how many there are
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]


@full_precision
def sigreg(
    z: Float[Tensor, "batch dim"], directions: Float[Tensor, "directions dim"]
) -> Float[Tensor, ""]:
    """Be normally distributed along every direction (Balestriero & LeCun 2025, algorithm 1).

    The statistic of Epps and Pulley (1983), which is zero where the characteristic functions of
    the projections and of the standard normal distribution agree, by the trapezoidal rule:

        N integral |mean_n exp(i t a.z_n) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt,  t from -5 to 5

    Args:
        z: Embeddings, of any length.
        directions: Unit vectors `a` to project on.

    Returns:
        The mean over the directions, from 0 on; about 1.06 for samples that are normal.

    >>> sigreg(torch.zeros(2, 1), torch.ones(1, 1))  # 2 integral (1 - g)^2 g
    tensor(0.8178)
    """
    # By symmetry, half of 17 points from -5 to 5.
    t = torch.linspace(0, 5, 9, device=z.device, dtype=z.dtype)
    normal = torch.exp(-t.square() / 2)
    angle = (z @ directions.T)[..., None] * t
    distance = (angle.cos().mean(dim=0) - normal).square() + angle.sin().mean(dim=0).square()
    return 2 * len(z) * torch.trapezoid(distance * normal, t).mean()
