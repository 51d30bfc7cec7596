"""What a discovery and its baselines are worth: against a truth, or without one."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int64

from nearkin.config import DiscoverConfig
from nearkin.data.copies import copy_to, file_names
from nearkin.data.sheets import class_sheet
from nearkin.discovery import assignments as assigned
from nearkin.discovery import clusters as clustered
from nearkin.discovery.assignments import Assignments, assign
from nearkin.discovery.classifier import Calibration, Clustering, Predictions
from nearkin.discovery.clusters import Cluster, describe_clusters, typical
from nearkin.discovery.data import DiscoveryData, DiscoveryTask
from nearkin.discovery.findings import Finding
from nearkin.discovery.number import NumberOfClasses
from nearkin.discovery.pipeline import DiscoveryState
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
from nearkin.discovery.trials import Mode, mean_accuracy
from nearkin.measures.intervals import wilson
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.tables import write_csv
from nearkin.types import UNKNOWN
from nearkin.version import __version__

LEARNED, HELD_OUT = "unlabeled training images", "held-out images"


@dataclass(frozen=True, eq=False)
class Scoring:
    """The images that are scored, and their truth."""

    dataset: DiscoveryData
    task: DiscoveryTask
    mode: Mode
    seed: int

    def of(self, arm: Clustering) -> list[Score]:
        """All scores of an arm; without a truth, what held-out labels of known classes say."""
        known = self._known(arm)
        return known if self.dataset.truth is None else known + self._truth(arm)

    def confusion(self, arm: Clustering) -> Confusion | None:
        """True classes against the classes found, of unlabeled training images."""
        if self.dataset.truth is None:
            return None
        rows, known = self.task.unlabeled, self.task.num_known
        truth, found = self.dataset.truth[rows], self.found(arm)[rows]
        if not (truth != UNKNOWN).any():
            return None
        matched = novel_match if self.mode == "ncd" else joint_match
        return confusion(truth, found, matched(truth, found, known))

    def found(self, arm: Clustering) -> Int64[np.ndarray, " images"]:
        """The classes that unlabeled images are put in."""
        return arm.novel if self.mode == "ncd" else arm.joint

    def agreement(self, arms: Mapping[str, Clustering], ours: Clustering) -> dict[str, float]:
        """How alike each arm's classes are to ours: the adjusted Rand index, 1 if they are."""
        from sklearn.metrics import adjusted_rand_score

        rows = self.task.unlabeled
        mine = self.found(ours)[rows]
        return {
            name: float(adjusted_rand_score(mine, self.found(arm)[rows]))
            for name, arm in arms.items()
        }

    def _known(self, arm: Clustering) -> list[Score]:
        rows = self.dataset.parts.test_rows
        rows = rows[self.dataset.label[rows] != UNKNOWN]
        if not len(rows):
            return []
        right = int((arm.joint[rows] == self.dataset.label[rows]).sum())
        low, high = wilson(right, len(rows))
        protocol = f"{len(rows)} held-out labeled images, all classes possible; Wilson interval"
        return [("known classes, held out", right / len(rows), low, high, protocol)]

    def _truth(self, arm: Clustering) -> list[Score]:
        assert self.dataset.truth is not None
        truth, test, rows = self.dataset.truth, self.dataset.parts.test_rows, self.task.unlabeled
        few = dict(num_known=self.task.num_known, seed=self.seed)
        if self.mode == "gcd":
            parts = {LEARNED: rows, HELD_OUT: test}
            return [
                score
                for images, part in parts.items()
                for score in _named(
                    images, gcd(truth[part], arm.joint[part], images=images, **few)
                )
            ]
        aware = {
            images: task_aware(truth[part], arm.novel[part], images=images, **few)
            for images, part in {LEARNED: rows, HELD_OUT: test}.items()
        }
        agnostic = task_agnostic(truth[test], arm.joint[test], images=HELD_OUT, **few)
        found = [score for images, scores in aware.items() for score in _named(images, scores)]
        return found + _named(HELD_OUT, agnostic)


def _named(images: str, scores: list[Score]) -> list[Score]:
    """Scores whose names say of which images they are."""
    where = "held out" if images == HELD_OUT else "train"
    return [
        (f"{name}, {where}", value, low, high, protocol)
        for name, value, low, high, protocol in scores
    ]


