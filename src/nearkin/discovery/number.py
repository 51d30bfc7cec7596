"""The number of novel classes, by two rules that hidden known classes correct."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, exp, floor, log, sqrt
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.classifier.features import CachedFeatures
from nearkin.config import DiscoverConfig
from nearkin.discovery.data import FEWEST, DiscoveryData
from nearkin.errors import DataError
from nearkin.files import replace_text, usable
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.types import UNLABELED

ROWS: Final = 1200  # Unlabeled images that are looked at, and as many labeled ones, at most
FOLDS: Final = 8  # Draws of known classes that are hidden
CORRECTION: Final = 0.5  # Share of the mean error on hidden classes that is taken off
LEAST_ERROR: Final = 0.1  # An estimate is not trusted more, however well it did; a tenth of it
DOUBT: Final = 0.5
"""Error, on the scale of logarithms, that is taken to have been made in further folds, because
hidden classes are fewer than novel ones may be, and folds share them."""
DOUBT_FOLDS: Final = 4  # As many as these
WIDTH: Final = 1.28  # Root mean squares of errors to either side: four fifths of a normal
HEIGHTS: Final = 60  # At which the tree of labeled images is cut
SMALLEST: Final = 4  # Images of a class in the mean, where the most classes are tried
SPHERE: Final = 0.8  # Share of a sphere in the whitening scatter; few classes show few directions
COARSE: Final = 12  # Numbers tried before those around the best


@dataclass(frozen=True)
class NumberOfClasses:
    """Estimates of the number of novel classes, at least 1."""

    chosen: int
    low: int
    high: int  # An interval that is to hold the number in four of five cases
    estimates: Mapping[str, int]
    """By rule, corrected: `linkage` and `silhouette`; the latter alone, and as it is, where fewer
    than two known classes have two labeled images."""
    curve: list[tuple[int, float]]  # The mean silhouette, for each number tried
    most: int  # Classes that the images looked at can show

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

    Two rules estimate it:

    - `linkage`: trees of images by average linkage (Sokal & Michener 1958). The height at which a
      cut of the labeled images' tree agrees best with their classes, by the adjusted Rand index,
      cuts that of the unlabeled ones. Counted is the effective number of clusters, 1 / sum of
      squared shares, which single odd images do not change; it becomes a number by what known
      classes have of both, so novel classes are taken to be as unequal in size as these are.
    - `silhouette` (Rousseeuw 1987): the k-means with the best silhouette; of unlabeled images
      alone if classes are disjoint, else of all, with known classes fixed.

    Then known classes are hidden, in several draws, and counted as if they were novel: half of
    them, or fewer in mode gcd, as large a share of the images as seems to be of novel classes.
    Half of each rule's mean error there, on the scale of logarithms, is taken off; the estimate is
    the geometric mean of both rules, and the interval is as wide as the errors of that mean.

    In mode gcd, images of known classes are left out before, as far as they can be told: those
    nearer to a known class than the distance at which as many images of known classes are farther
    as images of hidden ones are nearer. Hidden classes are searched in the same way, so what this
    gets wrong is corrected too. (`silhouette` does not need it.)

    With fewer than two known classes of two labeled images, it is `silhouette` alone, and no
    error is known. Of more than 1,200 unlabeled images, 1,200 are looked at, which can show 300
    classes: `NumberOfClasses.most`.

    Args:
        features: One row per image; only directions count.
        label: The known class of each image, or `UNLABELED`.
        disjoint: Whether no unlabeled image is of a known class.
        seed: Random seed.
    """
    unlabeled = np.flatnonzero(label == UNLABELED)
    if len(unlabeled) < FEWEST:
        raise DataError(
            f"{len(unlabeled)} unlabeled images; counting classes takes at least {FEWEST}"
        )
    generator = np.random.default_rng(seed)
    labeled = _balanced(label, generator)
    can_compare = len(np.unique(label[labeled])) >= 2
    if not can_compare:
        labeled = np.flatnonzero(label != UNLABELED)[:ROWS]
    rows = np.append(generator.permutation(unlabeled)[:ROWS], labeled)
    x, y = compact(torch.from_numpy(features[rows])), label[rows]
    novel = y == UNLABELED
    task = _Task(x[novel], x[~novel], np.unique(y[~novel], return_inverse=True)[1], disjoint)
    if not can_compare:
        return _estimate(task, {"silhouette": _silhouette(task)}, np.zeros(0))
    sizes = np.unique(label[label != UNLABELED], return_counts=True)[1]
    return _corrected(task, _inequality(sizes), generator)


