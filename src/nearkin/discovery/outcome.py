"""What a discovery found, its scores beside the baselines, and its files."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.config import DiscoverConfig
from nearkin.data.copies import copy_to, file_names
from nearkin.data.sheets import class_sheet
from nearkin.discovery.assignments import (
    CLUSTER_COLUMNS,
    COLUMNS,
    Assignments,
    Cluster,
    assign,
    cluster_table,
    describe_clusters,
    typical,
)
from nearkin.discovery.classifier import (
    Calibration,
    Classifier,
    Clustering,
    Predictions,
    all_class_names,
    fit_calibration,
    frozen_copy,
    head_clustering,
    heads_of,
    kmeans_clustering,
)
from nearkin.discovery.data import DiscoveryData, DiscoveryTask
from nearkin.discovery.findings import Finding, late_findings
from nearkin.discovery.pipeline import DiscoveryState, TrainedMethods
from nearkin.discovery.scores import (
    Confusion,
    Protocol,
    Score,
    confusion,
    joint_match,
    novel_match,
    score,
)
from nearkin.discovery.trials import MODE_METHOD, TUNED, Trial, mean_accuracy
from nearkin.evaluation.encoder import write_encoder
from nearkin.measures.intervals import wilson
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.tables import read_numbers, write_csv
from nearkin.types import UNKNOWN
from nearkin.version import __version__

OURS: Final = "nearkin"
"""The name of the result among the baselines."""
TRAIN: Final = "unlabeled training images", "train"
HELD_OUT: Final = "held-out images", "held out"
"""Which images are scored, in protocols and behind the names of scores."""
SILHOUETTE_IMAGES: Final = 2000
CORE: Final = 24
BORDER: Final = 12
RANDOM: Final = 12
"""Images shown of each class."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything that is known after the last training."""

    folder: RunFolder
    config: DiscoverConfig
    data: str
    state: DiscoveryState
    predictions: Predictions
    calibration: Calibration | None
    result: Clustering
    other_seeds: list[Clustering]
    baselines: Mapping[str, Clustering]
    findings: list[Finding]

    @property
    def dataset(self) -> DiscoveryData:
        """All images."""
        return self.state.dataset

    @property
    def task(self) -> DiscoveryTask:
        """The images that were learned from."""
        return self.state.task

    @property
    def rows(self) -> Int64[np.ndarray, " unlabeled"]:
        """The rows of the assignments among all images."""
        return np.flatnonzero(self.predictions.label == UNKNOWN)

    def assignments(self) -> Assignments:
        """Assign all images that came without a label."""
        return assign(self.predictions, calibration=self.calibration)

    def clusters(self, assignments: Assignments) -> list[Cluster]:
        """Describe the classes of these images, and novel classes that stayed empty."""
        others = [self._labels(clustering)[self.rows] for clustering in self.other_seeds]
        return describe_clusters(assignments, others)

    def images_of(self, assignments: Assignments, number: int) -> dict[str, np.ndarray]:
        """Return the rows of images that are shown of a class, by the reason they are shown."""
        members = typical(assignments, number)
        least_sure = members[np.argsort(assignments.margin[members], kind="stable")]
        shuffled = np.random.default_rng([self.config.seed, number]).permutation(members)
        groups = {
            "medoid": members[:1],
            "core": members[:CORE],
            "border": least_sure[:BORDER],
            "random": shuffled[:RANDOM],
        }
        return {name: self.rows[group] for name, group in groups.items()}

    def scores(self) -> dict[str, list[Score]]:
        """Score the result and every baseline.

        Known classes are scored on held-out labels, all classes only where there is a truth.
        """
        clusterings = {OURS: self.result, **self.baselines}
        return {
            name: self._known_scores(clustering) + self._truth_scores(clustering)
            for name, clustering in clusterings.items()
        }

    def _labels(self, clustering: Clustering) -> Int64[np.ndarray, " images"]:
        """Return the classes that unlabeled images are put in."""
        return clustering.novel if self.config.mode == "ncd" else clustering.joint

    def _known_scores(self, clustering: Clustering) -> list[Score]:
        rows = self.dataset.parts.test_rows
        rows = rows[self.dataset.label[rows] != UNKNOWN]
        if not len(rows):
            return []
        correct = int((clustering.joint[rows] == self.dataset.label[rows]).sum())
        low, high = wilson(correct, len(rows))
        protocol = f"{len(rows)} held-out labeled images, all classes possible; Wilson interval"
        return [Score("known classes, held out", correct / len(rows), low, high, protocol)]

    def _truth_scores(self, clustering: Clustering) -> list[Score]:
        truth, test = self.dataset.truth, self.dataset.parts.test_rows
        if truth is None:
            return []
        train, num_known, seed = self.task.unlabeled, self.task.num_known, self.config.seed
        scored: list[tuple[Protocol, tuple[str, str], np.ndarray, np.ndarray]] = [
            ("GCD", TRAIN, train, clustering.joint),
            ("GCD", HELD_OUT, test, clustering.joint),
        ]
        if self.config.mode == "ncd":
            scored = [
                ("task-aware", TRAIN, train, clustering.novel),
                ("task-aware", HELD_OUT, test, clustering.novel),
                ("task-agnostic", HELD_OUT, test, clustering.joint),
            ]
        return [
            each._replace(name=f"{each.name}, {where}")
            for protocol, (images, where), rows, found in scored
            for each in score(
                protocol, truth[rows], found[rows], num_known=num_known, images=images, seed=seed
            )
        ]

    def confusion(self) -> Confusion | None:
        """Count true classes against those of the result, over unlabeled training images."""
        rows, num_known = self.task.unlabeled, self.task.num_known
        if self.dataset.truth is None or not (self.dataset.truth[rows] != UNKNOWN).any():
            return None
        truth, found = self.dataset.truth[rows], self._labels(self.result)[rows]
        match = novel_match if self.config.mode == "ncd" else joint_match
        return confusion(truth, found, match(truth, found, num_known))

    def agreement(self) -> dict[str, float]:
        """Return the adjusted Rand index between the result and each baseline."""
        from sklearn.metrics import adjusted_rand_score

        rows = self.task.unlabeled
        ours = self._labels(self.result)[rows]
        return {
            name: float(adjusted_rand_score(ours, self._labels(clustering)[rows]))
            for name, clustering in self.baselines.items()
        }


