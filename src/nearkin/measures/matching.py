"""Matching clusters with classes (Hungarian algorithm)."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int


def cluster_accuracy(
    labels: Int[np.ndarray, " n"], clusters: Int[np.ndarray, " n"]
) -> tuple[float, dict[int, int]]:
    """Return the accuracy of clusters under the best one-to-one match with the classes.

    One Hungarian match over all images. If there are more clusters than classes, some clusters
    match no class and their images count as wrong, and the other way round. Returns the accuracy,
    0 if there are no images, and the class of each matched cluster.

    >>> cluster_accuracy(np.array([7, 7, 8, 9]), np.array([1, 1, 0, 0]))
    (0.75, {1: 7, 0: 8})
    """
    mapping = match(labels, clusters)
    correct = float(right(labels, clusters, mapping).sum())
    return correct / max(len(labels), 1), mapping


def match(
    labels: Int[np.ndarray, " n"],
    clusters: Int[np.ndarray, " n"],
    weight: Int[np.ndarray, " n"] | None = None,
) -> dict[int, int]:
    """Return the class of each matched cluster, in the match that has the most images right.

    As many are matched as there are clusters or classes, whichever are fewer. The `weight` of an
    image is 1 by default; below 2^53 in total.

    >>> match(np.array([0, 0, 1]), np.array([5, 5, 5]), weight=np.array([1, 1, 3]))
    {5: 1}
    """
    from scipy.optimize import linear_sum_assignment

    classes, names, table = _contingency(labels, clusters, weight)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return {int(names[c]): int(classes[r]) for r, c in zip(rows, columns, strict=True)}


def right(
    labels: Int[np.ndarray, " n"], clusters: Int[np.ndarray, " n"], mapping: Mapping[int, int]
) -> Bool[np.ndarray, " n"]:
    """Return which images are in a cluster that is matched with their class.

    >>> right(np.array([7, 7, 8]), np.array([1, 2, 3]), {1: 7, 2: 8})
    array([ True, False, False])
    """
    names, column = np.unique(clusters, return_inverse=True)
    matched = np.array([name in mapping for name in names.tolist()], dtype=bool)
    label = np.array([mapping.get(name, 0) for name in names.tolist()], dtype=np.int64)
    return np.asarray(matched[column] & (label[column] == labels))


def adjusted_rand_index(labels: Int[np.ndarray, " n"], clusters: Int[np.ndarray, " n"]) -> float:
    """Adjusted Rand index (Hubert & Arabie 1985), of the same value as scikit-learn's.

    A bootstrap calls it hundreds of times, and scikit-learn's takes over 20 times as long.
    """
    _, _, table = _contingency(labels, clusters)
    together, of_class, of_cluster, pairs = (
        int((counts * (counts - 1)).sum())
        for counts in (table, table.sum(axis=1), table.sum(axis=0), table.sum())
    )
    if of_class == of_cluster == together:
        return 1.0
    expected = of_class * of_cluster / pairs
    return (together - expected) / ((of_class + of_cluster) / 2 - expected)


def normalized_mutual_information(
    labels: Int[np.ndarray, " n"], clusters: Int[np.ndarray, " n"]
) -> float:
    """Mutual information over the mean of both entropies, of the same value as scikit-learn's."""
    classes, names, table = _contingency(labels, clusters)
    if len(classes) == len(names) <= 1:
        return 1.0
    joint, of_class, of_cluster = (
        _entropy(counts / len(labels)) for counts in (table, table.sum(axis=1), table.sum(axis=0))
    )
    return max(0.0, 2 * (of_class + of_cluster - joint) / (of_class + of_cluster))


def _entropy(shares: Float[np.ndarray, "*counts"]) -> float:
    shares = shares[shares > 0]
    return -float(shares @ np.log(shares))


def _contingency(
    labels: Int[np.ndarray, " n"],
    clusters: Int[np.ndarray, " n"],
    weight: Int[np.ndarray, " n"] | None = None,
) -> tuple[Int[np.ndarray, " c"], Int[np.ndarray, " k"], Int[np.ndarray, "c k"]]:
    """Return classes, clusters, and how many images, or how much weight, they share."""
    (classes, row), (names, column) = _numbered(labels), _numbered(clusters)
    shape = len(classes), len(names)
    counts = np.bincount(row * shape[1] + column, weight, minlength=shape[0] * shape[1])
    return classes, names, counts.astype(np.int64).reshape(shape)


def _numbered(
    names: Int[np.ndarray, " n"],
) -> tuple[Int[np.ndarray, " distinct"], Int[np.ndarray, " n"]]:
    """Return the distinct names, ascending, and the place of each name among them."""
    if not len(names) or names.min() < 0 or names.max() >= len(names):
        return np.unique(names, return_inverse=True)
    there = np.bincount(names) > 0  # many times as fast as to sort a million
    return np.flatnonzero(there), (np.cumsum(there) - 1)[names]
