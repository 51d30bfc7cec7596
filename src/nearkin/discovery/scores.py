"""Scores of predicted classes against true ones, by the protocols of the papers.

Clusters have no names, so they are matched with the true classes first. Throughout, `truth` is the
true class of each image or `UNKNOWN`, and `predicted` the class it was put in. Classes below
`num_known` are known, the others novel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from nearkin.measures.intervals import bootstrap
from nearkin.measures.matching import (
    adjusted_rand_index,
    match,
    normalized_mutual_information,
    right,
)
from nearkin.types import UNKNOWN

Labels = Int[np.ndarray, " n"]
Statistic = Callable[[Labels], float]
Protocol = Literal["task-aware", "task-agnostic", "GCD"]

SURPLUS: Final = "images of surplus clusters are errors, match anew in each draw"
INTERVAL: Final = "interval as if images were independent, model fixed"
MATCHED: Final[dict[Protocol, str]] = {
    "task-aware": "task-aware: novel classes only",
    "task-agnostic": "task-agnostic: known classes as they are, "
    f"one Hungarian match of novel ones, {SURPLUS}",
    "GCD": f"one Hungarian match over all classes, {SURPLUS}",
}
"""How clusters are matched with classes."""


class Score(NamedTuple):
    """A value with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float
    protocol: str


def score(
    protocol: Protocol,
    truth: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
    *,
    num_known: int,
    images: str,
    seed: int = 0,
) -> list[Score]:
    """Score predicted classes by a protocol.

    - `task-aware`: images of novel classes, where the classifier rules all known ones out.
      Accuracy under one Hungarian match of novel clusters with novel classes, where the images of
      surplus clusters are errors; normalized mutual information (arithmetic mean); adjusted Rand
      index. Images of known classes are left out. A novel one put in a known class is an error.
    - `task-agnostic`: images that could each be of any class. A known class keeps its number: an
      image of it is right if put in that very class. Novel clusters are matched with novel
      classes by one Hungarian match over the images that are novel and predicted to be. So images
      of known classes in novel clusters are errors, and have no say in the match.
    - `GCD` (Vaze, Han, Vedaldi, Zisserman. Generalized category discovery. CVPR 2022,
      arXiv:2201.02609): one match over all classes, as in the second version of its evaluation:
      images of known ("Old") and novel ("New") classes are counted under the one match of all. A
      match for each part, as in the first version, raises both numbers.

    Args:
        protocol: Its name.
        truth: True classes.
        predicted: Predicted classes.
        num_known: Number of known classes.
        images: Which images these are, such as "unlabeled training images".
        seed: Random seed of the bootstrap.

    Returns:
        Task-aware: accuracy, NMI and ARI. Otherwise the accuracies of all images, of known and of
        novel classes. No score of a part without images.
    """
    aware = protocol == "task-aware"
    scored = truth >= num_known if aware else truth != UNKNOWN
    y, x = truth[scored], predicted[scored]
    if not len(y):
        return []
    matched = joint_match if protocol == "GCD" else novel_match

    def accuracy(part: Bool[np.ndarray, " m"]) -> Statistic:
        def statistic(rows: Labels) -> float:
            correct = right(y[rows], x[rows], matched(y[rows], x[rows], num_known))
            chosen = part[rows]
            return float(correct[chosen].sum() / max(chosen.sum(), 1))  # a draw may have none

        return statistic

    def adapted(measure: Callable[[Labels, Labels], float]) -> Statistic:
        return lambda rows: measure(y[rows], x[rows])

    every, known = np.ones(len(y), bool), y < num_known
    parts = {"all": every, "known": known, "novel": ~known}
    how = f"{_counted(truth, scored, images)}; {MATCHED[protocol]}"
    if not aware:
        return [
            _score(f"{protocol} accuracy, {name}", accuracy(part), len(y), how, seed)
            for name, part in parts.items()
            if part.any()
        ]
    measures = {
        "accuracy": (accuracy(every), f"one Hungarian match, {SURPLUS}", 0.0),
        "NMI": (adapted(normalized_mutual_information), "arithmetic mean", 0.0),
        "ARI": (adapted(adjusted_rand_index), "adjusted for chance", -0.5),
    }
    return [
        _score(f"{protocol} {name}", statistic, len(y), f"{how}; {meaning}", seed, least)
        for name, (statistic, meaning, least) in measures.items()
    ]


def _score(
    name: str, statistic: Statistic, n: int, how: str, seed: int, least: float = 0.0
) -> Score:
    low, high = bootstrap(statistic, n, seed=seed, bounds=(least, 1.0))
    return Score(name, float(statistic(np.arange(n))), low, high, f"{how}; {INTERVAL}")


def _counted(truth: Labels, scored: Bool[np.ndarray, " n"], images: str) -> str:
    """Say how many images are scored, and how many left out."""
    unknown = np.count_nonzero(truth == UNKNOWN)
    known = np.count_nonzero(~scored) - unknown
    reasons = {"without a true class": unknown, "of known classes": known}
    left_out = " and ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    return f"{np.count_nonzero(scored)} {images}" + (left_out and f" ({left_out} left out)")


def novel_match(truth: Labels, predicted: Labels, num_known: int) -> dict[int, int]:
    """Match clusters with classes where known classes keep their numbers: task-agnostic."""
    novel = (truth >= num_known) & (predicted >= num_known)
    return {number: number for number in range(num_known)} | match(truth[novel], predicted[novel])


def joint_match(truth: Labels, predicted: Labels, num_known: int) -> dict[int, int]:
    """Match clusters with classes, all at once: GCD."""
    # Of the matches with most images right, the one with the fewest novel images right: the
    # scores of the parts are then unique, and those of novel classes are not flattering.
    y, x = truth[truth != UNKNOWN], predicted[truth != UNKNOWN]
    return match(y, x, weight=len(y) + 1 + (y < num_known).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Confusion:
    """How many images of each true class each cluster holds, matched ones on the diagonal."""

    classes: Int[np.ndarray, " classes"]  # The matched ones in their order, then the others
    clusters: Int[np.ndarray, " clusters"]  # The cluster of each matched class, then the others
    count: Int[np.ndarray, "classes clusters"]
    num_matched: int


def confusion(truth: Labels, predicted: Labels, mapping: Mapping[int, int]) -> Confusion:
    """Count the images behind an accuracy, under the classes of clusters by one of the matches."""
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
