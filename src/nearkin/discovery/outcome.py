"""What a discovery found, beside the baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.config import DiscoverConfig
from nearkin.discovery.assignments import (
    Assignments,
    Cluster,
    assign,
    describe_clusters,
    reference_of,
    typical,
)
from nearkin.discovery.classifier import (
    Calibration,
    Classifier,
    Clustering,
    Predictions,
    Reference,
    all_class_names,
    fit_calibration,
    frozen_copy,
    head_clustering,
    heads_of,
    kmeans_clustering,
)
from nearkin.discovery.data import DiscoveryData, DiscoveryTask, Mode
from nearkin.discovery.features import FinetunedEncoder, ViewSettings
from nearkin.discovery.findings import Finding, late_findings
from nearkin.discovery.number import mean_silhouette
from nearkin.discovery.pipeline import DiscoveryState, Pipeline, TrainedMethods
from nearkin.discovery.scores import Protocol, score
from nearkin.discovery.trials import Candidate, Trial
from nearkin.encoders.encoder import Encoder, write_encoder
from nearkin.evaluation.baselines import PIXEL_BANK, pixel_features
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.metrics.metric import Metric, share
from nearkin.run.folder import RunFolder, data_name
from nearkin.tables import read_numbers
from nearkin.types import UNKNOWN

OURS: Final = "nearkin"  # The name of the result among the baselines
IMAGES: Final = {"train": "unlabeled training images", "held out": "held-out images"}
SCORED: Final[Mapping[Mode, Sequence[tuple[Protocol, str]]]] = {
    "gcd": (("GCD", "train"), ("GCD", "held out")),
    "ncd": (("task-aware", "train"), ("task-aware", "held out"), ("task-agnostic", "held out")),
}
"""By which protocol a mode is scored on which images."""
SILHOUETTE_IMAGES: Final = 2000
CORE: Final = 24
BORDER: Final = 12
RANDOM: Final = 12  # Images shown of each class


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything that is known after the last training."""

    folder: RunFolder
    config: DiscoverConfig
    data: str
    state: DiscoveryState
    classifier: Classifier
    assignments: Assignments  # Of all images that came without a label
    clusters: list[Cluster]  # The classes of these images, and novel classes that stayed empty
    clusterings: Mapping[str, Clustering]  # Of the result, `OURS`, and of every baseline
    findings: list[Finding]

    @property
    def dataset(self) -> DiscoveryData:
        """All images."""
        return self.state.dataset

    @property
    def task(self) -> DiscoveryTask:
        """The images that were learned from."""
        return self.state.task

    def images_of(self, number: int) -> dict[str, np.ndarray]:
        """Return the rows of images that are shown of a class, by the reason they are shown."""
        members = typical(self.assignments, number)
        least_sure = members[np.argsort(self.assignments.margin[members], kind="stable")]
        shuffled = np.random.default_rng([self.config.seed, number]).permutation(members)
        groups = {
            "medoid": members[:1],
            "core": members[:CORE],
            "border": least_sure[:BORDER],
            "random": shuffled[:RANDOM],
        }
        return {name: self.assignments.rows[group] for name, group in groups.items()}

    @cached_property
    def scores(self) -> dict[str, list[Metric]]:
        """Scores of the result and of every baseline.

        Known classes are scored on held-out labels, all classes only where there is a truth.
        """
        return {
            name: self._known_scores(clustering) + self._truth_scores(clustering)
            for name, clustering in self.clusterings.items()
        }

    @cached_property
    def unlike(self) -> Metric | None:
        """The share of held-out images that are flagged as unlike; None if none is held out."""
        rows, flagged = self.dataset.parts.test_rows, self.assignments.predictions.unlike
        if flagged is None or not len(rows):
            return None
        protocol = {"method": "flagged as unlike every class", "of": "held-out images"}
        groups = self.dataset.images.groups[rows]
        return share("flagged as unlike, held out", flagged[rows], protocol, groups=groups)

    def _known_scores(self, clustering: Clustering) -> list[Metric]:
        rows = self.dataset.parts.test_rows
        rows = rows[self.dataset.label[rows] != UNKNOWN]
        if not len(rows):
            return []
        correct = clustering.joint[rows] == self.dataset.label[rows]
        protocol = {
            "method": "known classes: all classes possible",
            "of": "held-out labeled images",
        }
        groups = self.dataset.images.groups[rows]
        return [share("known classes, held out", correct, protocol, groups=groups)]

    def _truth_scores(self, clustering: Clustering) -> list[Metric]:
        truth, test = self.dataset.truth, self.dataset.parts.test_rows
        if truth is None:
            return []
        rows = {"train": self.task.unlabeled, "held out": test}
        return [
            replace(each, name=f"{each.name}, {where}")
            for protocol, where in SCORED[self.config.mode]
            for each in score(
                protocol,
                truth[rows[where]],
                (clustering.novel if protocol == "task-aware" else clustering.joint)[rows[where]],
                num_known=self.task.num_known,
                images=IMAGES[where],
                groups=self.dataset.images.groups[rows[where]],
                seed=self.config.seed,
            )
        ]

    @cached_property
    def agreement(self) -> dict[str, float]:
        """The adjusted Rand index between the result and each baseline."""
        from sklearn.metrics import adjusted_rand_score

        rows, mode = self.task.unlabeled, self.config.mode
        predicted = {name: each.of(mode)[rows] for name, each in self.clusterings.items()}
        ours = predicted.pop(OURS)
        return {name: float(adjusted_rand_score(ours, each)) for name, each in predicted.items()}


