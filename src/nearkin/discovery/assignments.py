"""The class of each image without a label, and how certain it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from nearkin.discovery.classifier import Calibration, Predictions
from nearkin.measures.neighbors import nearest
from nearkin.objectives import unit
from nearkin.types import UNKNOWN

COLUMNS: Final = (
    "path",
    "cluster",
    "score",
    "margin",
    "entropy",
    "agreement",
    "purity",
    "nearest_known",
    "similarity",
    "flag",
)
"""The columns of `Assignments.rows`."""

NEIGHBORS: Final = 20
"""Neighbors behind the purity."""
CORE_MARGIN: Final = 0.5
BORDER_MARGIN: Final = 0.2
CORE_AGREEMENT: Final = 0.9
BORDER_AGREEMENT: Final = 0.75
MIN_SIZE: Final = 5
"""Thresholds of the flags; see `assign`."""


@dataclass(frozen=True, eq=False)
class Assignments:
    """One row per image without a label, in the order of the predictions."""

    paths: tuple[str, ...]
    cluster: Int[np.ndarray, " images"]
    """The most probable class."""
    score: Float[np.ndarray, " images"]
    """Its probability p1: calibrated if a calibration was given, else too high as a rule."""
    margin: Float[np.ndarray, " images"]
    """p1 - p2, from 0 to 1, where p2 is that of the second most probable class."""
    entropy: Float[np.ndarray, " images"]
    """Of the probabilities, as a share of the largest possible: 0 is certain, 1 a pure guess."""
    agreement: Float[np.ndarray, " images"]
    """Share of the augmented views whose most probable class is the assigned one."""
    purity: Float[np.ndarray, " images"]
    """Share of the 20 nearest other images without a label that have the same class; NaN where
    there is no other."""
    nearest_known: Int[np.ndarray, " images"]
    """The known class whose labeled images have the most similar mean feature, or `UNKNOWN`."""
    similarity: Float[np.ndarray, " images"]
    """The cosine similarity to that mean; NaN where no image has a label."""
    flag: tuple[str, ...]
    """See `assign`."""
    classes: tuple[str, ...]
    """Names of all classes."""

    def rows(self) -> Iterator[tuple[str | float | None, ...]]:
        """Yield plain values in the order of `COLUMNS`; None where there is no number."""
        numbers = (self.score, self.margin, self.entropy, self.agreement, self.purity)
        for row, path in enumerate(self.paths):
            known = self.nearest_known[row]
            yield (
                path,
                self.classes[self.cluster[row]],
                *(rounded(float(column[row])) for column in numbers),
                self.classes[known] if known != UNKNOWN else "",
                rounded(float(self.similarity[row])),
                self.flag[row],
            )


def rounded(value: float | None) -> float | None:
    """Round to four digits; None for NaN."""
    return None if value is None or np.isnan(value) else round(value, 4)


def assign(predictions: Predictions, *, calibration: Calibration | None = None) -> Assignments:
    """Return the most probable class of each image without a label, and how certain it is.

    The flag is the first of these that holds:

    - `tiny-cluster`: its novel class has fewer images than 5, or than a tenth of the median of
      the novel classes that have any.
    - `maybe-known`: its class is novel, but its feature is more similar to the mean of a known
      class than to the mean of the other images of its own.
    - `border`: fewer than 75 % of its views say the same, or its margin is below 0.2.
    - `core`: its margin is at least 0.5, and at least 90 % of its views and half of its nearest
      neighbors say the same.

    Args:
        predictions: Of all images. Those with a label only give the means of known classes.
        calibration: Applied to the probabilities, which are too high as a rule.
    """
    rows = predictions.label == UNKNOWN
    cluster, features = predictions.cluster[rows], predictions.features[rows]
    probability = predictions.probability[rows]
    if calibration is not None:
        probability = calibration.apply(probability)
    # Padding: where there is one class only, one of probability 0 is the second.
    second, first = np.sort(np.pad(probability, ((0, 0), (1, 0))), axis=1)[:, -2:].T
    agreement = (predictions.by_view[:, rows] == cluster).mean(axis=0)
    purity = _purity(features, cluster)
    nearest_known, similarity = nearest_known_class(predictions, features)
    novel = cluster >= predictions.num_known
    looks_known = novel & (similarity > _own_similarity(features, cluster))
    conditions = {
        "tiny-cluster": _tiny(cluster, novel),
        "maybe-known": looks_known,
        "border": (agreement < BORDER_AGREEMENT) | (first - second < BORDER_MARGIN),
        "core": (first - second >= CORE_MARGIN) & (agreement >= CORE_AGREEMENT) & (purity >= 0.5),
    }
    flag = np.select(list(conditions.values()), list(conditions), default="")
    return Assignments(
        paths=tuple(np.array(predictions.paths, dtype=object)[rows]),
        cluster=cluster,
        score=first,
        margin=first - second,
        entropy=_entropy(probability),
        agreement=agreement,
        purity=purity,
        nearest_known=nearest_known,
        similarity=similarity,
        flag=tuple(flag.tolist()),
        classes=predictions.classes,
    )


def nearest_known_class(
    predictions: Predictions, features: Float[np.ndarray, "n dim"]
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Return the known class whose labeled images have the mean most similar to each row.

    And the cosine similarity to it. Without labeled images: `UNKNOWN`, and NaN.
    """
    known = np.unique(predictions.label[predictions.label != UNKNOWN])
    if not len(known):
        return np.full(len(features), UNKNOWN), np.full(len(features), np.nan)
    sums = class_sums(predictions.features, predictions.label, predictions.num_known)
    means = unit_rows(sums[known])
    similarity = unit_rows(features) @ means.T
    return known[similarity.argmax(axis=1)], similarity.max(axis=1)


def class_sums(
    features: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"], num_classes: int
) -> Float[np.ndarray, "num_classes dim"]:
    """Return the sum of the features of each class; zeros for a class without images."""
    sums = np.zeros((num_classes, features.shape[1]), dtype=features.dtype)
    for number in range(num_classes):
        sums[number] = features[cluster == number].sum(axis=0)
    return sums


def unit_rows(x: Float[np.ndarray, "rows dim"]) -> Float[np.ndarray, "rows dim"]:
    """Scale rows to length one; rows of zeros stay zeros."""
    return unit(torch.from_numpy(x)).numpy()


def _own_similarity(
    features: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Return the cosine similarity to the mean of the other images of the class."""
    # A mean with the image in it would be too similar, the more so the fewer there are.
    sums = class_sums(features, cluster, int(cluster.max(initial=0)) + 1)
    others = unit_rows(sums[cluster] - features)
    return np.asarray((features * others).sum(axis=1))


def _purity(
    features: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    if len(features) < 2:
        return np.full(len(features), np.nan)
    x = torch.from_numpy(features)
    _, index = nearest(x, x, NEIGHBORS, exclude_self=True)
    return np.asarray((cluster[index.numpy()] == cluster[:, None]).mean(axis=1))


def _entropy(probability: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, " n"]:
    """Return the share of the largest entropy; 0 where only one class is possible."""
    from scipy.special import entr

    possible = int((probability > 0).any(axis=0).sum())
    return np.asarray(entr(probability).sum(axis=1) / np.log(max(possible, 2)))


def _tiny(cluster: Int[np.ndarray, " n"], novel: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    size = np.bincount(cluster)
    novel_sizes = size[np.unique(cluster[novel])]
    usual = float(np.median(novel_sizes)) if len(novel_sizes) else 0.0
    return np.asarray(novel & (size[cluster] < max(MIN_SIZE, usual / 10)))
