"""Metrics of a classification on held-out images, beside its baselines."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from nearkin.classification.data import LabeledData
from nearkin.classification.probes import Trained
from nearkin.classifier.calibration import EPSILON, Calibration, calibrated, calibration_error
from nearkin.classifier.classifier import Classifier, Predictions
from nearkin.config import ClassifyConfig
from nearkin.evaluation.baselines import PIXEL_BANK, TITLES, pixel_features
from nearkin.evaluation.metrics import predict
from nearkin.metrics.intervals import balanced_interval, positive_interval
from nearkin.metrics.metric import Metric, Protocol, share, with_interval
from nearkin.metrics.probe import train_probe
from nearkin.run.opening import OpenRun

HELD_OUT_ACCURACY: Final = "held-out training accuracy"
MAJORITY: Final = "majority class"
NEIGHBORS: Final = "kNN, frozen features"
LINEAR: Final = "linear probe, frozen features"

Features = Float[Tensor, "_ dim"]


def measure(
    classifier: Classifier, predictions: Predictions, trained: Trained, data: LabeledData
) -> list[Metric]:
    """Measure a classifier on the labeled images that were held out, and while it was chosen."""
    metrics, rows = list[Metric](), data.test_rows
    if len(rows):
        truth, groups = data.images.labels[rows], data.images.groups[rows]
        metrics += scores(predictions.cluster[rows], truth, groups)
        probability, calibration = predictions.probability[rows], classifier.calibration
        metrics += _probability_scores(calibration, probability, truth, groups)
        metrics += _outlier_scores(predictions.distance[rows], truth >= data.num_classes)
    validated = trained.validated
    if len(validated.rows):
        method = "each image held out from the fits that predict it"
        if validated.choice.images:
            method += "; the choice was made on them, so it is somewhat too high"
        protocol = {"method": method, "of": "training images"}
        groups = data.images.groups[validated.rows]
        metrics.append(share(HELD_OUT_ACCURACY, validated.correct, protocol, groups=groups))
    return metrics


def scores(
    predicted: Int64[np.ndarray, " n"],
    truth: Int64[np.ndarray, " n"],
    groups: Int64[np.ndarray, " n"],
) -> list[Metric]:
    """Return accuracy and balanced accuracy, with intervals."""
    correct, n, classes = predicted == truth, len(truth), len(np.unique(truth))
    plain: Protocol = {"method": "labels decided nothing", "of": "test images"}
    recall: Protocol = {"method": "mean recall", "classes": classes, "of": "test images"}
    name, found = "balanced accuracy", balanced_interval(correct, truth, groups)
    balanced = with_interval(name, *found, recall, kind="Wilson", n=n, groups=groups)
    return [share("accuracy", correct, plain, groups=groups), balanced]


def _probability_scores(
    calibration: Calibration | None,
    probability: Float[np.ndarray, "n classes"],
    truth: Int64[np.ndarray, " n"],
    groups: Int64[np.ndarray, " n"],
) -> list[Metric]:
    """Return log-loss and calibration error, without the temperature and, if any, with it."""
    shares, num = np.bincount(truth) / len(truth), probability.shape[1]
    chance = float(-np.log(shares[truth]).mean())
    versions = {"uncalibrated": probability}
    if calibration is not None:
        versions = {"calibrated": calibrated(probability, calibration)} | versions
    metrics = []
    for name, p in versions.items():
        score, correct = p.max(axis=1), p.argmax(axis=1) == truth
        own = p[np.arange(len(truth)), truth.clip(max=num - 1)]
        # A class that was not learned has no probability.
        loss = -np.log(np.where(truth < num, own, 0.0).clip(min=EPSILON))
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
        # Of images that are right where each score is exactly the chance of that
        drawn = np.random.default_rng(0)
        right = (drawn.random(len(score)) < score for _ in range(100))
        perfect = float(np.mean([calibration_error(score, each) for each in right]))
        protocol = {"method": "expected calibration error, ten equal bins", "of": "test images"}
        found = {"that of a perfectly calibrated classifier with these scores": round(perfect, 3)}
        error = calibration_error(score, correct)
        name = f"calibration error, {name}"
        metrics.append(Metric(name, error, None, None, len(score), None, protocol, found))
    return metrics


def _outlier_scores(
    distance: Float[np.ndarray, " n"], unseen: Bool[np.ndarray, " n"]
) -> list[Metric]:
    """Return how well test images of classes that were not learned are told from the others."""
    from sklearn.metrics import roc_auc_score

    if unseen.all() or not unseen.any():
        return []
    value = float(roc_auc_score(unseen, distance))
    protocol: Protocol = {
        "method": "AUROC of the distance to the images learned from",
        "outliers": int(unseen.sum()),
        "of": "test images",
    }
    return [Metric("outliers, AUROC", value, None, None, len(unseen), None, protocol)]


def baselines(
    run: OpenRun[ClassifyConfig], trained: Trained, data: LabeledData, features: Features
) -> dict[str, list[Metric]]:
    """Measure what a classifier stands beside, on the same images with the same labels.

    `features` are those of all images by the encoder as it was given; a linear probe on them is a
    baseline if it is not the classifier itself.
    """
    images, train, test = data.images, data.train_rows, data.test_rows
    labels, groups = images.labels, images.groups
    if not len(test):
        return {}

    def probe(bank: Features, queries: Features) -> Int64[np.ndarray, " test"]:
        fitted = train_probe(bank, labels[train], seed=run.config.seed, groups=groups[train])
        return fitted.predict(queries)

    bank, queries = (features[torch.from_numpy(rows)] for rows in (train, test))
    predicted = {} if trained.layers == "linear" else {LINEAR: probe(bank, queries)}
    predicted[NEIGHBORS] = predict(bank, labels[train], queries)
    if len(images) <= PIXEL_BANK:
        parts = [images.subset(rows) for rows in (train, test)]
        pixels = pixel_features(parts, int(run.config.workers), run.log.progress)
        predicted[TITLES["pixels"]] = probe(*pixels)
    predicted[MAJORITY] = np.full(len(test), np.bincount(labels[train]).argmax())
    return {name: scores(each, labels[test], groups[test]) for name, each in predicted.items()}
