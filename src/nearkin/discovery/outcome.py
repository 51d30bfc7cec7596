"""What a discovery leaves: tables, galleries, scores, the page, and copies if asked for."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from nearkin.config import DiscoverConfig
from nearkin.discovery import assignments as assigned
from nearkin.discovery import clusters as clustered
from nearkin.discovery.arms import Arm
from nearkin.discovery.assignments import Assignments, assign
from nearkin.discovery.calibration import Calibration
from nearkin.discovery.clusters import Cluster, describe_clusters, typical
from nearkin.discovery.copies import copy_to, file_names
from nearkin.discovery.findings import Finding
from nearkin.discovery.ground import Ground
from nearkin.discovery.material import Material
from nearkin.discovery.number import NumberOfClasses
from nearkin.discovery.predictions import Predictions
from nearkin.discovery.scores import Score
from nearkin.discovery.scoring import Scoring
from nearkin.discovery.task import Task
from nearkin.discovery.trials import mean_accuracy
from nearkin.report.sheets import class_sheet
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logged
from nearkin.tables import write_csv
from nearkin.types import UNKNOWN
from nearkin.version import __version__

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
    ground: Ground
    predictions: Predictions
    calibration: Calibration | None
    ours: Arm
    seeds: list[Arm]
    """The result of the other seeds."""
    baselines: Mapping[str, Arm]
    findings: list[Finding]

    @property
    def material(self) -> Material:
        """The pictures."""
        return self.ground.material

    @property
    def task(self) -> Task:
        """What was learned from."""
        return self.ground.task

    @property
    def counted(self) -> NumberOfClasses | None:
        """The estimate of the number of novel classes, if it was not given."""
        return self.ground.counted

    @property
    def scoring(self) -> Scoring:
        """What is scored."""
        return Scoring(self.material, self.task, self.config.mode, self.config.seed)

    def assignments(self) -> Assignments:
        """Of all pictures that came without a label."""
        return assign(self.predictions, calibration=self.calibration)

    def clusters(self, assignments: Assignments) -> list[Cluster]:
        """Of all classes that these pictures were put in, and of novel ones that stayed empty."""
        rows = self.rows
        others = [self.scoring.found(arm)[rows] for arm in self.seeds]
        return describe_clusters(self.predictions, assignments, others)

    @property
    def rows(self) -> np.ndarray:
        """Where the pictures of the assignments are among all pictures."""
        return np.flatnonzero(self.predictions.label == UNKNOWN)

    def scores(self) -> dict[str, list[Score]]:
        """Of the result and of every baseline."""
        arms = {OURS: self.ours, **self.baselines}
        return {name: self.scoring.of(arm) for name, arm in arms.items()}

    def groups(self, assignments: Assignments, number: int) -> dict[str, np.ndarray]:
        """What is shown of a class: rows of pictures, among all, by why they are shown."""
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
    outcome: Outcome, assignments: Assignments, clusters: list[Cluster], told: Logged
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
            class_sheet(outcome.material.images, groups, folder.classes / f"{name}.png")
    if outcome.config.copy_to:
        classes = [assignments.classes[number] for number in assignments.cluster]
        written = copy_to(
            folder=Path(outcome.config.copy_to),
            images=outcome.material.images,
            rows=outcome.rows,
            classes=classes,
            data=[outcome.data],
        )
        told.line(f"copied {written} pictures to {outcome.config.copy_to}")


def summary(outcome: Outcome, clusters: list[Cluster]) -> dict[str, Any]:
    """All numbers, as plain values."""
    counted, calibration = outcome.counted, outcome.calibration
    strengths = sorted({trial.strength for trial in outcome.ground.trials})
    return {
        "command": "discover",
        "mode": outcome.config.mode,
        "data": outcome.data,
        "known": list(outcome.material.classes),
        "novel": outcome.task.num_novel,
        "labeled": int((outcome.material.label != UNKNOWN).sum()),
        "unlabeled": len(outcome.rows),
        "held_out": len(outcome.material.parts.test_rows),
        "number": None if counted is None else asdict(counted),
        "strength": outcome.ground.strength,
        "trials": {f"{s:g}": mean_accuracy(outcome.ground.trials, s) for s in strengths},
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
