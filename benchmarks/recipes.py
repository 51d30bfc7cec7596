"""Print a table of the results of CIFAR-10 recipes beside the published ones.

    python benchmarks/recipes.py RUNS

RUNS holds a run folder per recipe, with its name. An unfinished run is shown with its epoch; a
missing one as not run.
"""

import argparse
import csv
import itertools
import json
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes" / "cifar10"
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
        cells = [f"{m['value']:.3f} [{m['low']:.3f}, {m['high']:.3f}]" for m in shown]
        return [str(summary["epochs"]), *cells]
    if (run / "metrics.csv").exists():
        with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        seen = [row["knn"] for row in rows if row["knn"]]
        knn = f"{float(seen[-1]):.3f} on the way" if seen else "not yet"
        return [f"{float(rows[-1]['epoch']):.0f}, not ended" if rows else "0", knn, "not yet"]
    return ["0", "not run", "not run"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", type=Path)
    options = parser.parse_args()
    print("| recipe | epochs | kNN | linear probe | published |\n|---|---|---|---|---|")
    for recipe in sorted(RECIPES.glob("*.toml")):
        cells = [recipe.stem, *found(options.runs / recipe.stem), published(recipe)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
