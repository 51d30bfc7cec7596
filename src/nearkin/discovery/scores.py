"""Scores of predicted classes against true ones, by the protocols of papers and one of ours.

Clusters have no names, so they are matched with the true classes first. Throughout, `truth` is the
true class of each image or `UNLABELED`, and `predicted` the class it was put in. Classes below
`num_known` are known, the others novel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from nearkin.classifier.calibration import calibration_error
from nearkin.metrics.clusters import (
    RESAMPLES,
    UNSEEN,
    adjusted_rand_index,
    agreement,
    match,
    normalized_mutual_information,
    right,
)
from nearkin.metrics.intervals import Groups, Interval, quantile
from nearkin.metrics.metric import Metric, share, with_interval
from nearkin.metrics.metric import Protocol as Method
from nearkin.types import UNLABELED

Labels = Int[np.ndarray, " n"]
Protocol = Literal["task-aware", "task-agnostic", "GCD"]

ALIKE: Final = 1e-9  # Half of an interval that is none: of draws that differ by rounding alone
SURPLUS: Final = "images of surplus clusters are errors"
MATCHED: Final[dict[Protocol, str]] = {
    "task-aware": f"task-aware: novel classes only, one Hungarian match, {SURPLUS}",
    "task-agnostic": "task-agnostic: known classes as they are, "
    f"one Hungarian match of novel ones, {SURPLUS}",
    "GCD": f"GCD, v2: one Hungarian match over all classes, {SURPLUS}",
}
"""How clusters are matched with classes."""


def score(
    protocol: Protocol,
    truth: Labels,
    predicted: Labels,
    *,
    num_known: int,
    images: str,
    groups: Groups = None,
    seed: int = 0,
) -> list[Metric]:
    """Score predicted classes by a protocol.

    - `task-aware`: images of novel classes, where the classifier rules all known ones out.
      Accuracy under one Hungarian match of novel clusters with novel classes, where the images of
      surplus clusters are errors; normalized mutual information (arithmetic mean); adjusted Rand
      index. Images of known classes are left out. A novel one put in a known class is an error.
    - `task-agnostic`: images that could each be of any class. This protocol is ours, and stricter
      than UNO's, which matches all outputs with the classes of each part anew. A known class keeps
      its number: an image of it is right if put in that very class. Novel clusters are matched
      with novel classes by one Hungarian match over the images that are novel and predicted to
      be. So images of known classes in novel clusters are errors, and have no say in the match.
    - `GCD` (Vaze, Han, Vedaldi, Zisserman. Generalized category discovery. CVPR 2022,
      arXiv:2201.02609): one match over all classes, as in the second version of its evaluation
      (`split_cluster_acc_v2`): images of known ("Old") and novel ("New") classes are counted under
      the one match of all. A match for each part, as in the first version, raises both numbers.

    Intervals are those of other images, with the same model and the same match.

    Args:
        protocol: Its name.
        truth: True classes.
        predicted: Predicted classes.
        num_known: Number of known classes.
        images: Which images these are, such as "unlabeled training images".
        groups: The group of each image; None if all are independent.
        seed: Random seed of the bootstrap.

    Returns:
        Task-aware: accuracy, NMI and ARI. Otherwise the accuracies of all images, of known and of
        novel classes. No score of a part without images.
    """
    aware = protocol == "task-aware"
    scored = truth >= num_known if aware else truth != UNLABELED
    y, x = truth[scored], predicted[scored]
    own = None if groups is None else groups[scored]
    if not len(y):
        return []
    matched = joint_match if protocol == "GCD" else novel_match
    correct, known = right(y, x, matched(y, x, num_known)), y < num_known
    how: Method = {"method": MATCHED[protocol], **_left_out(truth, scored), "of": images}
    if aware:
        return [
            share("task-aware accuracy", correct, how, groups=own),
            _agreement("NMI", normalized_mutual_information, y, x, own, how, seed),
            _agreement("ARI", adjusted_rand_index, y, x, own, how, seed),
        ]
    parts = {"all": np.ones(len(y), bool), "known": known, "novel": ~known}
    return [
        share(
            f"{protocol} accuracy, {name}",
            correct[part],
            how,
            groups=None if own is None else own[part],
        )
        for name, part in parts.items()
        if part.any()
    ]


def _agreement(
    name: str,
    statistic: Callable[[Any], float],
    truth: Labels,
    predicted: Labels,
    groups: Groups,
    how: Method,
    seed: int,
) -> Metric:
    value, interval = agreement(statistic, truth, predicted, groups, seed=seed)
    return with_interval(
        f"task-aware {name}", value, interval, how, kind="bootstrap", n=len(truth), groups=groups
    )


def score_quality(
    certainty: Float[np.ndarray, " n"],
    correct: Bool[np.ndarray, " n"],
    *,
    images: str,
    groups: Groups = None,
    seed: int = 0,
) -> list[Metric]:
    """Measure whether the scores of images tell which of them are right.

    Args:
        certainty: The score of each image, the probability of its class.
        correct: Whether this class is right.
        images: Which images these are.
        groups: The group of each image; None if all are independent.
        seed: Random seed of the bootstrap.

    Returns:
        `ECE`, the expected calibration error, from 0 (best) to 1; and `AUROC`, how often a right
        image has a higher score than a wrong one, where there are both. Each plus and minus its
        bootstrap error.
    """
    how: Method = {"method": "score of an image: the probability of its class", "of": images}
    statistics: dict[str, Callable[[Any, Any], float]] = {"ECE": calibration_error}
    if correct.any() and not correct.all():
        statistics["AUROC"] = _auroc
    qualities = list[Metric]()
    for name, statistic in statistics.items() if len(correct) else ():
        value = statistic(certainty, correct)
        half = quantile(groups) * _bootstrap_error(statistic, certainty, correct, groups, seed)
        if half < ALIKE:  # as all draws are: other images may still differ
            half = UNSEEN / _fewest(correct, groups, both=name == "AUROC")
        interval = Interval(max(0.0, value - half), min(1.0, value + half), None)
        title = f"{name} of the score"
        qualities.append(
            with_interval(
                title, value, interval, how, kind="bootstrap", n=len(correct), groups=groups
            )
        )
    return qualities


def _fewest(correct: Bool[np.ndarray, " n"], groups: Groups, *, both: bool) -> int:
    """Count independent images or, where both count, the right or the wrong ones, if fewer."""
    of = np.arange(len(correct)) if groups is None else groups
    kinds = (correct, ~correct) if both else (np.ones(len(correct), bool),)
    return min(len(np.unique(of[kind])) for kind in kinds)


def _auroc(certainty: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> float:
    """Return how often a right image has a higher score than a wrong one."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(correct, certainty))


