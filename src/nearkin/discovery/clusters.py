"""How large, tight and stable the classes that were found are, and which may be one class."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from jaxtyping import Float, Int

from nearkin.discovery.assignments import (
    Assignments,
    class_sums,
    nearest_known_class,
    rounded,
)
from nearkin.discovery.classifier import Predictions
from nearkin.objectives.numerics import MIN_LENGTH
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

SAMPLE: Final = 2000
"""The silhouette needs all distances: more images than this are thinned out."""
OFTEN: Final = 1 / 3
HEAP: Final = 1 / 5


@dataclass(frozen=True)
class Cluster:
    """A class that images without labels were assigned to, or a novel one that stayed empty."""

    name: str
    number: int
    """Its number among the classes of the predictions."""
    kind: Literal["known", "novel"]
    size: int
    """How many images without a label were assigned to it."""
    score: float | None
    """The mean score of its images; None if it has none."""
    silhouette: float | None
    """The mean silhouette of its images, from -1 to 1; None with fewer than two images, or
    where there is no other class."""
    medoid: int | None
    """The row in the assignments of its most typical image; None if it has none."""
    stability: float | None
    """How alike it was when trained with other seeds, from 0 to 1; None if empty or trained
    once."""
    nearest_known: str
    """The known class with the most similar mean feature; '' if no image has a label."""
    merge: tuple[str, ...]
    """Novel classes that it may be one class with."""


def rows(
    clusters: Iterable[Cluster], assignments: Assignments
) -> Iterator[tuple[str | float | None, ...]]:
    """Plain values in the order of `COLUMNS`; the name is empty, for the user to fill in."""
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
    """All novel classes, and the known ones that images without a label were assigned to.

    Silhouette: Rousseeuw 1987, with the cosine distance, over at most about 2,000 images, as
    many of each class. Stability: the share of images that a class and its best match of
    another seed have in common (Jaccard), averaged over the seeds (Hennig 2007). Suggestions to
    merge are those of `one_class`.

    Args:
        predictions: Of all images.
        assignments: Made from them by `assign`.
        others: The classes of the same images, in the order of the assignments, from classifiers
            trained with other seeds; their numbers need not mean the same.
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
    return [found for found in every if found.kind == "novel" or found.size]


def typical(
    predictions: Predictions, assignments: Assignments, number: int
) -> Int[np.ndarray, " members"]:
    """Rows of the assignments to a class, the most typical first.

    Typical is what is similar to the mean feature of the class. The first is its medoid: the
    similarity of a unit vector to the sum of the others is the sum of its similarities to them.
    """
    members = np.flatnonzero(assignments.cluster == number)
    features = predictions.features[np.flatnonzero(predictions.label == UNKNOWN)[members]]
    similarity = features @ features.sum(axis=0)
    return members[np.argsort(-similarity, kind="stable")]


def one_class(a: Float[np.ndarray, " a"], b: Float[np.ndarray, " b"]) -> bool:
    """Whether positions on a line from class b to class a are those of one heap, not of two.

    They are where a fifth of the images or more have left the mean of their class by more than
    a quarter of the way to the mean of the other. The halves of any symmetric distribution with
    one peak have a quarter or more, those of a Gaussian 31 %; two Gaussians have less than a
    fifth where their means are more than 3.4 standard deviations apart.

    >>> line = np.linspace(0, 1, 100)
    >>> one_class(line, -line), one_class(1 + line, -1 - line)
    (True, False)
    """
    way = float(a.mean() - b.mean())
    if way < MIN_LENGTH:
        return True
    astray = (a < a.mean() - way / 4).sum() + (b > b.mean() + way / 4).sum()
    return bool(astray >= HEAP * (len(a) + len(b)))


def _merges(predictions: Predictions, assignments: Assignments) -> dict[int, list[int]]:
    """Pairs of novel classes that look like one, each from both ends.

    A third or more of their images have the other as second choice, and their features are
    `one_class` along the line between the two means.
    """
    unlabeled = predictions.label == UNKNOWN
    cluster, features = assignments.cluster, predictions.features[unlabeled]
    chosen = _second_choices(predictions.probability[unlabeled], cluster)
    sizes = np.bincount(cluster, minlength=len(chosen))
    pairs = np.triu(chosen + chosen.T >= OFTEN * np.add.outer(sizes, sizes), k=1)
    pairs[: predictions.num_known] = False
    pairs[sizes < 2] = pairs[:, sizes < 2] = False
    found: dict[int, list[int]] = {}
    for a, b in np.argwhere(pairs).tolist():
        of_a, of_b = features[cluster == a], features[cluster == b]
        if one_class(_ahead(of_a, of_b), -_ahead(of_b, of_a)):
            found.setdefault(a, []).append(b)
            found.setdefault(b, []).append(a)
    return {number: sorted(partners) for number, partners in found.items()}


def _second_choices(
    probability: Float[np.ndarray, "n classes"], cluster: Int[np.ndarray, " n"]
) -> Int[np.ndarray, "classes classes"]:
    """How many images of each class (row) have each class (column) as second choice."""
    rest = probability.copy()
    np.put_along_axis(rest, cluster[:, None], 0.0, axis=1)
    count = np.zeros((probability.shape[1],) * 2, dtype=np.int64)
    has_second = rest.any(axis=1)
    np.add.at(count, (cluster[has_second], rest.argmax(axis=1)[has_second]), 1)
    return count


def _ahead(
    own: Float[np.ndarray, "own dim"], other: Float[np.ndarray, "other dim"]
) -> Float[np.ndarray, " own"]:
    """Positions of a class's features on the line from the mean of another class to its own.

    The own mean leaves out the image itself: in many dimensions it would lean towards each of
    its images, and any two classes would seem apart.
    """
    mean_of_others = (own.sum(axis=0) - own) / (len(own) - 1)
    return np.asarray((own * (mean_of_others - other.mean(axis=0))).sum(axis=1))


def _silhouette(
    features: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"]
) -> dict[int, float]:
    """The mean silhouette of each class that has one."""
    from sklearn.metrics import silhouette_samples

    numbers, size = np.unique(cluster, return_counts=True)
    if len(numbers) < 2 or size.max() < 2:
        return {}
    share = max(2, SAMPLE // len(numbers))
    members = (np.flatnonzero(cluster == number) for number in numbers)
    drawn = np.concatenate([rows[_evenly(len(rows), share)] for rows in members])
    values = silhouette_samples(features[drawn], cluster[drawn], metric="cosine")
    return {
        int(number): float(values[cluster[drawn] == number].mean())
        for number in numbers[size >= 2]
    }


def _evenly(length: int, number: int) -> Int[np.ndarray, " drawn"]:
    """Up to `number` places between 0 and `length - 1`, evenly spaced."""
    return np.linspace(0, length - 1, min(number, length)).round().astype(np.int64)


def _stability(
    cluster: Int[np.ndarray, " n"], others: Sequence[Int[np.ndarray, " n"]]
) -> dict[int, float]:
    """The best Jaccard index of each class with images, averaged over the other clusterings."""
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
