"""The files of a finished classification: tables, page and summary."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs

from nearkin.classification.outcome import OURS, Outcome
from nearkin.classifier.report import class_views, score_meaning, tiles, write_results
from nearkin.evaluation.embeddings import embeddings_of
from nearkin.evaluation.evaluate import metric_rows
from nearkin.metrics.metric import Metric
from nearkin.objectives import unit
from nearkin.pace import count
from nearkin.report.encoder_report import run_sections, typed
from nearkin.report.page.blocks import (
    Cards,
    Chart,
    ClassView,
    Confusion,
    Findings,
    Page,
    Paragraphs,
    Table,
    Tile,
    Tiles,
)
from nearkin.run.data import computed_with, versions
from nearkin.run.reporter import Logger
from nearkin.text import aligned
from nearkin.types import UNLABELED

SHOWN: Final = 48  # Images to look at


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Summarize a classification in lines: metrics beside baselines, and what to look at."""
    sizes = summary["sizes"]
    columns = {
        table: [Metric(**entry) for entry in column.values()]
        for table, column in summary["metrics"].items()
    }
    notes = [f"{flag}: {count(n, 'image')}" for flag, n in summary["flags"].items()]
    doubts = len(summary["labels_to_check"])
    learned = sum(each["train"] > 0 for each in summary["classes"])  # others are in the test part
    return [
        f"learned {count(learned, 'class')} from {count(sizes['train'], 'image')}, "
        f"{summary['train_layers']}: {summary['protocol']}",
        *aligned(metric_rows(columns)),
        *notes,
        *([f"labels to check: {doubts}, see the page"] if doubts else []),
    ]


def write_outcome(outcome: Outcome, log: Logger) -> None:
    """Write all files of a classification, the summary last: it marks the run complete."""
    images = outcome.dataset.images
    summary = outcome.summary() | computed_with(outcome.config.seed)
    # Not what an attentive probe pools: images are searched for by the encoder that is written.
    embedded = embeddings_of(images, unit(outcome.features).numpy())
    write_results(
        outcome.folder,
        outcome.config,
        images,
        outcome.assignments,
        replace(embedded, splits=outcome.dataset.parts.splits),
        build_page(outcome),
        summary,
        data=outcome.data,
        encoder=outcome.classifier.digest,
        log=log,
    )
    log.debug("\n".join(lines(summary)))


def build_page(outcome: Outcome) -> Page:
    """Return the content of the page."""
    images, views = outcome.dataset.images, tuple(_views(outcome))
    name = Path(outcome.data).name
    meaning = Paragraphs((_confidence(outcome),))
    return Page(
        kicker="nearkin classify",
        title=f"{count(outcome.dataset.num_classes, 'class')} in {name}",
        lead=_lead(outcome),
        sections=(
            ("Summary", (Findings(tuple(_findings(outcome))),)),
            ("Evaluation", tuple(_results(outcome))),
            ("Confusion", _confusion(outcome)),
            ("Images to look at", (_unsure(outcome), _doubts(outcome))),
            ("Confidence", (meaning, *_reliability(outcome))),
            ("Classes", (Cards("class", views, sum(view.size for view in views)),)),
            *run_sections(
                outcome.folder,
                outcome.data,
                outcome.config,
                _protocol(outcome),
                _next_steps(outcome),
                versions(),
            ),
        ),
        tiny=images.is_small,
    )


def _lead(outcome: Outcome) -> str:
    dataset, layers = outcome.dataset, outcome.config.train_layers
    number = layers.removeprefix("last:")
    trained = {
        "linear": "a linear probe on the frozen encoder",
        "attentive": "an attentive probe on the tokens of the frozen encoder",
        "all": "all of the encoder",
        "last:1": "the last block of the encoder",
    }.get(layers, f"the last {number} blocks of the encoder")
    backbone = outcome.trained.encoder.details["backbone"]
    return (
        f"{count(len(dataset.train_rows), 'labeled image')} of "
        f"{count(dataset.num_classes, 'class')} trained {trained} ({backbone}). "
        f"{count(len(outcome.dataset.test_rows), 'other labeled image')} held out; "
        f"{count(dataset.num_unlabeled, 'image')} had no label. All images that were not learned "
        "from are classified."
    )


def _findings(outcome: Outcome) -> Iterator[str]:
    metrics = outcome.metrics.get(OURS, [])
    own = next((each for each in metrics if each.name == "accuracy"), None)
    if own is None:
        yield "No labeled image is held out, so nothing here is measured on images not used."
    else:
        yield f"Accuracy on test images: {own}."
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
        yield f"{count(len(outcome.doubts), 'training label')} to check; see below."


