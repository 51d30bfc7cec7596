"""The number of novel classes, by two rules that hidden known classes correct."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import ceil, exp, floor, log, sqrt
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.config import DiscoverConfig
from nearkin.discovery.data import FEWEST, DiscoveryData
from nearkin.discovery.features import CachedFeatures
from nearkin.errors import DataError
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.tables import replace_text, usable
from nearkin.types import UNKNOWN

ROWS: Final = 1200  # Unlabeled images that are looked at, and as many labeled ones, at most
FOLDS: Final = 8  # Draws of known classes that are hidden
LEAST_ERROR: Final = 0.1  # No rule is trusted more, however well it did; a tenth of the number
DOUBT: Final = {"ncd": 0.6, "gcd": 1.0}
"""Error, on the scale of logarithms, that is taken to have been made in further folds, because
hidden classes are fewer than novel ones may be, and folds share them."""
DOUBT_FOLDS: Final = 4  # As many as these
WIDTH: Final = 1.5  # Root mean squares of errors to either side that the interval reaches
BINS: Final = 60  # Bins of cosines, with as many pairs each
STEPS: Final = 300  # Of the likelihood of one share, which is concave
SPHERE: Final = 0.8  # Share of a sphere in the whitening scatter; few classes show few directions
FINE: Final = 1.1  # The search among numbers of clusters ends at this ratio
SILHOUETTE_DRAWS: Final = 3
SILHOUETTE_COARSE: Final = 10  # Numbers tried before those around the best


@dataclass(frozen=True)
class NumberOfClasses:
    """Estimates of the number of novel classes, at least 1."""

    chosen: int
    low: int
    high: int  # An interval that is to hold the number in four of five cases
    estimates: Mapping[str, int]
    """By rule, corrected: `pairs` and `dispersion`; or `silhouette`, where fewer than two known
    classes have two labeled images."""
    curves: Mapping[str, list[tuple[int, float]]]
    """The criterion of `dispersion` or `silhouette`, for each number tried."""

    @property
    def text(self) -> str:
        """Each rule's estimate."""
        return ", ".join(f"{name} {number}" for name, number in self.estimates.items())


def number_of_novel_classes(
    features: Float[np.ndarray, "n dim"],
    label: Int[np.ndarray, " n"],
    *,
    disjoint: bool,
    seed: int,
) -> NumberOfClasses:
    """Estimate the number of novel classes from what known classes look like.

    Two rules measure the effective number of classes, 1 / sum of squared shares, which is their
    number where they are equally large:

    - `pairs`: cosines of pairs of unlabeled images are a mixture of those of pairs of one class
      and of two, whose densities the labeled images show. The share of pairs of one class, by
      maximum likelihood, is the sum of squared shares.
    - `dispersion`: as many clusters as leave the scatter within them, by k-means, that k-means of
      labeled images leaves at their true number; where the mean scatter within known classes is
      a sphere.

    Then known classes are hidden, in several draws, and counted as if they were novel: half of
    them, or fewer in mode gcd, as large a share of the images as seems to be of novel classes.
    Each rule is corrected by its mean error, on the scale of logarithms; both are averaged, with
    weights that are one over the square of the variance that is left; and the interval is as wide
    as the errors of that average. Last, the effective number becomes a number by what known
    classes have of both, so novel classes are taken to be as unequal in size as labeled ones are.

    In mode gcd, images of known classes are left out before, as far as they can be told: those
    nearer to a known class than the distance at which as many images of known classes are farther
    as images of hidden ones are nearer. Hidden classes are searched in the same way, so what this
    gets wrong is corrected too.

    With fewer than two known classes of two labeled images, it is the k-means with the best
    silhouette (Rousseeuw 1987), between the extremes of three draws.

    Args:
        features: One row per image; only directions count.
        label: The known class of each image, or `UNKNOWN`.
        disjoint: Whether no unlabeled image is of a known class.
        seed: Random seed.
    """
    unlabeled = np.flatnonzero(label == UNKNOWN)
    if len(unlabeled) < FEWEST:
        raise DataError(
            f"{len(unlabeled)} unlabeled images; counting classes takes at least {FEWEST}"
        )
    generator = np.random.default_rng(seed)
    labeled = _balanced(label, generator)
    if len(np.unique(label[labeled])) < 2:
        rows = np.arange(len(label)) if not disjoint else unlabeled
        return _by_silhouette(features[rows], label[rows], seed)
    rows = np.append(generator.permutation(unlabeled)[:ROWS], labeled)
    x, y = compact(torch.from_numpy(features[rows])), label[rows]
    novel = y == UNKNOWN
    task = _Task(x[novel], x[~novel], np.unique(y[~novel], return_inverse=True)[1])
    sizes = np.unique(label[label != UNKNOWN], return_counts=True)[1]
    return _corrected(task, disjoint, _inequality(sizes), generator)