def build_outcome(pipeline: Pipeline, state: DiscoveryState, trained: TrainedMethods) -> Outcome:
    """Classify all images by the first seed, write its encoder and classifier, and compare it."""
    config, folder = state.config, pipeline.folder
    dataset, task, encoder = state.dataset, state.task, state.encoder
    method = trained.methods[0]
    cached, layer = encoder.features(method, with_views=True)
    pretrained = state.pretrained
    network = (
        encoder.parts(method)[0] if isinstance(encoder, FinetunedEncoder) else pretrained.backbone
    )
    classifier = Classifier(
        layer=frozen_copy(layer),
        heads=frozen_copy(heads_of(method)),
        classes=all_class_names(dataset.classes, task.num_novel),
        num_known=task.num_known,
        disjoint=config.mode == "ncd",
        calibration=calibrate(trained.calibration, state.chosen),
        drawn=ViewSettings(state.base.augment, config.num_views, state.base.seed),
        digest=Encoder(network, pretrained.preprocessing, pretrained.details).digest,
    )
    write_encoder(folder.encoder, network, pretrained.details, pretrained.preprocessing)
    predictions = classifier.predict(cached, tuple(dataset.images.names), dataset.label)
    reference = learned_reference(cached.center, predictions.cluster, task)
    classifier = replace(classifier, reference=reference)
    classifier.write(folder.classifier)
    learned = np.isin(np.arange(len(task.label)), task.rows)
    unlike = reference.unlike(cached.center)
    predictions = replace(predictions, learned=learned, unlike=unlike)
    result, *other_seeds = [head_clustering(encoder, m, task.num_known) for m in trained.methods]
    assignments = assign(predictions, calibration=classifier.calibration)
    others = [clustering.of(config.mode)[assignments.rows] for clustering in other_seeds]
    center, seed = state.frozen.cached.center, state.base.seed
    clusterings = {OURS: result, "k-means": kmeans_clustering(center, task, seed)}
    if len(dataset.images) <= PIXEL_BANK:
        pixels = pixel_features([dataset.images], int(state.base.workers))[0]
        clusterings["k-means, pixels"] = kmeans_clustering(pixels, task, seed)
    for name, baseline in trained.baselines.items():
        clusterings[name] = head_clustering(encoder, baseline, task.num_known)
    findings = late_findings(
        predictions,
        mode=config.mode,
        positive_rate=positive_rate(folder) if state.chosen.method == "ncl" else None,
        silhouettes=silhouettes(center, predictions, task),
    )
    return Outcome(
        folder=folder,
        config=config,
        data=data_name(pipeline.data),
        state=state,
        classifier=classifier,
        assignments=assignments,
        clusters=describe_clusters(assignments, others),
        clusterings=clusterings,
        findings=state.findings + findings,
    )


def learned_reference(
    features: Float[Tensor, "images _"],
    cluster: Int64[np.ndarray, " images"],
    task: DiscoveryTask,
) -> Reference:
    """Return what the encoder's features of the images of each class are like.

    Only images that were learned from count, in the class of their label or in the one, `cluster`,
    that they were assigned to.
    """
    own = np.where(task.label == UNKNOWN, cluster, task.label)[task.rows]
    learned = features[torch.from_numpy(task.rows)].numpy()
    return reference_of(learned, own, task.num_known + task.num_novel)


def positive_rate(folder: RunFolder) -> float:
    """Return the mean positive rate of the last epoch of NCL."""
    rows = read_numbers(folder.stage("ncl-0").metrics)
    last = rows[-1]["epoch"]
    return fmean(row["positive_rate"] for row in rows if row["epoch"] > last - 1)


def calibrate(trials: Sequence[Trial], candidate: Candidate) -> Calibration | None:
    """Fit the calibration to the trials of one candidate, if there are any.

    Hidden known classes stand in for novel ones, whose labels nobody has.
    """
    chosen = [trial for trial in trials if trial.candidate == candidate]
    if not chosen:
        return None
    return fit_calibration(
        np.concatenate([trial.probability for trial in chosen]),
        np.concatenate([trial.correct for trial in chosen]),
    )


def silhouettes(
    before: Float[Tensor, "images _"], predictions: Predictions, task: DiscoveryTask
) -> tuple[float, float]:
    """Return silhouettes of k-means of unlabeled images, before and after learning from labels.

    In as many clusters as there are novel classes; without any, as there are known ones.
    """
    rows = task.unlabeled[:: len(task.unlabeled) // SILHOUETTE_IMAGES + 1]

    def score(features: Float[Tensor, "images _"]) -> float:
        x = compact(features[torch.from_numpy(rows)])
        no_labels = np.full(len(x), UNKNOWN)
        cluster = constrained_kmeans(
            x, no_labels, task.num_novel or task.num_known, seed=0, n_init=4
        ).cluster
        return mean_silhouette(x, cluster)

    return score(before), score(torch.from_numpy(predictions.features))
