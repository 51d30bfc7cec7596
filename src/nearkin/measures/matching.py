"""Matching clusters with classes (Hungarian algorithm)."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int


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

    classes, row = np.unique(labels, return_inverse=True)
    names, column = np.unique(clusters, return_inverse=True)
    table = np.zeros((len(classes), len(names)), dtype=np.int64)
    np.add.at(table, (row, column), 1 if weight is None else weight)
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
