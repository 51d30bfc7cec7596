"""The class of each image without a label and how certain it is; classes, and which to merge."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.discovery.classifier import Calibration, Predictions, Reference
from nearkin.metrics.neighbors import nearest
from nearkin.metrics.selection import least_certain
from nearkin.objectives import unit
from nearkin.objectives.contrast import MIN_LENGTH
from nearkin.types import UNKNOWN

NEIGHBORS: Final = 20  # Behind the purity
CORE_MARGIN: Final = 0.5
BORDER_MARGIN: Final = 0.2
CORE_AGREEMENT: Final = 0.9
BORDER_AGREEMENT: Final = 0.75
MIN_SIZE: Final = 5  # Thresholds of the flags; see `assign`
UNLIKE: Final = 0.01  # Share of the images learned from that would be flagged themselves
MIN_REFERENCE: Final = 20  # Images from which 99 % of them say something
SILHOUETTE_IMAGES: Final = 2000
"""The silhouette takes all distances, so of more images only some are compared."""
SECOND_CHOICES: Final = 1 / 3
"""Share of two classes that has the other as second choice, from which they may be one."""
ASTRAY: Final = 1 / 5
"""Share of two classes far from their means, from which they may be one; see `one_class`."""

Features = Float[np.ndarray, "n dim"]
Clusters = Int[np.ndarray, " n"]
Numbers = Float[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Assignments:
    """One row per image without a label, in the order of the predictions.

    Columns of assignments.csv are its path and the fields from `cluster` on.
    """

    predictions: Predictions  # Of all images
    rows: Clusters  # The images without a label among all
    cluster: Clusters  # The most probable class
    score: Numbers  # Its probability p1: calibrated, or else too high as a rule
    margin: Numbers  # p1 - p2, where p2 is that of the second most probable class
    entropy: Numbers  # As a share of the largest possible: 0 is certain, 1 a pure guess
    agreement: Numbers
    """Share of the augmented views whose most probable class is the same; NaN without views."""
    purity: Numbers
    """Share of the 20 nearest other images without a label that have the same class; NaN where
    there is no other."""
    nearest_known: Clusters
    """The known class whose labeled images have the most similar mean feature, or `UNKNOWN`."""
    similarity: Numbers  # The cosine similarity to that mean; NaN where no image has a label
    flag: tuple[str, ...]  # See `assign`

    @property
    def paths(self) -> list[str]:
        """The images' names."""
        return [self.predictions.paths[row] for row in self.rows.tolist()]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes."""
        return self.predictions.classes

    @property
    def class_names(self) -> list[str]:
        """The class that each image is assigned to."""
        return [self.classes[number] for number in self.cluster.tolist()]

    @property
    def features(self) -> Features:
        """Unit vectors that the heads take."""
        return np.asarray(self.predictions.features[self.rows])

    def table(self) -> Iterator[tuple[str | float | None, ...]]:
        """Yield plain values in the order of `COLUMNS`; None where there is no number."""
        names = (*self.classes, "")
        numbers = (self.score, self.margin, self.entropy, self.agreement, self.purity)
        for row, path in enumerate(self.paths):
            yield (
                path,
                names[self.cluster[row]],
                *(_rounded(float(column[row])) for column in numbers),
                names[self.nearest_known[row]],
                _rounded(float(self.similarity[row])),
                self.flag[row],
            )


COLUMNS: Final = ("path", *(column.name for column in fields(Assignments)[2:]))


def _rounded(value: Any) -> Any:
    """Round a float to four digits; None for NaN."""
    if not isinstance(value, float):
        return value
    return None if np.isnan(value) else round(value, 4)


def assign(
    predictions: Predictions,
    *,
    calibration: Calibration | None = None,
    known_means: Float[np.ndarray, "known dim"] | None = None,
) -> Assignments:
    """Return the most probable class of each image without a label, and how certain it is.

    The flag is the first of these that holds:

    - `unlike`: by the encoder's features it is less similar to the mean of every class than 99 %
      of the images that were learned from; see `reference_of`.
    - `tiny-cluster`: its novel class has fewer images than 5, or than a tenth of the median of
      the novel classes that have any.
    - `maybe-known`: its class is novel, but its feature is more similar to the mean of a known
      class than to the mean of the other images of its own.
    - `border`: fewer than 75 % of its views say the same, or its margin is below 0.2.
    - `core`: its margin is at least 0.5, and at least 90 % of its views and half of its nearest
      neighbors say the same. A classification has no views, and only the other two count.

    Args:
        predictions: Of all images. Those with a label only give the means of known classes, if
            they were learned from.
        calibration: Applied to the probabilities, which are too high as a rule.
        known_means: Instead of those means.
    """
    from scipy.special import entr

    rows = np.flatnonzero(predictions.label == UNKNOWN)
    cluster, features = predictions.cluster[rows], predictions.features[rows]
    probability = predictions.probability[rows]
    if calibration is not None:
        probability = calibration.apply(probability)
    # Padding: where there is one class only, one of probability 0 is the second.
    second, first = np.sort(np.pad(probability, ((0, 0), (1, 0))), axis=1)[:, -2:].T
    possible = int((probability > 0).any(axis=0).sum())
    agreement = np.full(len(rows), np.nan)
    if len(predictions.by_view):
        agreement = (predictions.by_view[:, rows] == cluster).mean(axis=0)
    purity = _purity(features, cluster)
    if known_means is None:
        nearest_known, similarity = nearest_known_class(predictions, features)
    else:
        nearest_known, similarity = most_similar(features, known_means)
    unlike = np.zeros(len(rows), bool) if predictions.unlike is None else predictions.unlike[rows]
    novel, size = cluster >= predictions.num_known, np.bincount(cluster)
    novel_sizes = size[np.unique(cluster[novel])]
    usual = float(np.median(novel_sizes)) if len(novel_sizes) else 0.0
    conditions = {
        "unlike": unlike,
        "tiny-cluster": novel & (size[cluster] < max(MIN_SIZE, usual / 10)),
        "maybe-known": novel & (similarity > _own_similarity(features, cluster)),
        "border": (agreement < BORDER_AGREEMENT) | (first - second < BORDER_MARGIN),
        "core": (first - second >= CORE_MARGIN)
        & (np.isnan(agreement) | (agreement >= CORE_AGREEMENT))
        & (purity >= 0.5),
    }
    flag = np.select(list(conditions.values()), list(conditions), default="")
    return Assignments(
        predictions,
        rows,
        cluster,
        score=first,
        margin=first - second,
        entropy=np.asarray(entr(probability).sum(axis=1) / np.log(max(possible, 2))),
        agreement=agreement,
        purity=purity,
        nearest_known=nearest_known,
        similarity=similarity,
        flag=tuple(flag.tolist()),
    )


def reference_of(features: Features, cluster: Clusters, num_classes: int) -> Reference:
    """Return the classes' mean directions, and how similar to them 99 % of these images are.

    Each image is compared with the means without itself. Of too few images, all are taken to be
    similar enough.

    Args:
        features: The encoder's, of the images that were learned from.
        cluster: The class of each: its label, or the one that it was assigned to.
        num_classes: Number of all classes; the mean of one without images is zeros.
    """
    x = unit_rows(features)
    sums = class_sums(x, cluster, num_classes)
    means = unit_rows(sums)
    similarity = x @ means.T
    similarity[np.arange(len(x)), cluster] = (x * unit_rows(sums[cluster] - x)).sum(axis=1)
    alone = np.bincount(cluster)[cluster] == 1
    nearest = similarity.max(axis=1)[~alone]
    enough = len(nearest) >= MIN_REFERENCE
    return Reference(means, float(np.quantile(nearest, UNLIKE)) if enough else -1.0)


def nearest_known_class(predictions: Predictions, features: Features) -> tuple[Clusters, Numbers]:
    """Return the known class whose labeled images have the mean most similar to each row.

    And the cosine similarity to it. Without labeled images: `UNKNOWN`, and NaN. Labels of images
    that were not learned from decide nothing: they are what known classes are scored on.
    """
    label, learned = predictions.label, predictions.learned
    if learned is not None:
        label = np.where(learned, label, UNKNOWN)
    known = np.unique(label[label != UNKNOWN])
    if not len(known):
        return np.full(len(features), UNKNOWN), np.full(len(features), np.nan)
    sums = class_sums(predictions.features, label, predictions.num_known)
    position, similarity = most_similar(features, unit_rows(sums[known]))
    return known[position], similarity


def most_similar(
    features: Features, means: Float[np.ndarray, "classes dim"]
) -> tuple[Clusters, Numbers]:
    """Return the class whose mean, of length one, is most similar to each row; and the cosine."""
    similarity = unit_rows(features) @ means.T
    return np.asarray(similarity.argmax(axis=1)), np.asarray(similarity.max(axis=1))


def class_sums(
    features: Features, cluster: Clusters, num_classes: int
) -> Float[np.ndarray, "num_classes dim"]:
    """Return the sum of the features of each class; zeros for a class without images."""
    return np.stack([features[cluster == number].sum(axis=0) for number in range(num_classes)])


def unit_rows(x: Float[np.ndarray, "rows dim"]) -> Float[np.ndarray, "rows dim"]:
    """Scale rows to length one; rows of zeros stay zeros."""
    return unit(torch.from_numpy(x)).numpy()


def _own_similarity(features: Features, cluster: Clusters) -> Numbers:
    """Return the cosine similarity to the mean of the other images of the class."""
    # A mean with the image in it would be too similar, the more so the fewer there are.
    sums = class_sums(features, cluster, int(cluster.max(initial=0)) + 1)
    others = unit_rows(sums[cluster] - features)
    return np.asarray((features * others).sum(axis=1))


def _purity(features: Features, cluster: Clusters) -> Numbers:
    if len(features) < 2:
        return np.full(len(features), np.nan)
    x = torch.from_numpy(features)
    _, index = nearest(x, x, NEIGHBORS, exclude_self=True)
    return np.asarray((cluster[index.numpy()] == cluster[:, None]).mean(axis=1))


def label_first(assignments: Assignments, learned: Clusters) -> Int[np.ndarray, " rows"]:
    """Return the rows of the assignments whose labels would teach most.

    Those are the most typical image of each novel class, of which there is no label yet (Hacohen,
    Dekel, Weinshall. Active learning on a budget. ICML 2022), then the others by `least_certain`.
    docs/discovery.md has what the first bring.

    Args:
        assignments: Of all images without a label.
        learned: The images to learn from. A label of any other teaches nothing.
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
        yield [paths[row], "", names[row], _rounded(score), _rounded(margin)]


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
    stability: float | None
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
        yield [_rounded(cells[column]) for column in CLUSTER_COLUMNS]


