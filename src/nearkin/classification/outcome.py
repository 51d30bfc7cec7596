"""What a classification learned, beside its baselines, and its files: tables, page and summary."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.classification.data import LabeledData
from nearkin.classification.metrics import HELD_OUT_ACCURACY
from nearkin.classification.probes import Trained
from nearkin.classifier.assignments import COLUMNS, Assignments
from nearkin.classifier.calibration import BINS, calibrated
from nearkin.classifier.classifier import Classifier
from nearkin.classifier.report import class_views, flag_counts, score_meaning, tiles, write_results
from nearkin.config import ClassifyConfig
from nearkin.data.notes import plain
from nearkin.evaluation.embeddings import embeddings_of
from nearkin.evaluation.evaluate import metric_rows
from nearkin.metrics.metric import Difference, Metric, difference, share
from nearkin.objectives import unit
from nearkin.pace import count
from nearkin.report.encoder_report import run_sections, typed
from nearkin.report.page.blocks import (
    Cards,
    Chart,
    Confusion,
    Findings,
    Page,
    Paragraphs,
    Table,
    Tile,
    Tiles,
)
from nearkin.run.data import computed_with, versions
from nearkin.run.opening import OpenRun
from nearkin.tables import write_csv
from nearkin.text import aligned
from nearkin.types import UNLABELED

OURS: Final = "classifier"  # The result among the baselines
SHOWN: Final = 48  # Images to look at, at the most
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

    run: OpenRun[ClassifyConfig]
    data: str
    dataset: LabeledData
    trained: Trained
    classifier: Classifier
    features: Float[Tensor, "images dim"]  # Of all images, by the encoder in the run folder
    assignments: Assignments  # Of all images that were not learned from
    metrics: Mapping[str, list[Metric]]  # Of the classifier, `OURS`, and of each baseline

    @cached_property
    def figures(self) -> list[ClassFigures]:
        """What is known of each class, those that only test images have included."""
        images, train, test = self.dataset.images, self.dataset.train_rows, self.dataset.test_rows
        truth, predicted = images.labels[test], self.assignments.predictions.cluster[test]
        right, groups = truth == predicted, images.groups[test]

        def of(name: str, rows: Bool[np.ndarray, " test"]) -> Metric | None:
            protocol = {"method": name, "of": "test images"}
            return share(name, right[rows], protocol, groups=groups[rows]) if rows.any() else None

        figures = list[ClassFigures]()
        for number, name in enumerate(images.classes):
            own, found = truth == number, predicted == number
            masks = (images.labels[train] == number, own, own & found, found)
            learned, scored, correct, all_found = (int(each.sum()) for each in masks)
            shares = of("recall", own), of("precision", found)
            figures.append(ClassFigures(name, learned, scored, correct, all_found, *shares))
        return figures

    @cached_property
    def doubts(self) -> list[Doubt]:
        """Training labels that fits without the image contradict, the surest first."""
        validated = self.trained.validated
        probability = calibrated(self.trained.probability, self.classifier.calibration)
        predicted, score = probability.argmax(axis=1), probability.max(axis=1)
        wrong = np.flatnonzero((predicted != validated.target) & (score >= SURE))
        wrong = wrong[np.argsort(-score[wrong], kind="stable")]
        columns = (x[wrong] for x in (validated.rows, validated.target, predicted, score))
        names, classes = self.dataset.images.names, self.dataset.classes
        return [
            Doubt(names[row], classes[label], classes[other], float(sure))
            for row, label, other, sure in zip(*columns, strict=True)
        ]

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """How the classifier differs from each baseline, on the same test images."""
        others = {name: column[0] for name, column in self.metrics.items() if name != OURS}
        return {name: difference(self.metrics[OURS][0], each) for name, each in others.items()}

    def summary(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        calibration = self.classifier.calibration
        return {
            "command": "classify",
            "data": self.data,
            "encoder": self.run.config.encoder,
            "train_layers": self.run.config.train_layers,
            "chosen": dict(self.trained.chosen),
            "protocol": self.trained.protocol,
            "classes": [dict(zip(each._fields[:5], each, strict=False)) for each in self.figures],
            "sizes": self.dataset.sizes,
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


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Summarize a classification in lines: metrics beside baselines, and what to look at."""
    sizes = summary["sizes"]
    columns = {
        table: [Metric(**entry) for entry in column.values()]
        for table, column in summary["metrics"].items()
    }
    heading, *rows = metric_rows(columns)
    notes = [f"{flag}: {count(n, 'image')}" for flag, n in summary["flags"].items()]
    doubts, ours = len(summary["labels_to_check"]), summary["metrics"][OURS]
    learned = sum(each["train"] > 0 for each in summary["classes"])  # others are in the test part
    return [
        f"learned {count(learned, 'class')} from {count(sizes['train'], 'image')}, "
        f"{summary['train_layers']}: {summary['protocol']}",
        *(aligned([heading, *rows]) if rows else []),
        *notes,
        *(
            [f"labels to check: {doubts} of {ours[HELD_OUT_ACCURACY]['n']:,}, see summary.json"]
            if doubts
            else []
        ),
    ]


