"""What leaks are worth: accuracy with and without them, and by the distance to training images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from nearkin.auditing.data import Audited
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn, linear_probe
from nearkin.metrics.metric import Difference, Metric, difference, share
from nearkin.report.page.blocks import Chart
from nearkin.types import UNLABELED

BINS: Final = 8  # Points of the curve, of equally many test images each, where there are enough
BIN_SIZE: Final = 20  # Test images of a point, at the least
FITTED: Final = 2**17  # Training images of the linear probe, at most: it passes over them often


@dataclass(frozen=True)
class Point:
    """Test images at about the same distance to their nearest training image."""

    distance: float  # The mean of one minus the cosine
    n: int
    values: tuple[float, ...]  # Of each classifier, its accuracy


@dataclass(frozen=True)
class Price:
    """Accuracies of kNN and of a linear classifier, with leaks and without."""

    linked: int  # Training images that share a group with a test image
    every: tuple[Metric, ...]  # On all test images
    clean: tuple[Metric, ...]  # On those that share no group with a training image, if any do not
    owed: tuple[Difference, ...]
    """Of learning from all training images to learning from those that are not linked, on all
    test images: what the accuracy owes to leaks."""
    curve: tuple[Point, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """A row per classifier: on all test images, on clean ones, without linked images."""
        clean = {each.name: str(each) for each in self.clean}
        owed = {each.name: str(each) for each in self.owed}
        return [
            (each.name, str(each), clean.get(each.name, "-"), owed.get(each.name, "-"))
            for each in self.every
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "linked": self.linked,
            "every": [each.to_dict() for each in self.every],
            "clean": [each.to_dict() for each in self.clean],
            "owed": [asdict(each) for each in self.owed],
            "curve": [asdict(each) for each in self.curve],
        }

    def chart(self) -> Chart | None:
        """Return the curve as lines of a page; None where there are too few images for one."""
        if len(self.curve) < 2:
            return None
        lines = {
            metric.name: [(point.distance, point.values[at]) for point in self.curve]
            for at, metric in enumerate(self.every)
        }
        note = f"{len(self.curve)} groups of equally many test images, by their mean distance."
        x = "1 - cosine to the nearest training image"
        return Chart("Accuracy by distance to the training part", x, "accuracy", lines, note)


def price(
    audited: Audited,
    groups: Int[np.ndarray, " n"],
    cosine: Float[np.ndarray, " test"],
    *,
    seed: int,
    device: torch.device,
) -> Price | None:
    """Measure what accuracy owes to training images of the groups of test images.

    Intervals are of 95 %, with the groups; those of differences are paired by test image. Groups
    are of duplicates, and of images of one source; `cosine` is that of each test image and its
    nearest training image. None where the training or the test images have no labels.

    Raises:
        DataError: If the labeled training images are of a single class.
        UsageError: If no training image, or those of a single class, would be left.
    """
    embeddings = replace(audited.embeddings, groups=groups)
    train_rows, test_rows = audited.train_rows, audited.test_rows
    train, test = embeddings.subset(train_rows), embeddings.subset(test_rows)
    scored = test.labels != UNLABELED
    if not ((train.labels != UNLABELED).any() and scored.any()):
        return None
    linked = np.isin(groups[train_rows], groups[test_rows])
    shared = np.isin(groups[test_rows], groups[train_rows])
    every = _accuracies(train, np.full(len(train), True), test, seed, device)
    owed: tuple[Difference, ...] = ()
    if linked.any():
        rest = train.labels[~linked]
        if len(np.unique(rest[rest != UNLABELED])) < 2:
            raise UsageError(
                f"{linked.sum()} of {len(linked)} training images share a group with a test one, "
                "and the others are not of two classes; give parts of more groups"
            )
        without = _accuracies(train, ~linked, test, seed, device)
        owed = tuple(difference(old, new) for old, new in zip(every, without, strict=True))
    some = shared.any() and (scored & ~shared).any()
    clean = tuple(_of_some(each, ~shared) for each in every) if some else ()
    return Price(int(linked.sum()), every, clean, owed, tuple(_curve(every, cosine)))


def _accuracies(
    train: Embeddings,
    known: Bool[np.ndarray, " train"],
    test: Embeddings,
    seed: int,
    device: torch.device,
) -> tuple[Metric, ...]:
    """Return the accuracy of kNN at its first k, and that of the linear probe.

    Both learn from the known training images, the probe from those among `FITTED` that are drawn
    from all: what is known does not change the draw.
    """
    drawn = np.random.default_rng(seed).permutation(len(train)) < FITTED
    first = knn(train.subset(np.flatnonzero(known)), test, device=device)[0]
    fitted = train.subset(np.flatnonzero(known & drawn))
    return first, linear_probe(fitted, test, seed=seed, device=device)


def _of_some(metric: Metric, chosen: Bool[np.ndarray, " test"]) -> Metric:
    """Return the same metric of some of the test images."""
    outcome = metric.outcome
    assert outcome is not None
    own = chosen[outcome.rows]
    groups = None if outcome.groups is None else outcome.groups[own]
    return share(
        metric.name, outcome.correct[own], metric.protocol, groups=groups, rows=outcome.rows[own]
    )


def _curve(every: Sequence[Metric], cosine: Float[np.ndarray, " test"]) -> list[Point]:
    """Return accuracies of labeled test images in bins of their distance, the nearest first."""
    outcome = every[0].outcome
    assert outcome is not None
    order = outcome.rows[np.argsort(-cosine[outcome.rows], kind="stable")]
    points, bins = list[Point](), max(1, min(BINS, len(order) // BIN_SIZE))
    for rows in np.array_split(order, bins):
        chosen = np.isin(np.arange(len(cosine)), rows)
        values = tuple(_of_some(each, chosen).value for each in every)
        points.append(Point(float(1 - cosine[rows].mean()), len(rows), values))
    return points
