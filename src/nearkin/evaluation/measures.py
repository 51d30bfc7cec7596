"""Measures of embeddings with their protocols: kNN, probes, few-shot, retrieval, geometry.

A measure takes training and test embeddings, or those of the test alone. Images without a label
are left out of those that need labels; where too few are left, a measure raises DataError.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nearkin.distributed import ALONE, Share, threads_for
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.measures.fewshot import (
    STRENGTH,
    centered,
    draw_shots,
    logistic_regression,
    nearest_class_mean,
)
from nearkin.measures.geometry import (
    alignment,
    effective_rank,
    feature_std,
    mean_cosine,
    uniformity,
)
from nearkin.measures.intervals import bootstrap, mean_interval, wilson
from nearkin.measures.kmeans import WIDEST, compact, lloyd, reduction
from nearkin.measures.matching import (
    adjusted_rand_index,
    cluster_accuracy,
    normalized_mutual_information,
)
from nearkin.measures.neighbors import nearest, neighbor_agreement, predict_without, tally
from nearkin.measures.probe import HELD_OUT, train_probe
from nearkin.measures.retrieval import retrieve
from nearkin.measures.spectrum import FIRST, LAST, RIDGE, alpha_req, lidar, rankme
from nearkin.types import UNKNOWN

CPU: Final = torch.device("cpu")
TEMPERATURE: Final = 0.1  # Temperature of the votes of kNN in the papers
GEOMETRY_IMAGES: Final = 5_000  # Whose geometry is measured, at the most; evenly spaced among all
FOLDS: Final = 20  # Parts of the bank that are left out in turn
NEIGHBORS: Final = 10  # Nearest images that two views are compared by
# Of kNN as papers report it: DINO and its successors take the first temperature, InstDisc and
# MoCo the second, and the k with the best result of these.
KS: Final = (10, 20, 100, 200)
TEMPERATURES: Final = (0.07, 0.1)
TALLIED: Final = 2**22  # Votes for classes that are held at once
SAMPLE: Final = 65_536  # Images that k-means starts on, or this many of each cluster if more:
FEWEST: Final = 32
SHOTS: Final = (1, 2, 5, 10)  # Training images per class
DRAWS: Final = 10  # How often these are drawn


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


def mean_score(name: str, values: Float[np.ndarray, " n"], protocol: str, *, seed: int) -> Measure:
    """Return the mean of a score from 0 to 1 of each image, with a bootstrap interval.

    Where all images score alike, as few do, draws show no error; Wilson's interval does.
    """
    n = len(values)
    if np.ptp(values) > 0:
        low, high = bootstrap(lambda rows: float(values[rows].mean()), n, seed=seed)
    else:
        low, high = wilson(round(float(values.sum())), n)
    value = float(values.mean())
    return Measure(name, value, min(low, value), max(high, value), protocol)


def _unseen(train: Embeddings, test: Embeddings) -> str:
    """Return a remark for protocols on test classes without training images, if any."""
    missing = len(np.setdiff1d(test.labels, train.labels))
    return f", {missing} test classes without any training image count as wrong" if missing else ""


# Nearest neighbors


def num_neighbors(bank: int) -> int:
    """Return the `k` of kNN: 200 as in the papers, or 20 where classes may have fewer images."""
    return 200 if bank >= 10_000 else 20


def knn(
    train: Embeddings,
    test: Embeddings,
    *,
    k: int = 200,
    temperature: float = TEMPERATURE,
    device: torch.device = CPU,
    share: Share = ALONE,
) -> Measure:
    """Measure how often the vote of the `k` nearest training images is right.

    The protocol of Wu et al. 2018 and of MoCo's CIFAR-10 demonstration. Of classes with equal
    votes, the lowest number wins. Neighbors are searched on the device; processes share the
    test images.
    """
    rows = np.flatnonzero(test.labels != UNKNOWN)
    train, test = train.labeled(), test.labeled()
    if not len(train) or not len(test):
        raise DataError("kNN needs labeled training images and labeled test images")
    bank, queries = train.tensor.to(device), test.tensor.to(device)
    predicted = predict(bank, train.labels, queries, k=k, temperature=temperature, share=share)
    protocol = (
        f"weighted kNN by cosine, k {min(k, len(train))}, temperature {temperature:g}, "
        f"bank of {len(train)} training images, {len(test)} test images{_unseen(train, test)}"
    )
    return accuracy("kNN top-1", predicted == test.labels, protocol, rows)


def knn_grid(train: Embeddings, test: Embeddings, share: Share = ALONE) -> list[Measure]:
    """Measure kNN at every `k` of `KS` and temperature of `TEMPERATURES`, and by plain majority.

    All of them from one search. None of them is chosen: the best of several on test images would
    be too good.
    """
    scored = np.flatnonzero(test.labels != UNKNOWN)
    train, test = train.labeled(), test.labeled()
    if not len(train) or not len(test):
        raise DataError("kNN needs labeled training images and labeled test images")
    ks = [k for k in KS if k <= len(train)] or [len(train)]
    of = f"{len(train)} training images, {len(test)} test images{_unseen(train, test)}"
    kinds = [(t, f"t {t:g}", f"temperature {t:g}, weighted") for t in TEMPERATURES]
    kinds.append((float("inf"), "majority", "unweighted"))
    votes = [(k, temperature) for k in ks for temperature, _, _ in kinds]
    predicted = predict_each(train.tensor, train.labels, test.tensor, votes, share=share)
    return [
        accuracy(
            f"kNN k {k}, {name}",
            winner == test.labels,
            f"{kind} kNN by cosine, k {k}, bank of {of}",
            scored,
        )
        for winner, (k, (_, name, kind)) in zip(predicted, product(ks, kinds), strict=True)
    ]


def knn_refits(
    train: Embeddings, test: Embeddings, *, k: int = 200, temperature: float = TEMPERATURE
) -> Bool[np.ndarray, "folds n"]:
    """Return which images `knn` gets right without a twentieth of the bank, each in turn.

    They show how much the accuracy depends on which training images there are. Whole groups are
    left out. Those that vote are the nearest `k` of what is left.
    """
    train, test = train.labeled(), test.labeled()
    classes, numbers = np.unique(train.labels, return_inverse=True)
    fold = _folds(np.arange(len(train)) if train.groups is None else train.groups)
    predicted = predict_without(
        train.tensor, numbers, test.tensor, fold, k=k, temperature=temperature
    )
    return np.asarray(classes[predicted.cpu().numpy()] == test.labels)


def _folds(groups: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Divide images into `FOLDS` parts at random, whole groups each; fewer if groups are."""
    names, member = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(names))
    return np.asarray(order[member] % FOLDS)