def write_outcome(outcome: Outcome) -> None:
    """Write all files of a classification, the summary last: it marks the run complete."""
    images = outcome.dataset.images
    summary = outcome.summary() | computed_with(outcome.run.config.seed)
    # Not what an attentive probe pools: images are searched for by the encoder that is written.
    embedded = embeddings_of(images, unit(outcome.features).numpy())
    write_csv(outcome.run.folder.assignments, COLUMNS, outcome.assignments.table())
    write_results(
        outcome.run,
        images,
        replace(embedded, splits=outcome.dataset.parts.splits),
        build_page(outcome),
        summary,
        data=outcome.data,
        encoder=outcome.classifier.digest,
    )
    outcome.run.log.debug("\n".join(lines(summary)))


def build_page(outcome: Outcome) -> Page:
    """Return the content of the page."""
    images, views = outcome.dataset.images, tuple(class_views(outcome.assignments).values())
    name = Path(outcome.data).name
    calibration = outcome.classifier.calibration
    held_out = "training images, while they were held out,"
    none = "no training image could be held out to measure how often it is right"
    meaning = score_meaning(calibration, held_out if calibration else none)
    return Page(
        kicker="nearkin classify",
        title=f"{count(outcome.dataset.num_classes, 'class')} in {name}",
        lead=_lead(outcome),
        sections=(
            ("Summary", (Findings(tuple(_findings(outcome))),)),
            ("Evaluation", tuple(_results(outcome))),
            ("Confusion", _confusion(outcome)),
            ("Images to look at", (_unsure(outcome), _doubts(outcome))),
            ("Confidence", (Paragraphs((meaning,)), *_reliability(outcome))),
            ("Classes", (Cards("class", views, sum(view.size for view in views)),)),
            *run_sections(
                outcome.run.folder,
                outcome.data,
                outcome.run.config,
                _protocol(outcome),
                _next_steps(outcome),
                versions(),
            ),
        ),
        tiny=images.is_small,
    )


def _lead(outcome: Outcome) -> str:
    dataset, layers = outcome.dataset, outcome.trained.layers
    trained = {
        "linear": "a linear probe on the frozen encoder",
        "attentive": "an attentive probe on the tokens of the frozen encoder",
        "all": "all of the encoder",
        "last:1": "the last block of the encoder",
    }.get(layers, f"the last {layers.removeprefix('last:')} blocks of the encoder")
    backbone = outcome.trained.encoder.details["backbone"]
    return (
        f"{count(len(dataset.train_rows), 'labeled image')} of "
        f"{count(dataset.num_classes, 'class')} trained {trained} ({backbone}). "
        f"{count(dataset.sizes['test'], 'other labeled image')} held out; "
        f"{count(dataset.sizes['unlabeled'], 'image')} had no label. All images that were not "
        "learned from are classified."
    )


def _findings(outcome: Outcome) -> Iterator[str]:
    if len(outcome.dataset.test_rows):
        yield f"Accuracy on test images: {outcome.metrics[OURS][0]}."
    else:
        yield "No labeled image is held out, so nothing here is measured on images not used."
    reached = [
        f"{name} ({each.second:.3f}, difference {each})"
        for name, each in outcome.differences.items()
        if each.clear <= 0
    ]
    if reached:
        yield f"That is not significantly higher than: {'; '.join(reached)}."
    single = [each.name for each in outcome.figures if each.train == 1]
    if single:
        yield (
            f"{count(len(single), 'class')} with a single training image: nothing tells how well "
            "it is learned. Label another one each."
        )
    outliers = outcome.assignments.flag.count("outlier")
    if outliers:
        yield (
            f"{count(outliers, 'image')} flagged as outliers: farther from the training images "
            "than 95 % of those of classes that were held out, or than 99 % of these from one "
            "another. They may be of a class that has no label yet."
        )
    if outcome.doubts:
        checked = len(outcome.trained.validated.rows)
        yield f"{count(len(outcome.doubts), 'training label')} of {checked:,} to check; see below."