def _balanced(
    label: Int[np.ndarray, " n"], generator: np.random.Generator
) -> Int[np.ndarray, " m"]:
    """Draw labeled rows, evenly over the classes that have two or more."""
    order = generator.permutation(np.flatnonzero(label != UNKNOWN))
    order = order[label[order].argsort(kind="stable")]
    _, first, size = np.unique(label[order], return_index=True, return_counts=True)
    turn = np.arange(len(order)) - np.repeat(first, size)  # within the class
    several = np.repeat(size > 1, size)
    drawn = order[several][turn[several].argsort(kind="stable")][:ROWS]
    # The last turn may be cut short; where it is the second, classes of one row are left.
    _, back, size = np.unique(label[drawn], return_inverse=True, return_counts=True)
    return np.asarray(drawn[size[back] > 1])


def _effective(size: Int[np.ndarray, " classes"]) -> float:
    """One over the sum of squared shares."""
    return float(size.sum() ** 2 / (size.astype(float) ** 2).sum())


def _inequality(size: Int[np.ndarray, " classes"]) -> float:
    """How many classes there are for each effective one, without bias by how few are known."""
    return float(1 + (size / size.mean()).var(ddof=1))


@dataclass(frozen=True, eq=False)
class _Task:
    """Unlabeled images, and labeled ones of at least two classes, two or more of each."""

    x: Float[np.ndarray, "u dim"]
    labeled: Float[np.ndarray, "l dim"]
    label: Int[np.ndarray, " l"]  # 0 to one less than the number of classes
    tried: dict[int, float] = field(default_factory=dict)
    """Scatter within each number of clusters tried, one being that sought."""

    @property
    def size(self) -> Int[np.ndarray, " classes"]:
        """Labeled images of each class."""
        return np.bincount(self.label)

    @property
    def means(self) -> Float[np.ndarray, "classes dim"]:
        """Of the labeled images of each class."""
        total = np.zeros((len(self.size), self.x.shape[1]))
        np.add.at(total, self.label, self.labeled)
        return np.asarray(total / self.size[:, None])

    def within(self) -> Float[np.ndarray, "dim dim"]:
        """Scatter within known classes, all of which count alike."""
        left = self.labeled - self.means[self.label]
        weight = 1 / (self.size - 1)[self.label] / len(self.size)
        return np.asarray((left * weight[:, None]).T @ left)

    def whitened(self) -> "_Task":
        """The same where the scatter within known classes is nearly a sphere, if there is any."""
        scatter = self.within()
        mean = np.trace(scatter) / len(scatter)
        if mean < np.finfo(np.float32).eps ** 2:
            return self
        value, vector = np.linalg.eigh(
            (1 - SPHERE) * scatter + SPHERE * mean * np.eye(len(scatter))
        )
        turn = vector / np.sqrt(value)
        return _Task(self.x @ turn, self.labeled @ turn, self.label)

    def novel(self) -> tuple["_Task", float]:
        """The same with those unlabeled images only that seem to be of no known class.

        Also return the share of the unlabeled images that are of none.
        """
        white = self.whitened()
        means, size = white.means, white.size[white.label]
        away = _squares(white.labeled, means)
        own = np.arange(len(away)), white.label
        with_own = away.copy()
        with_own[own] *= (size / (size - 1)) ** 2  # from the mean of the others of its class
        away[own] = np.inf
        known, hidden = with_own.min(axis=1), away.min(axis=1)
        weight = 1 / size / len(means)
        both: Float[np.ndarray, " twice"] = np.append(known, hidden)
        order = both.argsort()
        # Going outwards, from all known ones too far and no hidden one near to the opposite.
        near = np.cumsum(np.append(weight, weight)[order])
        cut = float(both[order[min(int(near.searchsorted(1)), len(order) - 1)]])
        far, wrong = _squares(white.x, means).min(axis=1) > cut, float(weight[known > cut].sum())
        share = (far.mean() - wrong) / (1 - 2 * wrong) if wrong < 1 / 2 else 1.0
        return _Task(self.x[far], self.labeled, self.label), float(np.clip(share, 0, 1))

    def hide(
        self, classes: int, disjoint: bool, generator: np.random.Generator
    ) -> tuple["_Task", float]:
        """Hide some known classes; also return their effective number.

        In mode gcd, half of the other labeled images are hidden too, as far as two are left.
        """
        count = len(self.size)
        hidden = np.isin(self.label, generator.permutation(count)[:classes])
        unlabeled = hidden.copy()
        if not disjoint:
            order = generator.permutation(len(self.label))
            turn = np.empty_like(order)
            for number in range(count):
                own = order[self.label[order] == number]
                turn[own] = np.arange(len(own))
            unlabeled |= turn >= np.maximum(2, self.size // 2)[self.label]
        label = np.unique(self.label[~unlabeled], return_inverse=True)[1]
        task = _Task(self.labeled[unlabeled], self.labeled[~unlabeled], label)
        return task, _effective(np.bincount(self.label[hidden])[np.unique(self.label[hidden])])


def _squares(
    x: Float[np.ndarray, "n dim"], center: Float[np.ndarray, "k dim"]
) -> Float[np.ndarray, "n k"]:
    """Squared distances."""
    square = (x**2).sum(axis=1)[:, None] + (center**2).sum(axis=1) - 2 * x @ center.T
    return np.asarray(np.maximum(square, 0))


def _pairs(task: _Task) -> float:
    # Between both means, because many classes of one kind would draw a common mean to them.
    center = (task.x.mean(axis=0) + task.means.mean(axis=0)) / 2
    x, labeled = _unit(task.x - center), _unit(task.labeled - center)
    one, other = np.triu_indices(len(labeled), 1)
    cosine, same = (labeled @ labeled.T)[one, other], task.label[one] == task.label[other]
    pairs = task.size * (task.size - 1) / 2
    weight = 1 / pairs[task.label[one[same]]]  # each class counts alike
    unlabeled = (x @ x.T)[np.triu_indices(len(x), 1)]
    both = (_evenly(values) for values in (cosine[same], unlabeled))
    edges = np.unique(np.quantile(np.concatenate(list(both)), np.linspace(0, 1, BINS + 1)[1:-1]))
    together = _density(cosine[same], edges, weight * len(weight) / weight.sum())
    apart, mixed = _density(cosine[~same], edges), _density(unlabeled, edges)
    share = 0.1
    for _ in range(STEPS):
        share = float((mixed * share * together / (share * together + (1 - share) * apart)).sum())
    # An image and itself are a pair of one class that is not among those counted.
    return log(len(x) / (1 + share * (len(x) - 1)))


def _unit(x: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, "n dim"]:
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.maximum(length, np.finfo(np.float32).tiny))


