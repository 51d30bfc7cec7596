"""Scores of predicted classes against true ones, by the protocols of the papers.

Clusters have no names, so they are matched with the true classes first. Throughout, `truth` is the
true class of each image or `UNKNOWN`, and `predicted` the class it was put in. Classes below
`num_known` are known, the others novel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from nearkin.measures.intervals import bootstrap
from nearkin.measures.matching import match, right
from nearkin.types import UNKNOWN

SURPLUS: Final = "images of surplus clusters are errors, match anew in each draw"
INTERVAL: Final = "interval as if images were independent, model fixed"

Labels = Int[np.ndarray, " n"]


class Score(NamedTuple):
    """A value with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float
    protocol: str

    def of(self, where: str) -> "Score":
        """Return the score under a name that says of which images it is."""
        return self._replace(name=f"{self.name}, {where}")


def task_aware(
    truth: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
    *,
    num_known: int,
    images: str,
    seed: int = 0,
) -> list[Score]:
    """Score images of novel classes, where the classifier rules all known ones out.

    Accuracy under one Hungarian match of novel clusters with novel classes, where the images
    of surplus clusters are errors; normalized mutual information (arithmetic mean); adjusted Rand
    index. Images of known classes are left out. A novel one put in a known class is an error.

    Args:
        truth: True classes.
        predicted: Predicted classes.
        num_known: Number of known classes.
        images: Which images these are, such as "unlabeled training images".
        seed: Random seed of the bootstrap.

    Returns:
        No score if there is no image to score.
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    kept = truth >= num_known
    y, x = truth[kept], predicted[kept]
    counted = f"{_counted(truth, kept, images)}; task-aware: novel classes only"

    def score(name: str, of: Callable[[Labels, Labels], float], how: str, least: float) -> Score:
        def statistic(rows: Labels) -> float:
            return float(of(y[rows], x[rows]))

        protocol = f"{counted}; {how}; {INTERVAL}"
        return _score(f"task-aware {name}", statistic, len(y), protocol, seed=seed, least=least)

    def accuracy(y: Labels, x: Labels) -> float:
        return float(right(y, x, novel_match(y, x, num_known)).mean())

    if len(y) == 0:
        return []
    return [
        score("accuracy", accuracy, f"one Hungarian match, {SURPLUS}", 0.0),
        score("NMI", normalized_mutual_info_score, "arithmetic mean", 0.0),
        score("ARI", adjusted_rand_score, "adjusted for chance", -0.5),
    ]


def task_agnostic(
    truth: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
    *,
    num_known: int,
    images: str,
    seed: int = 0,
) -> list[Score]:
    """Score images that could each be of any class, known or novel.

    A known class keeps its number: an image of it is right if put in that very class. Novel
    clusters are matched with novel classes by one Hungarian match over the images that are
    novel and predicted to be; an image of a novel class is right if put in the cluster
    matched with it. So images of known classes in novel clusters are errors, and have no say
    in the match. The arguments are those of `task_aware`.

    Returns:
        Scores of all images, of known and of novel classes; none of a part without images.
    """
    how = f"task-agnostic: known classes as they are, one Hungarian match of novel ones, {SURPLUS}"
    protocol = f"{_counted(truth, truth != UNKNOWN, images)}; {how}; {INTERVAL}"
    return _parts("task-agnostic", truth, predicted, num_known, novel_match, protocol, seed)


def gcd(
    truth: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
    *,
    num_known: int,
    images: str,
    seed: int = 0,
) -> list[Score]:
    """Score generalized category discovery: one match over all classes, then parts.

    Vaze, Han, Vedaldi, Zisserman. Generalized category discovery. CVPR 2022, arXiv:2201.02609,
    as in the second version of its evaluation: images of known ("Old") and novel ("New")
    classes are counted under the one match of all. A match for each part, as in the first
    version, raises both numbers. The arguments are those of `task_aware`.

    Returns:
        Scores of all images, of known and of novel classes; none of a part without images.
    """
    how = f"one Hungarian match over all classes, {SURPLUS}"
    protocol = f"{_counted(truth, truth != UNKNOWN, images)}; {how}; {INTERVAL}"
    return _parts("GCD", truth, predicted, num_known, joint_match, protocol, seed)


def novel_match(
    truth: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"], num_known: int
) -> dict[int, int]:
    """Match clusters with classes where known classes keep their numbers; see `task_agnostic`."""
    novel = (truth >= num_known) & (predicted >= num_known)
    return {number: number for number in range(num_known)} | match(truth[novel], predicted[novel])


def joint_match(
    truth: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"], num_known: int
) -> dict[int, int]:
    """Match clusters with classes, all at once; see `gcd`."""
    # Of the matches with most images right, the one with the fewest novel images right: the
    # scores of the parts are then unique, and those of novel classes are not flattering.
    y, x = truth[truth != UNKNOWN], predicted[truth != UNKNOWN]
    return match(y, x, weight=len(y) + 1 + (y < num_known).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Confusion:
    """How many images of each true class each cluster holds, matched ones on the diagonal."""

    classes: Int[np.ndarray, " classes"]
    """True classes: the matched ones in their order, then the others."""
    clusters: Int[np.ndarray, " clusters"]
    """The cluster of each matched class, then the others."""
    count: Int[np.ndarray, "classes clusters"]
    num_matched: int


def confusion(
    truth: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"], mapping: Mapping[int, int]
) -> Confusion:
    """Count the images behind an accuracy.

    Args:
        truth: True classes.
        predicted: Predicted classes.
        mapping: The class of each cluster, by `novel_match` or `joint_match`.
    """
    y, x = truth[truth != UNKNOWN], predicted[truth != UNKNOWN]
    common = set(x[right(y, x, mapping)].tolist())
    matched = sorted(common, key=mapping.__getitem__)
    classes, clusters = _led_by([mapping[c] for c in matched], y), _led_by(matched, x)
    count = np.zeros((len(classes), len(clusters)), dtype=np.int64)
    for row, number in zip(count, classes, strict=True):
        row[:] = np.bincount(x[y == number], minlength=x.max() + 1)[clusters]
    return Confusion(classes, clusters, count, len(matched))


def _led_by(first: list[int], numbers: Labels) -> Int[np.ndarray, " numbers"]:
    """Return all numbers there are: the first ones in their order, then the others, ascending."""
    return np.array(first + sorted(set(numbers.tolist()) - set(first)), dtype=np.int64)


def _parts(
    name: str,
    truth: Labels,
    predicted: Labels,
    num_known: int,
    matched: Callable[[Labels, Labels, int], dict[int, int]],
    protocol: str,
    seed: int,
) -> list[Score]:
    """Score all images, the known and the novel ones, under the match of all."""
    y, x = truth[truth != UNKNOWN], predicted[truth != UNKNOWN]
    parts = {"all": y != UNKNOWN, "known": y < num_known, "novel": y >= num_known}

    def score(part: str) -> Score:
        def accuracy(rows: Labels) -> float:
            correct = right(y[rows], x[rows], matched(y[rows], x[rows], num_known))
            chosen = parts[part][rows]
            return float(correct[chosen].sum() / max(chosen.sum(), 1))  # a draw may have none

        return _score(f"{name} accuracy, {part}", accuracy, len(y), protocol, seed=seed)

    return [score(part) for part, chosen in parts.items() if chosen.any()]


def _score(
    name: str,
    statistic: Callable[[Labels], float],
    n: int,
    protocol: str,
    *,
    seed: int,
    least: float = 0.0,
) -> Score:
    low, high = bootstrap(statistic, n, seed=seed, bounds=(least, 1.0))
    return Score(name, statistic(np.arange(n)), low, high, protocol)


def _counted(truth: Labels, kept: Bool[np.ndarray, " n"], images: str) -> str:
    """Say how many images are scored, and how many left out."""
    unknown = np.count_nonzero(truth == UNKNOWN)
    known = np.count_nonzero(~kept) - unknown
    reasons = {"without a true class": unknown, "of known classes": known}
    left_out = " and ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    return f"{np.count_nonzero(kept)} {images}" + (left_out and f" ({left_out} left out)")
