"""Accuracy on corrupted images of classifiers that have learned from clean ones."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.data.corruptions import CORRUPTIONS
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measures import Measure, mean_score, predict
from nearkin.evaluation.views import ImageViews
from nearkin.measures.intervals import bootstrap
from nearkin.measures.probe import train_probe

CORRUPTED_IMAGES: Final = 1_000  # Test images, at the most, that are corrupted
SEVERITIES: Final = (1, 3, 5)  # Of the five of the papers

Classifier = Callable[[Tensor], Int[np.ndarray, " n"]]


def robustness(train: Embeddings, views: ImageViews, *, k: int, seed: int) -> list[Measure]:
    """Measure kNN and linear probe on corrupted test images.

    Both have learned from clean training images alone, as in Hendrycks & Dietterich 2019: nothing
    is adapted to a corruption. For each classifier the mean accuracy over all corruptions and
    severities, and its share of the accuracy on the same images without corruption; of kNN also
    the accuracy under each corruption. Intervals resample the images.
    """
    train = train.labeled()
    if len(np.unique(train.labels)) < 2:
        raise DataError("robustness needs labeled training images of two classes or more")
    probe = train_probe(train.tensor, train.labels, seed=seed, groups=train.groups)
    classifiers: dict[str, Classifier] = {
        "kNN": lambda x: predict(train.tensor, train.labels, x, k=k),
        "linear probe": probe.predict,
    }
    clean = _correct(views, "", 1, classifiers)
    correct: dict[str, dict[str, Float[np.ndarray, " n"]]] = {name: {} for name in classifiers}
    for done, name in enumerate(CORRUPTIONS):
        views.on_progress(done, len(CORRUPTIONS), f"corrupted: {name}")
        by_severity = [_correct(views, name, severity, classifiers) for severity in SEVERITIES]
        for classifier, rows in correct.items():
            rows[name] = np.mean([each[classifier] for each in by_severity], axis=0)
    measures = []
    for classifier in classifiers:
        measures += _summaries(classifier, clean[classifier], correct[classifier], seed)
    return measures


def _correct(
    views: ImageViews, name: str, severity: int, classifiers: Mapping[str, Classifier]
) -> dict[str, Bool[np.ndarray, " n"]]:
    """Return which images each classifier gets right after a corruption; '' is none."""
    test = views.corrupted(CORRUPTED_IMAGES, name, severity).labeled()
    if not len(test):
        raise DataError("robustness needs labeled test images")
    return {each: classify(test.tensor) == test.labels for each, classify in classifiers.items()}


def _summaries(
    classifier: str,
    clean: Bool[np.ndarray, " n"],
    correct: Mapping[str, Float[np.ndarray, " n"]],
    seed: int,
) -> list[Measure]:
    """Return the means of a classifier, from the share of severities that each image is right at.

    Under each corruption only for kNN, which all encoders can be compared by.
    """
    n, severities = len(clean), ", ".join(map(str, SEVERITIES))
    mean = np.mean(list(correct.values()), axis=0)
    protocol = (
        f"{classifier} of clean training images on {n} test images, corruptions of Hendrycks & "
        f"Dietterich 2019 at severities {severities}"
    )

    def share(name: str, values: Float[np.ndarray, " n"], of: str) -> Measure:
        return mean_score(name, values, f"{of}; {protocol}", seed=seed)

    def relative_accuracy(rows: Int[np.ndarray, " rows"]) -> float:
        return float(mean[rows].mean() / max(clean[rows].mean(), 1 / n))

    low, high = bootstrap(relative_accuracy, n, seed=seed, bounds=(0.0, np.inf))
    of = f"mean of {len(correct)} corruptions"
    relative = f"{of} over the accuracy without any; {protocol}"
    summaries = [
        share(f"{classifier}, uncorrupted", clean.astype(np.float64), "no corruption"),
        share(f"{classifier}, corrupted", mean, of),
        Measure(f"{classifier}, kept", relative_accuracy(np.arange(n)), low, high, relative),
    ]
    if classifier == "kNN":
        summaries += [share(f"kNN, {name}", values, name) for name, values in correct.items()]
    return summaries
