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
from torch import Tensor

from nearkin.discovery.data import FEWEST
from nearkin.discovery.task import DiscoveryTask
from nearkin.files import replace_text, usable
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.types import UNLABELED

Features = Float[np.ndarray, "n dim"]
Labels = Int[np.ndarray, " n"]

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
    features: Features, label: Labels, *, disjoint: bool, seed: int
) -> NumberOfClasses:
    """Estimate the number of novel classes, by a tree of images and by silhouettes near it.

    - `linkage`: trees of images by average linkage (Sokal & Michener 1958). The height at which a
      cut of the labeled images' tree agrees best with their classes, by the adjusted Rand index,
      cuts that of the unlabeled ones. Counted is the effective number of clusters, 1 / sum of
      squared shares, which single odd images do not change; it becomes a number by what known
      classes have of both, so novel classes are taken to be as unequal in size as these are.
    - `silhouette` (Rousseeuw 1987): the k-means with the best mean silhouette of unlabeled images;
      of these images alone if classes are disjoint, else beside known classes, which are fixed.

    The tree is off by some, but never says one where there are many; silhouettes have a sharp peak
    where classes are apart, and none where they touch. So the estimate has the best silhouette
    after a penalty that grows with the square of the distance to the tree's number, on the scale
    of logarithms. With fewer than two known classes of two labeled images, there is no tree.

    Of `features`, only directions count. With `disjoint` classes, no unlabeled image is of a known
    one. There are at least `FEWEST` unlabeled images.
    """
    unlabeled = int((label == UNLABELED).sum())
    classes = np.unique(label[label != UNLABELED], return_counts=True)[1]
    rows = max(ROWS, PER_CLASS * len(classes))
    while True:
        task = _draw(features, label, min(rows, MOST_ROWS), disjoint, seed)
        found = _estimate(task, classes)
        if PER_CLASS * found.chosen <= rows or rows >= min(unlabeled, MOST_ROWS):
            return found
        rows *= 2


def _draw(features: Features, label: Labels, count: int, disjoint: bool, seed: int) -> "_Task":
    """Draw unlabeled and labeled rows."""
    from sklearn.preprocessing import normalize

    generator, known = np.random.default_rng(seed), np.flatnonzero(label != UNLABELED)
    labeled = _balanced(label, count, generator)
    if len(np.unique(label[labeled])) < 2:
        labeled = known[:count]
    novel = generator.permutation(np.flatnonzero(label == UNLABELED))[:count]
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
        """The unlabeled images that seem to be of no known class.

        Those farther from all than the distance at which as many images of known classes are
        farther as images of left-out ones are nearer.
        """
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
    has_tree = len(task.size) > 1 and task.size.min() > 1
    tree = _linkage(task) + log(_inequality(classes)) if has_tree else 0.0
    penalty = PENALTY if has_tree else 0.0
    tried = _search(task.silhouette, lambda tried: _best(tried, tree, penalty), task.most)
    chosen, peak = _best(tried, tree, penalty), _best(tried, tree, 0.0)
    reach, estimates = UNCORRECTED, {"silhouette": float(peak)}
    if has_tree:
        reach = hypot(ERROR, DOUBT * (tree - log(peak)))
        estimates = {"linkage": exp(tree)} | estimates

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
    path: Path, features: Float[Tensor, "images dim"], task: DiscoveryTask, seed: int
) -> NumberOfClasses:
    """Return the estimate in a file, or a new one: of images that are learned from alone."""
    if not path.exists():
        x, label = features[torch.from_numpy(task.rows)].numpy(), task.label[task.rows]
        estimate = number_of_novel_classes(x, label, disjoint=task.disjoint, seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(estimate)) + "\n")
    with usable(path, "remove it, it will be made again"):
        estimate = msgspec.json.decode(path.read_bytes(), type=NumberOfClasses)
        if not 1 <= estimate.chosen <= len(task.rows):
            raise ValueError(f"{estimate.chosen} classes of {len(task.rows)} images")
    return estimate
