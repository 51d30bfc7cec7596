"""What a classification learned: predictions, measures beside floors, and labels to check."""

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
from nearkin.encoders.encoder import Encoder, untrained_like
from nearkin.evaluation.embeddings import encode_images
from nearkin.evaluation.evaluate import PIXEL_BANK, TITLES, pixel_features
from nearkin.evaluation.measures import Measure, accuracy, num_neighbors, predict
from nearkin.measures.intervals import bootstrap, wilson
from nearkin.measures.probe import train_validated_probe
from nearkin.pace import ProgressCallback
from nearkin.run.folder import RunFolder

OURS: Final = "classifier"  # The result among the floors
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

    @property
    def recall(self) -> tuple[float, float, float] | None:
        """Share of its test images that are right, with Wilson's interval; None without any."""
        if not self.test:
            return None
        return self.correct / self.test, *wilson(self.correct, self.test)

    @property
    def precision(self) -> tuple[float, float, float] | None:
        """Share of the test images predicted as the class that are of it; None without any."""
        if not self.predicted:
            return None
        return self.correct / self.predicted, *wilson(self.correct, self.predicted)


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
    measures: Mapping[str, list[Measure]]  # Of the classifier, `OURS`, and of each floor

    @property
    def test_rows(self) -> Int64[np.ndarray, " test"]:
        """The labeled images that were held out."""
        return self.dataset.test_rows

    @cached_property
    def figures(self) -> list[ClassFigures]:
        """What is known of each class, those that only test images have included."""
        images, num = self.dataset.images, len(self.dataset.images.classes)
        truth, predicted = images.labels[self.test_rows], self.predictions.cluster[self.test_rows]
        counts = [
            np.bincount(labels, minlength=num)
            for labels in (
                images.labels[self.dataset.train_rows],
                truth,
                truth[truth == predicted],
                predicted,
            )
        ]
        return [
            ClassFigures(name, *(int(count[number]) for count in counts))
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
            "classes": [each._asdict() for each in self.figures],
            "sizes": {
                "train": len(self.dataset.train_rows),
                "test": len(self.test_rows),
                "unlabeled": self.dataset.num_unlabeled,
            },
            "measures": {
                table: {measure.name: measure.to_dict() for measure in column}
                for table, column in self.measures.items()
            },
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


# ---- measures ----


def measure(
    classifier: Classifier,
    predictions: Predictions,
    trained: Trained,
    data: LabeledData,
    seed: int,
) -> list[Measure]:
    """Measure a classifier on the labeled images that were held out, and while it was chosen."""
    measures = []
    truth = data.images.labels[data.test_rows]
    if len(truth):
        probability = predictions.probability[data.test_rows]
        what = f"{len(truth)} test images, whose labels decided nothing"
        measures += scores(probability.argmax(axis=1), truth, what, seed)
        measures += probability_scores(classifier, probability, truth, what, seed)
    validated = trained.validated
    if len(validated.rows):
        protocol = (
            f"{len(validated.rows)} training images, each held out from the fits that predict it; "
            "the choice was made on them, so it is somewhat too high"
        )
        measures.append(accuracy("held-out training accuracy", validated.correct, protocol))
    return measures


def scores(
    predicted: Int64[np.ndarray, " n"], truth: Int64[np.ndarray, " n"], what: str, seed: int
) -> list[Measure]:
    """Return accuracy and balanced accuracy, with intervals."""
    correct = predicted == truth

    def balanced(rows: Int64[np.ndarray, " n"]) -> float:
        total = np.bincount(truth[rows])
        right = np.bincount(truth[rows], weights=correct[rows])
        return float((right[total > 0] / total[total > 0]).mean())

    low, high = bootstrap(balanced, len(truth), seed=seed)
    return [
        accuracy("accuracy", correct, what),
        Measure(
            "balanced accuracy",
            balanced(np.arange(len(truth))),
            low,
            high,
            f"mean recall of {len(np.unique(truth))} classes, {what}; bootstrap interval",
        ),
    ]


def probability_scores(
    classifier: Classifier,
    probability: Float[np.ndarray, "n classes"],
    truth: Int64[np.ndarray, " n"],
    what: str,
    seed: int,
) -> list[Measure]:
    """Return log-loss and calibration error, with and without the temperature."""
    shares = np.bincount(truth) / len(truth)
    chance = float(-np.log(shares[truth]).mean())
    versions = {"calibrated": calibrated(classifier, probability)}
    if classifier.calibration is not None:
        versions["uncalibrated"] = probability
    measures = []
    for name, each in versions.items():
        score, correct = each.max(axis=1), each.argmax(axis=1) == truth
        loss = -np.log(of_truth(each, truth).clip(min=EPSILON))
        low, high = bootstrap(
            lambda rows, loss=loss: float(loss[rows].mean()),  # type: ignore[misc]
            len(truth),
            seed=seed,
            bounds=(0.0, float("inf")),
        )
        protocol = (
            f"mean -log p of the true class, in nats, {what}; the shares of the classes alone "
            f"have {chance:.3f}"
        )
        measures.append(Measure(f"log-loss, {name}", float(loss.mean()), low, high, protocol))
        value = calibration_error(score, correct)
        perfect = float(np.mean([calibration_error(score, d) for d in _drawn(score, seed)]))
        protocol = (
            f"expected calibration error, ten equal bins, {what}; a perfectly calibrated "
            f"classifier with these scores has {perfect:.3f} on so many images"
        )
        measures.append(Measure(f"calibration error, {name}", value, None, None, protocol))
    return measures


def of_truth(
    probability: Float[np.ndarray, "n classes"], truth: Int64[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Return the probability of the true classes; 0 of one that was not learned."""
    padded = np.pad(probability, ((0, 0), (0, 1)))
    column = np.minimum(truth, probability.shape[1])
    return np.asarray(padded[np.arange(len(truth)), column])


def _drawn(score: Float[np.ndarray, " n"], seed: int) -> list[Bool[np.ndarray, " n"]]:
    """Draw which images are right where each score is exactly the chance of that."""
    generator = np.random.default_rng(seed)
    return [generator.random(len(score)) < score for _ in range(100)]


@dataclass(frozen=True, eq=False)
class Floors:
    """What the classifier has to beat, on the same images with the same labels."""

    data: LabeledData
    encoder: Encoder  # As it was given
    features: Float[Tensor, "images dim"]  # Of all images, by that encoder
    config: ClassifyConfig
    device: torch.device
    workers: int
    on_progress: ProgressCallback

    def measures(self) -> dict[str, list[Measure]]:
        """Measure each floor; none if nothing is held out."""
        truth = self.data.images.labels[self.data.test_rows]
        if not len(truth):
            return {}
        what = f"{len(truth)} test images"
        return {
            name: scores(predicted(), truth, what, self.config.seed)
            for name, predicted in self._floors().items()
        }

    def _floors(self) -> dict[str, Callable[[], Int64[np.ndarray, " test"]]]:
        floors = {
            LINEAR: lambda: self._linear(self.features),
            NEIGHBORS: self._neighbors,
            TITLES["untrained"]: self._untrained,
            TITLES["pixels"]: self._pixels,
            MAJORITY: self._majority,
        }
        if self.config.train_layers == "linear":
            del floors[LINEAR]
        if len(self.data.images) > PIXEL_BANK:
            del floors[TITLES["pixels"]]
        return floors

    def _linear(self, features: Float[Tensor, "images dim"]) -> Int64[np.ndarray, " test"]:
        data = self.data
        probe, _ = train_validated_probe(
            features, data.train_labels, seed=self.config.seed, groups=data.images.groups
        )
        return probe.predict(features[torch.from_numpy(data.test_rows)])

    def _neighbors(self) -> Int64[np.ndarray, " test"]:
        train, test = self.data.train_rows, self.data.test_rows
        bank, queries = (self.features[torch.from_numpy(rows)] for rows in (train, test))
        labels = self.data.images.labels[train]
        # With few labels per class, 20 neighbors would be mostly of other classes.
        k = min(num_neighbors(len(train)), int(np.bincount(labels).max()))
        return predict(bank, labels, queries, k=k)

    def _untrained(self) -> Int64[np.ndarray, " test"]:
        encoder = untrained_like(self.encoder, self.config.seed)
        rows = np.union1d(self.data.train_rows, self.data.test_rows)
        embedded = encode_images(
            encoder,
            self.data.images.subset(rows),
            device=self.device,
            workers=self.workers,
            on_progress=self.on_progress,
        )
        features = torch.zeros(len(self.features), embedded.vectors.shape[1])
        features[torch.from_numpy(rows)] = embedded.tensor
        return self._linear(features)

    def _pixels(self) -> Int64[np.ndarray, " test"]:
        return self._linear(pixel_features([self.data.images], self.workers, self.on_progress)[0])

    def _majority(self) -> Int64[np.ndarray, " test"]:
        most = np.bincount(self.data.images.labels[self.data.train_rows]).argmax()
        return np.full(len(self.data.test_rows), most)
