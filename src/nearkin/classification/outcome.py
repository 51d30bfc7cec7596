"""What a classification learned: predictions, metrics beside baselines, and labels to check."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from nearkin.classification.data import LabeledData
from nearkin.classification.frozen import Trained
from nearkin.config import ClassifyConfig
from nearkin.data.notes import plain
from nearkin.discovery.assignments import (
    Assignments,
    assign,
    reference_of,
    typical,
)
from nearkin.discovery.classifier import (
    BINS,
    EPSILON,
    Classifier,
    Predictions,
    Reference,
    calibration_error,
    fit_temperature,
)
from nearkin.discovery.features import CachedFeatures, ViewSettings
from nearkin.evaluation.baselines import PIXEL_BANK, TITLES, pixel_features
from nearkin.evaluation.metrics import predict
from nearkin.metrics.intervals import balanced_interval, positive_interval
from nearkin.metrics.metric import Difference, Metric, difference, share, with_interval
from nearkin.metrics.probe import train_probe
from nearkin.pace import ProgressCallback
from nearkin.run.folder import RunFolder

OURS: Final = "classifier"  # The result among the baselines
MAJORITY: Final = "majority class"
NEIGHBORS: Final = "kNN, frozen features"
LINEAR: Final = "linear probe, frozen features"
TYPICAL: Final = 24
UNSURE: Final = 12
DOUBTS: Final = 100  # Labels to check, at most
SURE: Final = 0.5  # Probability of another class from which a label is to be checked


class ClassFigures(NamedTuple):
    """A class, and how many of its held-out images are right."""

    name: str
    train: int  # Training images
    test: int  # Test images
    correct: int  # Of these, predicted as the class
    predicted: int  # Test images that are predicted as the class
    recall: Metric | None  # Share of its test images that are right; None without any
    precision: Metric | None  # Share of those predicted as the class that are of it


class Doubt(NamedTuple):
    """A label that the fits without the image contradict."""

    path: str
    label: str
    predicted: str
    score: float  # Calibrated probability of the predicted class


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything that is known after training."""

    folder: RunFolder
    config: ClassifyConfig
    data: str
    dataset: LabeledData
    trained: Trained
    classifier: Classifier
    features: Float[Tensor, "images dim"]  # Of all images, by the encoder in the run folder
    predictions: Predictions  # Of all images; only those learned from have a label here
    assignments: Assignments  # Of all images that were not learned from
    metrics: Mapping[str, list[Metric]]  # Of the classifier, `OURS`, and of each baseline

    @property
    def test_rows(self) -> Int64[np.ndarray, " test"]:
        """The labeled images that were held out."""
        return self.dataset.test_rows

    @cached_property
    def figures(self) -> list[ClassFigures]:
        """What is known of each class, those that only test images have included."""
        images, train, test = self.dataset.images, self.dataset.train_rows, self.test_rows
        truth, predicted = images.labels[test], self.predictions.cluster[test]
        right, groups = truth == predicted, images.groups[test]

        def of(name: str, rows: Bool[np.ndarray, " test"]) -> Metric | None:
            protocol = {"method": name, "of": "test images"}
            return share(name, right[rows], protocol, groups=groups[rows]) if rows.any() else None

        return [
            ClassFigures(
                name,
                int((images.labels[train] == number).sum()),
                int((truth == number).sum()),
                int((right & (truth == number)).sum()),
                int((predicted == number).sum()),
                of("recall", truth == number),
                of("precision", predicted == number),
            )
            for number, name in enumerate(images.classes)
        ]

    @cached_property
    def doubts(self) -> list[Doubt]:
        """Training labels that fits without the image contradict, the surest first."""
        validated = self.trained.validated
        if not len(validated.rows):
            return []
        probability = softmax(validated.logits)
        if self.classifier.calibration is not None:
            probability = self.classifier.calibration.apply(probability)
        predicted, score = probability.argmax(axis=1), probability.max(axis=1)
        wrong = np.flatnonzero((predicted != validated.target) & (score >= SURE))
        images, classes = self.dataset.images, self.dataset.classes
        return [
            Doubt(
                images.names[validated.rows[row]],
                classes[validated.target[row]],
                classes[predicted[row]],
                float(score[row]),
            )
            for row in wrong[np.argsort(-score[wrong], kind="stable")][:DOUBTS]
        ]

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """How the classifier differs from each baseline, on the same test images."""
        accuracy = {
            name: next((each for each in column if each.name == "accuracy"), None)
            for name, column in self.metrics.items()
        }
        own = accuracy.pop(OURS, None)
        return {name: difference(own, other) for name, other in accuracy.items() if own and other}

    def images_of(self, number: int) -> dict[str, np.ndarray]:
        """Return the rows of the assignments that are shown of a class, by why they are."""
        members = typical(self.assignments, number)
        least_sure = members[np.argsort(self.assignments.margin[members], kind="stable")]
        return {"core": members[:TYPICAL], "border": least_sure[:UNSURE]}

    def reliability(self) -> list[tuple[float, float, int]]:
        """Return mean score, accuracy and number of test images, in up to ten equal bins."""
        truth = self.dataset.images.labels[self.test_rows]
        score, correct = self._scored(truth)
        order = np.array_split(score.argsort(kind="stable"), min(BINS, max(1, len(score) // 5)))
        return [
            (float(score[part].mean()), float(correct[part].mean()), len(part))
            for part in order
            if len(part)
        ]

    def _scored(
        self, truth: Int64[np.ndarray, " test"]
    ) -> tuple[Float[np.ndarray, " test"], Bool[np.ndarray, " test"]]:
        probability = calibrated(self.classifier, self.predictions.probability[self.test_rows])
        return probability.max(axis=1), probability.argmax(axis=1) == truth

    def summary(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        calibration, reference = self.classifier.calibration, self.classifier.reference
        flags = self.assignments.flag
        return {
            "command": "classify",
            "data": self.data,
            "encoder": self.config.from_run,
            "train_layers": self.config.train_layers,
            "chosen": dict(self.trained.chosen),
            "protocol": self.trained.protocol,
            "classes": [dict(zip(each._fields[:5], each, strict=False)) for each in self.figures],
            "sizes": {
                "train": len(self.dataset.train_rows),
                "test": len(self.test_rows),
                "unlabeled": self.dataset.num_unlabeled,
            },
            "metrics": {
                table: {metric.name: metric.to_dict() for metric in column}
                for table, column in self.metrics.items()
            },
            "differences": {name: asdict(each) for name, each in self.differences.items()},
            "calibration": None if calibration is None else asdict(calibration),
            "min_similarity": None if reference is None else reference.min_similarity,
            "labels_to_check": [doubt._asdict() for doubt in self.doubts],
            "flags": {flag: flags.count(flag) for flag in sorted(set(flags)) if flag},
            "notes": plain(self.dataset.images.notes),
        }


def softmax(logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    """Return probabilities of logits."""
    from scipy.special import softmax as scipy_softmax

    return np.asarray(scipy_softmax(logits, axis=1))


def calibrated(
    classifier: Classifier, probability: Float[np.ndarray, "n classes"]
) -> Float[np.ndarray, "n classes"]:
    """Return probabilities as the classifier's calibration corrects them, if it has one."""
    calibration = classifier.calibration
    return probability if calibration is None else calibration.apply(probability)


def build_classifier(
    trained: Trained,
    features: Float[Tensor, "images dim"],
    data: LabeledData,
    config: ClassifyConfig,
    *,
    reference: bool = True,
) -> Classifier:
    """Return the classifier, calibrated on training images while they were held out.

    `features` are those it takes, by which it knows what the classes are like if `reference`.
    """
    validated, calibration = trained.validated, None
    if len(validated.rows):
        groups = data.images.groups[validated.rows]
        calibration = fit_temperature(softmax(validated.logits), validated.target, groups)
    return Classifier(
        layer=nn.Identity(),
        heads=trained.head.eval().requires_grad_(False),
        classes=data.classes,
        num_known=data.num_classes,
        disjoint=False,
        calibration=calibration,
        drawn=ViewSettings("ncl", num_views=0, seed=config.seed),
        kind="classification",
        pooling=trained.pooling,
        reference=_reference(features, data) if reference else None,
        digest=trained.encoder.digest,
    )


def _reference(features: Float[Tensor, "images dim"], data: LabeledData) -> Reference:
    rows = data.train_rows
    learned = features[torch.from_numpy(rows)].numpy()
    return reference_of(learned, data.train_labels[rows], data.num_classes)


def predictions_of(
    classifier: Classifier, features: Float[Tensor, "images dim"], data: LabeledData
) -> tuple[Predictions, Assignments]:
    """Classify all images, and describe those that were not learned from."""
    cached = CachedFeatures(features, features.new_zeros((0, *features.shape)))
    predictions = classifier.predict(cached, tuple(data.images.names), data.train_labels)
    return predictions, assign(
        predictions, calibration=classifier.calibration, known_means=classifier.known_means
    )


# ---- metrics ----


def measure(
    classifier: Classifier, predictions: Predictions, trained: Trained, data: LabeledData
) -> list[Metric]:
    """Measure a classifier on the labeled images that were held out, and while it was chosen."""
    metrics = []
    truth = data.images.labels[data.test_rows]
    if len(truth):
        probability, groups = predictions.probability[data.test_rows], _test_groups(data)
        metrics += scores(probability.argmax(axis=1), truth, groups)
        metrics += probability_scores(classifier, probability, truth, groups)
    validated = trained.validated
    if len(validated.rows):
        protocol = {
            "method": "each image held out from the fits that predict it; the choice was made on "
            "them, so it is somewhat too high",
            "of": "training images",
        }
        groups = data.images.groups[validated.rows]
        name = "held-out training accuracy"
        metrics.append(share(name, validated.correct, protocol, groups=groups))
    return metrics


def _test_groups(data: LabeledData) -> Int64[np.ndarray, " test"]:
    return np.asarray(data.images.groups[data.test_rows])


def scores(
    predicted: Int64[np.ndarray, " n"],
    truth: Int64[np.ndarray, " n"],
    groups: Int64[np.ndarray, " n"],
) -> list[Metric]:
    """Return accuracy and balanced accuracy, with intervals."""
    protocol = {"method": "labels decided nothing", "of": "test images"}
    value, interval = balanced_interval(predicted == truth, truth, groups)
    return [
        share("accuracy", predicted == truth, protocol, groups=groups),
        with_interval(
            "balanced accuracy",
            value,
            interval,
            {"method": "mean recall", "classes": len(np.unique(truth)), "of": "test images"},
            kind="Wilson",
            n=len(truth),
            groups=groups,
        ),
    ]


def probability_scores(
    classifier: Classifier,
    probability: Float[np.ndarray, "n classes"],
    truth: Int64[np.ndarray, " n"],
    groups: Int64[np.ndarray, " n"],
) -> list[Metric]:
    """Return log-loss and calibration error, with and without the temperature."""
    shares = np.bincount(truth) / len(truth)
    chance = float(-np.log(shares[truth]).mean())
    versions = {"calibrated": calibrated(classifier, probability)}
    if classifier.calibration is not None:
        versions["uncalibrated"] = probability
    metrics = []
    for name, each in versions.items():
        score, correct = each.max(axis=1), each.argmax(axis=1) == truth
        loss = -np.log(of_truth(each, truth).clip(min=EPSILON))
        metrics.append(
            with_interval(
                f"log-loss, {name}",
                float(loss.mean()),
                positive_interval(loss, groups),
                {"method": "mean -log p of the true class, in nats", "of": "test images"},
                kind="Student's of the logarithm",
                n=len(loss),
                groups=groups,
                chosen={"that of the shares of the classes alone": round(chance, 3)},
            )
        )
        perfect = float(np.mean([calibration_error(score, drawn) for drawn in _drawn(score)]))
        metrics.append(
            Metric(
                f"calibration error, {name}",
                calibration_error(score, correct),
                None,
                None,
                len(score),
                None,
                {"method": "expected calibration error, ten equal bins", "of": "test images"},
                {"that of a perfectly calibrated classifier with these scores": round(perfect, 3)},
            )
        )
    return metrics


def of_truth(
    probability: Float[np.ndarray, "n classes"], truth: Int64[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Return the probability of the true classes; 0 of one that was not learned."""
    padded = np.pad(probability, ((0, 0), (0, 1)))
    column = np.minimum(truth, probability.shape[1])
    return np.asarray(padded[np.arange(len(truth)), column])


def _drawn(score: Float[np.ndarray, " n"]) -> list[Bool[np.ndarray, " n"]]:
    """Draw which images are right where each score is exactly the chance of that."""
    generator = np.random.default_rng(0)
    return [generator.random(len(score)) < score for _ in range(100)]


@dataclass(frozen=True, eq=False)
class Baselines:
    """What the classifier stands beside, on the same images with the same labels."""

    data: LabeledData
    features: Float[Tensor, "images dim"]  # Of all images, by the encoder as it was given
    config: ClassifyConfig
    workers: int
    on_progress: ProgressCallback

    def metrics(self) -> dict[str, list[Metric]]:
        """Measure each baseline; none if nothing is held out."""
        truth = self.data.images.labels[self.data.test_rows]
        if not len(truth):
            return {}
        return {
            name: scores(predicted(), truth, _test_groups(self.data))
            for name, predicted in self._baselines().items()
        }

    def _baselines(self) -> dict[str, Callable[[], Int64[np.ndarray, " test"]]]:
        baselines = {
            LINEAR: lambda: self._linear(self.features),
            NEIGHBORS: self._neighbors,
            TITLES["pixels"]: self._pixels,
            MAJORITY: self._majority,
        }
        if self.config.train_layers == "linear":
            del baselines[LINEAR]
        if len(self.data.images) > PIXEL_BANK:
            del baselines[TITLES["pixels"]]
        return baselines

    def _linear(self, features: Float[Tensor, "images dim"]) -> Int64[np.ndarray, " test"]:
        data = self.data
        probe = train_probe(
            features, data.train_labels, seed=self.config.seed, groups=data.images.groups
        )
        return probe.predict(features[torch.from_numpy(data.test_rows)])

    def _neighbors(self) -> Int64[np.ndarray, " test"]:
        train, test = self.data.train_rows, self.data.test_rows
        bank, queries = (self.features[torch.from_numpy(rows)] for rows in (train, test))
        return predict(bank, self.data.images.labels[train], queries)

    def _pixels(self) -> Int64[np.ndarray, " test"]:
        images, train = self.data.images, self.data.train_rows
        rest = np.setdiff1d(np.arange(len(images)), train)
        parts = [images.subset(rows) for rows in (train, rest) if len(rows)]
        pixels = torch.cat(pixel_features(parts, self.workers, self.on_progress))
        return self._linear(pixels[np.argsort(np.concatenate([train, rest]))])

    def _majority(self) -> Int64[np.ndarray, " test"]:
        most = np.bincount(self.data.images.labels[self.data.train_rows]).argmax()
        return np.full(len(self.data.test_rows), most)
