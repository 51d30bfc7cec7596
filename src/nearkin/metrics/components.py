"""Principal components of rows, by whichever matrix is smaller."""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from nearkin.objectives.fused import blocks

BLOCK: Final = 2**23  # Numbers that are held in float64 at once, 64 MiB
ROUNDING: Final = 1e-10  # Below this share of the largest, a variance is none


class Components(NamedTuple):
    """The mean of some rows, and their leading principal components."""

    mean: Float[np.ndarray, " dim"]
    directions: Float[np.ndarray, "dim count"]


def principal_components(rows: Float[np.ndarray, "n dim"], count: int) -> Components:
    """Return the components of most variance, of which each has its largest number positive.

    Of fewer rows than columns, by the products of rows: a covariance of 100,000 columns takes
    40 GB. Zeros are a component without variance then.
    """
    if len(rows) < rows.shape[1]:
        return _of_few(rows, count)
    from sklearn.decomposition import PCA

    pca = PCA(count, svd_solver="covariance_eigh").fit(rows)
    return Components(pca.mean_, pca.components_.T)


def _of_few(rows: Float[np.ndarray, "n dim"], count: int) -> Components:
    from scipy.linalg import eigh

    (n, dim), mean = rows.shape, rows.mean(axis=0)
    gram, directions = np.zeros((n, n)), np.empty((dim, count), rows.dtype)
    columns = [*blocks(dim, max(1, BLOCK // n))]
    for some in columns:
        x = (rows[:, some] - mean[some]).astype(np.float64)
        gram += x @ x.T
    squares, left = eigh(gram, overwrite_a=True, subset_by_index=(n - count, n - 1))
    squares, left = squares[::-1], left[:, ::-1]
    scale = np.where(squares > ROUNDING * squares[0], squares, np.inf) ** -0.5
    for some in columns:
        directions[some] = (rows[:, some] - mean[some]).T @ left * scale
    largest = np.abs(directions).argmax(axis=0)
    return Components(mean, directions * np.sign(directions[largest, range(count)]))
