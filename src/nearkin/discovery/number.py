"""The number of novel classes: the best silhouette near what a tree of images says."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, exp, floor, hypot, log
from pathlib import Path
from typing import Final

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

ROWS: Final = 1200  # Unlabeled images that are looked at, and as many labeled ones, at first
PER_CLASS: Final = 8  # More are, where there are fewer of each class; but at most
MOST_ROWS: Final = 4096  # so many: with as many labeled ones, the distances take 256 MiB
SMALLEST: Final = 4  # Images of a class in the mean, where the most classes are tried
HEIGHTS: Final = 60  # At which the tree of labeled images is cut
COARSE: Final = 16  # Numbers tried before those around the best
PENALTY: Final = 0.015
"""How much better the silhouette of a number must be that is e times the tree's, or less by as
much. Chosen on the design tasks of docs/discovery.md, as are the next two."""
ERROR: Final = 0.2  # Half of the interval, on the scale of logarithms, where both rules agree
DOUBT: Final = 0.5  # What a unit of their disagreement adds to it, as squares add
UNCORRECTED: Final = 0.7  # The half without known classes, where there is no tree


@dataclass(frozen=True)
class NumberOfClasses:
    """Estimates of the number of novel classes, at least 1."""

    chosen: int
    low: int
    high: int  # An interval that is to hold the number in four of five cases
    estimates: Mapping[str, int]
    """By rule, alone: `linkage` and `silhouette`; the latter only, where fewer than two known
    classes have two labeled images."""
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
    """Estimate the number of novel classes, by a tree of images and by silhouettes near it.

    - `linkage`: trees of images by average linkage (Sokal & Michener 1958). The height at which a
      cut of the labeled images' tree agrees best with their classes, by the adjusted Rand index,
      cuts that of the unlabeled ones. Counted is the effective number of clusters, 1 / sum of
      squared shares, which single odd images do not change; it becomes a number by what known
      classes have of both, so novel classes are taken to be as unequal in size as these are.
      In mode gcd, images of known classes are left out before, as far as they can be told: those
      nearer to a known class than the distance at which as many images of known classes are
      farther as images of left-out ones are nearer.
    - `silhouette` (Rousseeuw 1987): the k-means with the best mean silhouette of unlabeled images;
      of these images alone if classes are disjoint, else beside known classes, which are fixed.

    The tree is off by some, but never says one where there are many; silhouettes have a sharp peak
    where classes are apart, and none where they touch. So the estimate has the best silhouette
    after a penalty that grows with the square of the distance to the tree's number, on the scale
    of logarithms. The interval is wider where both rules disagree.

    With fewer than two known classes of two labeled images, it is `silhouette` alone. 1,200
    unlabeled images are looked at; more, up to 4,096, if there are fewer than 8 of them for each
    class that is found. They can show one class for four: `NumberOfClasses.most`.

    Args:
        features: One row per image; only directions count.
        label: The known class of each image, or `UNLABELED`.
        disjoint: Whether no unlabeled image is of a known class.
        seed: Random seed.
    """
    unlabeled = int((label == UNLABELED).sum())
    if unlabeled < FEWEST:
        raise DataError(f"{unlabeled} unlabeled images; counting classes takes at least {FEWEST}")
    classes = np.unique(label[label != UNLABELED], return_counts=True)[1]
    rows = max(ROWS, PER_CLASS * len(classes))
    while True:
        task = _draw(features, label, min(rows, MOST_ROWS), disjoint, seed)
        found = _estimate(task, classes)
        if PER_CLASS * found.chosen <= rows or rows >= min(unlabeled, MOST_ROWS):
            return found
        rows *= 2


def _draw(
    features: Float[np.ndarray, "n dim"],
    label: Int[np.ndarray, " n"],
    count: int,
    disjoint: bool,
    seed: int,
) -> "_Task":
    """Draw unlabeled and labeled rows."""
    from sklearn.preprocessing import normalize

    generator = np.random.default_rng(seed)
    labeled = _balanced(label, count, generator)
    if len(np.unique(label[labeled])) < 2:
        labeled = np.flatnonzero(label != UNLABELED)[:count]
    novel = generator.permutation(np.flatnonzero(label == UNLABELED))[:count]
    known = np.flatnonzero(label != UNLABELED)
    others = known[~np.isin(label[known], label[labeled])]
    others = others[np.unique(label[others], return_index=True)[1]]
    rows = np.concatenate([novel, labeled, others])
    x = normalize(compact(torch.from_numpy(features[rows])))
    number = np.unique(label[labeled], return_inverse=True)[1]
    free, several, single = np.split(x, np.cumsum([len(novel), len(labeled)]))
    return _Task(free, several, single, number, disjoint)


def _balanced(
    label: Int[np.ndarray, " n"], count: int, generator: np.random.Generator
) -> Int[np.ndarray, " m"]:
    """Draw labeled rows, evenly over the classes that have two or more."""
    order = generator.permutation(np.flatnonzero(label != UNLABELED))
    order = order[label[order].argsort(kind="stable")]
    _, first, size = np.unique(label[order], return_index=True, return_counts=True)
    turn = np.arange(len(order)) - np.repeat(first, size)  # within the class
    several = np.repeat(size > 1, size)
    drawn = order[several][turn[several].argsort(kind="stable")][:count]
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
    """Unlabeled and labeled images, their features of length 1."""

    x: Float[np.ndarray, "u dim"]
    labeled: Float[np.ndarray, "l dim"]
    single: Float[np.ndarray, "m dim"]
    """An image of each known class that `labeled` has none of, since it has one label alone."""
    label: Int[np.ndarray, " l"]  # 0 to one less than the number of classes
    disjoint: bool  # Whether no unlabeled image is of a known class

    @property
    def most(self) -> int:
        """The largest number of classes that is tried."""
        return max(2, len(self.x) // SMALLEST)

    @property
    def size(self) -> Int[np.ndarray, " classes"]:
        """Labeled images of each class."""
        return np.bincount(self.label)

    @cached_property
    def searched(self) -> Float[np.ndarray, "n dim"]:
        """The unlabeled images that seem to be of no known class."""
        if self.disjoint:
            return self.x
        size = self.size
        total = np.zeros((len(size), self.x.shape[1]))
        np.add.at(total, self.label, self.labeled)
        means, own = total / size[:, None], (np.arange(len(self.label)), self.label)
        away = _squares(self.labeled, means)
        with_own = away.copy()
        with_own[own] *= (size / (size - 1))[self.label] ** 2  # from the mean of the others
        away[own] = np.inf
        known, left_out = with_own.min(axis=1), away.min(axis=1)
        weight = 1 / size[self.label] / len(size)
        both: Float[np.ndarray, " twice"] = np.append(known, left_out)
        order = both.argsort()
        # Going outwards, from all known ones too far and no left-out one near to the opposite.
        near = np.cumsum(np.append(weight, weight)[order])
        cut = float(both[order[min(int(near.searchsorted(1)), len(order) - 1)]])
        places = np.concatenate([means, self.single])
        return np.asarray(self.x[_squares(self.x, places).min(axis=1) > cut])

    @cached_property
    def silhouette(self) -> Callable[[int], float]:
        """The mean silhouette of unlabeled images, with so many clusters of novel classes."""
        from sklearn.metrics import pairwise_distances, silhouette_samples

        x, label, known = self.x, np.full(len(self.x), UNLABELED), 0
        if not self.disjoint:
            x, many = np.concatenate([x, self.labeled, self.single]), len(self.size)
            known = many + len(self.single)
            label = np.concatenate([label, self.label, np.arange(many, known)])
        distance, free = pairwise_distances(x), label == UNLABELED

        def silhouette(k: int) -> float:
            total = min(known + k, len(x))
            cluster = constrained_kmeans(x, label, total, seed=0, n_init=1, max_iter=20).cluster
            if not 1 < len(np.unique(cluster)) < len(cluster):
                return 0.0
            values = silhouette_samples(distance, cluster, metric="precomputed")
            return float(values[free].mean())

        return silhouette


def _squares(
    x: Float[np.ndarray, "n dim"], center: Float[np.ndarray, "k dim"]
) -> Float[np.ndarray, "n k"]:
    """Squared distances."""
    square = (x**2).sum(axis=1)[:, None] + (center**2).sum(axis=1) - 2 * x @ center.T
    return np.asarray(np.maximum(square, 0))


def _linkage(task: _Task) -> float:
    """The logarithm of the effective number of novel classes; 0 where hardly an image is novel."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from sklearn.metrics import adjusted_rand_score

    if len(task.searched) < FEWEST:
        return 0.0
    tree = linkage(task.labeled, "average")
    heights = np.quantile(tree[:, 2], np.linspace(0, 1, HEIGHTS))
    cuts = [fcluster(tree, height, "distance") for height in heights]
    best = int(np.argmax([adjusted_rand_score(task.label, cluster) for cluster in cuts]))
    cluster = fcluster(linkage(task.searched, "average"), heights[best], "distance")
    return log(_effective(np.bincount(cluster)))


