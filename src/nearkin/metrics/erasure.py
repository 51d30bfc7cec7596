"""LEACE: removes what a linear classifier could tell of a column from features, in closed form.

Belrose, Schneider-Joseph, Ravfogel, Cotterell, Raff, Biderman. LEACE: Perfect linear concept
erasure in closed form. NeurIPS 2023, arXiv:2306.03819.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ROUNDING: Final = 1e-6  # Below it, a correlation of features and concept is none


@dataclass(frozen=True, slots=True)
class Eraser:
    """An affine projection `x - W^-1 P W (x - mean)`."""

    mean: Float[Tensor, " dim"]
    colored: Float[Tensor, "dim rank"]  # W^-1 times an orthonormal basis of the range of P
    whitened: Float[Tensor, "rank dim"]  # That basis, transposed, times W

    def __call__(self, features: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
        """Return the features without the column, on the same scale."""
        return features - (features - self.mean) @ self.whitened.T @ self.colored.T


def leace(
    features: Float[Tensor, "n dim"],
    concept: Float[Tensor, "n values"],
    classes: Int[np.ndarray, " n"],
) -> Eraser:
    """Fit the least change of features after which no affine classifier tells the concept.

    The closed form of section 4 of the paper, with P the orthogonal projection onto the columns of
    `W S_xz`:

        r(x) = x - W^+ P W (x - E x),    W = S_xx^(-1/2)

    Afterwards the covariance of features and concept is 0, for any invertible W. So W may be of
    the covariance that Ledoit & Wolf (2004) shrink, which also serves where images are fewer than
    dimensions; with the covariance itself, the mean squared change is the least.

    Both covariances are those within classes: what a concept shares with classes, as a camera
    that has taken one of them, is not removed with it. In a single class this is the paper's.
    `concept` has a column of zeros and ones for each value.
    """
    from sklearn.covariance import ledoit_wolf_shrinkage

    x, z = (_centered(of.double(), classes) for of in (features, concept))
    covariance, cross = x.T @ x / len(x), x.T @ z / len(x)
    shrinkage = float(ledoit_wolf_shrinkage(x.numpy(), assume_centered=True))
    variances, directions = torch.linalg.eigh(covariance)
    ridge = shrinkage * variances.mean() + torch.finfo(torch.float64).tiny
    scale = ((1 - shrinkage) * variances.clamp(min=0) + ridge).sqrt()
    whiten, color = (directions * s @ directions.T for s in (1 / scale, scale))
    basis, size, _ = torch.linalg.svd(whiten @ cross, full_matrices=False)
    basis = basis[:, size > ROUNDING]  # of the rank of the concept: its columns sum to one
    return Eraser(features.mean(dim=0), (color @ basis).float(), (basis.T @ whiten).float())


def _centered(x: Float[Tensor, "n dim"], classes: Int[np.ndarray, " n"]) -> Float[Tensor, "n dim"]:
    """Return each row minus the mean of its class."""
    member = torch.from_numpy(np.unique(classes, return_inverse=True)[1])
    sums = x.new_zeros(int(member.max()) + 1, x.shape[1]).index_add_(0, member, x)
    return x - (sums / member.bincount()[:, None])[member]
