"""The classes that a discovery found: size, most typical image, how sure, and which to merge."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.classifier.assignments import Assignments, rounded, typical
from nearkin.classifier.reference import Reference, class_sums, nearest_known
from nearkin.metrics.metric import Metric
from nearkin.metrics.selection import least_certain
from nearkin.objectives import unit
from nearkin.objectives.contrast import MIN_LENGTH
from nearkin.types import UNLABELED

SILHOUETTE_IMAGES: Final = 2000
"""The silhouette takes all distances, so of more images only some are compared."""
SECOND_CHOICES: Final = 1 / 3
"""Share of two classes that has the other as second choice, from which they may be one."""
ASTRAY: Final = 1 / 5
"""Share of two classes far from their means, from which they may be one; see `one_class`."""

Features = Float[np.ndarray, "n dim"]
Clusters = Int[np.ndarray, " n"]


@dataclass(frozen=True)
class Cluster:
    """A class with its unlabeled images, or a novel class that stayed empty.

    Columns of clusters.csv: its name, one for a name by the user, and the fields from `kind` on.
    """

    name: str
    number: int  # Among the classes of the predictions
    kind: Literal["known", "novel"]
    size: int  # Unlabeled images assigned to it
    score: float | None  # Mean over its images; None if it has none
    silhouette: float | None
    """Mean over its images, from -1 to 1; None with fewer than two, or without another class."""
    medoid: int | None  # The row of its most typical image in the assignments; None if it has none
    seed_agreement: float | None
    """Overlap with its best match of other seeds, from 0 to 1; None if empty or trained once."""
    nearest_known: str
    """The known class with the most similar mean feature; '' if no image has a label."""
    merge: tuple[str, ...]  # Novel classes that it may be one class with


CLUSTER_COLUMNS: Final = ("cluster", "name", *(column.name for column in fields(Cluster)[2:]))


def cluster_table(clusters: Iterable[Cluster], assignments: Assignments) -> Iterator[list[Any]]:
    """Yield plain values in the order of `CLUSTER_COLUMNS`; names are for the user to fill in."""
    paths = assignments.paths
    for cluster in clusters:
        medoid = None if cluster.medoid is None else paths[cluster.medoid]
        cells = asdict(cluster) | {"cluster": cluster.name, "name": "", "medoid": medoid}
        cells["merge"] = "; ".join(cluster.merge)
        yield [rounded(cells[column]) for column in CLUSTER_COLUMNS]


def describe_clusters(
    assignments: Assignments,
    reference: Reference,
    others: Sequence[Int[np.ndarray, " images"]] = (),
) -> list[Cluster]:
    """Describe all novel classes, and known ones that unlabeled images were assigned to.

    Silhouette: Rousseeuw 1987, with the cosine distance, over about 2,000 images, as many of each
    class. Seed agreement: the Jaccard index of a class with its best match of another seed,
    averaged over the seeds (as Hennig 2007, of resamples).

    `assignments` are of all images without a label, `others` their classes by other seeds, whose
    numbers may differ. `reference` has the images that were learned from, with the same features.
    """
    cluster, classes = assignments.cluster, assignments.classes
    features, num_known = assignments.features, assignments.predictions.num_known
    means = unit(class_sums(torch.from_numpy(features), cluster, len(classes)))
    nearest, _ = nearest_known(reference, means)
    silhouette, merge = class_silhouettes(features, cluster), _merges(assignments)
    seed_agreement = _seed_agreement(cluster, others)

    def describe(number: int) -> Cluster:
        members = typical(assignments, number)
        some, near = len(members) > 0, nearest[number]
        return Cluster(
            name=classes[number],
            number=number,
            kind="known" if number < num_known else "novel",
            size=len(members),
            score=float(assignments.score[members].mean()) if some else None,
            silhouette=silhouette.get(number),
            medoid=int(members[0]) if some else None,
            seed_agreement=seed_agreement.get(number),
            nearest_known=classes[near] if some and near != UNLABELED else "",
            merge=tuple(classes[other] for other in merge.get(number, ())),
        )

    described = map(describe, range(len(classes)))
    return [cluster for cluster in described if cluster.kind == "novel" or cluster.size]


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


def _merges(assignments: Assignments) -> dict[int, list[int]]:
    """Return pairs of novel classes that look like one, in both directions.

    A third or more of their images have the other as second choice, and their features are
    `one_class` along the line between the two means.
    """
    cluster, features = assignments.cluster, assignments.features
    chosen = _second_choices(assignments.predictions.probability[assignments.rows], cluster)
    sizes = np.bincount(cluster, minlength=len(chosen))
    pairs = np.triu(chosen + chosen.T >= SECOND_CHOICES * np.add.outer(sizes, sizes), k=1)
    pairs[: assignments.predictions.num_known] = False
    pairs[sizes < 2] = pairs[:, sizes < 2] = False
    partners = defaultdict[int, list[int]](list)
    for a, b in np.argwhere(pairs).tolist():
        of_a, of_b = features[cluster == a], features[cluster == b]
        if one_class(_projections(of_a, of_b), -_projections(of_b, of_a)):
            partners[a].append(b)
            partners[b].append(a)
    return partners  # in order, as pairs are


def _second_choices(
    probability: Float[np.ndarray, "n classes"], cluster: Clusters
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


def class_silhouettes(features: Features, cluster: Clusters) -> dict[int, float]:
    """Return the mean silhouette (cosine distance) of each class of two images or more.

    Nothing with fewer than two classes. Of many images, about 2,000 are compared.
    """
    from sklearn.metrics import silhouette_samples

    numbers, size = np.unique(cluster, return_counts=True)
    if len(numbers) < 2 or size.max() < 2:
        return {}
    share = max(2, SILHOUETTE_IMAGES // len(numbers))
    drawn = np.concatenate([_evenly_spaced(np.flatnonzero(cluster == n), share) for n in numbers])
    values = silhouette_samples(features[drawn], cluster[drawn], metric="cosine")
    return {
        int(number): float(values[cluster[drawn] == number].mean())
        for number in numbers[size >= 2]
    }


def _evenly_spaced(rows: Int[np.ndarray, " rows"], number: int) -> Int[np.ndarray, " drawn"]:
    count = min(number, len(rows))
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(np.int64)]


def _seed_agreement(cluster: Clusters, others: Sequence[Clusters]) -> dict[int, float]:
    """Return the best Jaccard index of each class with images, averaged over other seeds."""
    from sklearn.metrics.cluster import contingency_matrix

    if not others or not len(cluster):
        return {}
    best = []
    for other in others:
        shared = contingency_matrix(cluster, other)
        either = shared.sum(axis=1, keepdims=True) + shared.sum(axis=0) - shared
        best.append((shared / either).max(axis=1))
    return dict(zip(np.unique(cluster).tolist(), np.mean(best, axis=0).tolist(), strict=True))


@dataclass(frozen=True)
class Alternative:
    """A number of novel classes, in figures that need no truth."""

    novel: int
    sizes: tuple[int, ...]  # Unlabeled images of each novel class, largest first
    silhouette: float | None
    """Mean over the classes that have one, from -1 to 1, by the features of the frozen encoder:
    those that are learned differ from number to number. None with fewer than two classes."""
    seed_agreement: float | None
    """Mean adjusted Rand index of two trainings that differ in the seed; None if trained once."""
    known: Metric | None  # Accuracy on held-out images of known classes; None without any

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"known": self.known and self.known.to_dict()}


def describe_alternative(
    features: Float[np.ndarray, "images dim"],
    by_seed: Sequence[Int[np.ndarray, " images"]],
    *,
    num_known: int,
    num_novel: int,
    known: Metric | None,
) -> Alternative:
    """Describe what each seed found with a number of novel classes; the first is shown.

    `features` are of all unlabeled images, by the frozen encoder, and `by_seed` has their classes,
    novel ones from `num_known` on.
    """
    from sklearn.metrics import adjusted_rand_score

    first = by_seed[0]
    counts = np.bincount(first, minlength=num_known + num_novel)[num_known:]
    sizes = tuple(sorted(counts.tolist(), reverse=True))
    silhouettes = [*class_silhouettes(features, first).values()]
    similar = [float(adjusted_rand_score(*pair)) for pair in combinations(by_seed, 2)]
    silhouette, alike = (fmean(x) if x else None for x in (silhouettes, similar))
    return Alternative(num_novel, sizes, silhouette, alike, known)


def label_first(assignments: Assignments, learned: Clusters) -> Int[np.ndarray, " rows"]:
    """Return the rows of the assignments whose labels would teach most.

    Those are the most typical image of each novel class, of which there is no label yet (Hacohen,
    Dekel, Weinshall. Active learning on a budget. ICML 2022), then the others by `least_certain`.
    docs/discovery.md has what the first bring. A label of an image that is not `learned` from
    teaches nothing.
    """
    can_teach = np.isin(assignments.rows, learned)
    rows, first = np.flatnonzero(can_teach), list[int]()
    for number in range(assignments.predictions.num_known, len(assignments.classes)):
        members = typical(assignments, number)
        first += members[can_teach[members]][:1].tolist()
    uncertain = rows[least_certain(assignments.margin[rows], assignments.cluster[rows])]
    return np.concatenate([np.asarray(first, np.int64), uncertain[~np.isin(uncertain, first)]])


LABEL_COLUMNS: Final = ("path", "label", "cluster", "score", "margin")


def label_table(assignments: Assignments, rows: Clusters) -> Iterator[list[Any]]:
    """Yield plain values in the order of `LABEL_COLUMNS`; labels are for the user to fill in."""
    paths, names = assignments.paths, assignments.class_names
    for row in rows.tolist():
        score, margin = float(assignments.score[row]), float(assignments.margin[row])
        yield [paths[row], "", names[row], rounded(score), rounded(margin)]
