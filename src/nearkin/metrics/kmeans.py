"""K-means in which the class of some rows may be known."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.distributed import threads_for
from nearkin.errors import DataError
from nearkin.metrics.components import principal_components
from nearkin.objectives import unit
from nearkin.objectives.fused import blocks
from nearkin.types import UNLABELED

Features = Float[np.ndarray, "n dim"]
Centers = Float[np.ndarray, "k dim"]
Clusters = Int[np.ndarray, " n"]
"""The number of the cluster of each row."""

WIDEST: Final = 64  # Wider features are reduced to as many principal components, for speed
COPIES: Final = 4  # Of what it clusters, that k-means holds at most, with its first draws
BLOCK: Final = 2**23  # Features, or distances, that are computed with at once, 32 MiB in float32
SAMPLE: Final = 65_536  # Rows that principal components are of, at the most
# Rows drawn for each first center, at most. Labeled rows hold centers where they are, so that
# k-means repairs a bad start less than without; the usual 2 + log k draws leave classes out.
DRAWS: Final = 20
ROUNDING: Final = 1e-24  # A squared distance below this share of the longest row's square is none


@dataclass(frozen=True, eq=False)
class Clustering:
    """Rows in clusters, the mean of each cluster, and what is left within them."""

    cluster: Clusters  # The cluster of each row, 0 to `k - 1`
    centers: Centers  # The mean of its rows; for an empty one, where it was
    inertia: float  # Sum of squared distances of the rows to the centers of their clusters


def compact(features: Float[Tensor, "n dim"]) -> Float[np.ndarray, "n kept"]:
    """Unit features, or their `WIDEST` leading principal components if they are wider.

    These are of at most `SAMPLE` evenly spread rows. Features may be on disk.
    """
    (n, dim), mean, components = features.shape, None, None
    if dim > WIDEST and n > 1:  # one row has no components
        sample = unit(features[:: -(-n // SAMPLE)].float()).cpu().numpy()
        found = principal_components(sample, min(WIDEST, len(sample)))
        mean, components = (torch.from_numpy(x).to(features.device) for x in found)
    reduced = np.empty((n, dim if components is None else components.shape[1]), np.float32)
    # Kept in pieces between the blocks, they would leave holes in memory that no block fits into.
    for part in blocks(n, max(1, BLOCK // dim)):
        x = unit(features[part].float())
        if mean is not None and components is not None:
            # Centered first, unlike by `transform`: equal rows stay equal despite rounding.
            x = (x - mean) @ components
        reduced[part] = x.cpu().numpy()
    return reduced


def constrained_kmeans(
    features: Features,
    label: Clusters,
    k: int,
    *,
    seed: int,
    n_init: int = 10,
    max_iter: int = 100,
) -> Clustering:
    """K-means in which labeled rows stay in the cluster of their class, if there are any.

    Centers of labeled classes start at the means of their labeled rows, the others by k-means++
    (Arthur & Vassilvitskii 2007, each time the best of a few) among the unlabeled ones. A cluster
    that loses all its rows starts anew at the unlabeled row farthest from its center. Each of
    `n_init` starts ends after `max_iter` steps, or when no row moves; the one with the least
    inertia wins. The label of a row is its cluster, or `UNLABELED`; `k` counts the clusters of
    the labeled classes, too.

    Han et al. Learning to discover novel visual categories via deep transfer clustering. ICCV
    2019; Vaze et al. Generalized category discovery. CVPR 2022, section 3.2.

    Raises:
        DataError: If there are no rows, or more classes than clusters.
    """
    classes = int(label.max(initial=UNLABELED)) + 1
    if not len(label):
        raise DataError("no rows to cluster; k-means needs at least one")
    if k < (least := max(classes, 1)):
        raise DataError(f"{k} clusters for {classes} labeled classes; ask for {least} or more")
    middle = features.mean(axis=0, dtype=np.float64)
    x = features - middle  # squares of what all rows share would drown the rest
    x = x.astype(np.result_type(features, np.float32))
    rows = _Rows(x, label, k)
    generator = np.random.default_rng(seed)
    attempts = (_descend(rows, _start(rows, generator), max_iter) for _ in range(n_init))
    with threads_for(x.size):
        best = min(attempts, key=lambda clustering: clustering.inertia)
    return Clustering(best.cluster, best.centers + middle, best.inertia)


class _Rows:
    """The rows; the sums over labeled ones, which never move, are computed once."""

    def __init__(self, x: Features, label: Clusters, k: int) -> None:
        self.x, self.label, self.moving = x, label, label == UNLABELED
        self.free = x if self.moving.all() else x[self.moving]
        self.square = np.einsum("nd,nd->n", self.free, self.free)
        self.least = ROUNDING * float(np.einsum("nd,nd->n", x, x).max())
        self.total, self.count = _sums(x[~self.moving], label[~self.moving], k)

    def distances(self, centers: Centers, rows: slice = slice(None)) -> Float[np.ndarray, "n k"]:
        """Squared, of unlabeled rows."""
        centers = centers.astype(self.free.dtype)
        product: Float[np.ndarray, "n k"] = self.free[rows] @ (-2 * centers.T)
        product += np.einsum("kd,kd->k", centers, centers)
        product += self.square[rows, None]
        np.maximum(product, 0, out=product)
        return product

    def nearest(self, centers: Centers) -> tuple[Clusters, Float[np.ndarray, " n"]]:
        """Return the nearest center of each unlabeled row, and the squared distance to it."""
        cluster = np.empty(len(self.free), np.int64)
        away = np.full(len(self.free), np.inf, self.free.dtype)
        for rows in blocks(len(self.free) if len(centers) else 0, 1 + BLOCK // (1 + len(centers))):
            squares = self.distances(centers, rows)
            cluster[rows] = squares.argmin(axis=1)
            away[rows] = squares.min(axis=1)
        return cluster, away

    def means(self, cluster: Clusters, centers: Centers) -> tuple[Centers, Int[np.ndarray, " k"]]:
        """Return the mean and the size of each cluster; the means of empty ones stay."""
        total, count = _sums(self.free, cluster, len(centers))
        count = count + self.count
        mean = (total + self.total) / np.maximum(count, 1)[:, None]
        return np.where(count[:, None] > 0, mean, centers), count


def _sums(x: Features, cluster: Clusters, k: int) -> tuple[Centers, Int[np.ndarray, " k"]]:
    """Return the sum of each cluster's rows, and their number."""
    from scipy.sparse import csr_array

    total = np.zeros((k, x.shape[1]))
    for rows in blocks(len(x), max(1, BLOCK // max(1, x.shape[1]))):  # in double precision
        own = cluster[rows]
        member = csr_array((np.ones(len(own)), (own, np.arange(len(own)))), shape=(k, len(own)))
        total += member @ x[rows]
    return total, np.bincount(cluster, minlength=k)


def _start(rows: _Rows, generator: np.random.Generator) -> Centers:
    """Means of the labeled classes, then k-means++ with respect to them."""
    taken = rows.count > 0
    centers: Centers = rows.total / np.maximum(rows.count, 1)[:, None]
    if not len(rows.free):
        return centers  # nothing will ever move there
    away = rows.nearest(centers[taken])[1].astype(np.float64)
    draws = min(DRAWS, 1 + len(away) // 10)  # the best of nearly all would be the same each time
    for cluster in np.flatnonzero(~taken):
        total = away.sum()
        usual = np.finfo(float).tiny < total < np.inf  # else all rows are as good
        drawn = generator.choice(len(away), draws, p=away / total if usual else None)
        closer = np.minimum(away[:, None], rows.distances(rows.free[drawn]))
        best = closer.sum(axis=0).argmin()
        centers[cluster], away = rows.free[drawn[best]], closer[:, best]
    return centers


def _descend(rows: _Rows, centers: Centers, max_iter: int) -> Clustering:
    """Move rows to the nearest center and centers to the mean, until no row moves."""
    cluster = np.full(len(rows.free), UNLABELED)
    for _ in range(max_iter):
        before, cluster = cluster, rows.nearest(centers)[0]
        if np.array_equal(before, cluster):
            break
        cluster, centers = _settle(rows, cluster, centers)
    everywhere = rows.label.astype(np.int64)
    everywhere[rows.moving] = cluster
    left = rows.x - centers[everywhere]
    return Clustering(everywhere, centers, float(np.einsum("nd,nd->", left, left)))


def _settle(rows: _Rows, cluster: Clusters, centers: Centers) -> tuple[Clusters, Centers]:
    """New centers, and a row for each empty cluster as long as one is away from its center."""
    centers, count = rows.means(cluster, centers)
    for empty in np.flatnonzero(count == 0):
        left = rows.free - centers[cluster]
        away = np.einsum("nd,nd->n", left, left)
        if away.max() <= rows.least:
            break
        cluster[away.argmax()] = empty
        centers, count = rows.means(cluster, centers)
    return cluster, centers
