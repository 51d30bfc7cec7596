"""Size, silhouette and stability of the classes that were found, and which to merge."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from jaxtyping import Float, Int

from nearkin.discovery.assignments import Assignments, class_sums, nearest_known_class, rounded
from nearkin.discovery.classifier import Predictions
from nearkin.objectives.contrast import MIN_LENGTH
from nearkin.types import UNKNOWN

COLUMNS: Final = (
    "cluster",
    "name",
    "kind",
    "size",
    "score",
    "silhouette",
    "medoid",
    "stability",
    "nearest_known",
    "merge",
)
"""The columns of `rows`."""
SILHOUETTE_IMAGES: Final = 2000
"""The silhouette takes all distances, so of more images only some are compared."""
SECOND_CHOICES: Final = 1 / 3
"""Share of two classes that has the other as second choice, from which they may be one."""
ASTRAY: Final = 1 / 5
"""Share of two classes far from their means, from which they may be one; see `one_class`."""


@dataclass(frozen=True)
class Cluster:
    """A class with its unlabeled images, or a novel class that stayed empty."""

    name: str
    number: int
    """Among the classes of the predictions."""
    kind: Literal["known", "novel"]
    size: int
    """Unlabeled images assigned to it."""
    score: float | None
    """Mean over its images; None if it has none."""
    silhouette: float | None
    """Mean over its images, from -1 to 1; None with fewer than two, or without another class."""
    medoid: int | None
    """The row of its most typical image in the assignments; None if it has none."""
    stability: float | None
    """Overlap with its best match of other seeds, from 0 to 1; None if empty or trained once."""
    nearest_known: str
    """The known class with the most similar mean feature; '' if no image has a label."""
    merge: tuple[str, ...]
    """Novel classes that it may be one class with."""


def rows(
    clusters: Iterable[Cluster], assignments: Assignments
) -> Iterator[tuple[str | float | None, ...]]:
    """Yield plain values in the order of `COLUMNS`; the name is for the user to fill in."""
    for cluster in clusters:
        yield (
            cluster.name,
            "",
            cluster.kind,
            cluster.size,
            rounded(cluster.score),
            rounded(cluster.silhouette),
            "" if cluster.medoid is None else assignments.paths[cluster.medoid],
            rounded(cluster.stability),
            cluster.nearest_known,
            "; ".join(cluster.merge),
        )


def describe_clusters(
    predictions: Predictions,
    assignments: Assignments,
    others: Sequence[Int[np.ndarray, " images"]] = (),
) -> list[Cluster]:
    """Describe all novel classes, and known ones that unlabeled images were assigned to.

    Silhouette: Rousseeuw 1987, with the cosine distance, over about 2,000 images, as many of each
    class. Stability: the Jaccard index of a class with its best match of another seed, averaged
    over the seeds (Hennig 2007).

    Args:
        predictions: Of all images.
        assignments: Of the same predictions.
        others: Classes of the assigned images by other seeds; their numbers may differ.
    """
    cluster, classes = assignments.cluster, assignments.classes
    features = predictions.features[predictions.label == UNKNOWN]
    silhouette = _silhouette(features, cluster)
    stability = _stability(cluster, others)
    merge = _merges(predictions, assignments)
    nearest, _ = nearest_known_class(predictions, class_sums(features, cluster, len(classes)))

    def describe(number: int) -> Cluster:
        members = typical(predictions, assignments, number)
        some = len(members) > 0
        return Cluster(
            name=classes[number],
            number=number,
            kind="known" if number < predictions.num_known else "novel",
            size=len(members),
            score=float(assignments.score[members].mean()) if some else None,
            silhouette=silhouette.get(number),
            medoid=int(members[0]) if some else None,
            stability=stability.get(number),
            nearest_known=classes[nearest[number]] if some and nearest[number] != UNKNOWN else "",
            merge=tuple(classes[other] for other in merge.get(number, ())),
        )

    every = (describe(number) for number in range(len(classes)))
    return [cluster for cluster in every if cluster.kind == "novel" or cluster.size]


def typical(
    predictions: Predictions, assignments: Assignments, number: int
) -> Int[np.ndarray, " members"]:
    """Return the rows of the assignments to a class, most similar to its mean feature first.

    The first is the medoid: the similarity of a unit vector to the sum of the others is the sum of
    its similarities to them.
    """
    members = np.flatnonzero(assignments.cluster == number)
    features = predictions.features[np.flatnonzero(predictions.label == UNKNOWN)[members]]
    similarity = features @ features.sum(axis=0)
    return members[np.argsort(-similarity, kind="stable")]


def one_class(a: Float[np.ndarray, " a"], b: Float[np.ndarray, " b"]) -> bool:
    """Whether positions on a line from class b to class a have one peak, not two.

    They have one if a fifth of the images or more are past their own class's mean by over a
    quarter of the way to the mean of the other. The halves of any symmetric distribution with
    one peak have a quarter or more, those of a Gaussian 31 %; two Gaussians have less than a
    fifth where their means are more than 3.4 standard deviations apart.

    >>> line = np.linspace(0, 1, 100)
    >>> one_class(line, -line), one_class(1 + line, -1 - line)
    (True, False)
    """
    distance = float(a.mean() - b.mean())
    if distance < MIN_LENGTH:
        return True
    astray = (a < a.mean() - distance / 4).sum() + (b > b.mean() + distance / 4).sum()
    return bool(astray >= ASTRAY * (len(a) + len(b)))


def _merges(predictions: Predictions, assignments: Assignments) -> dict[int, list[int]]:
    """Return pairs of novel classes that look like one, in both directions.

    A third or more of their images have the other as second choice, and their features are
    `one_class` along the line between the two means.
    """
    unlabeled = predictions.label == UNKNOWN
    cluster, features = assignments.cluster, predictions.features[unlabeled]
    chosen = _second_choices(predictions.probability[unlabeled], cluster)
    sizes = np.bincount(cluster, minlength=len(chosen))
    pairs = np.triu(chosen + chosen.T >= SECOND_CHOICES * np.add.outer(sizes, sizes), k=1)
    pairs[: predictions.num_known] = False
    pairs[sizes < 2] = pairs[:, sizes < 2] = False
    partners = defaultdict[int, list[int]](list)
    for a, b in np.argwhere(pairs).tolist():
        of_a, of_b = features[cluster == a], features[cluster == b]
        if one_class(_projections(of_a, of_b), -_projections(of_b, of_a)):
            partners[a].append(b)
            partners[b].append(a)
    return {number: sorted(others) for number, others in partners.items()}


def _second_choices(
    probability: Float[np.ndarray, "n classes"], cluster: Int[np.ndarray, " n"]
) -> Int[np.ndarray, "classes classes"]:
    """Count the images of each class (row) that have each class (column) as second choice."""
    rest = probability.copy()
    np.put_along_axis(rest, cluster[:, None], 0.0, axis=1)
    count = np.zeros((probability.shape[1],) * 2, dtype=np.int64)
    has_second = rest.any(axis=1)
    np.add.at(count, (cluster[has_second], rest.argmax(axis=1)[has_second]), 1)
    return count


def _projections(
    own: Float[np.ndarray, "own dim"], other: Float[np.ndarray, "other dim"]
) -> Float[np.ndarray, " own"]:
    """Return positions of a class's features on the line from another class's mean to its own."""
    # The own mean leaves out the image itself: in many dimensions it leans towards each of its
    # images, and any two classes would seem separate.
    mean_of_others = (own.sum(axis=0) - own) / (len(own) - 1)
    return np.asarray((own * (mean_of_others - other.mean(axis=0))).sum(axis=1))


def _silhouette(
    features: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"]
) -> dict[int, float]:
    """Return the mean silhouette of each class that has one."""
    from sklearn.metrics import silhouette_samples

    numbers, size = np.unique(cluster, return_counts=True)
    if len(numbers) < 2 or size.max() < 2:
        return {}
    share = max(2, SILHOUETTE_IMAGES // len(numbers))
    members = (np.flatnonzero(cluster == number) for number in numbers)
    drawn = np.concatenate([_evenly_spaced(rows, share) for rows in members])
    values = silhouette_samples(features[drawn], cluster[drawn], metric="cosine")
    return {
        int(number): float(values[cluster[drawn] == number].mean())
        for number in numbers[size >= 2]
    }


def _evenly_spaced(rows: Int[np.ndarray, " rows"], number: int) -> Int[np.ndarray, " drawn"]:
    count = min(number, len(rows))
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(np.int64)]


def _stability(
    cluster: Int[np.ndarray, " n"], others: Sequence[Int[np.ndarray, " n"]]
) -> dict[int, float]:
    """Return the best Jaccard index of each class with images, averaged over other seeds."""
    if not others or not len(cluster):
        return {}
    numbers, row = np.unique(cluster, return_inverse=True)
    best = []
    for other in others:
        names, column = np.unique(other, return_inverse=True)
        shared = np.zeros((len(numbers), len(names)), dtype=np.int64)
        np.add.at(shared, (row, column), 1)
        either = shared.sum(axis=1, keepdims=True) + shared.sum(axis=0) - shared
        best.append((shared / either).max(axis=1))
    return dict(zip(numbers.tolist(), np.mean(best, axis=0).tolist(), strict=True))
