"""Metrics of a classification on held-out images, beside its baselines."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from nearkin.classification.data import LabeledData
from nearkin.classification.probes import Trained
from nearkin.classifier.calibration import EPSILON, calibration_error
from nearkin.classifier.classifier import Classifier, Predictions
from nearkin.classifier.reference import outlier_auroc
from nearkin.evaluation.baselines import PIXEL_BANK, TITLES, pixel_features
from nearkin.evaluation.metrics import predict
from nearkin.metrics.intervals import balanced_interval, positive_interval
from nearkin.metrics.metric import Metric, Protocol, share, with_interval
from nearkin.metrics.probe import train_probe
from nearkin.pace import ProgressCallback

MAJORITY: Final = "majority class"
NEIGHBORS: Final = "kNN, frozen features"
LINEAR: Final = "linear probe, frozen features"


def measure(
    classifier: Classifier, predictions: Predictions, trained: Trained, data: LabeledData
) -> list[Metric]:
    """Measure a classifier on the labeled images that were held out, and while it was chosen."""
    metrics = []
    truth = data.images.labels[data.test_rows]
    if len(truth):
        probability, groups = (
            predictions.probability[data.test_rows],
            data.images.groups[data.test_rows],
        )
        metrics += scores(probability.argmax(axis=1), truth, groups)
        metrics += probability_scores(classifier, probability, truth, groups)
        metrics += _outlier_scores(predictions, data)
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


def calibrated(
    classifier: Classifier, probability: Float[np.ndarray, "n classes"]
) -> Float[np.ndarray, "n classes"]:
    """Return probabilities as the classifier's calibration corrects them, if it has one."""
    calibration = classifier.calibration
    return probability if calibration is None else calibration.apply(probability)


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


def _outlier_scores(predictions: Predictions, data: LabeledData) -> list[Metric]:
    """Return how well test images of classes that were not learned are told from the others."""
    distance, truth = predictions.distance, data.images.labels[data.test_rows]
    unseen = truth >= data.num_classes
    if unseen.all() or not unseen.any():
        return []
    value = outlier_auroc(distance[data.test_rows], unseen)
    protocol: Protocol = {
        "method": "AUROC of the distance to the images learned from",
        "outliers": int(unseen.sum()),
        "of": "test images",
    }
    return [Metric("outliers, AUROC", value, None, None, len(truth), None, protocol)]


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


def baselines(
    data: LabeledData,
    features: Float[Tensor, "images dim"],
    *,
    linear: bool,
    seed: int,
    workers: int,
    on_progress: ProgressCallback,
) -> dict[str, list[Metric]]:
    """Measure what a classifier stands beside, on the same images with the same labels.

    `features` are those of all images by the encoder as it was given; a linear probe on them is a
    baseline if it is not the classifier itself.
    """
    train, test, labels = data.train_rows, data.test_rows, data.images.labels
    if not len(test):
        return {}

    def probe(x: Float[Tensor, "images dim"]) -> Int64[np.ndarray, " test"]:
        fitted = train_probe(x, data.train_labels, seed=seed, groups=data.images.groups)
        return fitted.predict(x[torch.from_numpy(test)])

    bank, queries = (features[torch.from_numpy(rows)] for rows in (train, test))
    predicted = {LINEAR: probe(features)} if linear else {}
    predicted[NEIGHBORS] = predict(bank, labels[train], queries)
    if len(data.images) <= PIXEL_BANK:
        predicted[TITLES["pixels"]] = probe(_pixels(data, workers, on_progress))
    predicted[MAJORITY] = np.full(len(test), np.bincount(labels[train]).argmax())
    truth, groups = labels[test], data.images.groups[test]
    return {name: scores(each, truth, groups) for name, each in predicted.items()}


def _pixels(
    data: LabeledData, workers: int, on_progress: ProgressCallback
) -> Float[Tensor, "images dim"]:
    """Return raw pixels of all images, less the mean of the training images."""
    train = data.train_rows
    rest = np.setdiff1d(np.arange(len(data.images)), train)
    parts = [data.images.subset(rows) for rows in (train, rest) if len(rows)]
    pixels = torch.cat(pixel_features(parts, workers, on_progress))
    return pixels[np.argsort(np.concatenate([train, rest]))]
