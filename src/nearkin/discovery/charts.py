"""Curves of a discovery: how the number of classes was chosen, and how the training went."""

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from statistics import fmean

from nearkin.discovery.outcome import Outcome
from nearkin.discovery.trials import METHODS
from nearkin.report.page.report import Chart
from nearkin.tables import read_numbers

LABELS = {
    "silhouette": "silhouette of the clusters",
    "dtc": "accuracy on held-out known classes (DTC)",
    "dtc_silhouette": "silhouette beside it (DTC)",
    "gcd": "accuracy on known classes (GCD)",
}


def counting(outcome: Outcome) -> list[Chart]:
    """The curves by which the number of classes was estimated; none if it was given."""
    counted = outcome.counted
    if counted is None:
        return []
    series = {LABELS[name]: points for name, points in counted.curves.items()}
    return [
        Chart(
            "How many novel classes?",
            "novel classes",
            "",
            series,
            "Each rule's estimate: "
            + ", ".join(f"{name} {number}" for name, number in counted.estimates.items())
            + ".",
            counted.chosen,
            (counted.low, counted.high),
        )
    ]


def training(outcome: Outcome) -> list[Chart]:
    """How the last stage of the result went."""
    rows = read_numbers(outcome.folder.stage(f"{METHODS[outcome.config.mode]}-0").metrics)
    charts = []
    for name in ("loss", "positive_rate", "entropy"):
        points = _by_epoch([(row["epoch"], row[name]) for row in rows if name in row])
        if points:
            title = name.replace("_", " ").capitalize()
            charts.append(Chart(title, "epoch", name.replace("_", " "), {name: points}))
    return charts


def _by_epoch(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over epochs."""
    epochs: dict[int, list[float]] = defaultdict(list)
    for epoch, value in points:
        epochs[ceil(epoch)].append(value)
    return [(float(epoch), fmean(values)) for epoch, values in sorted(epochs.items())]
