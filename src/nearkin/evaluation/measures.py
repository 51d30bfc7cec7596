"""Measures of embeddings with their protocols: kNN, linear probe, clusters and geometry.

A measure takes training and test embeddings, or those of the test alone. Images without a label
are left out of those that need labels; where too few are left, a measure raises DataError.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.measures.geometry import (
    alignment,
    effective_rank,
    feature_std,
    mean_cosine,
    uniformity,
)
from nearkin.measures.intervals import bootstrap, wilson
from nearkin.measures.kmeans import WIDEST, compact
from nearkin.measures.matching import (
    adjusted_rand_index,
    cluster_accuracy,
    normalized_mutual_information,
)
from nearkin.measures.neighbors import nearest, neighbor_agreement, vote
from nearkin.measures.probe import HELD_OUT, train_probe
from nearkin.types import UNKNOWN

TEMPERATURE: Final = 0.1  # Temperature of the votes of kNN in the papers
GEOMETRY_IMAGES: Final = 5_000  # Whose geometry is measured, at the most; evenly spaced among all
NEIGHBORS: Final = 10  # Nearest images that two views are compared by


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Which images a measure got right: what two encoders are compared by, image by image."""

    rows: Int[np.ndarray, " n"]  # Positions of the images that were scored, among all test images
    correct: Bool[np.ndarray, " n"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number with its 95 % confidence interval and its protocol."""

    name: str
    value: float
    low: float | None  # Lower end of the interval; None if the number has none
    high: float | None
    protocol: str  # All that must be the same for two numbers to be compared, in words
    outcome: Outcome | None = field(default=None, compare=False, repr=False)
    """Of a share of images that are right; not kept in JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `Measure(**values)` is the measure again."""
        return {name: getattr(self, name) for name in ("name", "value", "low", "high", "protocol")}

    def __str__(self) -> str:
        """The value and its interval, to three digits."""
        if self.low is None or self.high is None:
            return _short(self.value)
        return f"{_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def accuracy(
    name: str,
    correct: Bool[np.ndarray, " n"],
    protocol: str,
    rows: Int[np.ndarray, " n"] | None = None,
) -> Measure:
    """Return the share of correct predictions, with Wilson's interval.

    It takes images as independent, which those of one group are not, and its protocol says so.
    `rows` are the positions of these images among all test images, None for all of them.
    """
    low, high = wilson(int(correct.sum()), len(correct))
    protocol += "; interval as if images were independent"
    rows = np.arange(len(correct)) if rows is None else rows
    return Measure(name, float(correct.mean()), low, high, protocol, Outcome(rows, correct))


def _unseen(train: Embeddings, test: Embeddings) -> str:
    """Return a remark for protocols on test classes without training images, if any."""
    missing = len(np.setdiff1d(test.labels, train.labels))
    return f", {missing} test classes without any training image count as wrong" if missing else ""


# Nearest neighbors


def num_neighbors(bank: int) -> int:
    """Return the `k` of kNN: 200 as in the papers, or 20 where classes may have fewer images."""
    return 200 if bank >= 10_000 else 20


def knn(
    train: Embeddings, test: Embeddings, *, k: int = 200, temperature: float = TEMPERATURE
) -> Measure:
    """Measure how often the vote of the `k` nearest training images is right.

    The protocol of Wu et al. 2018 and of MoCo's CIFAR-10 demonstration. Of classes with equal
    votes, the lowest number wins.
    """
    rows = np.flatnonzero(test.labels != UNKNOWN)
    train, test = train.labeled(), test.labeled()
    if not len(train) or not len(test):
        raise DataError("kNN needs labeled training images and labeled test images")
    predicted = predict(train.tensor, train.labels, test.tensor, k=k, temperature=temperature)
    protocol = (
        f"weighted kNN by cosine, k {min(k, len(train))}, temperature {temperature:g}, "
        f"bank of {len(train)} training images, {len(test)} test images{_unseen(train, test)}"
    )
    return accuracy("kNN top-1", predicted == test.labels, protocol, rows)


def predict(
    bank: Float[Tensor, "bank dim"],
    labels: Shaped[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    *,
    k: int,
    temperature: float = TEMPERATURE,
) -> Shaped[np.ndarray, " queries"]:
    """Return the label that wins each query's vote; of equals, the one that sorts first."""
    classes, numbers = np.unique(labels, return_inverse=True)
    scores = vote(bank, numbers, queries, k=k, temperature=temperature, num_classes=len(classes))
    return np.asarray(classes[scores.argmax(dim=1).cpu().numpy()])


def knn_classes(embeddings: Embeddings) -> Shaped[np.ndarray, " n"]:
    """Predict the class name of each labeled test image from its nearest training images.

    The predictions behind the kNN accuracy; empty for all other images.
    """
    names, labeled = embeddings.class_names, embeddings.labels != UNKNOWN
    train, test = (np.flatnonzero(labeled & (embeddings.splits == s)) for s in ("train", "test"))
    predicted = np.full(len(names), "", names.dtype)
    if len(train) and len(test):
        bank, queries = (torch.from_numpy(embeddings.vectors[rows]) for rows in (train, test))
        predicted[test] = predict(bank, names[train], queries, k=num_neighbors(len(train)))
    return predicted


# Linear probe


def linear_probe(train: Embeddings, test: Embeddings, *, seed: int) -> Measure:
    """Measure the accuracy of a linear classifier on frozen features; see `train_probe`."""
    rows, test = np.flatnonzero(test.labels != UNKNOWN), test.labeled()
    if not len(test):
        raise DataError("the linear probe needs labeled test images")
    train = train.labeled()
    probe = train_probe(train.tensor, train.labels, seed=seed, groups=train.groups)
    reduced = "" if probe.basis is None else f"{probe.basis.shape[1]} principal components of "
    protocol = (
        f"logistic regression on {reduced}standardized features, C {probe.strength:g} chosen on "
        f"{HELD_OUT:.0%} of the training images, {len(train)} training images, "
        f"{len(test)} test images{_unseen(train, test)}"
    )
    correct = probe.predict(test.tensor) == test.labels
    return accuracy("linear probe", correct, protocol, rows)


# Clusters


def clusters(test: Embeddings, *, seed: int) -> list[Measure]:
    """Measure how well k-means, given the number of classes, separates the classes.

    Accuracy under the best one-to-one match, normalized mutual information (arithmetic mean)
    and adjusted Rand index. Their intervals resample the images and keep the clustering.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    test = test.labeled()
    k = len(np.unique(test.labels))
    if k < 2:
        raise DataError("clusters need labeled test images of two classes or more")
    with warnings.catch_warnings():  # collapsed features have fewer points than clusters
        warnings.simplefilter("ignore", ConvergenceWarning)
        kmeans = KMeans(k, n_init=10, random_state=seed)
        assigned = kmeans.fit_predict(compact(test.tensor)).astype(np.int64)
    protocol = (
        f"k-means of {len(test)} test images, k {k} (the number of classes), 10 starts, "
        f"unit features, {min(test.vectors.shape[1], WIDEST)} dimensions; "
        "interval as if images were independent, clustering fixed"
    )

    def score(name: str, statistic: Callable[..., float], lowest: float = 0.0) -> Measure:
        def of(rows: Int[np.ndarray, " rows"]) -> float:
            return float(statistic(test.labels[rows], assigned[rows]))

        interval = bootstrap(of, len(test), seed=seed, bounds=(lowest, 1.0))
        return Measure(name, of(np.arange(len(test))), *interval, protocol)

    return [
        score("cluster accuracy", lambda labels, clusters: cluster_accuracy(labels, clusters)[0]),
        score("NMI", normalized_mutual_information),
        score("ARI", adjusted_rand_index, lowest=-0.5),
    ]


# Without labels


def view_retrieval(test: Embeddings) -> list[Measure]:
    """Measure how often an image is the nearest of all to an augmented view of itself.

    The task of instance discrimination (Wu et al. 2018) on images it was not trained on. Another
    image of the same group, such as a near-duplicate, counts as right too. Where no second view
    was drawn there is no measure.
    """
    view = test.second_view
    if view is None or not len(view):
        return []
    if len(view) < 2:
        raise DataError("view retrieval needs two images or more")
    bank = test.tensor[torch.from_numpy(view.rows)]
    first = nearest(bank, view.tensor, k=1)[1][:, 0].cpu().numpy()
    own = np.arange(len(view)) if test.groups is None else test.groups[view.rows]
    protocol = (
        "the image nearest to an augmented view by cosine is its own, "
        f"{len(view)} of {len(test)} test images"
    )
    return [accuracy("view retrieval", own[first] == own, protocol, view.rows)]


def geometry_rows(n: int) -> Int[np.ndarray, " rows"]:
    """Return the rows, of `n`, whose geometry is measured."""
    return np.arange(min(n, GEOMETRY_IMAGES)) * n // max(min(n, GEOMETRY_IMAGES), 1)


def geometry(test: Embeddings) -> list[Measure]:
    """Effective rank, spread and uniformity; with a second view also what both views share.

    Numbers about a sample: no intervals. Effective rank and neighbor agreement depend on the
    number of images, which their protocol says.
    """
    view = test.second_view
    rows = geometry_rows(len(test)) if view is None else view.rows
    if len(rows) < 2:
        raise DataError("the geometry of features needs two images or more")
    x = test.tensor[torch.from_numpy(rows)]
    measures = {
        "effective rank": (effective_rank(x), f"centered features, dimension {x.shape[1]}"),
        "feature std": (feature_std(x), "unit features, times the root of the dimension"),
        "mean cosine": (mean_cosine(x), "over pairs of different images"),
        "uniformity": (uniformity(x), "unit features, t 2, over pairs of different images"),
    }
    if view is not None:
        y, k = view.tensor, min(NEIGHBORS, len(rows) - 1)
        measures |= {
            "alignment": (alignment(x, y), "squared distance of two views, unit features"),
            "neighbor agreement": (
                neighbor_agreement(x, y, k),
                f"share of the {k} nearest images that two views have in common, by cosine",
            ),
        }
    images = f"{len(rows)} of {len(test)} test images"
    return [
        Measure(name, float(value), None, None, f"{protocol}, {images}")
        for name, (value, protocol) in measures.items()
    ]
