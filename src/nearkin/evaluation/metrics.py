"""Metrics of embeddings with their protocols: kNN, probes, few-shot, retrieval, geometry.

A metric is taken of training and test embeddings, or of those of the test alone. Images without a
label are left out of those that need labels; where too few are left, it raises DataError.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nearkin.distributed import threads_for
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.metrics.clusters import agreement, match, right
from nearkin.metrics.fewshot import STRENGTH as C
from nearkin.metrics.fewshot import centered, draw_shots, predict_few_shot
from nearkin.metrics.geometry import (
    alignment,
    effective_rank,
    feature_std,
    mean_cosine,
    uniformity,
)
from nearkin.metrics.intervals import crossed_interval
from nearkin.metrics.kmeans import SAMPLE, WIDEST, compact
from nearkin.metrics.metric import Metric, Protocol, share, with_interval
from nearkin.metrics.neighbors import nearest, neighbor_agreement, predict_without, tally
from nearkin.metrics.probe import probe_device, train_probe
from nearkin.metrics.retrieval import retrieve
from nearkin.pace import count
from nearkin.types import UNLABELED

CPU: Final = torch.device("cpu")
TEST: Final = "test images"  # What is scored, where images are held out
KNN: Final = "kNN top-1"  # The headline, of `K` neighbors
K, LARGE_K = 20, 200  # Neighbors that vote; DINO and its successors report both
TEMPERATURE: Final = 0.07  # Of their votes, as DINO's and lightly's
KS: Final = (10, 20, 100, 200)  # Of the grid: papers report the k with the best result of these
TEMPERATURES: Final = (0.07, 0.1)  # That of DINO, and that of InstDisc and MoCo
FOLDS: Final = 20  # Parts of the bank that are left out in turn
TALLIED: Final = 2**22  # Votes for classes that are held at once
GEOMETRY_IMAGES: Final = 5_000  # Whose geometry is measured, at the most; evenly spaced among all
NEIGHBORS: Final = 10  # Nearest images that two views are compared by
STARTS: Final = 10  # Of k-means
MANY_CLUSTERS: Final = 1_000  # Above so many, one start, which takes minutes
SHOTS: Final = (1, 2, 5, 10)  # Training images per class
DRAWS: Final = 10  # How often these are drawn
UNSEEN: Final = "test classes without any training image, which count as wrong"


def _labeled(
    train: Embeddings, test: Embeddings, what: str
) -> tuple[Embeddings, Embeddings, Int[np.ndarray, " test"]]:
    """Return the labeled images of both, and the rows of those of the test."""
    rows = np.flatnonzero(test.labels != UNLABELED)
    train, test = train.labeled(), test.labeled()
    if not len(train) or not len(test):
        raise DataError(f"{what} needs labeled training images and labeled test images")
    return train, test, rows


def sizes(train: Embeddings, test: Embeddings) -> dict[str, str | int | float]:
    """Return how many images are learned from, and which are scored, for a protocol."""
    missing = len(np.setdiff1d(test.labels, train.labels))
    unseen = {UNSEEN: missing} if missing else {}
    return {"training images": len(train), **unseen, "of": TEST}


# Nearest neighbors


def knn(train: Embeddings, test: Embeddings, *, device: torch.device = CPU) -> list[Metric]:
    """Measure how often the vote of the nearest training images is right, at k 20 and 200.

    The protocol of Wu et al. 2018, at the k and the temperature of DINO (Caron et al. 2021), for
    any number of training images; k 200 where there are more. Of classes with equal votes, the
    lowest number wins.
    """
    votes = {KNN: (K, TEMPERATURE)}
    if _num_labeled(train) > LARGE_K:
        votes[f"{KNN}, k {LARGE_K}"] = LARGE_K, TEMPERATURE
    return _voted(
        train, test, votes, device,
        "Accuracy of a weighted kNN classifier on held-out images. Nothing is trained: it "
        "measures the features as they are.",
    )  # fmt: skip


def knn_grid(train: Embeddings, test: Embeddings) -> list[Metric]:
    """Measure kNN at every `k` of `KS` and temperature of `TEMPERATURES`, and by plain majority.

    All of them from one search. None of them is chosen: the best of several on test images would
    be too good.
    """
    num = _num_labeled(train)
    kinds = {f"t {t:g}": t for t in TEMPERATURES} | {"majority": math.inf}
    votes = {
        f"kNN k {k}, {name}": (k, temperature)
        for k in [k for k in KS if k <= num] or [num]
        for name, temperature in kinds.items()
    }
    return _voted(
        train, test, votes, CPU,
        "kNN at other k: neighbors weighted at temperature t, or counted alike. Every paper has "
        "its own; none is chosen here.",
    )  # fmt: skip


def _voted(
    train: Embeddings,
    test: Embeddings,
    votes: Mapping[str, tuple[int, float]],
    device: torch.device,
    meaning: str,
) -> list[Metric]:
    """Measure kNN at several `k` and temperatures, by the name of the metric."""
    train, test, rows = _labeled(train, test, "kNN")
    bank, queries = train.tensor.to(device), test.tensor.to(device)
    predicted = predict_each(bank, train.labels, queries, list(votes.values()))
    return [
        share(
            name,
            winner == test.labels,
            {**vote_protocol(min(k, len(train)), temperature), **sizes(train, test)},
            groups=test.groups,
            rows=rows,
            meaning=meaning,
        )
        for (name, (k, temperature)), winner in zip(votes.items(), predicted, strict=True)
    ]


def vote_protocol(k: int, temperature: float = TEMPERATURE) -> Protocol:
    """Return what a vote is, for a protocol."""
    if temperature == math.inf:
        return {"method": "unweighted kNN by cosine", "k": k}
    return {"method": "weighted kNN by cosine", "k": k, "temperature": temperature}


def _num_labeled(embeddings: Embeddings) -> int:
    return int((embeddings.labels != UNLABELED).sum())


def large_ks(train: Embeddings) -> dict[str, str]:
    """Return which `k` of `KS` are not in `knn_grid`, and why."""
    num = _num_labeled(train)
    ks = ", ".join(str(k) for k in KS if k > num)
    return {f"kNN k {ks}": f"there are {count(num, 'labeled training image')}"} if ks else {}


def knn_refits(train: Embeddings, test: Embeddings) -> Bool[np.ndarray, "folds n"]:
    """Return which images `knn` gets right without a twentieth of the bank, each in turn.

    They show how much the accuracy depends on which training images there are. Whole groups are
    left out. Those that vote are the nearest `K` of what is left.
    """
    train, test = train.labeled(), test.labeled()
    classes, numbers = np.unique(train.labels, return_inverse=True)
    names, member = np.unique(
        np.arange(len(train)) if train.groups is None else train.groups, return_inverse=True
    )
    fold = np.random.default_rng(0).permutation(len(names))[member] % FOLDS
    predicted = predict_without(
        train.tensor, numbers, test.tensor, fold, k=K, temperature=TEMPERATURE
    )
    return np.asarray(classes[predicted.cpu().numpy()] == test.labels)


def predict(
    bank: Float[Tensor, "bank dim"],
    labels: Shaped[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
) -> Shaped[np.ndarray, " queries"]:
    """Return the label that wins each query's vote as in `knn`; of equals, the first by order."""
    return np.asarray(predict_each(bank, labels, queries, [(K, TEMPERATURE)])[0])