def describe_clusters(
    assignments: Assignments, others: Sequence[Int[np.ndarray, " images"]] = ()
) -> list[Cluster]:
    """Describe all novel classes, and known ones that unlabeled images were assigned to.

    Silhouette: Rousseeuw 1987, with the cosine distance, over about 2,000 images, as many of each
    class. Stability: the Jaccard index of a class with its best match of another seed, averaged
    over the seeds (Hennig 2007).

    Args:
        assignments: Of all images without a label.
        others: Classes of the same images by other seeds; their numbers may differ.
    """
    predictions, cluster, classes = (
        assignments.predictions,
        assignments.cluster,
        assignments.classes,
    )
    features = assignments.features
    silhouette = _silhouette(features, cluster)
    stability = _stability(cluster, others)
    merge = _merges(assignments)
    nearest, _ = nearest_known_class(predictions, class_sums(features, cluster, len(classes)))

    def describe(number: int) -> Cluster:
        members = typical(assignments, number)
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


def typical(assignments: Assignments, number: int) -> Int[np.ndarray, " members"]:
    """Return the rows of the assignments to a class, most similar to its mean feature first.

    The first is the medoid: the similarity of a unit vector to the sum of the others is the sum of
    its similarities to them.
    """
    members = np.flatnonzero(assignments.cluster == number)
    features = assignments.predictions.features[assignments.rows[members]]
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
    return {number: sorted(others) for number, others in partners.items()}


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


def _silhouette(features: Features, cluster: Clusters) -> dict[int, float]:
    """Return the mean silhouette of each class that has one."""
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


def _stability(cluster: Clusters, others: Sequence[Clusters]) -> dict[int, float]:
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
