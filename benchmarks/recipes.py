"""Print a table of the results of CIFAR-10 recipes beside the published ones.

    python benchmarks/recipes.py RUNS

RUNS holds a run folder per recipe, with its name. An unfinished run is shown with its epoch; a
missing one as not run. kNN of the embedding is that of `nearkin evaluate --features embedding`.
"""

import argparse
import csv
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "src" / "nearkin" / "recipes" / "cifar10"
MEASURES = ("kNN top-1", "linear probe")


def published(recipe: Path) -> str:
    """Return the published result from the head of a recipe."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    start = next(row for row, line in enumerate(lines) if line.startswith("# Published"))
    said = [lines[start].removeprefix("# Published")]
    more = itertools.takewhile(lambda line: line.startswith("#      "), lines[start + 1 :])
    return " ".join(line.strip("# ") for line in [*said, *more])


def found(run: Path) -> list[str]:
    """Return the measures of a run, or its progress."""
    if (run / "summary.json").exists():
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        measures = summary["measures"]["encoder"]
        shown = (measures[name] for name in MEASURES)
        return [str(summary["epochs"]), *map(cell, shown), embedding(run)]
    if (run / "metrics.csv").exists():
        with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        seen = [row["knn"] for row in rows if row["knn"]]
        knn = f"{float(seen[-1]):.3f} on the way" if seen else "not yet"
        epoch = f"{float(rows[-1]['epoch']):.0f}, not ended" if rows else "0"
        return [epoch, knn, "not yet", "not yet"]
    return ["0", *["not run"] * 3]


def cell(measure: Mapping[str, Any]) -> str:
    """Return a measure with its interval."""
    return f"{measure['value']:.3f} [{measure['low']:.3f}, {measure['high']:.3f}]"


def embedding(run: Path) -> str:
    """Return the kNN accuracy of a run's embedding, if it was measured."""
    if not (run / "evaluation.json").exists():
        return "-"
    measures = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["measures"]
    knn = measures.get("embedding", {}).get("kNN top-1")
    return cell(knn) if knn else "-"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", type=Path)
    options = parser.parse_args()
    header = ["recipe", "epochs", "kNN", "linear probe", "kNN of the embedding", "published"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for recipe in sorted(RECIPES.glob("*.toml")):
        cells = [recipe.stem, *found(options.runs / recipe.stem), published(recipe)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
