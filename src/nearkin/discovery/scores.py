"""Scores of predicted classes against true ones, by the protocols of papers and one of ours.

Clusters have no names, so they are matched with the true classes first. Throughout, `truth` is the
true class of each image or `UNLABELED`, and `predicted` the class it was put in. Classes below
`num_known` are known, the others novel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from nearkin.classifier.calibration import calibration_error
from nearkin.discovery.task import DiscoveryTask
from nearkin.metrics.clusters import RESAMPLES, UNSEEN, agreement, match, right
from nearkin.metrics.intervals import Interval, quantile
from nearkin.metrics.metric import Metric, share, with_interval
from nearkin.metrics.metric import Protocol as Method
from nearkin.report.page.blocks import Confusion
from nearkin.types import UNLABELED

Labels = Int[np.ndarray, " n"]
Certainty = Float[np.ndarray, " n"]
Correct = Bool[np.ndarray, " n"]
Statistic = Callable[[Any, Any], float]
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


@dataclass(frozen=True, eq=False)
class Scored:
    """Images that are scored, each measure with an interval of what other images would have."""

    images: str  # Which these are, such as "unlabeled training images"
    groups: Labels  # Images of one are not independent, and are drawn together
    seed: int  # Of the draws

    def score(
        self, protocol: Protocol, truth: Labels, predicted: Labels, num_known: int
    ) -> list[Metric]:
        """Score predicted classes by a protocol.

        - `task-aware`: images of novel classes, where the classifier rules all known ones out.
          Accuracy, normalized mutual information (arithmetic mean), adjusted Rand index. A novel
          image put in a known class is an error.
        - `task-agnostic`: accuracy of images that could each be of any class. This protocol is
          ours, and stricter than UNO's, which matches all outputs with the classes of each part
          anew.
        - `GCD` (Vaze, Han, Vedaldi, Zisserman. Generalized category discovery. CVPR 2022,
          arXiv:2201.02609): as in the second version of its evaluation (`split_cluster_acc_v2`).
          A match for each part, as in the first version, raises the numbers of both.

        `MATCHED` says how clusters are matched. Intervals are those with the same model and the
        same match. There is a score of all images, of known and of novel classes, as far as there
        are such.
        """
        aware = protocol == "task-aware"
        scored = truth >= num_known if aware else truth != UNLABELED
        y, x, own = truth[scored], predicted[scored], self.groups[scored]
        if not len(y):
            return []
        matched = joint_match if protocol == "GCD" else novel_match
        correct, known = right(y, x, matched(y, x, num_known)), y < num_known
        unknown = int((truth == UNLABELED).sum())
        reasons = {
            "without a true class left out": unknown,
            "of known classes left out": int((~scored).sum()) - unknown,
        }
        left_out = {reason: count for reason, count in reasons.items() if count}
        how: Method = {"method": MATCHED[protocol], **left_out, "of": self.images}
        if aware:
            accuracy = share("task-aware accuracy", correct, how, groups=own)
            return [accuracy, *_agreements(y, x, own, how, self.seed)]
        parts = {"all": np.ones(len(y), bool), "known": known, "novel": ~known}
        return [
            share(f"{protocol} accuracy, {name}", correct[part], how, groups=own[part])
            for name, part in parts.items()
            if part.any()
        ]

    def quality(self, certainty: Certainty, correct: Correct) -> list[Metric]:
        """Measure whether the scores of images, probabilities of their classes, tell who is right.

        `ECE` is the expected calibration error, from 0 (best) to 1; `AUROC` is how often a right
        image has a higher score than a wrong one, where there are both. Each plus and minus its
        bootstrap error.
        """
        from sklearn.metrics import roc_auc_score

        if not len(correct):
            return []
        score, groups = "score of an image: the probability of its class", self.groups
        how: Method = {"method": score, "of": self.images}
        statistics: dict[str, Statistic] = {"ECE": calibration_error}
        if correct.any() and not correct.all():
            statistics["AUROC"] = lambda x, y: float(roc_auc_score(y, x))
        qualities, n = list[Metric](), len(correct)
        for name, statistic in statistics.items():
            value = statistic(certainty, correct)
            half = quantile(groups) * self._bootstrap_error(statistic, certainty, correct)
            if half < ALIKE:  # as all draws are: other images may still differ
                # Of independent images or, for an order of two kinds, of the rarer kind.
                kinds = (groups[correct], groups[~correct]) if name == "AUROC" else (groups,)
                half = UNSEEN / min(len(np.unique(kind)) for kind in kinds)
            interval = Interval(max(0.0, value - half), min(1.0, value + half), None)
            name = f"{name} of the score"
            metric = with_interval(
                name, value, interval, how, kind="bootstrap", n=n, groups=groups
            )
            qualities.append(metric)
        return qualities

    def _bootstrap_error(
        self, statistic: Statistic, certainty: Certainty, correct: Correct
    ) -> float:
        """Return the standard deviation over draws of groups that have images of both kinds."""
        rows, generator = np.arange(len(correct)), np.random.default_rng(self.seed)
        names, member = np.unique(self.groups, return_inverse=True)
        even, values = np.full(len(names), 1 / len(names)), list[float]()
        for _ in range(RESAMPLES):
            drawn = np.repeat(rows, generator.multinomial(len(names), even)[member])
            if correct[drawn].any() == correct.any() and correct[drawn].all() == correct.all():
                values.append(statistic(certainty[drawn], correct[drawn]))
        return float(np.std(values, ddof=1)) if len(values) > 1 else 1.0


def _agreements(
    truth: Labels, predicted: Labels, groups: Labels, how: Method, seed: int
) -> Iterator[Metric]:
    for name, found in agreement(truth, predicted, groups, seed=seed).items():
        name, n = f"task-aware {name}", len(truth)
        yield with_interval(name, *found, how, kind="bootstrap", n=n, groups=groups)


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


def mode_match(truth: Labels, predicted: Labels, task: DiscoveryTask) -> dict[int, int]:
    """Match clusters with classes as the mode of a task does."""
    matched = novel_match if task.disjoint else joint_match
    return matched(truth, predicted, task.num_known)


def confusion(
    truth: Labels,
    predicted: Labels,
    mapping: Mapping[int, int],
    classes: Sequence[str],
    clusters: Sequence[str],
) -> Confusion:
    """Count the images behind an accuracy, matched classes and clusters on the diagonal.

    `mapping` has the class of each matched cluster; a match without a common image is not shown.
    """
    y, x = truth[truth != UNLABELED], predicted[truth != UNLABELED]
    matched = sorted(set(x[right(y, x, mapping)].tolist()), key=mapping.__getitem__)
    rows, row = _led_by([mapping[cluster] for cluster in matched], y, classes)
    columns, column = _led_by(matched, x, clusters)
    return Confusion.of(rows, columns, len(matched), np.stack([row, column], axis=1))


def _led_by(first: list[int], numbers: Labels, names: Sequence[str]) -> tuple[list[str], Labels]:
    """Return the names of all numbers, those of the first ones first, and the place of each."""
    every, place = np.unique(numbers, return_inverse=True)
    order = first + sorted(set(every.tolist()) - set(first))
    rank = np.array([order.index(number) for number in every.tolist()], np.int64)
    return [names[number] for number in order], rank[place]