def _bootstrap_error(
    statistic: Callable[[Any, Any], float],
    certainty: Float[np.ndarray, " n"],
    correct: Bool[np.ndarray, " n"],
    groups: Groups,
    seed: int,
) -> float:
    """Return the standard deviation over draws of images, or of whole groups, of both kinds."""
    rows, generator = np.arange(len(correct)), np.random.default_rng(seed)
    names, member = np.unique(rows if groups is None else groups, return_inverse=True)
    even, values = np.full(len(names), 1 / len(names)), list[float]()
    for _ in range(RESAMPLES):
        drawn = np.repeat(rows, generator.multinomial(len(names), even)[member])
        if correct[drawn].any() == correct.any() and correct[drawn].all() == correct.all():
            values.append(statistic(certainty[drawn], correct[drawn]))
    return float(np.std(values, ddof=1)) if len(values) > 1 else 1.0


def _left_out(truth: Labels, scored: Bool[np.ndarray, " n"]) -> dict[str, int]:
    """Count the images that are not scored, by the reason."""
    unknown = int(np.count_nonzero(truth == UNLABELED))
    reasons = {
        "without a true class left out": unknown,
        "of known classes left out": int(np.count_nonzero(~scored)) - unknown,
    }
    return {reason: count for reason, count in reasons.items() if count}


def novel_match(truth: Labels, predicted: Labels, num_known: int) -> dict[int, int]:
    """Match clusters with classes where known classes keep their numbers: task-agnostic."""
    novel = (truth >= num_known) & (predicted >= num_known)
    return {number: number for number in range(num_known)} | match(truth[novel], predicted[novel])


def joint_match(truth: Labels, predicted: Labels, num_known: int) -> dict[int, int]:
    """Match clusters with classes, all at once: GCD."""
    # Of the matches with most images right, the one with the fewest novel images right: the
    # scores of the parts are then unique, and those of novel classes are not flattering.
    y, x = truth[truth != UNLABELED], predicted[truth != UNLABELED]
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
    y, x = truth[truth != UNLABELED], predicted[truth != UNLABELED]
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