def _estimate(task: _Task, classes: Int[np.ndarray, " known"]) -> NumberOfClasses:
    """Apply both rules; `classes` has the labeled images of each known class."""
    if len(task.size) < 2 or task.size.min() < 2:
        tried = _search(task.silhouette, lambda tried: _best(tried, 0.0, 0.0), task.most)
        alone = _best(tried, 0.0, 0.0)
        return _number(task, tried, {"silhouette": float(alone)}, alone, UNCORRECTED)
    tree = _linkage(task) + log(_inequality(classes))
    tried = _search(task.silhouette, lambda tried: _best(tried, tree, PENALTY), task.most)
    chosen, peak = _best(tried, tree, PENALTY), _best(tried, tree, 0.0)
    reach = hypot(ERROR, DOUBT * (tree - log(peak)))
    return _number(task, tried, {"linkage": exp(tree), "silhouette": float(peak)}, chosen, reach)


def _number(
    task: _Task,
    tried: Mapping[int, float],
    estimates: Mapping[str, float],
    chosen: int,
    reach: float,
) -> NumberOfClasses:
    """Bring everything into numbers of classes that there may be."""

    def possible(number: float, rounding: Callable[[float], int] = round) -> int:
        return min(max(1, rounding(number)), len(task.x))

    return NumberOfClasses(
        chosen,
        possible(chosen * exp(-reach), floor),
        possible(chosen * exp(reach), ceil),
        {name: possible(value) for name, value in estimates.items()},
        sorted(tried.items()),
        task.most,
    )


def _best(tried: Mapping[int, float], tree: float, penalty: float) -> int:
    """The number of the best silhouette, less a penalty far from the tree's logarithm."""
    return max(sorted(tried), key=lambda k: tried[k] - penalty * (log(k) - tree) ** 2)


def _search(
    silhouette: Callable[[int], float], best: Callable[[Mapping[int, float]], int], most: int
) -> dict[int, float]:
    """Try numbers up to `most`, coarsely at first, then ever finer around the best."""
    tried: dict[int, float] = {}
    new = {int(k) for k in np.geomspace(1, most, COARSE).round()}
    while new:
        tried |= {k: silhouette(k) for k in sorted(new)}
        peak = best(tried)
        below = max((k for k in tried if k < peak), default=peak)
        above = min((k for k in tried if k > peak), default=peak)
        new = {(below + peak) // 2, (peak + above) // 2} - set(tried)
    return tried


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
