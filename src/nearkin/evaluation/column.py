"""What features know of a column, such as the camera, and what class accuracy owes to it."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped

from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import CPU, KNN, TEMPERATURE, K, knn, linear_probe, predict
from nearkin.metrics.erasure import Eraser, leace
from nearkin.metrics.metric import Difference, Metric, Protocol, difference, share
from nearkin.metrics.permutation import PermutationTest, permutation_test
from nearkin.types import UNLABELED

SURE: Final = 0.05  # The largest p with which a column counts as followed
FEW: Final = "not measured, it needs labeled test images, and training images of two classes"

Values = Shaped[np.ndarray, " _"]
"""The value of each image, as text; '' where it is unknown."""
Pair = tuple[Embeddings, Embeddings]


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
        return cls(
            plain["column"],
            plain["chance"],
            plain["p"],
            tuple(Metric(**each) for each in plain["metrics"].values()),
            Difference(**plain["loss"]) if plain["loss"] else None,
            tuple(Difference(**each) for each in plain["removal"]),
        )

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
       shuffled within each class, of images of one group only the first being asked. This
       permutation test finds what is not there in at most `SURE` of all cases.
    2. kNN predicts classes from training images of other values of the column. It stands beside
       kNN from as many training images of each class, of any value.
    3. `leace`, fitted to the training images, removes the column from both parts.

    Args:
        column: Its name.
        pair: Training and test features.
        values: Of the training and of the test images. Those without one are left out.
        seed: Decides what is drawn.
        device: Where to compute.

    Raises:
        UsageError: As `check_values`.
    """
    known = [np.flatnonzero(each != "") for each in values]
    train, test = (part.subset(rows) for part, rows in zip(pair, known, strict=True))
    own, asked = (each[rows] for each, rows in zip(values, known, strict=True))
    check_values(column, own, asked)
    accuracy, tested = column_accuracy(column, (train, test), (own, asked), seed)
    without = _without(train, test, own)
    left, *_ = _accuracy(column, without, (own, asked))
    metrics, removed = [accuracy, replace(left, name=f"{left.name}, removed")], f"{column} removed"
    if not _have_classes(train, test):
        return ColumnTest(column, tested.chance, tested.p, tuple(metrics), None, ())
    loss = None
    if len(np.unique(own[train.labels != UNLABELED])) > 1:
        other, any_value = _across(train, test, own, asked, seed)
        other_removed, _ = _across(*without, own, asked, seed)
        metrics += [
            replace(other, name=f"{KNN}, other {column}"),
            replace(any_value, name=f"{KNN}, as many of any {column}"),
            replace(other_removed, name=f"{KNN}, other {column}, {removed}"),
        ]
        loss = difference(other, any_value)
    before, after = (_of_classes(*each, seed, device) for each in ((train, test), without))
    metrics += [replace(each, name=f"{each.name}, {removed}") for each in after]
    removal = tuple(difference(new, old) for new, old in zip(after, before, strict=True))
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


def column_accuracy(
    column: str, pair: Pair, values: tuple[Values, Values], seed: int
) -> tuple[Metric, PermutationTest]:
    """Return the accuracy of kNN for a column, of which all values are known, beside chance.

    For the arguments see `column_test`.
    """
    accuracy, predicted, asked, labels = _accuracy(column, pair, values)
    tested = permutation_test(
        lambda order: float((predicted == asked[order]).mean()),
        labels,
        np.random.default_rng(seed),
    )
    return accuracy, tested


def _accuracy(
    column: str, pair: Pair, values: tuple[Values, Values]
) -> tuple[Metric, Values, Values, Int[np.ndarray, " asked"]]:
    """Return the accuracy, and what it is made of.

    That is, of the images that are asked, the predicted value, the true one, and the class.
    """
    (train, test), (own, asked) = pair, values
    if test.groups is not None:  # images of a group would all be right, or all be wrong
        first = np.unique(test.groups, return_index=True)[1]
        test, asked = test.subset(first), asked[first]
    predicted = predict(train.tensor, own, test.tensor)
    protocol: Protocol = {
        "method": "weighted kNN by cosine",
        "k": min(K, len(train)),
        "temperature": TEMPERATURE,
        "training images": len(train),
        "of": "test images",
    }
    return share(f"kNN of {column}", predicted == asked, protocol), predicted, asked, test.labels


