"""Write tables of the rows of compare.py, for docs/discovery.md.

    python benchmarks/discovery/summarize.py docs/discovery/mixed.csv

Prints Markdown: scores of every arm on every data set, and paired differences between arms.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from nearkin.tables import read_csv

SCORES = {
    "all": "all",
    "known": "known",
    "novel": "novel",
    "aware": "novel, task-aware",
    "train": "unlabeled, train",
}
"""Columns of compare.py, and their titles."""
COMPARED = {
    "ncd": (
        ("joint NCL", "base loss"),
        ("UNO", "base loss"),
        ("joint NCL", "k-means"),
        ("UNO", "k-means"),
        ("NCL", "NCL, official"),
        ("UNO", "UNO, official"),
    ),
    "gcd": (("SimGCD", "k-means"), ("UNO", "k-means"), ("SimGCD", "SimGCD, official")),
}
"""The pairs of arms that are compared."""
AUTO = "chosen by hidden classes"
FEWEST = 3
"""Smallest number of values with a deviation or an interval."""
DRAWS = 10_000


@dataclass(frozen=True)
class Results:
    """The rows of one mode on one data set."""

    mode: str
    data: str
    rows: Sequence[dict[str, str]]

    @cached_property
    def arms(self) -> list[str]:
        """In the order of the file."""
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    def scores(self, arm: str, column: str) -> dict[str, float]:
        """Return the scores of an arm by seed; those of `AUTO` are of the arm that was chosen."""

        def of_arm(row: dict[str, str]) -> bool:
            return row.get("chosen") == "1" if arm == AUTO else row["arm"] == arm

        return {row["seed"]: float(row[column]) for row in self.rows if of_arm(row)}


def read(path: Path) -> list[Results]:
    """Return the results of a file, per mode and data set."""
    rows = [dict(row) for row in read_csv(path)]
    keys = dict.fromkeys((row["mode"], row["data"]) for row in rows)
    return [Results(*key, [r for r in rows if (r["mode"], r["data"]) == key]) for key in keys]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    every = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation, or the values if they are too few."""
    if len(values) < FEWEST:
        return ", ".join(f"{value:.3f}" for value in values)
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


def means(results: Results) -> str:
    """Return the scores over the seeds, for every arm and for what hidden classes choose."""
    lines = []
    for arm in (*results.arms, AUTO):
        found = [list(results.scores(arm, column).values()) for column in SCORES]
        if found[0]:
            lines.append([arm, str(len(found[0])), *map(spread, found)])
    return table(["arm", "seeds", *SCORES.values()], lines)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean (Efron 1979)."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (DRAWS, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def differences(every: Sequence[Results], column: str) -> str:
    """Return the paired differences of arms on each data set of a mode."""
    lines = []
    for results in every:
        for arm, other in COMPARED[results.mode]:
            a, b = results.scores(arm, column), results.scores(other, column)
            if found := [a[seed] - b[seed] for seed in a if seed in b]:
                lines.append([f"{arm} minus {other}", results.data, *_difference(found)])
    measures = ["n", "mean", "95 % interval", "smallest", "largest", "positive"]
    return table(["difference", "data", *measures], lines)


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


def markdown(found: Sequence[Results]) -> str:
    """Return all tables, per mode."""
    parts = []
    for mode in dict.fromkeys(results.mode for results in found):
        every = [results for results in found if results.mode == mode]
        for results in every:
            parts += [f"#### {results.data}, mode {mode}", means(results)]
        parts += [f"#### Differences of all, mode {mode}", differences(every, "all")]
        parts += [f"#### Differences of novel, mode {mode}", differences(every, "novel")]
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    print(markdown(read(parser.parse_args().file)))


if __name__ == "__main__":
    main()
