"""Clusters against classes: matched one to one (Hungarian algorithm), and as two labelings."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int

from nearkin.metrics.intervals import Groups, Interval, quantile

RESAMPLES: Final = 200  # Draws of a bootstrap
UNSEEN: Final = 3  # Images that may be elsewhere where none was seen to be: the rule of three

Labels = Int[np.ndarray, " n"]
Table = Any
"""How many images each class and each cluster share: a sparse array of scipy, a row per class."""


# One to one


def match(
    labels: Labels, clusters: Labels, weight: Int[np.ndarray, " n"] | None = None
) -> dict[int, int]:
    """Return the class of each matched cluster, in the match that has the most images right.

    One Hungarian match over all images. If there are more clusters than classes, some match no
    class, and their images count as wrong; and the other way round. The `weight` of an image is 1
    by default; below 2^53 in total.

    >>> match(np.array([0, 0, 1]), np.array([5, 5, 5]), weight=np.array([1, 1, 3]))
    {5: 1}
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(
        contingency(labels, clusters, weight).toarray(), maximize=True
    )
    classes, names = np.unique(labels)[rows], np.unique(clusters)[columns]
    return dict(zip(names.tolist(), classes.tolist(), strict=True))


def right(labels: Labels, clusters: Labels, mapping: Mapping[int, int]) -> Bool[np.ndarray, " n"]:
    """Return which images are in a cluster that is matched with their class.

    >>> right(np.array([7, 7, 8]), np.array([1, 2, 3]), {1: 7, 2: 8})
    array([ True, False, False])
    """
    names, column = np.unique(clusters, return_inverse=True)
    matched = np.array([mapping.get(name, np.nan) for name in names.tolist()], np.float64)
    return np.asarray(matched[column] == labels)  # no class is NaN


# As two labelings


def contingency(
    labels: Labels, clusters: Labels, weight: Int[np.ndarray, " n"] | None = None
) -> Table:
    """Return the contingency table of two labelings; the `weight` of an image is 1 by default."""
    from scipy.sparse import csr_array

    classes, row = np.unique(labels, return_inverse=True)
    names, column = np.unique(clusters, return_inverse=True)
    weight = np.ones(len(row), np.int64) if weight is None else weight
    return csr_array((weight, (row, column)), shape=(len(classes), len(names)))


def _counts(table: Table) -> tuple[Int[np.ndarray, " _"], ...]:
    """Return the images of each cell, of each class, and of each cluster."""
    return table.data, table.sum(axis=1), table.sum(axis=0)


def normalized_mutual_information(table: Table) -> float:
    """Mutual information of a contingency table over the mean of both entropies, from 0 to 1."""
    from scipy.special import entr

    n = table.data.sum()
    joint, of_class, of_cluster = (float(entr(each / n).sum()) for each in _counts(table))
    both = of_class + of_cluster
    return max(0.0, 2 * (both - joint) / both) if both > 0 else 1.0


def adjusted_rand_index(table: Table) -> float:
    """Adjusted Rand index of a contingency table (Hubert & Arabie 1985), from -.5 to 1."""
    counts = (*_counts(table), table.data.sum())
    together, of_class, of_cluster, pairs = (float((x * (x - 1.0)).sum()) for x in counts)
    if of_class == of_cluster == together:
        return 1.0
    expected = of_class * of_cluster / pairs
    return (together - expected) / ((of_class + of_cluster) / 2 - expected)


STATISTICS: Final[Mapping[str, tuple[Callable[[Table], float], float]]] = {
    "NMI": (normalized_mutual_information, 0.0),
    "ARI": (adjusted_rand_index, -0.5),
}
"""The two by name, and what each can be at the least."""


def agreement(
    labels: Labels, clusters: Labels, groups: Groups = None, *, seed: int
) -> dict[str, tuple[float, Interval]]:
    """Return both statistics, each with the interval of what other images would have.

    Of as many images: mutual information is higher where they are few. Its value plus and minus
    its bootstrap error, by draws of images, or of whole groups, that keep their clusters. Some
    three images of a draw go to another one's cluster, so that few that agree are not certain.
    Quantiles of the draws are not used: repeated images raise both statistics.
    """
    table, n = contingency(labels, clusters), len(labels)
    generator = np.random.default_rng(seed)
    if groups is None or len(np.unique(groups)) == n:
        drawn = (generator.multinomial(n, table.data / n) for _ in range(RESAMPLES))
    else:
        pairs = np.stack([labels, clusters])
        cell = np.unique(pairs, axis=1, return_inverse=True)[1].ravel()  # in the order of the data
        each = contingency(groups, cell)
        even = np.full(each.shape[0], 1 / each.shape[0])
        drawn = (generator.multinomial(len(even), even) @ each for _ in range(RESAMPLES))
    tables = (_shuffled(table, count, generator) for count in drawn)
    draws = ([statistic(each) for statistic, _ in STATISTICS.values()] for each in tables)
    found, by_statistic = {}, zip(*draws, strict=True)
    for (name, (statistic, lowest)), own in zip(STATISTICS.items(), by_statistic, strict=True):
        value, half = statistic(table), quantile(groups) * float(np.std(own, ddof=1))
        found[name] = value, Interval(max(lowest, value - half), min(1.0, value + half), None)
    return found


def _shuffled(
    table: Table, count: Int[np.ndarray, " cells"], generator: np.random.Generator
) -> Table:
    """Return the table of so many of each cell, a few of which go to another one's cluster."""
    from scipy.sparse import csr_array

    (row, column), total = table.nonzero(), int(count.sum())
    moved = generator.choice(total, min(generator.poisson(UNSEEN), total), replace=False)
    left = np.searchsorted(count.cumsum(), moved, side="right")
    entered = generator.choice(len(column), len(left), p=table.data / table.data.sum())
    one = np.ones(len(left), np.int64)
    cells = (
        np.concatenate([row, row[left], row[left]]),
        np.concatenate([column, column[left], column[entered]]),
    )
    return csr_array((np.concatenate([count, -one, one]), cells), shape=table.shape)
