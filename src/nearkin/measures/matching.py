"""Clusters have no names: find the naming under which they fit the classes best."""

import numpy as np
from jaxtyping import Int


def cluster_accuracy(
    labels: Int[np.ndarray, " n"], clusters: Int[np.ndarray, " n"]
) -> tuple[float, dict[int, int]]:
    """Share of images in the right cluster, under the best one-to-one match with the classes.

    One Hungarian match over all images. If there are more clusters than classes, some clusters
    match no class and their images count as wrong, and the other way round.

    Args:
        labels: The class of each image, as any numbers.
        clusters: The cluster of each image, as any numbers.

    Returns:
        The accuracy, 0 if there are no images, and the class of each matched cluster.

    >>> cluster_accuracy(np.array([7, 7, 8, 9]), np.array([1, 1, 0, 0]))
    (0.75, {1: 7, 0: 8})
    """
    from scipy.optimize import linear_sum_assignment

    classes, row = np.unique(labels, return_inverse=True)
    names, column = np.unique(clusters, return_inverse=True)
    table = np.zeros((len(classes), len(names)), dtype=np.int64)
    np.add.at(table, (row, column), 1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    mapping = {int(names[c]): int(classes[r]) for r, c in zip(rows, columns, strict=True)}
    return float(table[rows, columns].sum() / max(len(labels), 1)), mapping
