"""What a classification learned: the classifier, its predictions, and labels to check."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nearkin.classification.data import LabeledData
from nearkin.classification.metrics import calibrated
from nearkin.classification.probes import Trained
from nearkin.classifier.assignments import Assignments
from nearkin.classifier.calibration import BINS, fit_calibration
from nearkin.classifier.classifier import Classifier, Predictions
from nearkin.classifier.features import UNTOUCHED, CachedFeatures
from nearkin.classifier.reference import reference_of
from nearkin.classifier.report import flag_counts
from nearkin.config import ClassifyConfig
from nearkin.data.notes import plain
from nearkin.metrics.metric import Difference, Metric, difference, share
from nearkin.run.folder import RunFolder

OURS: Final = "classifier"  # The result among the baselines
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

    @cached_property
    def figures(self) -> list[ClassFigures]:
        """What is known of each class, those that only test images have included."""
        images, train, test = self.dataset.images, self.dataset.train_rows, self.dataset.test_rows
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
        probability = calibrated(self.classifier, softmax(validated.logits))
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
            for row in wrong[np.argsort(-score[wrong], kind="stable")]
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

    def reliability(self) -> list[tuple[float, float, int]]:
        """Return mean score, accuracy and number of test images, in up to ten equal bins."""
        rows = self.dataset.test_rows
        truth = self.dataset.images.labels[rows]
        probability = calibrated(self.classifier, self.predictions.probability[rows])
        score, correct = probability.max(axis=1), probability.argmax(axis=1) == truth
        order = np.array_split(score.argsort(kind="stable"), min(BINS, max(1, len(score) // 5)))
        return [
            (float(score[part].mean()), float(correct[part].mean()), len(part))
            for part in order
            if len(part)
        ]

    def summary(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        calibration = self.classifier.calibration
        return {
            "command": "classify",
            "data": self.data,
            "encoder": self.config.encoder,
            "train_layers": self.config.train_layers,
            "chosen": dict(self.trained.chosen),
            "protocol": self.trained.protocol,
            "classes": [dict(zip(each._fields[:5], each, strict=False)) for each in self.figures],
            "sizes": {
                "train": len(self.dataset.train_rows),
                "test": len(self.dataset.test_rows),
                "unlabeled": self.dataset.num_unlabeled,
            },
            "metrics": {
                table: {metric.name: metric.to_dict() for metric in column}
                for table, column in self.metrics.items()
            },
            "differences": {name: asdict(each) for name, each in self.differences.items()},
            "calibration": None if calibration is None else asdict(calibration),
            "labels_to_check": [doubt._asdict() for doubt in self.doubts],
            "flags": flag_counts(self.assignments),
            "notes": plain(self.dataset.images.notes),
        }


def softmax(logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    """Return probabilities of logits."""
    from scipy.special import softmax as scipy_softmax

    return np.asarray(scipy_softmax(logits, axis=1))


def build_classifier(
    trained: Trained, data: LabeledData, features: Float[Tensor, "images dim"]
) -> Classifier:
    """Return the classifier, calibrated on training images while they were held out.

    `features` are those that it takes, of all images.
    """
    validated, calibration = trained.validated, None
    if len(validated.rows):
        groups = data.images.groups[validated.rows]
        calibration = fit_calibration(softmax(validated.logits), validated.target, groups)
    rows = data.train_rows
    learned, labels = features[torch.from_numpy(rows)], data.train_labels[rows]
    return Classifier(
        layer=nn.Identity(),
        heads=trained.head.eval().requires_grad_(False),
        classes=data.classes,
        num_known=data.num_classes,
        calibration=calibration,
        drawn=UNTOUCHED,
        reference=reference_of(learned, labels, np.ones(len(rows), bool), data.num_classes),
        kind="classification",
        pooling=trained.pooling,
        digest=trained.encoder.digest,
    )


def predictions_of(
    classifier: Classifier, features: Float[Tensor, "images dim"], data: LabeledData
) -> Predictions:
    """Classify all images; only those that were learned from have a label in the result."""
    cached = CachedFeatures(features, features.new_zeros((0, *features.shape)))
    return classifier.predict(cached, tuple(data.images.names), data.train_labels)
