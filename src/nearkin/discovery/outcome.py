"""What a discovery found, beside the baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from nearkin.classifier.assignments import Assignments, assign
from nearkin.classifier.calibration import Calibration, fit_calibration
from nearkin.classifier.classifier import (
    Classifier,
    all_class_names,
    class_probability,
)
from nearkin.classifier.features import ViewSettings
from nearkin.classifier.reference import reference_of
from nearkin.config import DiscoverConfig
from nearkin.discovery.clusters import (
    Alternative,
    Cluster,
    describe_alternative,
    describe_clusters,
    label_first,
)
from nearkin.discovery.data import DiscoveryData
from nearkin.discovery.features import (
    NUM_VIEWS,
    DiscoveryEncoder,
    FinetunedEncoder,
    for_inference,
    top_features,
)
from nearkin.discovery.findings import Finding, late_findings
from nearkin.discovery.pipeline import DiscoveryState
from nearkin.discovery.scores import Protocol, Scored, mode_match
from nearkin.discovery.task import DiscoveryTask, Mode
from nearkin.discovery.trials import Trial
from nearkin.encoders.encoder import write_encoder
from nearkin.evaluation.baselines import PIXEL_BANK, pixel_features
from nearkin.method import Method
from nearkin.metrics.clusters import right
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.metrics.metric import Metric, share
from nearkin.run.opening import OpenRun
from nearkin.types import UNLABELED

OURS: Final = "nearkin"  # The name of the result among the baselines
BASELINE: Final[Mapping[Mode, str]] = {"gcd": "semi-supervised k-means", "ncd": "k-means"}
"""Of the encoder's features. In `ncd` no label has a part in what it says of novel classes."""
IMAGES: Final = {"train": "unlabeled training images", "held out": "held-out images"}
SCORED: Final[Mapping[Mode, Sequence[tuple[Protocol, str]]]] = {
    "gcd": (("GCD", "train"), ("GCD", "held out")),
    "ncd": (("task-aware", "train"), ("task-aware", "held out"), ("task-agnostic", "held out")),
}
"""By which protocol a mode is scored on which images."""
FAR: Final = (
    "farther from the labeled images than 95 % of those of held-out classes, or from all images "
    "learned from than 99 % of these from one another"
)
"""What flags an image as an outlier."""


@dataclass(frozen=True, eq=False)
class Clustering:
    """The classes that one approach finds, for all images."""

    joint: Int64[np.ndarray, " images"]  # Among all classes, known and novel
    novel: Int64[np.ndarray, " images"]
    """Among the novel classes, numbered as in `joint`; `joint` where there is no novel class."""

    def of(self, task: DiscoveryTask) -> Int64[np.ndarray, " images"]:
        """Return the classes that a task lets unlabeled images be in."""
        return self.novel if task.disjoint else self.joint


def head_clustering(
    encoder: DiscoveryEncoder,
    method: Method[Any],
    task: DiscoveryTask,
    excluded: Bool[np.ndarray, "images classes"] | None = None,
) -> Clustering:
    """Return the most probable classes by a method's heads.

    `excluded` are classes that images are known not to have, which `joint` leaves out.
    """
    features = top_features(encoder, method)
    heads = for_inference(method.get_submodule("heads"))
    with torch.inference_mode():
        joint, novel = (
            class_probability(heads, features, impossible).argmax(dim=1).numpy()
            for impossible in (excluded, task.only_novel if task.num_novel else None)
        )
    return Clustering(joint, novel)


