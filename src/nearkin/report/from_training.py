"""How a training went: curves read off its metrics.csv."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data.images import Images
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import TITLES
from nearkin.evaluation.knn import knn_classes
from nearkin.evaluation.measure import Measure
from nearkin.report.page.report import Chart, Confusion, Points, Table, TrainingReport
from nearkin.run.folder import RunFolder
from nearkin.run.settings.describe import command
from nearkin.tables import read_numbers
from nearkin.version import __version__

CURVES: Final = {
    "loss": ("Loss", "What training makes smaller. Compare it only within one method."),
    "knn": (
        "kNN accuracy",
        "Of held-out images, by the vote of the most similar training images.",
    ),
    "effective_rank": ("Directions in use", "A fall to a few means that embeddings collapse."),
    "feature_std": ("Spread", "1 if embeddings fill the sphere evenly, 0 if all are alike."),
}
"""Title, and how to read it, by the column of metrics.csv."""
MOST_POINTS: Final = 300
"""A longer curve is thinned out."""


def training_curves(folder: RunFolder) -> dict[str, Chart]:
    """The curves of a training by their column, without those that it has no values for.

    Beside the kNN accuracy stand its floors, once they have been measured.
    """
    rows = read_numbers(folder.metrics)
    charts = {}
    for column, (title, note) in CURVES.items():
        points = [(row["epoch"], row[column]) for row in rows if column in row]
        if points:
            series = {title: _thinned(points)}
            if column == "knn":
                series |= _floors(folder.read_summary(), points[0][0], points[-1][0])
            charts[column] = Chart(title, "epoch", "", series, note)
    return charts


def _thinned(points: Sequence[tuple[float, float]]) -> Points:
    kept = np.linspace(0, len(points) - 1, min(MOST_POINTS, len(points))).astype(int)
    return [points[place] for place in kept]


def _floors(summary: Mapping[str, Any], start: float, end: float) -> dict[str, Points]:
    """The accuracy of what has learned nothing, as level lines."""
    measured = summary.get("measures", {})
    return {
        title: [(x, measured[name]["kNN top-1"]["value"]) for x in (start, end)]
        for name, title in TITLES.items()
        if "kNN top-1" in measured.get(name, {})
    }


MEANINGS: Final = {
    "kNN top-1": "Share of held-out images whose class wins the vote of the most similar "
    "training images. Nothing is trained for it: it shows the embedding as it is.",
    "linear probe": "Share of held-out images that a linear classifier on top of the frozen "
    "encoder gets right: what could be learned from few labels.",
    "cluster accuracy": "Share of held-out images in the right cluster, if clusters are named "
    "as well as possible: whether classes stand apart without any label.",
    "NMI": "What the clusters tell about the classes: 0 nothing, 1 all.",
    "ARI": "How often two images are rightly together or apart in the clusters: 0 as by chance, "
    "1 always.",
    "effective rank": "How many directions the features make use of. A few mean a collapse.",
    "feature std": "How evenly features fill the sphere: 1 evenly, 0 all alike.",
    "mean cosine": "How alike different images are on average: 0 as by chance, 1 all alike.",
    "uniformity": "The lower, the more evenly features fill the sphere.",
    "alignment": "How far apart two views of one image are: 0 at one place.",
    "neighbor agreement": "Share of its nearest images that an image keeps in another view.",
}


def report_of(folder: RunFolder, images: Images, found: Embeddings) -> TrainingReport:
    """What the page of a finished training tells.

    Args:
        folder: The run.
        images: Its images.
        found: Their embeddings.
    """
    config, data = folder.settings()
    summary = folder.read_summary()
    return TrainingReport(
        data=Path(data).name,
        lead=_lead(config, summary, images),
        health=_health(summary["verdict"]),
        findings=tuple(_findings(summary, summary["verdict"].startswith("collapsed"))),
        results=_results(summary),
        meanings=tuple((name, MEANINGS[name]) for name in _names(summary) if name in MEANINGS),
        confusion=_confusion(found),
        curves=tuple(training_curves(folder).values()),
        protocol=tuple(_protocol(summary)),
        configuration=vars(config) | {"options": dict(config.options)},
        versions={
            "nearkin": __version__,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
        },
        command=command("train", data, config, vars(TrainConfig())),
        steps=tuple(_steps(folder, data)),
        tiny=images.is_small,
    )


def _lead(config: TrainConfig, summary: Mapping[str, Any], images: Images) -> str:
    sizes = summary["sizes"]
    held = f"; {sizes['test']:,} others were held out to measure it" if "test" in sizes else ""
    labels = (
        "Their classes were used for nothing but the measures below."
        if images.classes
        else "They have no labels, so that only the shape of the embedding can be measured."
    )
    return (
        f"A {config.backbone} learned by {summary['title']} from "
        f"{sizes['train']:,} images in {config.epochs} epochs{held}. {labels}"
    )


def _health(said: str) -> str:
    return f"The embedding is {said}."


def _findings(summary: Mapping[str, Any], collapsed: bool) -> list[str]:
    found = []
    if collapsed:
        found.append("It shows signs of a collapse: compare it with its floors before you use it.")
    own = summary["measures"]["encoder"].get("kNN top-1")
    floors = {
        TITLES[name]: measures["kNN top-1"]["value"]
        for name, measures in summary["measures"].items()
        if name in TITLES and "kNN top-1" in measures
    }
    if own is not None:
        found += [
            f"By nearest neighbors it is not clearly better than the {name} ({value:.3f}): it may "
            "have learned too little."
            for name, value in floors.items()
            if own["low"] is not None and own["low"] <= value
        ]
    return found


def _names(summary: Mapping[str, Any]) -> list[str]:
    return list(summary["measures"]["encoder"])


def _results(summary: Mapping[str, Any]) -> Table:
    measures = summary["measures"]
    columns = ("", *(TITLES.get(name, "this encoder") for name in measures))
    rows = [
        (name, *(str(Measure(**of[name])) if name in of else "-" for of in measures.values()))
        for name in _names(summary)
    ]
    note = (
        "On held-out images, with 95 % intervals. The floors beside it are what the same "
        "network knew before training, and what raw pixels tell."
    )
    return Table("Beside its floors", columns, tuple(rows), note)


def _confusion(found: Embeddings) -> Confusion | None:
    answers = knn_classes(found)
    asked = answers != ""
    if not asked.any():
        return None
    both = np.concatenate([found.class_names[asked], answers[asked]])
    names, place = np.unique(both, return_inverse=True)
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, tuple(place.reshape(2, -1)), 1)
    classes = tuple(names.tolist())
    return Confusion(classes, classes, tuple(map(tuple, counts.tolist())))


def _protocol(summary: Mapping[str, Any]) -> list[str]:
    said = [
        f"{entry['name']}: {entry['protocol']}."
        for entry in summary["measures"]["encoder"].values()
    ]
    said += [f"{name}: not measured, {why}." for name, why in summary["left_out"].items()]
    return [*said, "The last epoch counts; nothing was chosen by the labels of held-out images."]


def _steps(folder: RunFolder, data: str) -> list[tuple[str, str]]:
    run, name = folder.path, "Name some classes, and find the others."
    return [
        ("See images at full size, and search with one of yours.", f"nearkin explore {run}"),
        ("Find the images that one is most like.", f"nearkin neighbors {run} PICTURE"),
        ("Write features for other programs.", f"nearkin embed {run} {data} -o vectors.parquet"),
        (name, f"nearkin discover {data} --known A,B --from {run}"),
    ]