def build_outcome(
    state: DiscoveryState,
    trained: TrainedMethods,
    config: DiscoverConfig,
    folder: RunFolder,
    data: str,
    pixels: Float[Tensor, "images _"] | None,
) -> Outcome:
    """Classify all images by the first seed, write its encoder and classifier, and compare it.

    Args:
        state: What the stages stood on.
        trained: What they trained.
        config: Settings.
        folder: The run folder.
        data: The data, as files name it.
        pixels: Raw pixels of all images, to cluster as a floor.
    """
    dataset, task, encoder = state.dataset, state.task, state.encoder
    method = trained.methods[0]
    cached, layer = encoder.features(method)
    classifier = Classifier(
        layer=frozen_copy(layer),
        heads=frozen_copy(heads_of(method)),
        classes=all_class_names(dataset.classes, task.num_novel),
        num_known=task.num_known,
        disjoint=config.mode == "ncd",
        calibration=calibrate(state.trials, state.tuned),
        details={
            "augment": state.base.augment,
            "num_views": config.num_views,
            "seed": state.base.seed,
        },
    )
    network = state.pretrained.backbone if encoder is state.frozen else method.backbone
    write_encoder(folder.encoder, network, state.pretrained.details)
    classifier.write(folder.classifier)
    predictions = classifier.predict(cached, tuple(dataset.images.names), dataset.label)
    clusterings = [head_clustering(encoder, each, task.num_known) for each in trained.methods]
    center, seed = state.frozen.cached.center, state.base.seed
    baselines = {"k-means": kmeans_clustering(center, task, seed)}
    if pixels is not None:
        baselines["k-means, pixels"] = kmeans_clustering(pixels, task, seed)
    for name, baseline in trained.baselines.items():
        baselines[name] = head_clustering(encoder, baseline, task.num_known)
    findings = late_findings(
        predictions,
        mode=config.mode,
        positive_rate=positive_rate(folder) if config.mode == "ncd" else None,
        silhouettes=silhouettes(center, predictions, task),
    )
    return Outcome(
        folder=folder,
        config=config,
        data=data,
        state=state,
        predictions=predictions,
        calibration=classifier.calibration,
        result=clusterings[0],
        other_seeds=clusterings[1:],
        baselines=baselines,
        findings=state.findings + findings,
    )


