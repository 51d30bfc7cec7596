"""Clusters against classes: matched one to one (Hungarian algorithm), and as two labelings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from nearkin.metrics.intervals import Groups, Interval, quantile

RESAMPLES: Final = 200  # Draws of a bootstrap
UNSEEN: Final = 3  # Images that may be elsewhere where none was seen to be: the rule of three

Labels = Int[np.ndarray, " n"]


# One to one


def cluster_accuracy(labels: Labels, clusters: Labels) -> tuple[float, dict[int, int]]:
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
    labels: Labels, clusters: Labels, weight: Int[np.ndarray, " n"] | None = None
) -> dict[int, int]:
    """Return the class of each matched cluster, in the match that has the most images right.

    As many are matched as there are clusters or classes, whichever are fewer. The `weight` of an
    image is 1 by default; below 2^53 in total.

    >>> match(np.array([0, 0, 1]), np.array([5, 5, 5]), weight=np.array([1, 1, 3]))
    {5: 1}
    """
    from scipy.optimize import linear_sum_assignment

    pairs = _Pairs.of(labels, clusters)
    table = pairs.table(np.bincount(pairs.cell, weight, minlength=len(pairs.row)))
    rows, columns = linear_sum_assignment(table.toarray(), maximize=True)
    classes, names = pairs.classes[rows].tolist(), pairs.clusters[columns].tolist()
    return dict(zip(names, classes, strict=True))


def right(labels: Labels, clusters: Labels, mapping: Mapping[int, int]) -> Bool[np.ndarray, " n"]:
    """Return which images are in a cluster that is matched with their class.

    >>> right(np.array([7, 7, 8]), np.array([1, 2, 3]), {1: 7, 2: 8})
    array([ True, False, False])
    """
    names, column = np.unique(clusters, return_inverse=True)
    matched = np.array([name in mapping for name in names.tolist()], dtype=bool)
    label = np.array([mapping.get(name, 0) for name in names.tolist()], dtype=np.int64)
    return np.asarray(matched[column] & (label[column] == labels))


# As two labelings


class Contingency(NamedTuple):
    """How many images each class and each cluster share, and how many each has."""

    joint: Float[np.ndarray, " cells"]
    of_class: Float[np.ndarray, " classes"]
    of_cluster: Float[np.ndarray, " clusters"]


def contingency(labels: Labels, clusters: Labels) -> Contingency:
    """Return the contingency table of two labelings."""
    pairs = _Pairs.of(labels, clusters)
    return pairs.contingency(np.bincount(pairs.cell), pairs.row, pairs.column)


def normalized_mutual_information(table: Contingency) -> float:
    """Mutual information of a contingency table over the mean of both entropies, from 0 to 1."""
    joint, of_class, of_cluster = (_entropy(counts / table.joint.sum()) for counts in table)
    both = of_class + of_cluster
    return max(0.0, 2 * (both - joint) / both) if both > 0 else 1.0


def adjusted_rand_index(table: Contingency) -> float:
    """Adjusted Rand index of a contingency table (Hubert & Arabie 1985), from -.5 to 1."""
    counts = (*table, table.joint.sum())
    together, of_class, of_cluster, pairs = (float((x * (x - 1.0)).sum()) for x in counts)
    if of_class == of_cluster == together:
        return 1.0
    expected = of_class * of_cluster / pairs
    return (together - expected) / ((of_class + of_cluster) / 2 - expected)


LOWEST: Final[Mapping[Callable[[Contingency], float], float]] = {
    normalized_mutual_information: 0.0,
    adjusted_rand_index: -0.5,
}
"""What each of the two can be at the least."""


def agreement(
    statistic: Callable[[Contingency], float],
    labels: Labels,
    clusters: Labels,
    groups: Groups = None,
    *,
    seed: int,
) -> tuple[float, Interval]:
    """Return one of the two statistics above, and the interval of what other images would have.

    Of as many images: mutual information is higher where they are few. Its value plus and minus
    its bootstrap error, by draws of images, or of whole groups, that keep their clusters. Some
    three images of a draw go to another one's cluster, so that few that agree are not certain.
    Quantiles of the draws are not used: repeated images raise both statistics.
    """
    pairs, generator = _Pairs.of(labels, clusters), np.random.default_rng(seed)
    value, n = statistic(contingency(labels, clusters)), len(labels)
    count = np.bincount(pairs.cell)
    if groups is None or len(np.unique(groups)) == n:
        drawn = (generator.multinomial(n, count / n) for _ in range(RESAMPLES))
    else:
        of_group = _Pairs.of(groups, pairs.cell)
        each = of_group.table(np.bincount(of_group.cell))
        even = np.full(each.shape[0], 1 / each.shape[0])
        drawn = (generator.multinomial(len(even), even) @ each for _ in range(RESAMPLES))
    draws = [statistic(pairs.shuffled(each, count, generator)) for each in drawn]
    half = quantile(groups) * float(np.std(draws, ddof=1))
    return value, Interval(max(LOWEST[statistic], value - half), min(1.0, value + half), None)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The pairs of class and cluster that images have, the cells of a contingency table."""

    classes: Int[np.ndarray, " classes"]
    clusters: Int[np.ndarray, " clusters"]
    row: Int[np.ndarray, " cells"]  # Of each cell, in `classes`
    column: Int[np.ndarray, " cells"]  # Of each cell, in `clusters`
    cell: Int[np.ndarray, " images"]  # Of each image

    @classmethod
    def of(cls, labels: Labels, clusters: Labels) -> "_Pairs":
        classes, row = np.unique(labels, return_inverse=True)
        names, column = np.unique(clusters, return_inverse=True)
        cells, cell = np.unique(row * max(len(names), 1) + column, return_inverse=True)
        return cls(classes, names, *np.divmod(cells, max(len(names), 1)), cell)

    def table(self, count: Int[np.ndarray, " cells"] | Float[np.ndarray, " cells"]) -> Any:
        """Return a sparse array of scipy, of so many images of each cell."""
        from scipy.sparse import coo_array

        shape = len(self.classes), len(self.clusters)
        return coo_array((count, (self.row, self.column)), shape=shape).tocsr()

    def shuffled(
        self,
        count: Int[np.ndarray, " cells"],
        all_images: Int[np.ndarray, " cells"],
        generator: np.random.Generator,
    ) -> Contingency:
        """Return the table of so many of each cell, some of which go to another one's cluster."""
        total = int(count.sum())
        moved = generator.choice(total, min(generator.poisson(UNSEEN), total), replace=False)
        left = np.searchsorted(count.cumsum(), moved, side="right")
        entered = generator.choice(len(self.column), len(left), p=all_images / all_images.sum())
        one = np.ones(len(left), np.int64)
        return self.contingency(
            np.concatenate([count, -one, one]),
            np.concatenate([self.row, self.row[left], self.row[left]]),
            np.concatenate([self.column, self.column[left], self.column[entered]]),
        )

    def contingency(
        self,
        count: Int[np.ndarray, " parts"],
        row: Int[np.ndarray, " parts"],
        column: Int[np.ndarray, " parts"],
    ) -> Contingency:
        """Return the table of counts of cells, of which one may be listed in several parts."""
        width = max(len(self.clusters), 1)
        cells, cell = np.unique(row * width + column, return_inverse=True)
        joint = np.bincount(cell, count)
        return Contingency(joint, *(np.bincount(x, joint) for x in np.divmod(cells, width)))


def _entropy(shares: Float[np.ndarray, "*counts"]) -> float:
    from scipy.special import entr

    return float(entr(shares).sum())