def _results(outcome: Outcome) -> Iterator[Table]:
    heading, *rows = metric_rows(outcome.metrics)
    title, notes = "Metrics", ["With 95 % confidence intervals."]
    if len(outcome.dataset.test_rows):
        notes.append(
            "On test images, but for the held-out training accuracy. Calibration error: how far "
            "scores are from the share of right ones, 0 is best."
        )
    if len(outcome.metrics) > 1:
        title = f"{title} beside their baselines"
        notes.append("The baselines have the same labels.")
    if rows:
        yield Table(title, ("", *heading[1:]), tuple(map(tuple, rows)), " ".join(notes))
    yield Table(
        "Each class",
        ("", "training images", "test images", "recall", "precision"),
        tuple(
            (name, f"{train:,}", f"{test:,}", str(recall or "-"), str(precision or "-"))
            for name, train, test, *_, recall, precision in outcome.figures
        ),
        "Recall: share of its test images that are right. Precision: share of the test images "
        "predicted as this class that are of it. With 95 % confidence intervals.",
    )


def _confusion(outcome: Outcome) -> tuple[Confusion, ...]:
    images, rows = outcome.dataset.images, outcome.dataset.test_rows
    if not len(rows):
        return ()
    found = outcome.assignments.predictions.cluster[rows]
    learned = outcome.dataset.classes  # which come first among all
    pairs = np.stack([images.labels[rows], found], axis=1)
    return (Confusion.of(images.classes, learned, len(learned), pairs),)


def _unsure(outcome: Outcome) -> Tiles:
    """Return the images without a label whose class is least certain; else, of test images."""
    assignments = outcome.assignments
    is_labeled = outcome.dataset.images.labels[assignments.rows] != UNLABELED
    order = np.argsort(assignments.margin, kind="stable")
    least = order[~is_labeled[order] | is_labeled.all()][:SHOWN]
    which = "Test images" if is_labeled.all() else "Not learned from. Their labels would help most"
    return Tiles(
        "Least certain images",
        f"{which}; below each, the predicted class.",
        tiles(assignments, least, with_class=True),
    )


def _doubts(outcome: Outcome) -> Tiles:
    return Tiles(
        "Labels to check",
        "Training images that fits without them put into another class: a wrong label, or a hard "
        f"image, of {len(outcome.trained.validated.rows):,} that were held out. Below each: its "
        "label, and the class that is predicted.",
        tuple(
            Tile(doubt.path, "", doubt.score, f"{doubt.label} → {doubt.predicted}")
            for doubt in outcome.doubts[:SHOWN]
        ),
    )


def _reliability(outcome: Outcome) -> Iterator[Chart]:
    rows, predictions = outcome.dataset.test_rows, outcome.assignments.predictions
    bins = min(BINS, len(rows) // 5)
    if bins > 1:
        probability = calibrated(predictions.probability[rows], outcome.classifier.calibration)
        right = probability.argmax(axis=1) == outcome.dataset.images.labels[rows]
        score = probability.max(axis=1)
        order = np.array_split(score.argsort(kind="stable"), bins)
        mean, accuracy = ([float(x[part].mean()) for part in order] for x in (score, right))
        ends = sorted({mean[0], mean[-1]})
        yield Chart(
            "Are scores as high as they should be?",
            "mean score",
            "accuracy",
            {
                "test images": [(round(x, 4), y) for x, y in zip(mean, accuracy, strict=True)],
                "perfectly calibrated": [(round(end, 4), end) for end in ends],
            },
            f"Test images in {bins} bins of equal size, by score. Below the line, scores are too "
            "high.",
        )


def _protocol(outcome: Outcome) -> Iterator[str]:
    yield outcome.trained.protocol
    yield "Nothing was chosen by the labels of test images."
    for table, column in outcome.metrics.items():
        for metric in column:
            if table == OURS or metric.name == "accuracy":
                yield f"{table}, {metric.name}: {metric.sentence}."


def _next_steps(outcome: Outcome) -> Iterator[tuple[str, str]]:
    run, data = outcome.run.folder.path, outcome.data
    yield "Classify new images.", typed("predict", run, "NEW_IMAGES", "-o", "new.csv")
    yield "Browse images at full size, and search by image.", typed("explore", run)
    yield (
        "Look for classes that have no label yet, beside these.",
        typed("discover", data, "--labeled", "LABELED", "--encoder", run),
    )
