"""What leaks are worth: accuracy with and without them, and by the distance to training images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float

from nearkin.auditing.data import Audited, Rows
from nearkin.errors import UsageError
from nearkin.evaluation.metrics import knn, linear_probe
from nearkin.metrics.metric import Difference, Metric, difference, share
from nearkin.report.page.blocks import Chart
from nearkin.types import UNLABELED

BINS: Final = 8  # Points of the curve, of equally many test images each, where there are enough
BIN_SIZE: Final = 20  # Test images of a point, at the least
FITTED: Final = 2**17  # Training images of the linear probe, at most: it passes over them often

Cosines = Float[np.ndarray, " test"]


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
        none = ("-",) * len(self.every)
        columns = self.every, self.clean or none, self.owed or none
        return [(row[0].name, *map(str, row)) for row in zip(*columns, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "linked": self.linked,
            "every": [each.to_dict() for each in self.every],
            "clean": [each.to_dict() for each in self.clean],
            "owed": [asdict(each) for each in self.owed],
            "curve": [asdict(each) for each in self.curve],
        }

    def charts(self) -> tuple[Chart, ...]:
        """Return the curve as lines of a page, unless there are too few images for one."""
        if len(self.curve) < 2:
            return ()
        lines = {
            metric.name: [(point.distance, point.values[at]) for point in self.curve]
            for at, metric in enumerate(self.every)
        }
        note = f"{len(self.curve)} groups of equally many test images, by their mean distance."
        x = "1 - cosine to the nearest training image"
        return (Chart("Accuracy by distance to the training part", x, "accuracy", lines, note),)


def price(
    audited: Audited, groups: Rows, cosine: Cosines, *, seed: int, device: torch.device
) -> Price | None:
    """Measure what accuracy owes to training images of the groups of test images.

    Intervals are of 95 %, with the groups; those of differences are paired by test image. Groups
    are of duplicates, and of images of one source; `cosine` is that of each test image and its
    nearest training image. None where the training or the test images have no labels; an error
    where the training images, or those that would be left, are not of two classes.
    """
    embeddings = replace(audited.embeddings, groups=groups)
    train_rows, test_rows = audited.train_rows, audited.test_rows
    train, test = embeddings.subset(train_rows), embeddings.subset(test_rows)
    scored = test.labels != UNLABELED
    if not ((train.labels != UNLABELED).any() and scored.any()):
        return None
    # What is known does not change which images a probe is fitted to.
    drawn = np.random.default_rng(seed).permutation(len(train)) < FITTED

    def accuracies(known: Bool[np.ndarray, " train"]) -> tuple[Metric, ...]:
        first = knn(train.subset(known), test, device=device)[0]
        return first, linear_probe(train.subset(known & drawn), test, seed=seed, device=device)

    linked = np.isin(groups[train_rows], groups[test_rows])
    shared = np.isin(groups[test_rows], groups[train_rows])
    every, owed = accuracies(np.full(len(train), True)), tuple[Difference, ...]()
    if linked.any():
        rest = train.labels[~linked]
        if len(np.unique(rest[rest != UNLABELED])) < 2:
            raise UsageError(
                f"{linked.sum()} of {len(linked)} training images share a group with a test one, "
                "and the others are not of two classes; give parts of more groups"
            )
        owed = tuple(map(difference, every, accuracies(~linked)))
    some = shared.any() and (scored & ~shared).any()
    clean = tuple(_of_some(each, np.flatnonzero(~shared)) for each in every) if some else ()
    return Price(int(linked.sum()), every, clean, owed, tuple(_curve(every, cosine)))


def _of_some(metric: Metric, rows: Rows) -> Metric:
    """Return the same metric of some of the test images."""
    outcome = metric.outcome
    assert outcome is not None
    own = np.isin(outcome.rows, rows)
    groups = None if outcome.groups is None else outcome.groups[own]
    return share(
        metric.name, outcome.correct[own], metric.protocol, groups=groups, rows=outcome.rows[own]
    )


def _curve(every: Sequence[Metric], cosine: Cosines) -> list[Point]:
    """Return accuracies of labeled test images in bins of their distance, the nearest first."""
    outcome = every[0].outcome
    assert outcome is not None
    order = outcome.rows[np.argsort(-cosine[outcome.rows], kind="stable")]
    bins = np.array_split(order, max(1, min(BINS, len(order) // BIN_SIZE)))
    return [
        Point(
            float(1 - cosine[rows].mean()),
            len(rows),
            tuple(_of_some(each, rows).value for each in every),
        )
        for rows in bins
    ]
