"""Rows that stand for others: of each class, of a set of copies, typical and uncertain ones."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.metrics.neighbors import held_at_once, nearest
from nearkin.objectives.fused import blocks, product
from nearkin.pace import ProgressCallback, ignore_progress
from nearkin.types import UNLABELED

ROUNDING: Final = 1e-6  # Of a cosine in float32: equal vectors may be so far below 1
CLUSTERS: Final = 500  # Of `typical`, at most, as in its paper
NEIGHBORS: Final = 20  # Nearest rows of a cluster whose mean distance says how typical a row is


def balanced(labels: np.ndarray, max_rows: int) -> Int[np.ndarray, " rows"]:
    """Sample at most this many rows, as equally over classes and evenly within them as possible.

    Rows without a label are a class of their own.

    >>> balanced(np.array(["a", "a", "a", "a", "b"]), 3).tolist()
    [0, 3, 4]
    """
    if len(labels) <= max_rows:
        return np.arange(len(labels))
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    shares, left = np.zeros(len(sizes), np.int64), max_rows
    # Small classes first: what they cannot use is left to the others.
    for done, number in enumerate(np.argsort(sizes, kind="stable")):
        shares[number] = min(sizes[number], left // (len(sizes) - done))
        left -= shares[number]
    rows = [
        np.flatnonzero(class_of == number)[np.linspace(0, size - 1, share).astype(np.int64)]
        for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    return np.sort(np.concatenate(rows))


@torch.no_grad()
def keep_one(
    x: Float[Tensor, "n dim"], threshold: float, on_progress: ProgressCallback = ignore_progress
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return for each row the row that is kept in its place, itself if it is kept; and the cosine.

    Rows are taken in order: one is kept unless it is a copy, by a cosine of `threshold` or more,
    of a row that is kept already, the first of which takes its place. So no two kept rows are
    copies, and each other row is a copy of the very row that is kept: a chain, whose ends are
    alike only by way of its middle, is not merged as a connected component would be. Exact, by
    products of blocks; memory is that of the unit vectors `x` and of one block.

    >>> chain = torch.tensor([[0.0, 0.4, 0.8]])
    >>> keep_one(torch.cat([chain.cos(), chain.sin()]).T, threshold=0.9)[0]
    array([0, 0, 2])
    """
    least = threshold - ROUNDING
    representative, similarity = torch.full((len(x),), -1), torch.ones(len(x))
    side = int(held_at_once(x.device) ** 0.5)
    for own in blocks(len(x), side):
        on_progress(own.start, len(x), "comparing images")
        free = own.start + (representative[own] < 0).nonzero().flatten()
        inside = product(x[free], x[free].T)
        copies = (inside >= least).numpy()
        for place, row in enumerate(free.tolist()):
            if representative[row] < 0:
                representative[row] = row
                if copies[place].sum() > 1:
                    later = place + 1 + np.flatnonzero(copies[place, place + 1 :])
                    later = later[(representative[free[later]] < 0).numpy()]
                    representative[free[later]] = row
                    similarity[free[later]] = inside[place, later]
        new = free[representative[free] == free]
        for other in blocks(len(x) - own.stop if len(new) else 0, side):
            rows = slice(own.stop + other.start, own.stop + other.stop)
            matrix = product(x[new], x[rows].T)
            alike = matrix >= least
            matched = (alike.any(dim=0) & (representative[rows] < 0)).nonzero().flatten()
            first = alike[:, matched].int().argmax(dim=0)
            representative[rows.start + matched] = new[first]
            similarity[rows.start + matched] = matrix[first, matched]
    return representative.numpy(), similarity.clamp(max=1).numpy()


def typical(
    features: Float[Tensor, "n dim"], labeled: Int[np.ndarray, " rows"], num: int, *, seed: int
) -> Int[np.ndarray, " unlabeled"]:
    """Return all unlabeled rows, those first that stand for most others, one per cluster in turn.

    TypiClust (Hacohen, Dekel, Weinshall. Active learning on a budget: opposite strategies suit
    high and low budgets. ICML 2022, arXiv:2202.02794, section 3.2): k-means into as many clusters
    as there will be labels, `CLUSTERS` at most. The next is of the cluster with the fewest labels,
    the largest of these, and in it the row whose `NEIGHBORS` nearest are nearest on average.
    `labeled` rows have a label, and `num` are to get one.
    """
    k = min(len(labeled) + num, CLUSTERS, len(features))
    x, nobody = compact(features), np.full(len(features), UNLABELED)
    cluster = constrained_kmeans(x, nobody, k, seed=seed, n_init=1).cluster
    is_labeled = np.isin(np.arange(len(x)), labeled)
    turn, size = np.zeros(len(x), np.int64), np.bincount(cluster, minlength=k)[cluster]
    for number in range(k):
        members = np.flatnonzero(cluster == number)
        spread = np.zeros(len(members))
        if len(members) > 1:
            own = features[members]
            near = nearest(own, own, NEIGHBORS, exclude_self=True)[0]
            spread = (2 - 2 * near).clamp(min=0).sqrt().mean(dim=1).numpy()
        first = np.lexsort((spread, ~is_labeled[members]))
        turn[members[first]] = np.arange(len(members))  # labeled ones took the first turns
    order = np.lexsort((cluster, -size, turn))
    return np.asarray(order[~is_labeled[order]])


def least_certain(
    margin: Float[np.ndarray, " n"], cluster: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Return the order of images by margin, one of each class in turn.

    The least certain image of each class, by its margin (Scheffer, Decomain, Wrobel. Active hidden
    Markov models for information extraction. IDA 2001), then the second of each, and so on: the
    least certain ones of all may lie between the same two classes.
    """
    order = np.argsort(margin, kind="stable")
    turn = np.zeros(len(order), np.int64)
    for number in np.unique(cluster):
        own = np.flatnonzero(cluster[order] == number)
        turn[own] = np.arange(len(own))
    return np.asarray(order[np.argsort(turn, kind="stable")])
