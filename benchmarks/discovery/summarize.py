"""Write tables and a plot of the rows of compare.py, for docs/discovery.md.

    python benchmarks/discovery/summarize.py docs/discovery/*.csv --plot train.png

Prints Markdown: scores of every arm, and in mode ncd also paired differences between arms.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearkin.tables import read_csv

COLUMNS = {
    "ncd": {"train": "train", "test": "test", "k_means": "k-means after", "known_test": "known"},
    "gcd": {"train": "All", "train_known": "Known", "train_novel": "Novel", "test": "test"},
}
"""Scores of each mode, and their titles."""
BY_SEED = {"ncd": ("train",), "gcd": ("train", "train_known", "train_novel")}
"""Scores that are shown for every seed."""
COMPARED = (
    ("NCL+SCL", "base"),
    ("NCL+SCL", "rank statistics"),
    ("NCL+SCL", "self-contrast"),
    ("NCL", "base"),
    ("NCL+SCL+HNG", "NCL+SCL"),
    ("NCL+SCL, clusters", "base, clusters"),
    ("NCL+SCL, clusters", "NCL+SCL"),
    ("SimGCD, clusters", "SimGCD"),
)
"""The pairs of arms that are compared."""
MAIN = "first"
"""The split that is also compared alone."""
FEWEST = 3
"""Smallest number of values with a deviation or an interval."""
DRAWS = 10_000
MARKERS = {"first": "o", "odd": "^", "mixed": "s"}
COLORS = {"first": "#30638e", "odd": "#c98b2b", "mixed": "#6b8f71"}
APART = 0.24
"""Distance between the dots of two splits; that of two arms is 1."""
WIDTH = 0.2
"""Width of the line at a mean."""
Pair = tuple[str, str]
"""A split and a seed; all arms share its images and features."""


@dataclass(frozen=True)
class Results:
    """The results of one mode on one data set."""

    name: str
    mode: str
    rows: Sequence[dict[str, str]]

    @cached_property
    def arms(self) -> list[str]:
        """In the order of the file."""
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    @cached_property
    def splits(self) -> list[str]:
        """In the order of the file."""
        return list(dict.fromkeys(row["split"] for row in self.rows))

    def scores(self, arm: str, column: str, split: str | None = None) -> dict[Pair, float]:
        """Return the scores of an arm by pair, optionally of one split."""
        return {
            (row["split"], row["seed"]): float(row[column])
            for row in self.rows
            if row["arm"] == arm and split in (None, row["split"]) and row.get(column)
        }


def read(path: Path) -> list[Results]:
    """Return the results of a file, per mode."""
    rows = [dict(row) for row in read_csv(path)]
    modes = dict.fromkeys(row["mode"] for row in rows)
    return [Results(path.stem, mode, [r for r in rows if r["mode"] == mode]) for mode in modes]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    every = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation, or the values if they are too few."""
    if len(values) < FEWEST:
        return ", ".join(f"{value:.3f}" for value in values)
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


def means(results: Results, split: str) -> str:
    """Return the scores over the seeds of one split, for every arm."""
    columns = COLUMNS[results.mode]
    lines = []
    for arm in results.arms:
        found = [list(results.scores(arm, column, split).values()) for column in columns]
        if found[0]:
            lines.append([arm, str(len(found[0])), *map(spread, found)])
    return table(["arm", "n", *columns.values()], lines)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean (Efron 1979)."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (DRAWS, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def differences(results: Results, column: str) -> str:
    """Return the paired differences of arms, over all splits and over the main one."""
    lines = []
    for arm, other in COMPARED:
        a, b = results.scores(arm, column), results.scores(other, column)
        found = {pair: a[pair] - b[pair] for pair in a if pair in b}
        main = [difference for (split, _), difference in found.items() if split == MAIN]
        name = f"{arm} minus {other}"
        if len(found) > len(main):
            lines.append([name, "all", *_difference(list(found.values()))])
        if main:
            lines.append([name, MAIN, *_difference(main)])
    measures = ["n", "mean", "95 % interval", "smallest", "largest", "positive"]
    return table(["difference", "splits", *measures], lines)


