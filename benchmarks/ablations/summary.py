"""Tables of means and deviations, and plots, of the rows of an ablation."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
from arms import Panel
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, str]
UNTRAINED = "untrained"
"""The arm of each seed's network before training."""
COLUMNS = {
    "knn": ("kNN", 3),
    "knn_embedding": ("kNN, embedding", 3),
    "effective_rank": ("effective rank", 1),
    "feature_std": ("feature_std", 2),
    "mean_cosine": ("mean cosine", 2),
    "loss": ("loss", 3),
    "loss_sd": ("its sd over steps", 3),
    "code_imbalance": ("code imbalance", 3),
    "neighbors_of_class": ("neighbors of the class", 3),
}
"""Titles of the measures, and digits after the point."""


def numbers(rows: Sequence[Row], column: str) -> list[float]:
    """Return the values of all seeds that have one."""
    found = [float(row.get(column) or "nan") for row in rows]
    return [value for value in found if not math.isnan(value)]


def cell(rows: Sequence[Row], column: str) -> str:
    """Format mean and standard deviation over the seeds."""
    values, digits = numbers(rows, column), COLUMNS[column][1]
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def table(arms: Mapping[str, Sequence[Row]], raw: float) -> str:
    """Return a Markdown table with a row per arm, floors last."""
    shown = [c for c in COLUMNS if any(numbers(rows, c) for rows in arms.values())]
    lines = [["arm", "n", *(COLUMNS[column][0] for column in shown)]]
    lines.append(["---"] * len(lines[0]))
    for name, rows in sorted(arms.items(), key=lambda item: item[0] == UNTRAINED):
        lines.append([name, str(len(rows)), *(cell(rows, column) for column in shown)])
    lines.append(["raw pixels", "", f"{raw:.3f}", *[""] * (len(shown) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(
    path: Path, panels: Sequence[Panel], arms: Mapping[str, Sequence[Row]], raw: float
) -> None:
    """Draw two plots per panel: kNN and effective rank, a point per seed."""
    mpl.use("Agg")
    figure = Figure(figsize=(9, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for panel, (left, right) in zip(panels, axes, strict=True):
        _plot(left, panel, arms, "knn")
        _plot(right, panel, arms, "effective_rank")
        left.axhline(raw, color="black", linestyle=":", label="raw pixels")
        untrained = mean(numbers(arms[UNTRAINED], "knn"))
        left.axhline(untrained, color="gray", linestyle="--", label="untrained")
        left.legend(fontsize=7)
        right.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def _plot(axis: Axes, panel: Panel, arms: Mapping[str, Sequence[Row]], column: str) -> None:
    every = [point for points in panel.lines.values() for point in points]
    points = list(dict.fromkeys(every))
    if all(point.isdecimal() for point in points):
        points.sort(key=int)
    place = {point: x for x, point in enumerate(points)}
    for line, those in panel.lines.items():
        found = {place[p]: numbers(arms[panel.name(line, p)], column) for p in those}
        drawn = axis.plot(list(found), [mean(v) for v in found.values()], "_-", label=line)
        for x, values in found.items():
            axis.plot([x] * len(values), values, "o", markersize=3, color=drawn[0].get_color())
    axis.set_xticks(range(len(points)), points, fontsize=8, rotation=15)
    axis.set_xlabel(panel.axis)
    axis.set_ylabel(COLUMNS[column][0])
