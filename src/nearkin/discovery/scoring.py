"""What a discovery and its baselines are worth: against a truth, or without one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from nearkin.discovery.arms import Arm
from nearkin.discovery.material import Material
from nearkin.discovery.scores import (
    Confusion,
    Score,
    confusion,
    gcd,
    joint_match,
    novel_match,
    task_agnostic,
    task_aware,
)
from nearkin.discovery.task import Task
from nearkin.discovery.trials import Mode
from nearkin.measures.intervals import wilson
from nearkin.types import UNKNOWN

LEARNED, HELD_OUT = "unlabeled training pictures", "held-out pictures"


@dataclass(frozen=True, eq=False)
class Scoring:
    """The pictures that are scored, and their truth."""

    material: Material
    task: Task
    mode: Mode
    seed: int

    def of(self, arm: Arm) -> list[Score]:
        """All scores of an arm; without a truth, what held-out labels of known classes say."""
        known = self._known(arm)
        return known if self.material.truth is None else known + self._truth(arm)

    def confusion(self, arm: Arm) -> Confusion | None:
        """True classes against the classes found, of unlabeled training pictures."""
        if self.material.truth is None:
            return None
        rows, known = self.task.unlabeled, self.task.num_known
        truth, found = self.material.truth[rows], self.found(arm)[rows]
        if not (truth != UNKNOWN).any():
            return None
        matched = novel_match if self.mode == "ncd" else joint_match
        return confusion(truth, found, matched(truth, found, known))

    def found(self, arm: Arm) -> Int64[np.ndarray, " images"]:
        """The classes that unlabeled pictures are put in."""
        return arm.novel if self.mode == "ncd" else arm.joint

    def agreement(self, arms: Mapping[str, Arm], ours: Arm) -> dict[str, float]:
        """How alike each arm's classes are to ours: the adjusted Rand index, 1 if they are."""
        from sklearn.metrics import adjusted_rand_score

        rows = self.task.unlabeled
        mine = self.found(ours)[rows]
        return {
            name: float(adjusted_rand_score(mine, self.found(arm)[rows]))
            for name, arm in arms.items()
        }

    def _known(self, arm: Arm) -> list[Score]:
        rows = self.material.parts.test_rows
        rows = rows[self.material.label[rows] != UNKNOWN]
        if not len(rows):
            return []
        right = int((arm.joint[rows] == self.material.label[rows]).sum())
        low, high = wilson(right, len(rows))
        protocol = f"{len(rows)} held-out labeled pictures, all classes possible; Wilson interval"
        return [("known classes, held out", right / len(rows), low, high, protocol)]

    def _truth(self, arm: Arm) -> list[Score]:
        assert self.material.truth is not None
        truth, test, rows = self.material.truth, self.material.parts.test_rows, self.task.unlabeled
        few = dict(num_known=self.task.num_known, seed=self.seed)
        if self.mode == "gcd":
            parts = {LEARNED: rows, HELD_OUT: test}
            return [
                score
                for pictures, part in parts.items()
                for score in _named(
                    pictures, gcd(truth[part], arm.joint[part], pictures=pictures, **few)
                )
            ]
        aware = {
            pictures: task_aware(truth[part], arm.novel[part], pictures=pictures, **few)
            for pictures, part in {LEARNED: rows, HELD_OUT: test}.items()
        }
        agnostic = task_agnostic(truth[test], arm.joint[test], pictures=HELD_OUT, **few)
        found = [score for pictures, scores in aware.items() for score in _named(pictures, scores)]
        return found + _named(HELD_OUT, agnostic)


def _named(pictures: str, scores: list[Score]) -> list[Score]:
    """Scores whose names say of which pictures they are."""
    where = "held out" if pictures == HELD_OUT else "train"
    return [
        (f"{name}, {where}", value, low, high, protocol)
        for name, value, low, high, protocol in scores
    ]
