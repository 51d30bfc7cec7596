"""Repeat a paper's ablation with a small network, small images and three seeds.

    python benchmarks/ablations/ablate.py PAPER --data fashion_mnist.npz [--out DIR] [--threads 1]

The papers are simsiam, byol, moco, instdisc, swav and nnclr. Each arm is trained with each seed,
from the same weights, on the same images in the same order. A row is added to DIR/PAPER.csv when
an arm is done, so the same command continues after an interruption. At the end a table is printed
and DIR/PAPER.png drawn.
"""

import argparse
import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from arms import PAPERS, Arm, Panel
from summary import UNTRAINED, Row, draw, table
from trial import ImageSet, Recipe, key, trial

from nearkin.errors import NearkinError
from nearkin.tables import read_csv, replace_text

SEEDS = (0, 1, 2)


def planned(
    panels: tuple[Panel, ...], recipe: Recipe, seeds: Iterable[int]
) -> Iterator[tuple[str, Arm, int, Recipe]]:
    """Return all trials of a paper, seed by seed, the floor first."""
    floor = next(iter(panels[0].arms.values()))
    for seed in seeds:
        yield UNTRAINED, floor, seed, replace(recipe, steps=0)
        for panel in panels:
            for name, arm in panel.arms.items():
                yield name, arm, seed, recipe


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows atomically."""
    rows = list(rows)
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(path, text.getvalue())


def ablate(
    panels: tuple[Panel, ...],
    recipe: Recipe,
    data: str,
    path: Path,
    seeds: Iterable[int] = SEEDS,
) -> str:
    """Run the arms missing in the file, draw the plot beside it, and return the table."""
    images = ImageSet(data, recipe)
    rows = {row["key"]: dict(row) for row in read_csv(path)} if path.exists() else {}
    arms: dict[str, list[Row]] = {}
    for name, arm, seed, how in planned(panels, recipe, seeds):
        this = key(arm, seed, how, images)
        if this not in rows:
            found = trial(arm, seed, how, images)
            numbers = {column: repr(value) for column, value in found.items()}
            about = {"key": this, "arm": name, "seed": str(seed), "steps": str(how.steps)}
            rows[this] = about | numbers
            write(path, rows.values())
            print(f"{name}, seed {seed}: kNN {found['knn']:.3f}", flush=True)
        arms.setdefault(name, []).append(rows[this])
    raw = images.raw()
    draw(path.with_suffix(".png"), panels, arms, raw)
    return table(arms, raw)


def main() -> None:
    """Run one paper's ablation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--data", default="torchvision:FashionMNIST", help="as for nearkin train")
    parser.add_argument("--out", type=Path, default=Path("ablations"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.paper}.csv"
    try:
        print(ablate(PAPERS[options.paper], Recipe(), options.data, path))
    except NearkinError as error:
        parser.exit(error.exit_code, f"error: {error}\n")


if __name__ == "__main__":
    main()