def _difference(values: Sequence[float]) -> list[str]:
    ends = interval(values) if len(values) >= FEWEST else None
    return [
        str(len(values)),
        f"{mean(values):+.3f}",
        f"[{ends[0]:+.3f}, {ends[1]:+.3f}]" if ends else "",
        f"{min(values):+.3f}",
        f"{max(values):+.3f}",
        f"{sum(value > 0 for value in values)} of {len(values)}",
    ]


def by_seed(results: Results) -> str:
    """Return the scores of every seed and split, with a column per arm."""
    columns = BY_SEED[results.mode]
    scores = [[results.scores(arm, column) for column in columns] for arm in results.arms]
    lines = []
    for pair in dict.fromkeys((row["split"], row["seed"]) for row in results.rows):
        cells = [[f"{of[pair]:.3f}" for of in arm if pair in of] for arm in scores]
        lines.append([*pair, *map(" / ".join, cells)])
    return table(["split", "seed", *results.arms], lines)


def markdown(results: Results) -> str:
    """Return all tables of one mode on one data set."""
    titles = COLUMNS[results.mode]
    parts = [f"## {results.name}, mode {results.mode}"]
    for split in results.splits:
        parts += [f"### Split `{split}`", means(results, split)]
    for column in ("train", "k_means") if results.mode == "ncd" else ("train",):
        parts += [f"### Differences of {titles[column]}", differences(results, column)]
    shown = " / ".join(titles[column] for column in BY_SEED[results.mode])
    return "\n\n".join([*parts, f"### {shown}, by seed", by_seed(results)])


def draw(path: Path, found: Sequence[Results]) -> None:
    """Draw a panel per data set and mode: a dot per seed, and the mean of each split."""
    wide = min(2, len(found))
    high = math.ceil(len(found) / wide)
    figure = Figure(figsize=(5.4 * wide, 3.9 * high), layout="constrained")
    axes = figure.subplots(high, wide, squeeze=False).ravel()
    for axis, results in zip(axes, found, strict=False):
        _plot(axis, results)
    for axis in axes[len(found) :]:
        axis.remove()
    figure.savefig(path, dpi=110)


def _plot(axis: Axes, results: Results) -> None:
    middle = (len(results.splits) - 1) / 2
    for place, split in enumerate(results.splits):
        color, marker = COLORS[split], MARKERS[split]
        for number, arm in enumerate(results.arms):
            x = number + (place - middle) * APART
            y = list(results.scores(arm, "train", split).values())
            axis.plot([x] * len(y), y, marker, color=color, markersize=5, alpha=0.6, mew=0)
            axis.hlines([mean(y)] if y else [], x - WIDTH / 2, x + WIDTH / 2, color)
        axis.plot([], [], marker, color=color, markersize=5, label=f"split {split}")
    axis.plot([], [], color="gray", label="mean of its seeds")
    axis.set_title(f"{results.name}, mode {results.mode}", fontsize=10, pad=20)
    axis.set_ylabel("accuracy on unlabeled training images", fontsize=9)
    axis.set_xticks(range(len(results.arms)), results.arms, fontsize=9)
    for label in axis.get_xticklabels():
        label.set(rotation=25, ha="right", rotation_mode="anchor")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    above = (0.5, 1.0)  # inside the panel, it would hide dots
    axis.legend(loc="lower center", bbox_to_anchor=above, ncols=4, frameon=False, fontsize=8)


def main() -> None:
    """Print the tables of the files, and draw the plot if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    found = [results for path in options.files for results in read(path)]
    print("\n\n".join(map(markdown, found)))
    if options.plot and found:
        draw(options.plot, found)


if __name__ == "__main__":
    main()