def _balanced(
    label: Int[np.ndarray, " n"], generator: np.random.Generator
) -> Int[np.ndarray, " m"]:
    """Draw labeled rows, evenly over the classes that have two or more."""
    order = generator.permutation(np.flatnonzero(label != UNLABELED))
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
    disjoint: bool  # Whether no unlabeled image is of a known class

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
        return replace(self, x=self.x @ turn, labeled=self.labeled @ turn)

    @cached_property
    def searched(self) -> tuple[Float[np.ndarray, "n dim"], float]:
        """The unlabeled images that seem to be of no known class, and the share that is of none.

        The share is not that of these images, since some are taken for what they are not.
        """
        if self.disjoint:
            return self.x, 1.0
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
        return self.x[far], float(np.clip(share, 0, 1))

    @property
    def few(self) -> bool:
        """Whether too few images seem novel to count classes of them."""
        return len(self.searched[0]) < FEWEST

    @cached_property
    def silhouettes(self) -> dict[int, float]:
        """The mean silhouette with each number of novel clusters that was tried."""
        x, label = self.x, np.full(len(self.x), UNLABELED)
        if not self.disjoint:
            x, label = np.concatenate([self.labeled, x]), np.append(self.label, label)
        return _search(_Clusters(x, label).silhouette, self.most)

    @property
    def most(self) -> int:
        """The largest number of classes that is tried."""
        return max(2, len(self.x) // SMALLEST)

    def hide(
        self, classes: int, generator: np.random.Generator
    ) -> tuple["_Task", Float[np.ndarray, " rules"]]:
        """Hide some known classes; also return what each rule is to count, as a logarithm.

        In mode gcd, half of the other labeled images are hidden too, as far as two are left.
        """
        count = len(self.size)
        hidden = np.isin(self.label, generator.permutation(count)[:classes])
        unlabeled = hidden.copy()
        if not self.disjoint:
            order = generator.permutation(len(self.label))
            turn = np.empty_like(order)
            for number in range(count):
                own = order[self.label[order] == number]
                turn[own] = np.arange(len(own))
            unlabeled |= turn >= np.maximum(2, self.size // 2)[self.label]
        label = np.unique(self.label[~unlabeled], return_inverse=True)[1]
        x, labeled = self.labeled[unlabeled], self.labeled[~unlabeled]
        size = np.bincount(self.label[hidden])[np.unique(self.label[hidden])]
        return _Task(x, labeled, label, self.disjoint), np.log([_effective(size), len(size)])


def _squares(
    x: Float[np.ndarray, "n dim"], center: Float[np.ndarray, "k dim"]
) -> Float[np.ndarray, "n k"]:
    """Squared distances."""
    square = (x**2).sum(axis=1)[:, None] + (center**2).sum(axis=1) - 2 * x @ center.T
    return np.asarray(np.maximum(square, 0))


def _linkage(task: _Task) -> float:
    from scipy.cluster.hierarchy import fcluster, linkage
    from sklearn.metrics import adjusted_rand_score
    from sklearn.preprocessing import normalize

    # Rows are unit, but for directions that `compact` left out.
    labeled, novel = normalize(task.labeled), normalize(task.searched[0])
    tree = linkage(labeled, "average")
    heights = np.quantile(tree[:, 2], np.linspace(0, 1, HEIGHTS))
    cuts = [fcluster(tree, height, "distance") for height in heights]
    best = int(np.argmax([adjusted_rand_score(task.label, cluster) for cluster in cuts]))
    cluster = fcluster(linkage(novel, "average"), heights[best], "distance")
    return log(_effective(np.bincount(cluster)))


def _silhouette(task: _Task) -> float:
    return log(_peak(task.silhouettes))


RULES: Final = ("linkage", "silhouette")


def _count(task: _Task) -> Float[np.ndarray, " rules"]:
    """The logarithm of the number by each rule; for `linkage`, of the effective number."""
    return np.zeros(2) if task.few else np.array([_linkage(task), _silhouette(task)])


def _corrected(task: _Task, inequality: float, generator: np.random.Generator) -> NumberOfClasses:
    """Apply the rules, corrected by their errors on hidden classes."""
    known, (_, share) = len(task.size), task.searched
    effective = np.array([log(inequality), 0.0])  # what makes a number of each rule's count
    uncorrected, errors = _count(task) + effective, np.zeros((0, 2))
    if known >= 4:
        # As large a share of the unlabeled images is hidden as seems to be novel: with half of
        # the images of other classes, h of k classes are 2 h / (k + h) of them.
        hidden = max(2, min(known // 2, round(share * known / (2 - share))))
        folds = [task.hide(hidden, generator) for _ in range(FOLDS)]
        errors = np.array([_count(fold) - true for fold, true in folds])
    correction = CORRECTION * errors.sum(axis=0) / max(len(errors), 1)
    rules = dict(zip(RULES, (uncorrected - correction).tolist(), strict=True))
    return _estimate(task, rules, (errors - correction).mean(axis=1), few=task.few)


def _estimate(
    task: _Task,
    rules: Mapping[str, float],
    errors: Float[np.ndarray, " folds"],
    *,
    few: bool = False,
) -> NumberOfClasses:
    """Join the rules, whose mean had these errors on hidden classes; all are logarithms."""
    middle = fmean(rules.values())
    doubted = ((errors**2).sum() + DOUBT_FOLDS * DOUBT**2) / (len(errors) + DOUBT_FOLDS)
    reach = WIDTH * sqrt(doubted + LEAST_ERROR**2)

    def number(logarithm: float, rounding: Callable[[float], int] = round) -> int:
        return min(max(1, rounding(exp(logarithm))), len(task.x))

    return NumberOfClasses(
        number(middle),
        number(middle - reach, floor),
        number(middle + reach, ceil),
        {name: number(value) for name, value in rules.items()},
        [] if few else sorted(task.silhouettes.items()),
        task.most,
    )


def _search(criterion: Callable[[int], float], most: int) -> dict[int, float]:
    """Try numbers up to `most`, coarsely at first, then ever finer around the best."""
    tried: dict[int, float] = {}
    new = {int(k) for k in np.geomspace(1, most, COARSE).round()}
    while new:
        tried |= {k: criterion(k) for k in sorted(new)}
        peak = _peak(tried)
        below = max((k for k in tried if k < peak), default=peak)
        above = min((k for k in tried if k > peak), default=peak)
        new = {(below + peak) // 2, (peak + above) // 2} - set(tried)
    return tried


def _peak(tried: Mapping[int, float]) -> int:
    """The least of the best."""
    return max(sorted(tried), key=tried.__getitem__)


@dataclass(frozen=True, eq=False)
class _Clusters:
    """K-means of images, those of a known class kept together."""

    x: Float[np.ndarray, "n dim"]
    label: Int[np.ndarray, " n"]  # 0 to one less than the number of known classes, or `UNLABELED`

    @cached_property
    def distances(self) -> Float[np.ndarray, "n n"]:
        """Between all images."""
        from sklearn.metrics import pairwise_distances

        return np.asarray(pairwise_distances(self.x))

    def silhouette(self, k: int) -> float:
        """The mean silhouette with k clusters beside those of known classes."""
        total = min(int(self.label.max(initial=UNLABELED)) + 1 + k, len(self.x))
        found = constrained_kmeans(self.x, self.label, total, seed=0, n_init=1, max_iter=20)
        return mean_silhouette(self.distances, found.cluster, metric="precomputed")


def mean_silhouette(
    x: Float[np.ndarray, "n dim"],
    cluster: Int[np.ndarray, " n"],
    metric: Literal["euclidean", "precomputed"] = "euclidean",
) -> float:
    """Return the mean silhouette; 0 if all rows are one cluster, or each its own.

    `x` has features, or for "precomputed" the distances between all rows.
    """
    from sklearn.metrics import silhouette_score

    some = 1 < len(np.unique(cluster)) < len(cluster)
    return float(silhouette_score(x, cluster, metric=metric)) if some else 0.0


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