def kmeans_clustering(
    features: Float[Tensor, "images dim"],
    task: DiscoveryTask,
    seed: int,
    excluded: Bool[np.ndarray, "images classes"] | None = None,
) -> Clustering:
    """Cluster the images to learn from by k-means; others go to the nearest center.

    `joint` clusters all of them, with labeled images fixed in their class (semi-supervised
    k-means, Vaze et al. 2022, section 3.2), but without the classes that are `excluded` and their
    images. `novel` is the nearest of its novel centers or, if unlabeled images are disjoint from
    the known classes, by k-means of these alone.
    """
    from sklearn.metrics import pairwise_distances_argmin

    x = compact(features).astype(np.float64)
    classes = np.arange(task.num_classes)
    if excluded is not None:
        classes = classes[~excluded.any(axis=0)]
    rows = task.rows[np.isin(task.label[task.rows], [UNLABELED, *classes])]
    number = np.searchsorted(classes, task.label[rows])
    label = np.where(task.label[rows] == UNLABELED, UNLABELED, number)
    joint = constrained_kmeans(x[rows], label, len(classes), seed=seed)
    nearest = classes[pairwise_distances_argmin(x, joint.centers)]
    if not task.num_novel:
        return Clustering(nearest, nearest)
    centers = joint.centers[-task.num_novel :]
    if task.disjoint:
        no_labels = np.full(len(task.unlabeled), UNLABELED)
        rows = x[task.unlabeled]
        centers = constrained_kmeans(rows, no_labels, task.num_novel, seed=seed).centers
    return Clustering(nearest, task.num_known + pairwise_distances_argmin(x, centers))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything that is known after the last training."""

    run: OpenRun[DiscoverConfig]
    data: str
    state: DiscoveryState
    classifier: Classifier
    assignments: Assignments  # Of all images that came without a label
    clusters: list[Cluster]  # The classes of these images, and novel classes that stayed empty
    clusterings: Mapping[str, Clustering]  # Of the result, `OURS`, and of every baseline
    by_number: Mapping[int, Sequence[Clustering]]
    """By each seed, for each number of novel classes that was trained with."""
    findings: list[Finding]
    digest: str  # Of the encoder of the features that the heads take

    @property
    def dataset(self) -> DiscoveryData:
        """All images."""
        return self.state.dataset

    @property
    def task(self) -> DiscoveryTask:
        """The images that were learned from."""
        return self.state.task

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
    def alternatives(self) -> list[Alternative]:
        """What was found with each number of novel classes; nothing if there was one only."""
        if len(self.by_number) < 2:
            return []
        rows = self.assignments.rows
        features = self.state.stages.encoder.cached.center[torch.from_numpy(rows)].numpy()
        return [
            describe_alternative(
                features,
                [seed.of(self.task)[rows] for seed in seeds],
                num_known=self.task.num_known,
                num_novel=number,
                known=next(iter(self._known_scores(seeds[0])), None),
            )
            for number, seeds in self.by_number.items()
        ]

    @cached_property
    def outliers(self) -> Metric | None:
        """The share of held-out images that are flagged as outliers; None if none is held out."""
        rows = self.dataset.parts.test_rows
        if not len(rows):
            return None
        flagged = self.assignments.predictions.outlier[rows]
        protocol = {"method": FAR, "of": "held-out images"}
        groups = self.dataset.images.groups[rows]
        return share("flagged as outliers, held out", flagged, protocol, groups=groups)

    @cached_property
    def to_label(self) -> Int[np.ndarray, " rows"]:
        """The rows of the assignments whose labels would teach most, most first."""
        return label_first(self.assignments, self.task.rows)

    def _scored(self, rows: Int[np.ndarray, " rows"], images: str) -> Scored:
        return Scored(images, self.dataset.images.groups[rows], self.run.config.seed)

    @property
    def _parts(self) -> dict[str, Int[np.ndarray, " scored"]]:
        """The images that are scored by a truth, by what their scores are called."""
        return {"train": self.task.unlabeled, "held out": self.dataset.parts.test_rows}

    def _known_scores(self, clustering: Clustering) -> list[Metric]:
        rows = self.dataset.parts.test_rows
        rows = rows[self.dataset.label[rows] != UNLABELED]
        if not len(rows):
            return []
        correct = clustering.joint[rows] == self.dataset.label[rows]
        how = "known classes: all classes possible"
        protocol = {"method": how, "of": "held-out labeled images"}
        groups = self.dataset.images.groups[rows]
        return [share("known classes, held out", correct, protocol, groups=groups)]

    def _truth_scores(self, clustering: Clustering) -> list[Metric]:
        truth = self.dataset.truth
        if truth is None:
            return []
        scores = list[Metric]()
        for protocol, where in SCORED[self.run.config.mode]:
            rows = self._parts[where]
            found = clustering.novel if protocol == "task-aware" else clustering.joint
            scored, num_known = self._scored(rows, IMAGES[where]), self.task.num_known
            of_protocol = scored.score(protocol, truth[rows], found[rows], num_known)
            scores += [replace(each, name=f"{each.name}, {where}") for each in of_protocol]
        return scores

    @cached_property
    def score_quality(self) -> list[Metric]:
        """How well the scores of images of novel classes tell which are right, by their truth."""
        truth, rows = self.dataset.truth, self.assignments.rows
        if truth is None:
            return []
        clusters, qualities = self.clusterings[OURS].of(self.task), list[Metric]()
        for where, part in self._parts.items():
            matched = mode_match(truth[part], clusters[part], self.task)
            own = np.isin(rows, part) & (truth[rows] >= self.task.num_known)
            correct = right(truth[rows[own]], self.assignments.cluster[own], matched)
            scored = self._scored(rows[own], f"{IMAGES[where]} of novel classes")
            of_part = scored.quality(self.assignments.score[own], correct)
            qualities += [replace(each, name=f"{each.name}, {where}") for each in of_part]
        return qualities


def build_outcome(
    data: str,
    state: DiscoveryState,
    methods: Mapping[int, Sequence[Method[Any]]],
    trials: Sequence[Trial],
) -> Outcome:
    """Classify all images by the first seed, write its encoder and classifier, and compare it.

    `methods` were trained by the stages, one per seed for each number of novel classes. `trials`
    calibrate the scores of the result.
    """
    folder, dataset, task, stages = state.run.folder, state.dataset, state.task, state.stages
    network, first = state.pretrained, methods[task.num_novel][0]
    if isinstance(stages.encoder, FinetunedEncoder):
        network = stages.encoder.trained(first)
    write_encoder(folder.encoder, network.backbone, network.details, network.preprocessing)
    calibration = calibrate(trials, dataset.images.groups)
    classifier, assignments = _classified(state, first, network.digest, calibration)
    classifier.write(folder.classifier)
    by_number = dict[int, list[Clustering]]()
    for number, seeds in methods.items():
        own = replace(task, num_novel=number)
        excluded = _excluded(dataset, own)
        by_number[number] = [
            head_clustering(stages.encoder, method, own, excluded) for method in seeds
        ]
    result, *other_seeds = by_number[task.num_novel]
    others = [clustering.of(task)[assignments.rows] for clustering in other_seeds]
    clusterings, name = {OURS: result}, BASELINE[task.mode]
    excluded, seed = _excluded(dataset, task), stages.base.seed
    cluster = partial(kmeans_clustering, task=task, seed=seed, excluded=excluded)
    clusterings[name] = cluster(stages.encoder.cached.center)
    if len(dataset.images) <= PIXEL_BANK:
        pixels = pixel_features([dataset.images], int(stages.base.workers))[0]
        clusterings[f"{name}, pixels"] = cluster(pixels)
    late = late_findings(assignments.predictions, disjoint=task.disjoint)
    return Outcome(
        run=state.run,
        data=data,
        state=state,
        classifier=classifier,
        assignments=assignments,
        clusters=describe_clusters(assignments, classifier.top_reference, others),
        clusterings=clusterings,
        by_number=by_number,
        findings=[*state.findings, *late],
        digest=classifier.below_heads(network).digest,
    )


def _excluded(
    dataset: DiscoveryData, task: DiscoveryTask
) -> Bool[np.ndarray, "images classes"] | None:
    """Return the classes that clusterings leave out of `joint`.

    Where all known ones are excluded, scores with all classes possible are wanted, too.
    """
    return None if task.disjoint else dataset.excluded(task.num_classes)


def _classified(
    state: DiscoveryState, method: Method[Any], digest: str, calibration: Calibration | None
) -> tuple[Classifier, Assignments]:
    """Return the classifier of a trained method, and all images in its classes."""
    dataset, task = state.dataset, state.task
    cached, layer = state.stages.encoder.features(method, with_views=True)
    layer, heads = map(for_inference, (layer, method.get_submodule("heads")))
    classes = all_class_names(dataset.classes, task.num_novel, dataset.names)
    # Only these are known to be of no known class; new images may be of any.
    excluded = dataset.excluded(len(classes))
    with torch.inference_mode():
        features = layer(cached.center)
        found = class_probability(heads, features, excluded).numpy().argmax(axis=1)
    labeled = task.label != UNLABELED
    own, rows = np.where(labeled, task.label, found), task.rows
    learned = cached.center[torch.from_numpy(rows)]
    classifier = Classifier(
        layer=layer,
        heads=heads,
        classes=classes,
        num_known=task.num_known,
        calibration=calibration,
        drawn=ViewSettings(state.stages.base.augment, NUM_VIEWS, state.stages.base.seed),
        reference=reference_of(learned, own[rows], labeled[rows], len(classes)),
        digest=digest,
    )
    names = tuple(dataset.images.names)
    predictions = classifier.predict(cached, names, dataset.label, excluded=excluded)
    return classifier, assign(predictions, classifier.top_reference, calibration)


def calibrate(trials: Sequence[Trial], groups: Int[np.ndarray, " images"]) -> Calibration | None:
    """Fit the calibration to the trials of the result's candidate, if there are any.

    Held-out known classes stand in for novel ones, whose labels nobody has. `groups` has the group
    of each image, near-duplicates among them.
    """
    if not trials:
        return None
    probability = np.concatenate([trial.probability for trial in trials])
    correct = np.concatenate([trial.correct for trial in trials])
    # Where a cluster is another class's, it is known only that the image is not of it.
    target = np.where(correct, probability.argmax(axis=1), UNLABELED)
    rows = np.concatenate([trial.rows for trial in trials])
    calibration = fit_calibration(probability, target, groups[rows])
    return replace(calibration, num_images=len(np.unique(rows)))  # several trials may have one
