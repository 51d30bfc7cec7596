"""How a training went: curves read off its metrics.csv."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from nearkin.evaluation.report import TITLES
from nearkin.report.page.report import Chart, Points
from nearkin.run.folder import RunFolder
from nearkin.tables import read_numbers

CURVES: Final = {
    "loss": ("Loss", "What training makes smaller. Compare it only within one method."),
    "knn": (
        "kNN accuracy",
        "Of held-out pictures, by the vote of the most similar training pictures.",
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