def _results(outcome: Outcome) -> Iterator[Table]:
    if outcome.metrics:
        heading, *rows = metric_rows(outcome.metrics)
        yield Table(
            "Metrics beside their baselines",
            ("", *heading[1:]),
            tuple(map(tuple, rows)),
            "On test images, with 95 % confidence intervals. The baselines have the same labels. "
            "Calibration error: how far scores are from the share of right ones, 0 is best.",
        )
    yield Table(
        "Each class",
        ("", "training images", "test images", "recall", "precision"),
        tuple(
            (
                each.name,
                f"{each.train:,}",
                f"{each.test:,}",
                str(each.recall or "-"),
                str(each.precision or "-"),
            )
            for each in outcome.figures
        ),
        "Recall: share of its test images that are right. Precision: share of the test images "
        "predicted as this class that are of it. With 95 % confidence intervals.",
    )


def _confusion(outcome: Outcome) -> tuple[Confusion, ...]:
    images, rows = outcome.dataset.images, outcome.dataset.test_rows
    if not len(rows):
        return ()
    pairs = np.stack([images.labels[rows], outcome.predictions.cluster[rows]], axis=1)
    learned = outcome.dataset.classes  # which come first among all
    return (Confusion.of(images.classes, learned, len(learned), pairs),)


def _views(outcome: Outcome) -> Iterator[ClassView]:
    """Yield each class with the images that are assigned to it."""
    for number, view in class_views(outcome.assignments).items():
        own, truth = outcome.figures[number], ""
        if own.predicted:
            images = count(own.predicted, "labeled image")
            truth = f"{own.correct / own.predicted:.0%} of {images} among them are of it."
        yield structs.replace(view, truth=truth)


def _unsure(outcome: Outcome) -> Tiles:
    """Return the images without a label whose class is least certain; else, of test images."""
    assignments = outcome.assignments
    labels = outcome.dataset.images.labels[assignments.rows]
    unlabeled = np.flatnonzero(labels == UNLABELED)
    rows = unlabeled if len(unlabeled) else np.arange(len(labels))
    least = rows[np.argsort(assignments.margin[rows], kind="stable")][:SHOWN]
    return Tiles(
        "Least certain images",
        "Not learned from. Their labels would help most; below each, the predicted class.",
        tiles(assignments, least, with_class=True),
    )


def _doubts(outcome: Outcome) -> Tiles:
    return Tiles(
        "Labels to check",
        "Training images that fits without them put into another class: a wrong label, or a "
        "hard image. Below each: its label, and the class that is predicted.",
        tuple(
            Tile(doubt.path, "", doubt.score, f"{doubt.label} → {doubt.predicted}")
            for doubt in outcome.doubts[:SHOWN]
        ),
    )


def _confidence(outcome: Outcome) -> str:
    calibration = outcome.classifier.calibration
    if calibration is None:
        images = "no training image could be held out to measure how often it is right"
    else:
        images = "training images, while they were held out,"
    return score_meaning(calibration, images)


def _reliability(outcome: Outcome) -> Iterator[Chart]:
    bins = outcome.reliability() if len(outcome.dataset.test_rows) else []
    if len(bins) > 1:
        ends = sorted({bins[0][0], bins[-1][0]})
        yield Chart(
            "Are scores as high as they should be?",
            "mean score",
            "accuracy",
            {
                "test images": [(round(score, 4), right) for score, right, _ in bins],
                "perfectly calibrated": [(round(end, 4), end) for end in ends],
            },
            f"Test images in {len(bins)} bins of equal size, by score. Below the line, scores are "
            "too high.",
        )


def _protocol(outcome: Outcome) -> Iterator[str]:
    yield outcome.trained.protocol
    yield "Nothing was chosen by the labels of test images."
    for table, column in outcome.metrics.items():
        for metric in column:
            if table == OURS or metric.name == "accuracy":
                yield f"{table}, {metric.name}: {metric.sentence}."


def _next_steps(outcome: Outcome) -> Iterator[tuple[str, str]]:
    run, data = outcome.folder.path, outcome.data
    yield "Classify new images.", typed("predict", run, "NEW_IMAGES", "-o", "new.csv")
    yield "Browse images at full size, and search by image.", typed("explore", run)
    yield (
        "Look for classes that have no label yet, beside these.",
        typed("discover", data, "--labeled", "LABELED", "--encoder", run),
    )