def remove_column(
    column: str,
    embeddings: Embeddings,
    values: Values,
    held_out: Bool[np.ndarray, " n"],
    *,
    seed: int,
) -> tuple[Embeddings, list[str]]:
    """Remove a column from features by `leace`, and measure what kNN predicts then.

    Args:
        column: Its name.
        embeddings: Unit features.
        values: The value of each image.
        held_out: Whether each image is scored. The others are the neighbors, and the projection
            is fitted to those of them whose value is known.
        seed: Decides what is drawn.

    Returns:
        Unit features of all images, as by another encoder: `encoder` is a digest of both the
        encoder and the projection. And a line on the accuracy of kNN for the column, before and
        after, with one on that for classes.

    Raises:
        UsageError: As `check_values`.
    """
    check_values(column, values[~held_out], values[held_out])
    known, parts = np.flatnonzero(values != ""), np.where(held_out, "test", "train")
    fitted = known[~held_out[known]]
    erase = _eraser(embeddings.subset(fitted), values[fitted])
    without = replace(
        embeddings,
        vectors=erase(embeddings.tensor).numpy(),
        encoder=_digest(embeddings.encoder, erase),
        removed=column,
    ).normalized()
    old, new = (
        divided(replace(of, splits=parts).subset(known), values[known])
        for of in (embeddings, without)
    )
    before, tested = column_accuracy(column, *old, seed)
    after, *_ = _accuracy(column, *new)
    lines = [
        f"{column} removed: kNN predicts it for {after} of {after.n:,} held-out images, before "
        f"for {before}, by chance within classes for {tested.chance:.3f}"
    ]
    change: Difference | str = FEW
    if _have_classes(*old[0]):
        change = difference(knn(*new[0])[0], knn(*old[0])[0])
    lines.append(f"{KNN} with {column} removed: {change}")
    return without, lines


def _have_classes(train: Embeddings, test: Embeddings) -> bool:
    """Whether classes of test images can be learned: from labeled images of two or more."""
    classes = np.unique(train.labels[train.labels != UNLABELED])
    return len(classes) > 1 and bool((test.labels != UNLABELED).any())


def _digest(encoder: str, erase: Eraser) -> str:
    """Return the digest of an encoder that a projection follows."""
    digest = hashlib.sha256(encoder.encode())
    for each in (erase.mean, erase.colored, erase.whitened):
        digest.update(each.numpy().tobytes())
    return digest.hexdigest()


def _eraser(train: Embeddings, own: Values) -> Eraser:
    concept = torch.from_numpy(own[:, None] == np.unique(own)).float()
    return leace(train.tensor, concept, train.labels)


def _without(train: Embeddings, test: Embeddings, own: Values) -> Pair:
    """Return the features without the column, as the training images show it."""
    erase = _eraser(train, own)
    return (
        replace(train, vectors=erase(train.tensor).numpy()),
        replace(test, vectors=erase(test.tensor).numpy()),
    )


def _across(
    train: Embeddings, test: Embeddings, own: Values, asked: Values, seed: int
) -> tuple[Metric, Metric]:
    """Return kNN by training images of other values, and by as many of each class of any."""
    rng = np.random.default_rng(seed)
    labeled = np.flatnonzero(test.labels != UNLABELED)
    predicted = np.zeros((2, len(test)), test.labels.dtype)
    order = rng.permutation(np.flatnonzero(train.labels != UNLABELED))
    order = order[np.argsort(train.labels[order], kind="stable")]
    for value in np.unique(asked[labeled]):
        rows = labeled[asked[labeled] == value]
        others = order[own[order] != value]
        counts = np.bincount(train.labels[others], minlength=train.labels.max() + 1)
        drawn = order[_rank(train.labels[order]) < counts[train.labels[order]]]
        for place, bank in enumerate((others, drawn)):
            some = np.sort(bank)
            votes = predict(train.tensor[some], train.labels[some], test.tensor[rows])
            predicted[place, rows] = votes
    method = {"method": "weighted kNN by cosine"}
    protocol: Protocol = {**method, "k": K, "temperature": TEMPERATURE}
    groups = None if test.groups is None else test.groups[labeled]
    other, any_value = (
        share(KNN, (each == test.labels)[labeled], protocol, groups=groups, rows=labeled)
        for each in predicted
    )
    return other, any_value


def _rank(ordered: np.ndarray) -> np.ndarray:
    """Return the position of each element among its equals, which follow each other."""
    _, start, size = np.unique(ordered, return_index=True, return_counts=True)
    return np.asarray(np.arange(len(ordered)) - np.repeat(start, size))


def _of_classes(
    train: Embeddings, test: Embeddings, seed: int, device: torch.device
) -> list[Metric]:
    first = knn(train, test, device=device)[0]
    return [first, linear_probe(train, test, seed=seed, device=device)]
