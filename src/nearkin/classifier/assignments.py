"""A row per image without a label: its class, how certain that is, and what to look at."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.classifier.calibration import Calibration, calibrated
from nearkin.classifier.classifier import Predictions
from nearkin.classifier.reference import Reference, nearest_known, neighbors, own_similarity
from nearkin.types import UNLABELED

NEIGHBORS: Final = 20  # Behind the neighbor agreement
CORE_MARGIN: Final = 0.5
BORDER_MARGIN: Final = 0.2
CORE_AGREEMENT: Final = 0.9
BORDER_AGREEMENT: Final = 0.75
MIN_SIZE: Final = 5  # Thresholds of the flags; see `assign`

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
    view_agreement: Numbers
    """Share of the augmented views whose most probable class is the same; NaN without views."""
    neighbor_agreement: Numbers
    """Share of the 20 nearest images that were learned from that have the same class."""
    nearest_known: Clusters
    """The known class whose labeled images have the most similar mean feature, or `UNLABELED`."""
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
        columns: dict[str, Iterable[Any]] = {
            "path": self.paths,
            "cluster": self.class_names,
            "nearest_known": [names[number] for number in self.nearest_known.tolist()],
            "flag": self.flag,
        }
        columns |= {name: map(rounded, getattr(self, name).tolist()) for name in NUMBERS}
        return zip(*(columns[name] for name in COLUMNS), strict=True)


COLUMNS: Final = ("path", *(column.name for column in fields(Assignments)[2:]))
NUMBERS: Final = (
    "score", "margin", "entropy", "view_agreement", "neighbor_agreement", "similarity",
)  # fmt: skip
"""Of these, those of numbers, which may be missing."""


def rounded(value: Any) -> Any:
    """Round a float to four digits; None for NaN."""
    if not isinstance(value, float):
        return value
    return None if np.isnan(value) else round(value, 4)


def assign(
    predictions: Predictions, reference: Reference, calibration: Calibration | None = None
) -> Assignments:
    """Return the most probable class of each image without a label, and how certain it is.

    A row depends on its image and on what was learned, not on the other images. The flag is the
    first of these that holds:

    - `outlier`: by the encoder's features it is farther from the labeled images than 95 % of the
      images of classes that were held out, or farther from all than 99 % of these from one
      another; see `Reference`.
    - `tiny-cluster`: its novel class has fewer images in the discovery than 5, or than a tenth of
      the median of the novel classes that have any.
    - `maybe-known`: its class is novel, but its feature is more similar to the mean of a known
      class than to the mean of the other images of its own.
    - `border`: fewer than 75 % of its views say the same, or its margin is below 0.2.
    - `core`: its margin is at least 0.5, and at least 90 % of its views (all of eight) and
      half of its nearest neighbors say the same. A classification has no views, and only the
      other two count.

    `reference` has unit features that the heads take; `calibration` is applied to probabilities.
    """
    from scipy.special import entr

    rows = np.flatnonzero(predictions.label == UNLABELED)
    cluster = predictions.cluster[rows]
    probability = calibrated(predictions.probability[rows], calibration)
    features = torch.from_numpy(predictions.features[rows])
    # Padding: where there is one class only, one of probability 0 is the second.
    second, first = np.sort(np.pad(probability, ((0, 0), (1, 0))), axis=1)[:, -2:].T
    possible = (probability > 0).sum(axis=1)
    view_agreement = np.full(len(rows), np.nan)
    if len(predictions.by_view):
        view_agreement = (predictions.by_view[:, rows] == cluster).mean(axis=0)
    near = neighbors(reference.features, features, NEIGHBORS)
    neighbor_agreement = (reference.cluster[near.rows] == cluster[:, None]).mean(axis=1)
    known, similarity = nearest_known(reference, features)
    own = own_similarity(reference, features, cluster, near.own)
    novel = cluster >= predictions.num_known
    conditions = {
        "outlier": predictions.outlier[rows],
        "tiny-cluster": novel & (reference.sizes[cluster] < _tiny(reference, predictions)),
        "maybe-known": novel & (similarity > own),
        "border": (view_agreement < BORDER_AGREEMENT) | (first - second < BORDER_MARGIN),
        "core": (first - second >= CORE_MARGIN)
        & (np.isnan(view_agreement) | (view_agreement >= CORE_AGREEMENT))
        & (neighbor_agreement >= 0.5),
    }
    flag = np.select(list(conditions.values()), list(conditions), default="")
    return Assignments(
        predictions,
        rows,
        cluster,
        score=first,
        margin=first - second,
        entropy=np.asarray(entr(probability).sum(axis=1) / np.log(possible.clip(min=2))),
        view_agreement=view_agreement,
        neighbor_agreement=neighbor_agreement,
        nearest_known=known,
        similarity=similarity,
        flag=tuple(flag.tolist()),
    )


def _tiny(reference: Reference, predictions: Predictions) -> float:
    """Return the number of images below which a novel class is tiny."""
    sizes = reference.sizes[predictions.num_known :]
    usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 0.0
    return float(max(MIN_SIZE, usual / 10))


def typical(assignments: Assignments, number: int) -> Int[np.ndarray, " members"]:
    """Return the rows of the assignments to a class, most similar to its mean feature first.

    The first is the medoid: the similarity of a unit vector to the sum of the others is the sum of
    its similarities to them.
    """
    members = np.flatnonzero(assignments.cluster == number)
    features = assignments.predictions.features[assignments.rows[members]]
    similarity = features @ features.sum(axis=0)
    return members[np.argsort(-similarity, kind="stable")]