def positive_rate(folder: RunFolder) -> float:
    """Return the mean positive rate of the last epoch of NCL."""
    rows = read_numbers(folder.stage(f"{MODE_METHOD['ncd']}-0").metrics)
    last = rows[-1]["epoch"]
    return fmean(row["positive_rate"] for row in rows if row["epoch"] > last - 1)


def calibrate(trials: Sequence[Trial], value: float) -> Calibration | None:
    """Fit the calibration to the trials of one value, if there are any.

    Hidden known classes stand in for novel ones, whose labels nobody has.
    """
    chosen = [trial for trial in trials if trial.value == value]
    if not chosen:
        return None
    return fit_calibration(
        np.concatenate([trial.probability for trial in chosen]),
        np.concatenate([trial.correct for trial in chosen]),
    )


def silhouettes(
    before: Float[Tensor, "images _"], predictions: Predictions, task: DiscoveryTask
) -> tuple[float, float]:
    """Return silhouettes of k-means of unlabeled images, before and after learning from labels."""
    from sklearn.metrics import silhouette_score

    rows = task.unlabeled[:: len(task.unlabeled) // SILHOUETTE_IMAGES + 1]
    after = torch.from_numpy(predictions.features)

    def score(features: Float[Tensor, "images _"]) -> float:
        x = compact(features[torch.from_numpy(rows)])
        no_labels = np.full(len(x), UNKNOWN)
        cluster = constrained_kmeans(x, no_labels, task.num_novel, seed=0, starts=4).cluster
        return float(silhouette_score(x, cluster)) if len(np.unique(cluster)) > 1 else 0.0

    return score(before), score(after)


def write_tables(
    outcome: Outcome, assignments: Assignments, clusters: list[Cluster], log: Logger
) -> None:
    """Write assignments.csv, clusters.csv, a sheet per class and, if requested, copies."""
    folder, images = outcome.folder, outcome.dataset.images
    write_csv(folder.assignments, COLUMNS, assignments.table())
    write_csv(folder.clusters, CLUSTER_COLUMNS, cluster_table(clusters, assignments))
    folder.classes.mkdir(exist_ok=True)
    names = file_names([cluster.name for cluster in clusters])
    for cluster, name in zip(clusters, names, strict=True):
        if cluster.size:
            groups = outcome.images_of(assignments, cluster.number)
            class_sheet(images, groups, folder.classes / f"{name}.png")
    if outcome.config.copy_to:
        classes = [assignments.classes[number] for number in assignments.cluster]
        destination = Path(outcome.config.copy_to)
        count = copy_to(destination, images, outcome.rows, classes, data=[outcome.data])
        log.info(f"copied {count} images to {destination}")


def summary(outcome: Outcome, clusters: list[Cluster]) -> dict[str, Any]:
    """Return all numbers as plain values."""
    state, config, calibration = outcome.state, outcome.config, outcome.calibration
    values = sorted({trial.value for trial in state.trials})
    return {
        "command": "discover",
        "mode": config.mode,
        "data": outcome.data,
        "known": list(outcome.dataset.classes),
        "novel": outcome.task.num_novel,
        "labeled": int((outcome.dataset.label != UNKNOWN).sum()),
        "unlabeled": len(outcome.rows),
        "held_out": len(outcome.dataset.parts.test_rows),
        "number": None if state.estimate is None else asdict(state.estimate),
        TUNED[config.mode]: state.tuned,
        "trials": {f"{value:g}": mean_accuracy(state.trials, value) for value in values},
        "calibration": None if calibration is None else asdict(calibration),
        "scores": {
            name: [score._asdict() for score in scores]
            for name, scores in outcome.scores().items()
        },
        "agreement": outcome.agreement(),
        "clusters": [asdict(cluster) for cluster in clusters],
        "findings": [asdict(finding) for finding in outcome.findings],
        "nearkin": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        "seed": config.seed,
    }