def predict(
    bank: Float[Tensor, "bank dim"],
    labels: Shaped[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    *,
    k: int,
    temperature: float = TEMPERATURE,
    share: Share = ALONE,
) -> Shaped[np.ndarray, " queries"]:
    """Return the label that wins each query's vote; of equals, the one that sorts first."""
    return np.asarray(predict_each(bank, labels, queries, [(k, temperature)], share=share)[0])


def predict_each(
    bank: Float[Tensor, "bank dim"],
    labels: Shaped[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    votes: Sequence[tuple[int, float]],
    *,
    share: Share = ALONE,
) -> Shaped[np.ndarray, "votes queries"]:
    """Predict by several `k` and temperatures, from one search; see `predict`.

    Queries are searched some at a time, and those of a share of them by other processes.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    own, most = queries[share.rows(len(queries))], max(k for k, _ in votes)
    voters, winners = torch.from_numpy(numbers), []
    for some in own.split(max(1, TALLIED // max(len(classes), most))):
        similarity, index = nearest(bank, some, most)
        voter = voters.to(index.device)[index]
        scores = (
            tally(similarity[:, :k], voter[:, :k], temperature=t, num_classes=len(classes))
            for k, t in votes
        )
        winners.append(torch.stack([each.argmax(dim=1) for each in scores], dim=1).cpu())
    joined = torch.cat(winners) if winners else torch.empty(0, len(votes), dtype=torch.int64)
    return np.asarray(classes[share.join(joined, len(queries)).T.numpy()])


@lru_cache(maxsize=1)  # two parts of a page show them
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


def linear_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    seed: int,
    device: torch.device = CPU,
    share: Share = ALONE,
) -> Measure:
    """Measure the accuracy of a linear classifier on frozen features; see `train_probe`.

    It is trained on the device; processes share the images.
    """
    rows, test = np.flatnonzero(test.labels != UNKNOWN), test.labeled()
    if not len(test):
        raise DataError("the linear probe needs labeled test images")
    train = train.labeled()
    probe = train_probe(
        train.tensor.to(device), train.labels, seed=seed, groups=train.groups, share=share
    )
    reduced = "" if probe.basis is None else f"{probe.basis.shape[1]} principal components of "
    protocol = (
        f"logistic regression on {reduced}standardized features, C {probe.strength:g} chosen on "
        f"{HELD_OUT:.0%} of the training images, {len(train)} training images, "
        f"{len(test)} test images{_unseen(train, test)}"
    )
    own = share.rows(len(test))
    right = torch.from_numpy(probe.predict(test.tensor[own].to(device)) == test.labels[own])
    correct = share.join(right.int(), len(test)).bool().numpy()
    return accuracy("linear probe", correct, protocol, rows)


# A few labels


def few_shot(train: Embeddings, test: Embeddings, *, seed: int) -> list[Measure]:
    """Measure classifiers from 1, 2, 5 and 10 labeled training images per class.

    Nearest class mean and logistic regression, on unit features minus the mean of all training
    images, which needs no label. Their accuracy on all test images is averaged over `DRAWS` draws
    of the training images. The interval is that of this mean: it covers which images happened to
    be labeled, but neither other test images nor another training of the encoder.
    """
    test = test.labeled()
    mean, train = train.tensor.mean(dim=0), train.labeled()
    classes, numbers = np.unique(train.labels, return_inverse=True)
    if len(classes) < 2 or not len(test):
        raise DataError("few-shot needs labeled test images, and training images of two classes")
    queries, y = centered(test.tensor, mean), numbers
    measures = []
    for shots in SHOTS:
        scores: dict[str, list[float]] = {"class mean": [], "logistic": []}
        for draw in range(DRAWS):
            rows = torch.from_numpy(draw_shots(y, shots, seed, draw))
            x = centered(train.tensor[rows], mean)  # of all would be a second copy of them
            few = x, torch.from_numpy(y)[rows], len(classes), queries
            for name, classify in (
                ("class mean", nearest_class_mean),
                ("logistic", logistic_regression),
            ):
                correct = classes[classify(*few).numpy()] == test.labels
                scores[name].append(float(correct.mean()))
        fewer = int((np.bincount(y) < shots).sum())
        measures += [
            _mean_of_draws(
                f"{shots}-shot {name}", np.array(values), _few_shot_protocol(name, shots, fewer)
            )
            for name, values in scores.items()
        ]
    of = f", {len(classes)} classes, {len(test)} test images{_unseen(train, test)}"
    return [replace(measure, protocol=measure.protocol + of) for measure in measures]


def _few_shot_protocol(name: str, shots: int, fewer: int) -> str:
    kinds = {
        "class mean": "nearest class mean",
        "logistic": f"logistic regression, C {STRENGTH:g}",
    }
    lacking = f", {fewer} classes have fewer and give all they have" if fewer else ""
    return (
        f"{kinds[name]} of {shots} training images per class{lacking}, unit features minus the "
        f"mean of all training images, mean of {DRAWS} draws; interval of this mean over draws "
        "(Student), test images fixed"
    )


def _mean_of_draws(name: str, values: Float[np.ndarray, " draws"], protocol: str) -> Measure:
    low, high = mean_interval(values)
    return Measure(name, float(values.mean()), max(0.0, low), min(1.0, high), protocol)


# Retrieval


def retrieval(train: Embeddings, test: Embeddings, *, seed: int) -> list[Measure]:
    """Measure how early a test image's class comes among all training images, by cosine.

    mAP, mAP@R and recall@1; images of the query's own group are not ranked.
    """
    scored = np.flatnonzero(test.labels != UNKNOWN)
    train, test = train.labeled(), test.labeled()
    if not len(train) or not len(test):
        raise DataError("retrieval needs labeled training images and labeled test images")
    result = retrieve(
        train.tensor,
        train.labels,
        test.tensor,
        test.labels,
        bank_groups=train.groups,
        query_groups=test.groups,
    )
    n = len(result.rows)
    if not n:
        raise DataError("retrieval needs test images of the classes of training images")
    without = len(test) - n
    left_out = f" ({without} more have no training image of their class)" if without else ""
    protocol = f"{n} test images{left_out} as queries, {len(train)} training images by cosine"

    def mean(name: str, kind: str, values: Float[np.ndarray, " n"]) -> Measure:
        remark = f"{kind}: {protocol}; interval over queries, as if images were independent"
        return mean_score(name, values, remark, seed=seed)

    return [
        mean("retrieval mAP", "mean average precision", result.average_precision),
        mean("retrieval mAP@R", "Musgrave et al. 2020", result.average_precision_at_r),
        accuracy("retrieval recall@1", result.first_correct, protocol, scored[result.rows]),
    ]


# Clusters


def clusters(test: Embeddings, *, seed: int, share: Share = ALONE) -> list[Measure]:
    """Measure how well k-means, given the number of classes, separates the classes.

    Accuracy under the best one-to-one match, normalized mutual information (arithmetic mean)
    and adjusted Rand index. Their intervals resample the images and keep the clustering. Of more
    than `SAMPLE` images, k-means starts on so many; its result then moves on all of them, which
    processes share.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    test = test.labeled()
    n, k = len(test), len(np.unique(test.labels))
    if k < 2:
        raise DataError("clusters need labeled test images of two classes or more")
    reduce = reduction(test.tensor, share)
    drawn = np.sort(np.random.default_rng(seed).permutation(n)[: max(SAMPLE, FEWEST * k)])
    kmeans, x = KMeans(k, n_init=10, random_state=seed), compact(test.tensor, reduce, drawn)
    with warnings.catch_warnings(), threads_for(x.size):
        # Collapsed features have fewer points than clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        assigned = kmeans.fit_predict(x).astype(np.int64)
    starts = "10 starts"
    if len(drawn) < n:
        x = compact(test.tensor, reduce, np.arange(n)[share.rows(n)])
        own = lloyd(x, kmeans.cluster_centers_, share=share)
        assigned = share.join(torch.from_numpy(own), n).numpy()
        starts += f" on {len(drawn)} of them, the best of which moves on all"
    protocol = (
        f"k-means of {n} test images, k {k} (the number of classes), {starts}, "
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


def smooth_rank(test: Embeddings) -> list[Measure]:
    """Measure RankMe of the same images as `geometry`; no interval."""
    x = _geometry_features(test)
    protocol = (
        f"features as they are, not centered, dimension {x.shape[1]}, "
        f"{len(x)} of {len(test)} test images"
    )
    return [Measure("RankMe", float(rankme(x)), None, None, protocol)]


def spectral_decay(test: Embeddings) -> list[Measure]:
    """Measure alpha-ReQ of the same images as `geometry`; no interval."""
    x = _geometry_features(test)
    protocol = (
        f"exponent of eigenvalues {FIRST} to {min(LAST, min(len(x) - 1, x.shape[1]) // 2)} of the "
        f"covariance, dimension {x.shape[1]}, {len(x)} of {len(test)} test images"
    )
    return [Measure("alpha-ReQ", float(alpha_req(x)), None, None, protocol)]


def _geometry_features(test: Embeddings) -> Float[Tensor, "n dim"]:
    view = test.second_view
    rows = geometry_rows(len(test)) if view is None else view.rows
    if len(rows) < 2:
        raise DataError("the spectrum of features needs two images or more")
    return test.tensor[torch.from_numpy(rows)]


def lidar_rank(views: Float[Tensor, "images views dim"], num_images: int) -> list[Measure]:
    """Measure LiDAR of augmented views of some of `num_images` test images; no interval."""
    images, count, dim = views.shape
    protocol = (
        f"{count} augmented views of each of {images} of {num_images} test images, dimension "
        f"{dim}, features as they are, ridge {RIDGE:g}"
    )
    return [Measure("LiDAR", float(lidar(views)), None, None, protocol)]