def predict_each(
    bank: Float[Tensor, "bank dim"],
    labels: Shaped[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    votes: Sequence[tuple[int, float]],
) -> Shaped[np.ndarray, "votes queries"]:
    """Predict by several `k` and temperatures, from one search of some queries at a time."""
    classes, numbers = np.unique(labels, return_inverse=True)
    most, voters, winners = max(k for k, _ in votes), torch.from_numpy(numbers), []
    for some in queries.split(max(1, TALLIED // max(len(classes), most))):
        similarity, index = nearest(bank, some, most)
        voter = voters.to(index.device)[index]
        scores = (
            tally(similarity[:, :k], voter[:, :k], temperature=t, num_classes=len(classes))
            for k, t in votes
        )
        winners.append(torch.stack([each.argmax(dim=1) for each in scores]).cpu())
    return np.asarray(classes[torch.cat(winners, dim=1).numpy()])


@lru_cache(maxsize=1)  # two parts of a page show them
def knn_classes(embeddings: Embeddings) -> Shaped[np.ndarray, " n"]:
    """Predict the class name of each labeled test image from its nearest training images.

    The predictions behind the kNN accuracy; empty for all other images.
    """
    names, labeled = embeddings.class_names, embeddings.labels != UNLABELED
    train, test = (np.flatnonzero(labeled & (embeddings.splits == s)) for s in ("train", "test"))
    predicted = np.full(len(names), "", names.dtype)
    if len(train) and len(test):
        bank, queries = (torch.from_numpy(embeddings.vectors[rows]) for rows in (train, test))
        predicted[test] = predict(bank, names[train], queries)
    return predicted


# Linear probe


def linear_probe(
    train: Embeddings, test: Embeddings, *, seed: int, device: torch.device = CPU
) -> Metric:
    """Measure the accuracy of a linear classifier on frozen features; see `train_probe`."""
    train, test, rows = _labeled(train, test, "the linear probe")
    where = probe_device(device)
    probe = train_probe(train.tensor.to(where), train.labels, seed=seed, groups=train.groups)
    reduced = {} if probe.basis is None else {"principal components": probe.basis.shape[1]}
    stopped = {} if probe.converged else {"fit": "stopped before its optimum"}
    return share(
        "linear probe",
        probe.predict(test.tensor.to(where)) == test.labels,
        {
            "method": "logistic regression on standardized features",
            **reduced,
            **sizes(train, test),
        },
        groups=test.groups,
        rows=rows,
        chosen=probe.choice.described() | stopped,
        meaning="Accuracy of a linear classifier, trained on frozen features, on held-out images.",
    )


# A few labels


def few_shot(train: Embeddings, test: Embeddings, *, seed: int) -> list[Metric]:
    """Measure classifiers from 1, 2, 5 and 10 labeled training images per class.

    Nearest class mean and logistic regression, on unit vectors of what differs from the mean of
    all training images, which needs no label. Their accuracy on all test images is averaged over
    `DRAWS` draws of the training images. The interval is that of other test images, and of other
    draws from the same training images.
    """
    mean = train.tensor.mean(dim=0)
    train, test, _ = _labeled(train, test, "few-shot")
    classes, numbers = np.unique(train.labels, return_inverse=True)
    if len(classes) < 2:
        raise DataError("few-shot needs labeled training images of two classes or more")
    queries, y = centered(test.tensor, mean), torch.from_numpy(numbers)
    kinds = {"class mean": "nearest class mean", "logistic": f"logistic regression with C {C:g}"}
    metrics = []
    for shots in SHOTS:
        correct: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
        for draw in range(DRAWS):
            few = torch.from_numpy(draw_shots(numbers, shots, seed, draw))
            x = centered(train.tensor[few], mean)  # of all would be a second copy of them
            for name, predicted in predict_few_shot(x, y[few], len(classes), queries).items():
                correct[name].append(classes[predicted.numpy()] == test.labels)
        fewer = int((np.bincount(numbers) < shots).sum())
        for name, method in kinds.items():
            protocol = {
                "method": f"{method} of unit vectors of what differs from the mean training image",
                "training images per class": shots,
                **({"classes that have fewer and give all": fewer} if fewer else {}),
                "draws": DRAWS,
                **sizes(train, test),
            }
            metrics.append(
                with_interval(
                    f"{shots}-shot {name}",
                    float(np.mean(correct[name])),
                    crossed_interval(np.array(correct[name]), test.groups),
                    protocol,
                    kind="Wilson, of other images and other draws from these training images",
                    n=len(test),
                    groups=test.groups,
                    meaning="Accuracy with so many labeled images per class, mean of ten draws of "
                    "these: nearest class mean, or logistic regression.",
                )
            )
    return metrics


# Retrieval


def retrieval(train: Embeddings, test: Embeddings) -> list[Metric]:
    """Measure how early a test image's class comes among all training images, by cosine.

    mAP, mAP@R and recall@1; images of the query's own group are not ranked.
    """
    train, test, rows = _labeled(train, test, "retrieval")
    result = retrieve(
        train.tensor,
        train.labels,
        test.tensor,
        test.labels,
        bank_groups=train.groups,
        query_groups=test.groups,
    )
    if not len(result.rows):
        raise DataError("retrieval needs test images of the classes of training images")
    without = len(test) - len(result.rows)
    left_out = {"further ones without a training image of their class": without} if without else {}
    images: Protocol = {"training images": len(train), **left_out, "of": TEST}
    groups = None if test.groups is None else test.groups[result.rows]
    among = rows[result.rows]

    def mean(name: str, values: Shaped[np.ndarray, " n"], method: str, meaning: str) -> Metric:
        protocol = {"method": f"{method} of rankings by cosine", **images}
        return share(name, values, protocol, groups=groups, rows=among, meaning=meaning)

    return [
        mean(
            "retrieval mAP",
            result.average_precision,
            "mean average precision",
            "Mean average precision: 1 if all training images of an image's class come before all "
            "others.",
        ),
        mean(
            "retrieval mAP@R",
            result.average_precision_at_r,
            "mAP@R (Musgrave et al. 2020)",
            "Mean average precision over the first R images, R being the number of those of its "
            "class.",
        ),
        mean(
            "retrieval recall@1",
            result.first_correct,
            "first image",
            "Share of images whose most similar training image is of their class.",
        ),
    ]


# Clusters


def clusters(test: Embeddings, *, seed: int) -> list[Metric]:
    """Measure how well k-means, given the number of classes, separates the classes.

    Accuracy under the best one-to-one match, normalized mutual information (arithmetic mean)
    and adjusted Rand index. Their intervals are those of other images, clusters and match being
    kept. Of many images k-means learns its centers from some.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    rows, test = np.flatnonzero(test.labels != UNLABELED), test.labeled()
    labels, groups, k = test.labels, test.groups, len(np.unique(test.labels))
    if k < 2:
        raise DataError("clusters need labeled test images of two classes or more")
    x, starts = compact(test.tensor), STARTS if k <= MANY_CLUSTERS else 1
    drawn = np.sort(np.random.default_rng(seed).permutation(len(x))[:SAMPLE])
    with warnings.catch_warnings(), threads_for(x.size):
        # Collapsed features have fewer points than clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        kmeans = KMeans(k, n_init=starts, random_state=seed).fit(x[drawn])
        assigned = kmeans.predict(x).astype(np.int64)
    some = {"images that its centers are learned from": len(drawn)} if len(drawn) < len(x) else {}
    protocol: Protocol = {
        "method": "k-means of unit features",
        "clusters, as many as classes": k,
        "dimensions": min(test.vectors.shape[1], WIDEST),
        "starts": starts,
        **some,
        "of": TEST,
    }

    meanings = {
        "NMI": "Normalized mutual information of clusters and classes: 0 independent, 1 equal.",
        "ARI": "Adjusted Rand index of clusters and classes: 0 as by chance, 1 equal.",
    }
    compared = [
        with_interval(
            name, *found, protocol, kind="bootstrap", n=len(test), groups=groups,
            meaning=meanings[name],
        )
        for name, found in agreement(labels, assigned, groups, seed=seed).items()
    ]  # fmt: skip
    return [
        share(
            "cluster accuracy",
            right(labels, assigned, match(labels, assigned)),
            protocol,
            groups=groups,
            rows=rows,
            meaning="Accuracy of k-means clusters on held-out images, under the best one-to-one "
            "matching of clusters to classes.",
        ),
        *compared,
    ]


# Without labels


def view_retrieval(test: Embeddings, scored: str = TEST) -> list[Metric]:
    """Measure how often an image is the nearest of all to an augmented view of itself.

    The task of instance discrimination (Wu et al. 2018). Another image of the same group, such as
    a near-duplicate, counts as right too. Where no second view was drawn there is no metric.
    `scored` says what images these are.
    """
    view = test.second_view
    if view is None or not len(view):
        return []
    if len(view) < 2:
        raise DataError("view retrieval needs two images or more")
    bank = test.tensor[torch.from_numpy(view.rows)]
    first = nearest(bank, view.tensor, k=1)[1][:, 0].cpu().numpy()
    groups = None if test.groups is None else test.groups[view.rows]
    own = np.arange(len(view)) if groups is None else groups
    return [
        share(
            "view retrieval",
            own[first] == own,
            {
                "method": "the image nearest to an augmented view by cosine is its own",
                "of": f"of {len(test)} {scored}",
            },
            groups=groups,
            rows=view.rows,
            meaning="Share of images that are the nearest of all to an augmented view of "
            "themselves. Contrastive methods are trained for this; it needs no labels, and tells "
            "nothing about classes.",
        )
    ]


def geometry_rows(n: int) -> Int[np.ndarray, " rows"]:
    """Return the rows, of `n`, whose geometry is measured."""
    return np.arange(min(n, GEOMETRY_IMAGES)) * n // max(min(n, GEOMETRY_IMAGES), 1)


def geometry(test: Embeddings, scored: str = TEST) -> list[Metric]:
    """Effective rank, spread and uniformity; with a second view also what both views share.

    Numbers about a sample: no intervals. Effective rank and neighbor agreement depend on the
    number of images, which their protocol says; `scored` says what images these are.
    """
    view = test.second_view
    rows = geometry_rows(len(test)) if view is None else view.rows
    if len(rows) < 2:
        raise DataError("the geometry of features needs two images or more")
    x = test.tensor[torch.from_numpy(rows)]

    def metric(
        name: str, value: Float[Tensor, ""], method: str, meaning: str, **more: int
    ) -> Metric:
        protocol: Protocol = {"method": method, **more, "of": f"of {len(test)} {scored}"}
        return Metric(name, float(value), None, None, len(rows), None, protocol, meaning=meaning)

    metrics = [
        metric(
            "effective rank",
            effective_rank(x),
            "centered features",
            "Number of directions that the features use. A few mean a collapse.",
            dimensions=x.shape[1],
        ),
        metric(
            "feature std",
            feature_std(x),
            "unit features, times the root of the dimension",
            "Scaled standard deviation of unit features: 1 spread evenly over the sphere, 0 "
            "collapsed.",
        ),
        metric(
            "mean cosine",
            mean_cosine(x),
            "pairs of different images",
            "Mean cosine similarity of different images: 0 as by chance, 1 collapsed.",
        ),
        metric(
            "uniformity",
            uniformity(x),
            "unit features, t 2, pairs of different images",
            "Lower if features are spread more evenly over the sphere.",
        ),
    ]
    if view is not None:
        k = min(NEIGHBORS, len(rows) - 1)
        metrics += [
            metric(
                "alignment",
                alignment(x, view.tensor),
                "squared distance of two views, unit features",
                "Mean squared distance between the features of two views of an image.",
            ),
            metric(
                "neighbor agreement",
                neighbor_agreement(x, view.tensor, k),
                "nearest images by cosine that two views have in common",
                "Share of an image's nearest neighbors that another view of it has too.",
                k=k,
            ),
        ]
    return metrics
