"""What features know of a column, such as the camera, and what class accuracy owes to it."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped

from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings, Pair
from nearkin.evaluation.metrics import CPU, KNN, TEST, K, knn, linear_probe, predict, vote_protocol
from nearkin.metrics.erasure import Eraser, leace
from nearkin.metrics.metric import Difference, Metric, difference, share
from nearkin.metrics.permutation import PermutationTest, permutation_test
from nearkin.types import UNLABELED

SURE: Final = 0.05  # The largest p with which a column counts as followed
FEW: Final = "not measured, it needs labeled test images, and training images of two classes"

Values = Shaped[np.ndarray, " _"]
"""The value of each image, as text; '' where it is unknown."""


@dataclass(frozen=True)
class ColumnTest:
    """Whether features follow a column, what classes lose by it, and with it removed."""

    column: str
    chance: float  # Accuracy of kNN for the column, with values shuffled within each class
    p: float  # How often that is as high as with the true values
    metrics: tuple[Metric, ...]
    """Accuracies; that of the column first, by all neighbors."""
    loss: Difference | None
    """Of kNN top-1 by neighbors of other values, to kNN by as many of any; None without labels of
    two classes, or where all labeled training images have one value."""
    removal: tuple[Difference, ...]  # Of each metric of classes without the column, to with it

    @classmethod
    def stored(cls, plain: Mapping[str, Any]) -> "ColumnTest":
        """Return what `to_dict` has made plain, without the outcomes of single images."""
        return msgspec.convert({**plain, "metrics": [*plain["metrics"].values()]}, cls)

    @property
    def followed(self) -> bool:
        """Whether kNN predicts the column better than by chance."""
        return self.p <= SURE

    @property
    def sentence(self) -> str:
        """How well kNN predicts the column, without a period."""
        return (
            f"kNN predicts {self.column} for {100 * self.metrics[0].value:.1f} % of the test "
            f"images ({100 * self.chance:.1f} % by chance within classes)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "column": self.column,
            "followed": self.followed,
            "chance": self.chance,
            "p": self.p,
            "metrics": {metric.name: metric.to_dict() for metric in self.metrics},
            "loss": self.loss and asdict(self.loss),
            "removal": [asdict(each) for each in self.removal],
        }

    def lines(self) -> list[str]:
        """A sentence on each question."""
        verdict = "features follow it" if self.followed else "no more than by chance"
        lines = [
            f"{self.column}: {verdict}; kNN predicts it for {self.metrics[0]} of the test images, "
            f"by chance within classes for {self.chance:.3f} (p {self.p:.3f})"
        ]
        if self.removal:  # there are labels of two classes
            loss = self.loss or "none, as all labeled training images have one"
            lines.append(f"{KNN} by images of another {self.column}: {loss}")
        else:
            lines.append(f"{KNN} with {self.column} removed: {FEW}")
        return lines + [f"{each.name} with {self.column} removed: {each}" for each in self.removal]


def column_test(
    column: str,
    pair: Pair,
    values: tuple[Values, Values],
    *,
    seed: int,
    device: torch.device = CPU,
) -> ColumnTest:
    """Ask whether features follow a column that they are to ignore, and remove it from them.

    1. kNN predicts the column of test images. Chance is what it reaches if their values are
       shuffled within each class, of images of one group only the first being asked.
    2. kNN predicts classes from training images of other values of the column. It stands beside
       kNN from as many training images of each class, of any value.
    3. `leace`, fitted to the training images, removes the column from both parts.

    Images without a value are left out; for errors see `check_values`.
    """
    old = Known.of(column, pair, values)
    new, tested, removed = old.without(old.eraser()), old.tested(seed), f"{column} removed"
    metrics = [old.accuracy, replace(new.accuracy, name=f"{new.accuracy.name}, removed")]
    if not old.has_classes:
        return ColumnTest(column, tested.chance, tested.p, tuple(metrics), None, ())
    loss = None
    if len(np.unique(old.own[old.train.labels != UNLABELED])) > 1:
        other, any_value = old.across(seed)
        other_removed, _ = new.across(seed)
        metrics += [
            replace(other, name=f"{KNN}, other {column}"),
            replace(any_value, name=f"{KNN}, as many of any {column}"),
            replace(other_removed, name=f"{KNN}, other {column}, {removed}"),
        ]
        loss = difference(other, any_value)
    before, after = (
        (knn(*of.pair, device=device)[0], linear_probe(*of.pair, seed=seed, device=device))
        for of in (old, new)
    )
    metrics += [replace(each, name=f"{each.name}, {removed}") for each in after]
    removal = tuple(map(difference, after, before))
    return ColumnTest(column, tested.chance, tested.p, tuple(metrics), loss, removal)


def divided(embeddings: Embeddings, values: Values) -> tuple[Pair, tuple[Values, Values]]:
    """Return the training and the test features, and the values of both, by `splits`."""
    train, test = (np.flatnonzero(embeddings.splits == part) for part in ("train", "test"))
    return (embeddings.subset(train), embeddings.subset(test)), (values[train], values[test])


def check_values(column: str, own: Values, asked: Values) -> None:
    """Refuse a column of which nothing can be learned, or nothing asked.

    Raises:
        UsageError: If the training images have less than two values, or no test image has one.
    """
    counts = [len(np.unique(each[each != ""])) for each in (own, asked)]
    if counts[0] < 2 or not counts[1]:
        raise UsageError(
            f"column {column} has {counts[0]} values among the training images and {counts[1]} "
            "among the test images; give one with two or more"
        )


def remove_column(
    column: str,
    embeddings: Embeddings,
    values: Values,
    held_out: Bool[np.ndarray, " n"],
    *,
    seed: int,
) -> tuple[Embeddings, list[str]]:
    """Remove a column from features by `leace`, and measure what kNN predicts then.

    Images that are `held_out` are scored. The others are the neighbors, and the projection is
    fitted to those of them whose value is known; for errors see `check_values`.

    Returns:
        Unit features of all images, as by another encoder: `encoder` is a digest of both the
        encoder and the projection. And two lines: what kNN predicts of the column before and
        after, and of classes.
    """
    parts = replace(embeddings, splits=np.where(held_out, "test", "train"))
    old = Known.of(column, *divided(parts, values))
    erase = old.eraser()
    new, tested = old.without(erase), old.tested(seed)
    digest = hashlib.sha256(embeddings.encoder.encode())
    for each in (erase.mean, erase.colored, erase.whitened):
        digest.update(each.numpy().tobytes())
    without = replace(
        embeddings,
        vectors=erase(embeddings.tensor).numpy(),
        encoder=digest.hexdigest(),
        removed=column,
    ).normalized()
    lines = [
        f"{column} removed: kNN predicts it for {new.accuracy} of {new.accuracy.n:,} held-out "
        f"images, before for {old.accuracy}, by chance within classes for {tested.chance:.3f}"
    ]
    change = difference(knn(*new.pair)[0], knn(*old.pair)[0]) if old.has_classes else FEW
    lines.append(f"{KNN} with {column} removed: {change}")
    return without, lines


@dataclass(frozen=True, eq=False)
class Known:
    """The images whose value of a column is known: their features, and the values."""

    column: str
    train: Embeddings
    test: Embeddings
    own: Values  # Of the training images
    asked: Values  # Of the test images

    @classmethod
    def of(cls, column: str, pair: Pair, values: tuple[Values, Values]) -> "Known":
        """Choose them; for errors see `check_values`."""
        check_values(column, *values)
        known = [np.flatnonzero(each != "") for each in values]
        train, test = (part.subset(rows) for part, rows in zip(pair, known, strict=True))
        return cls(column, train, test, values[0][known[0]], values[1][known[1]])

    @property
    def pair(self) -> Pair:
        """The features of both."""
        return self.train, self.test

    def eraser(self) -> Eraser:
        """Return what removes the column, as the training images show it."""
        concept = torch.from_numpy(self.own[:, None] == np.unique(self.own)).float()
        return leace(self.train.tensor, concept, self.train.labels)

    def without(self, erase: Eraser) -> "Known":
        """Return the same with other features."""
        train, test = (replace(of, vectors=erase(of.tensor).numpy()) for of in self.pair)
        return replace(self, train=train, test=test)

    @cached_property
    def predicted(self) -> tuple[Values, Values, Int[np.ndarray, " asked"]]:
        """What kNN predicts of the images that are asked; their values and classes."""
        test, asked = self.test, self.asked
        if test.groups is not None:  # images of a group would all be right, or all be wrong
            first = np.unique(test.groups, return_index=True)[1]
            test, asked = test.subset(first), asked[first]
        return predict(self.train.tensor, self.own, test.tensor), asked, test.labels

    @property
    def accuracy(self) -> Metric:
        """How often kNN predicts the column."""
        predicted, asked, _ = self.predicted
        num = len(self.train)
        protocol = {**vote_protocol(min(K, num)), "training images": num, "of": TEST}
        return share(f"kNN of {self.column}", predicted == asked, protocol)

    def tested(self, seed: int) -> PermutationTest:
        """Compare that with chance."""
        predicted, asked, labels = self.predicted
        return permutation_test(
            lambda order: float((predicted == asked[order]).mean()),
            labels,
            np.random.default_rng(seed),
        )

    @property
    def has_classes(self) -> bool:
        """Whether classes of test images can be learned: from labeled images of two or more."""
        classes = np.unique(self.train.labels[self.train.labels != UNLABELED])
        return len(classes) > 1 and bool((self.test.labels != UNLABELED).any())

    def across(self, seed: int) -> tuple[Metric, Metric]:
        """Measure kNN by training images of other values, and by as many of each class of any."""
        train, test, rng = self.train, self.test, np.random.default_rng(seed)
        labeled = np.flatnonzero(test.labels != UNLABELED)
        predicted, k = np.zeros((2, len(test)), test.labels.dtype), 0
        order = rng.permutation(np.flatnonzero(train.labels != UNLABELED))
        order = order[np.argsort(train.labels[order], kind="stable")]
        classes = train.labels[order]
        rank = np.arange(len(order)) - np.searchsorted(classes, classes)  # of each in its class
        for value in np.unique(self.asked[labeled]):
            rows = labeled[self.asked[labeled] == value]
            others = order[self.own[order] != value]
            k = max(k, min(K, len(others)))
            counts = np.bincount(train.labels[others], minlength=train.labels.max() + 1)
            for place, bank in enumerate((others, order[rank < counts[classes]])):
                some = np.sort(bank)
                votes = predict(train.tensor[some], train.labels[some], test.tensor[rows])
                predicted[place, rows] = votes
        groups = None if test.groups is None else test.groups[labeled]
        right = (predicted == test.labels)[:, labeled]
        other, any_value = (
            share(KNN, each, vote_protocol(k), groups=groups, rows=labeled) for each in right
        )
        return other, any_value