CORE: Final = 24
BORDER: Final = 12
RANDOM: Final = 12
SCORE: Final = ("name", "value", "low", "high", "protocol")
OURS: Final = "nearkin"
"""The name of the result among the baselines."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything that is known once all has been learned."""

    folder: RunFolder
    config: DiscoverConfig
    data: str
    state: DiscoveryState
    predictions: Predictions
    calibration: Calibration | None
    ours: Clustering
    seeds: list[Clustering]
    """The result of the other seeds."""
    baselines: Mapping[str, Clustering]
    findings: list[Finding]

    @property
    def dataset(self) -> DiscoveryData:
        """The images."""
        return self.state.dataset

    @property
    def task(self) -> DiscoveryTask:
        """What was learned from."""
        return self.state.task

    @property
    def estimate(self) -> NumberOfClasses | None:
        """The estimate of the number of novel classes, if it was not given."""
        return self.state.estimate

    @property
    def scoring(self) -> Scoring:
        """What is scored."""
        return Scoring(self.dataset, self.task, self.config.mode, self.config.seed)

    def assignments(self) -> Assignments:
        """Of all images that came without a label."""
        return assign(self.predictions, calibration=self.calibration)

    def clusters(self, assignments: Assignments) -> list[Cluster]:
        """Of all classes that these images were put in, and of novel ones that stayed empty."""
        rows = self.rows
        others = [self.scoring.found(arm)[rows] for arm in self.seeds]
        return describe_clusters(self.predictions, assignments, others)

    @property
    def rows(self) -> np.ndarray:
        """Where the images of the assignments are among all images."""
        return np.flatnonzero(self.predictions.label == UNKNOWN)

    def scores(self) -> dict[str, list[Score]]:
        """Of the result and of every baseline."""
        arms = {OURS: self.ours, **self.baselines}
        return {name: self.scoring.of(arm) for name, arm in arms.items()}

    def groups(self, assignments: Assignments, number: int) -> dict[str, np.ndarray]:
        """What is shown of a class: rows of images, among all, by why they are shown."""
        members = typical(self.predictions, assignments, number)
        unsure = members[np.argsort(assignments.margin[members], kind="stable")]
        chance = np.random.default_rng([self.config.seed, number]).permutation(members)
        shown = {
            "medoid": members[:1],
            "core": members[:CORE],
            "border": unsure[:BORDER],
            "random": chance[:RANDOM],
        }
        return {name: self.rows[chosen] for name, chosen in shown.items()}


def write_tables(
    outcome: Outcome, assignments: Assignments, clusters: list[Cluster], log: Logger
) -> None:
    """assignments.csv, clusters.csv, a sheet per class and, if asked for, copies."""
    folder = outcome.folder
    write_csv(folder.assignments, assigned.COLUMNS, assignments.rows())
    write_csv(folder.clusters, clustered.COLUMNS, clustered.rows(clusters, assignments))
    folder.classes.mkdir(exist_ok=True)
    names = file_names([cluster.name for cluster in clusters])
    for cluster, name in zip(clusters, names, strict=True):
        if cluster.size:
            groups = outcome.groups(assignments, cluster.number)
            class_sheet(outcome.dataset.images, groups, folder.classes / f"{name}.png")
    if outcome.config.copy_to:
        classes = [assignments.classes[number] for number in assignments.cluster]
        written = copy_to(
            folder=Path(outcome.config.copy_to),
            images=outcome.dataset.images,
            rows=outcome.rows,
            classes=classes,
            data=[outcome.data],
        )
        log.line(f"copied {written} images to {outcome.config.copy_to}")


def summary(outcome: Outcome, clusters: list[Cluster]) -> dict[str, Any]:
    """All numbers, as plain values."""
    estimate, calibration = outcome.estimate, outcome.calibration
    strengths = sorted({trial.strength for trial in outcome.state.trials})
    return {
        "command": "discover",
        "mode": outcome.config.mode,
        "data": outcome.data,
        "known": list(outcome.dataset.classes),
        "novel": outcome.task.num_novel,
        "labeled": int((outcome.dataset.label != UNKNOWN).sum()),
        "unlabeled": len(outcome.rows),
        "held_out": len(outcome.dataset.parts.test_rows),
        "number": None if estimate is None else asdict(estimate),
        "strength": outcome.state.strength,
        "trials": {f"{s:g}": mean_accuracy(outcome.state.trials, s) for s in strengths},
        "calibration": None if calibration is None else asdict(calibration),
        "scores": {
            name: [dict(zip(SCORE, each, strict=True)) for each in found]
            for name, found in outcome.scores().items()
        },
        "agreement": outcome.scoring.agreement(outcome.baselines, outcome.ours),
        "clusters": [asdict(cluster) for cluster in clusters],
        "findings": [asdict(finding) for finding in outcome.findings],
        "nearkin": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        "seed": outcome.config.seed,
    }
