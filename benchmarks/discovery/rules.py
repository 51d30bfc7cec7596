"""The number of novel classes by three rules of the papers; number.py has them for comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import fmean, median_high
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.discovery.number import mean_silhouette
from nearkin.errors import DataError
from nearkin.measures.intervals import wilson
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.measures.matching import cluster_accuracy
from nearkin.pace import count
from nearkin.types import UNKNOWN

ROWS: Final = 4000  # Images per repetition, at most
SILHOUETTE_ROWS: Final = 1500
"""Images of these whose silhouettes are measured, which takes all distances between them."""
REPETITIONS: Final = 3  # Draws of images, of held-out classes and of first centers
STARTS: Final = 3  # Starts of each k-means, in each repetition
COARSE: Final = 10  # Numbers tried before those around the best
HELD_OUT: Final = 0.3  # Share of the known classes that the DTC rule treats as novel
TINY: Final = 0.01  # The DTC rule counts no cluster smaller than this share of the largest


@dataclass(frozen=True)
class ThreeRules:
    """Estimates of the number of novel classes, at least 1."""

    chosen: int  # The median of the estimates
    low: int
    high: int  # The least and the largest estimate of any rule in any repetition
    estimates: Mapping[str, int]
    """By rule: `silhouette` and, with two known classes or more, `dtc` and `gcd`."""
    curves: Mapping[str, list[tuple[int, float]]]
    """By rule: its criterion for each number tried, the mean over the repetitions."""


def three_rules(
    features: Float[np.ndarray, "n dim"],
    label: Int[np.ndarray, " n"],
    *,
    disjoint: bool,
    seed: int,
    most: int | None = None,
) -> ThreeRules:
    """Estimate the number of novel classes by three rules.

    - `silhouette` (Rousseeuw 1987): the k-means with the best silhouette; of unlabeled images only
      if classes are disjoint, else of all, with known classes fixed.
    - `dtc` (Han et al. 2019): some known classes are held out and clustered with the unlabeled
      images, the others are fixed. Halfway between the numbers that find the held-out classes
      best and that have the best silhouette, less held-out classes and tiny clusters.
    - `gcd` (Vaze et al. 2022): the plain k-means of all that finds the known classes best, less
      known classes and clusters that hold at least half the usual share of labeled images.

    Many numbers find classes equally well, and the largest of them, which the DTC rule takes, is
    too large. Here the best silhouette, of all images, decides among those whose accuracy is in
    the 95 % interval of the best. Numbers tried are coarse at first, then fine around the best.

    Args:
        features: One row per image; only directions count.
        label: The known class of each image, or `UNKNOWN`.
        disjoint: Whether no unlabeled image is of a known class.
        seed: Random seed.
        most: The largest number tried; if None, one for 20 unlabeled images, at most 100.
    """
    unlabeled = int((label == UNKNOWN).sum())
    if unlabeled < 4:
        raise DataError(f"{unlabeled} unlabeled images; counting classes takes at least 4")
    highest = min(unlabeled, ROWS // 2) - 1
    most = max(2, min(100, unlabeled // 20)) if most is None else most
    if not 2 <= most <= highest:
        noun = count(most, "novel class")
        raise DataError(f"{noun} of {unlabeled} images; ask for 2 to {highest}")
    seeds = range(REPETITIONS * seed, REPETITIONS * (seed + 1))
    samples = [_draw(features, label, disjoint, each) for each in seeds]
    rules = RULES if samples[0].num_known > 1 else {"silhouette": _silhouette}
    searches = {name: _Search(rule, samples, most) for name, rule in rules.items()}
    estimates = {name: search.estimate() for name, search in searches.items()}
    every = [s.estimate(slice(r, r + 1)) for s in searches.values() for r in range(REPETITIONS)]
    every += estimates.values()
    curves = {name: list(search.mean("accuracy").items()) for name, search in searches.items()}
    curves["silhouette"] = list(searches["silhouette"].mean("silhouette").items())
    chosen = median_high(estimates.values())
    return ThreeRules(chosen, min(every), max(every), estimates, curves)


@dataclass(frozen=True, eq=False)
class _Sample:
    """What one repetition draws, in random order."""

    x: Float[np.ndarray, "n dim"]
    label: Int[np.ndarray, " n"]  # From 0 to `num_known - 1`, or `UNKNOWN`
    num_known: int
    fixed: Int[np.ndarray, " n"]  # The same without the classes held out, numbered anew
    disjoint: bool
    seed: int


def _draw(
    features: Float[np.ndarray, "n dim"], label: Int[np.ndarray, " n"], disjoint: bool, seed: int
) -> _Sample:
    generator = np.random.default_rng(seed)
    rows = _rows(label, generator)
    x = compact(torch.from_numpy(features[rows]))
    known = label[rows] != UNKNOWN
    classes, number = np.unique(label[rows][known], return_inverse=True)
    num_fixed = len(classes) - max(1, round(HELD_OUT * len(classes)))
    place = generator.permutation(len(classes))
    renumbered, fixed = np.full((2, len(rows)), UNKNOWN)
    renumbered[known] = number
    fixed[known] = np.where(place < num_fixed, place, UNKNOWN)[number]
    return _Sample(x, renumbered, len(classes), fixed, disjoint, seed)


def _rows(label: Int[np.ndarray, " n"], generator: np.random.Generator) -> Int[np.ndarray, " m"]:
    """Draw labeled rows by their share, evenly over classes, and unlabeled ones for the rest."""
    order = generator.permutation(len(label))
    order = order[label[order].argsort(kind="stable")]
    _, first, size = np.unique(label[order], return_index=True, return_counts=True)
    turn = np.arange(len(label)) - np.repeat(first, size)  # within the class
    known = label[order] != UNKNOWN
    unlabeled, labeled = order[~known], order[known][turn[known].argsort(kind="stable")]
    share = np.clip(len(labeled) / len(label), 1 / 8, 1 / 2)  # enough of both for any estimate
    labeled = labeled[: int(ROWS * share)]
    return generator.permutation(np.append(labeled, unlabeled[: ROWS - len(labeled)]))


class _Trial(NamedTuple):
    """The result of a rule for one number of novel classes."""

    accuracy: float
    labeled: int  # Rows behind the accuracy
    silhouette: float
    novel: int  # Clusters that count as novel classes


_cluster = partial(constrained_kmeans, starts=STARTS)


def _silhouette(sample: _Sample, k: int) -> _Trial:
    rows = (sample.label == UNKNOWN) | (not sample.disjoint)
    x, label = sample.x[rows], sample.label[rows]
    cluster = _cluster(x, label, int(label.max()) + 1 + k, seed=sample.seed).cluster
    return _Trial(1.0, 1, _separation(x, cluster), k)


def _dtc(sample: _Sample, k: int) -> _Trial:
    total, unlabeled = sample.num_known + k, sample.label == UNKNOWN
    hidden = (sample.fixed == UNKNOWN) & ~unlabeled
    cluster = _cluster(sample.x, sample.fixed, total, seed=sample.seed).cluster
    accuracy, match = cluster_accuracy(sample.label[hidden], cluster[hidden])
    size = np.bincount(cluster[unlabeled], minlength=total)
    others = np.setdiff1d(np.arange(sample.fixed.max() + 1, total), list(match))
    novel = int((size[others] > TINY * size.max()).sum())
    return _Trial(accuracy, int(hidden.sum()), _separation(sample.x, cluster), novel)


def _gcd(sample: _Sample, k: int) -> _Trial:
    total, labeled = sample.num_known + k, sample.label != UNKNOWN
    no_labels = np.full_like(sample.label, UNKNOWN)
    cluster = _cluster(sample.x, no_labels, total, seed=sample.seed).cluster
    accuracy, match = cluster_accuracy(sample.label[labeled], cluster[labeled])
    known, size = list(match), np.bincount(cluster, minlength=total)
    held = np.bincount(cluster[labeled], minlength=total)
    usual = held[known].sum() / size[known].sum()
    others = np.setdiff1d(np.flatnonzero(size), known)
    novel = int((held[others] < usual / 2 * size[others]).sum())
    return _Trial(accuracy, int(labeled.sum()), _separation(sample.x, cluster), novel)


Rule = Callable[[_Sample, int], _Trial]
RULES: Final[Mapping[str, Rule]] = {"silhouette": _silhouette, "dtc": _dtc, "gcd": _gcd}


def _separation(x: Float[np.ndarray, "n dim"], cluster: Int[np.ndarray, " n"]) -> float:
    return mean_silhouette(x[:SILHOUETTE_ROWS], cluster[:SILHOUETTE_ROWS])


class _Search:
    """Tries a rule in every repetition, with coarse numbers and then around the best."""

    def __init__(self, rule: Rule, samples: Sequence[_Sample], most: int) -> None:
        self.rule, self.samples = rule, samples
        self.tried: dict[int, list[_Trial]] = {}
        new = {int(k) for k in np.geomspace(2, most, COARSE).round()}
        while new:
            self.tried |= {k: self.trials(k) for k in new}
            new = {k for peak in self.peaks() for k in self.beside(peak)}

    def trials(self, k: int) -> list[_Trial]:
        """Return the trial of a number in each repetition."""
        return self.tried.get(k) or [self.rule(sample, k) for sample in self.samples]

    def mean(self, name: str, repetitions: slice = slice(None)) -> dict[int, float]:
        """Return the mean over repetitions of one field of the trials, by number."""
        tried = sorted(self.tried.items())
        return {k: fmean(getattr(t, name) for t in trials[repetitions]) for k, trials in tried}

    def peaks(self, repetitions: slice = slice(None)) -> list[int]:
        """Return the best number by accuracy, and for the DTC rule that by silhouette as well."""
        accuracy, silhouette = (self.mean(x, repetitions) for x in ("accuracy", "silhouette"))
        labeled = self.tried[2][0].labeled
        lowest, _ = wilson(round(max(accuracy.values()) * labeled), labeled)
        among = [[k for k in accuracy if accuracy[k] >= lowest]]
        among += [list(silhouette)] if self.rule is _dtc else []
        return [max(some, key=silhouette.__getitem__) for some in among]

    def beside(self, peak: int) -> list[int]:
        """Return untried numbers halfway between a peak and those tried around it."""
        below = max((k for k in self.tried if k < peak), default=peak)
        above = min((k for k in self.tried if k > peak), default=peak)
        return [k for k in ((below + peak) // 2, (peak + above) // 2) if k not in self.tried]

    def estimate(self, repetitions: slice = slice(None)) -> int:
        """Return the clusters that count, halfway between the peaks; at least 1."""
        middle = ceil(fmean(self.peaks(repetitions)))
        return max(1, median_high(trial.novel for trial in self.trials(middle)[repetitions]))