def _evenly(values: Float[np.ndarray, " n"], most: int = 20000) -> Float[np.ndarray, " m"]:
    return values[:: len(values) // most + 1]


def _density(
    values: Float[np.ndarray, " n"],
    edges: Float[np.ndarray, " edges"],
    weight: Float[np.ndarray, " n"] | None = None,
) -> Float[np.ndarray, " bins"]:
    """Share of each bin; half a value more in each, so that none is impossible."""
    bins = np.searchsorted(edges, values)
    count = np.bincount(bins, weight, minlength=len(edges) + 1) + 0.5
    return np.asarray(count / count.sum())


def _dispersion(task: _Task) -> float:
    white = task.whitened()
    sought = _scatter(white.labeled, len(white.size))

    def too_much(k: int) -> bool:
        task.tried[k] = _scatter(white.x, k) / sought if sought else 0.0
        return task.tried[k] > 1

    low, high = 1, max(2, len(white.x) // 2)
    if too_much(low):
        while high > low + 1 and high > FINE * low:
            middle = min(max(round(sqrt(low * high)), low + 1), high - 1)
            low, high = (middle, high) if too_much(middle) else (low, middle)
        return log(low * high) / 2 if high > low + 1 else log(high)
    return 0.0


def _scatter(x: Float[np.ndarray, "n dim"], k: int) -> float:
    """Mean square left within k clusters, for each degree of freedom."""
    no_labels = np.full(len(x), UNKNOWN)
    inertia = constrained_kmeans(x, no_labels, k, seed=0, starts=1, most=20).inertia
    return inertia / max(len(x) - k, 1)


Rule = Callable[[_Task], float]
RULES: Final[Mapping[str, Rule]] = {"pairs": _pairs, "dispersion": _dispersion}
"""The logarithm of the effective number of classes, by each rule."""


def _count(task: _Task) -> Float[np.ndarray, " rules"]:
    few = len(task.x) < 4
    return np.array([0.0 if few else rule(task) for rule in RULES.values()])


def _corrected(
    task: _Task, disjoint: bool, inequality: float, generator: np.random.Generator
) -> NumberOfClasses:
    """Apply the rules, corrected by their errors on hidden classes."""
    known = len(task.size)
    novel, share = (task, 1.0) if disjoint else task.novel()
    uncorrected = _count(novel)
    errors = np.zeros((0, len(RULES)))
    if known >= 4:
        # As large a share of the unlabeled images is hidden as seems to be novel: with half of
        # the images of other classes, h of k classes are 2 h / (k + h) of them.
        hidden = max(2, min(known // 2, round(share * known / (2 - share))))
        folds = [task.hide(hidden, disjoint, generator) for _ in range(FOLDS)]
        novels = [(fold if disjoint else fold.novel()[0], true) for fold, true in folds]
        errors = np.array([_count(fold) - log(true) for fold, true in novels])
    bias = errors.sum(axis=0) / max(len(errors), 1)
    errors -= bias
    variance = (errors**2).sum(axis=0) / max(len(errors), 1) + LEAST_ERROR**2
    weight = variance**-2 / (variance**-2).sum()
    rules = uncorrected - bias + log(inequality)
    doubt = DOUBT["ncd" if disjoint else "gcd"]
    middle, squares = float(rules @ weight), float(((errors @ weight) ** 2).sum())
    doubted = (squares + DOUBT_FOLDS * doubt**2) / (len(errors) + DOUBT_FOLDS)
    reach = WIDTH * sqrt(doubted + LEAST_ERROR**2)

    def number(logarithm: float, rounding: Callable[[float], int] = round) -> int:
        return min(max(1, rounding(exp(logarithm))), len(task.x))

    return NumberOfClasses(
        number(middle),
        number(middle - reach, floor),
        number(middle + reach, ceil),
        {name: number(value) for name, value in zip(RULES, rules.tolist(), strict=True)},
        {"dispersion": sorted(novel.tried.items())},
    )


def _by_silhouette(
    features: Float[np.ndarray, "n dim"], label: Int[np.ndarray, " n"], seed: int
) -> NumberOfClasses:
    """Return the number with the best silhouette; labeled images stay together, if there are any.

    Numbers tried are coarse at first, then fine around the best.
    """
    most = max(2, min(100, int((label == UNKNOWN).sum()) // 20))
    draws = [_Draw(features, label, seed * SILHOUETTE_DRAWS + n) for n in range(SILHOUETTE_DRAWS)]
    tried: dict[int, list[float]] = {}
    new = {int(k) for k in np.geomspace(2, most, SILHOUETTE_COARSE).round()}
    while new:
        tried |= {k: [draw.silhouette(k) for draw in draws] for k in sorted(new)}
        peak = max(sorted(tried), key=lambda k: fmean(tried[k]))
        below = max((k for k in tried if k < peak), default=peak)
        above = min((k for k in tried if k > peak), default=peak)
        new = {(below + peak) // 2, (peak + above) // 2} - set(tried)
    each = [max(sorted(tried), key=lambda k: tried[k][n]) for n in range(SILHOUETTE_DRAWS)]
    curve = [(k, fmean(values)) for k, values in sorted(tried.items())]
    low, high = min(*each, peak), max(*each, peak)
    return NumberOfClasses(peak, low, high, {"silhouette": peak}, {"silhouette": curve})


class _Draw:
    """Some of the images, in random order."""

    def __init__(
        self, features: Float[np.ndarray, "n dim"], label: Int[np.ndarray, " n"], seed: int
    ) -> None:
        rows = np.random.default_rng(seed).permutation(len(label))[:ROWS]
        self.x, self.seed = compact(torch.from_numpy(features[rows])), seed
        self.label = np.full(len(rows), UNKNOWN)
        known = label[rows] != UNKNOWN
        self.classes, self.label[known] = np.unique(label[rows][known], return_inverse=True)

    def silhouette(self, k: int) -> float:
        """Of k-means with k clusters beside those of known classes."""
        total = min(len(self.classes) + k, len(self.x))
        return mean_silhouette(
            self.x, constrained_kmeans(self.x, self.label, total, seed=self.seed, starts=3).cluster
        )


def mean_silhouette(x: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"]) -> float:
    """Return the mean silhouette; 0 if all rows are one cluster, or each its own."""
    from sklearn.metrics import silhouette_score

    some = 1 < len(np.unique(cluster)) < len(cluster)
    return float(silhouette_score(x, cluster)) if some else 0.0


def estimate_number(
    path: Path, cached: CachedFeatures, dataset: DiscoveryData, config: DiscoverConfig
) -> NumberOfClasses:
    """Return the estimate in a file, or a new one: of images that are learned from alone."""
    rows = dataset.parts.train_rows
    if not path.exists():
        estimate = number_of_novel_classes(
            cached.center[torch.from_numpy(rows)].numpy(),
            dataset.label[rows],
            disjoint=config.mode == "ncd",
            seed=config.seed,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(estimate)) + "\n")
    with usable(path, "remove it, it will be made again"):
        estimate = msgspec.json.decode(path.read_bytes(), type=NumberOfClasses)
        if not 1 <= estimate.chosen <= len(rows):
            raise ValueError(f"{estimate.chosen} classes of {len(rows)} images")
    return estimate
