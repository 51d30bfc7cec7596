"""Apply the health bounds to healthy and sabotaged runs.

    python benchmarks/health/bounds.py docs/health/cifar10.csv docs/health/fashion.csv

Prints a table per file of sabotage.py: the signs of collapse per method and arm.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from nearkin.methods import METHODS
from nearkin.tables import read_csv
from nearkin.training.health import violations

MEASURES = ("effective_rank", "directions", "feature_std", "mean_cosine")


def alarmed(row: Mapping[str, str]) -> list[str]:
    """Return the reasons why a run is not healthy."""
    if row["diverged"]:
        return ["diverged"]
    return list(violations({name: float(row[name]) for name in MEASURES}, METHODS[row["method"]]))


def harmed(row: Mapping[str, str]) -> bool:
    """Return whether a sabotaged run is worse than the untrained network.

    A loss of alignment alone makes all embeddings alike, whatever the features still know.
    """
    if row["arm"] == "aligned" or row["diverged"]:
        return True
    return float(row["knn"]) < float(row["untrained"])


def lines(path: Path) -> list[str]:
    """Print one table and its sums."""
    found = [
        "| method | arm | seed | rank | std | cosine | kNN | untrained | signs |",
        "|---" * 9 + "|",
    ]
    rows = list(read_csv(path))
    for row in rows:
        share = ""
        if not row["diverged"]:
            share = f"{float(row['effective_rank']) / float(row['directions']):.3f}"
        cells = [row["method"], row["arm"], row["seed"], share]
        cells += [f"{float(row[n]):.3f}" if row[n] else "" for n in (*MEASURES[2:], "knn")]
        cells += [f"{float(row['untrained']):.3f}", "; ".join(alarmed(row))]
        found.append("| " + " | ".join(cells) + " |")
    healthy = [row for row in rows if row["arm"] == "healthy"]
    others = [row for row in rows if row["arm"] != "healthy"]
    bad = [row for row in others if harmed(row)]
    caught, every, false = (
        sum(bool(alarmed(row)) for row in some) for some in (bad, others, healthy)
    )
    return [
        *found,
        "",
        f"{path.stem}: {false} alarms in {len(healthy)} healthy runs; {every} of {len(others)} "
        f"sabotaged runs caught, {caught} of the {len(bad)} that it harmed.",
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("rows", type=Path, nargs="+")
    for path in parser.parse_args().rows:
        print("\n".join(["", *lines(path)]))


if __name__ == "__main__":
    main()
