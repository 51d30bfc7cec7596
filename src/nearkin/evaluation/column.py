"""What features know of a column, such as the camera, and what class accuracy owes to it."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Shaped

from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import CPU, KNN, TEMPERATURE, K, knn, linear_probe, predict
from nearkin.metrics.erasure import leace
from nearkin.metrics.metric import Difference, Metric, Protocol, difference, share
from nearkin.types import UNLABELED

PERMUTATIONS: Final = 999
SURE: Final = 0.05  # The largest p with which a column counts as followed

Values = Shaped[np.ndarray, " _"]
"""The value of each image, as text; '' where it is unknown."""
Pair = tuple[Embeddings, Embeddings]


@dataclass(frozen=True)
class ColumnTest:
    """Whether neighbors tell a column, what classes lose without it, and with it removed."""

    column: str
    chance: float  # Accuracy of kNN with values that are shuffled within each class
    p: float  # How often that is as high as with the true values
    metrics: tuple[Metric, ...]
    """Accuracies; that of the column first, by all neighbors."""
    loss: Difference | None
    """Of kNN top-1 by neighbors of other values, to kNN by as many of any; None without labels."""
    removal: tuple[Difference, ...]  # Of each metric of classes without the column, to with it

    @property
    def followed(self) -> bool:
        """Whether the features tell the column better than chance does."""
        return self.p <= SURE

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
        verdict = "features follow it" if self.followed else "not told from chance"
        lines = [
            f"{self.column}: {verdict}; kNN is right for {self.metrics[0]} of the test images, "
            f"and for {self.chance:.3f} by chance within classes (p {self.p:.3f})"
        ]
        if self.loss is not None:
            lines.append(f"{KNN} by images of another {self.column}: {self.loss}")
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
        UsageError: If the training images have less than two values, or no test image has one.
    """
    known = [np.flatnonzero(each != "") for each in values]
    train, test = (part.subset(rows) for part, rows in zip(pair, known, strict=True))
    own, asked = (each[rows] for each, rows in zip(values, known, strict=True))
    if len(np.unique(own)) < 2 or not len(asked):
        raise UsageError(
            f"column {column} has {len(np.unique(own))} values among the training images and "
            f"{len(np.unique(asked))} among the test images; give one with two or more"
        )
    told, chance, p = _told(column, train, test, own, asked, seed)
    without = _without(train, test, own)
    gone, _, _ = _told(column, *without, own, asked, seed)
    metrics, removed = [told, replace(gone, name=f"{gone.name}, removed")], f"{column} removed"
    if not ((train.labels != UNLABELED).any() and (test.labels != UNLABELED).any()):
        return ColumnTest(column, chance, p, tuple(metrics), None, ())
    other, any_value = _across(train, test, own, asked, seed)
    other_removed, _ = _across(*without, own, asked, seed)
    before, after = (_of_classes(*each, seed, device) for each in ((train, test), without))
    metrics += [
        replace(other, name=f"{KNN}, other {column}"),
        replace(any_value, name=f"{KNN}, as many of any {column}"),
        replace(other_removed, name=f"{KNN}, other {column}, {removed}"),
        *(replace(each, name=f"{each.name}, {removed}") for each in after),
    ]
    removal = tuple(difference(new, old) for new, old in zip(after, before, strict=True))
    return ColumnTest(column, chance, p, tuple(metrics), difference(other, any_value), removal)


def _told(
    column: str, train: Embeddings, test: Embeddings, own: Values, asked: Values, seed: int
) -> tuple[Metric, float, float]:
    """Return how often kNN tells the column, how often by chance, and the p of the former."""
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
    told = share(f"kNN of {column}", predicted == asked, protocol)
    rng = np.random.default_rng(seed)
    by_class = np.argsort(test.labels, kind="stable")
    shuffled = (
        asked[np.lexsort((rng.random(len(asked)), test.labels))] for _ in range(PERMUTATIONS)
    )
    chance = np.array([(predicted[by_class] == each).mean() for each in shuffled])
    p = (1 + int((chance >= told.value).sum())) / (1 + PERMUTATIONS)
    return told, float(chance.mean()), p


def _without(train: Embeddings, test: Embeddings, own: Values) -> Pair:
    """Return the features without the column, as the training images show it."""
    concept = torch.from_numpy(own[:, None] == np.unique(own)).float()
    erase = leace(train.tensor, concept, train.labels)
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
