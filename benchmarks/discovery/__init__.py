"""Discovery of classes on features of frozen encoders, an arm at a time, beside k-means.

    python -m benchmarks discovery --data FOLDER [--sets caltech trash] [--seeds 6 7 8 9 10]
        [--arms k-means components] --csv docs/discovery/start.csv

FOLDER has the data sets (`SETS` of sets.py) and, in runs/NAME, an encoder trained on each without
labels. Scored are images held out, of known and novel classes mixed. A row of the table is written
once its arm is done, so a benchmark that was stopped goes on where it was. Protocol:
docs/discovery.md. `python -m benchmarks.discovery.tables` makes its tables of the rows.
"""

import csv
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.discovery.sets import SETS, Bench
from benchmarks.shared.options import Option, folder_of
from benchmarks.shared.rows import Row, commit
from benchmarks.shared.seeds import interval
from nearkin.discovery.outcome import Clustering, head_clustering, kmeans_clustering
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import Stage, Stages
from nearkin.discovery.task import DiscoveryTask
from nearkin.metrics.clusters import right

STARTS: Final = ("components", "known classes first")
"""Where SimGCD starts."""
OPTIONS: Final = (
    Option("sets", ["digits", "omniglot", "caltech", "trash", "flowers"], "data sets",
           quick=["digits"], choices=list(SETS)),
    Option("seeds", [6, 7, 8, 9, 10], "each draws novel classes, held-out images and labels",
           quick=[0]),
    Option("arms", ["k-means", *STARTS], "what is compared", choices=["k-means", *STARTS]),
    Option("csv", Path(), "where rows are kept; nowhere if empty"),
)  # fmt: skip
SCORES: Final = ("all", "known", "novel", "aware", "train")
COLUMNS: Final = ("mode", "data", "seed", "arm", *SCORES, "seconds", "commit")


def scores(bench: Bench, task: DiscoveryTask, found: Clustering) -> dict[str, float]:
    """Score an arm.

    `all`, `known` and `novel` are accuracies of images held out under one match of all clusters
    with all classes; `aware` is that of novel ones where known classes are ruled out; `train` is
    `all` of the unlabeled images that were learned from.
    """
    y, x = bench.truth[bench.held_out], found.joint[bench.held_out]
    known, num_known = y < task.num_known, task.num_known
    joint = right(y, x, joint_match(y, x, num_known))
    novel, rows = found.novel[bench.held_out][~known], task.unlabeled
    z, w = bench.truth[rows], found.joint[rows]
    return {
        "all": joint.mean(),
        "known": joint[known].mean(),
        "novel": joint[~known].mean(),
        "aware": right(y[~known], novel, novel_match(y[~known], novel, num_known)).mean(),
        "train": right(z, w, joint_match(z, w, num_known)).mean(),
    }


def found_by(bench: Bench, task: DiscoveryTask, arm: str) -> Clustering:
    """Return what SimGCD finds from a start, or GCD's semi-supervised k-means of the features."""
    if arm == "k-means":
        return kmeans_clustering(bench.encoder.cached.center, task, bench.seed)
    stages = Stages(bench.encoder, task, bench.base)
    known_first = arm == "known classes first"
    init = stages.from_known(Stage.try_out) if known_first else stages.from_components()
    stage = stages.classes(init, {})
    stage.try_out()
    return head_clustering(bench.encoder, stage.method, task)


def run(options: Namespace) -> Iterator[Row]:
    """Run the arms that have no row yet, and yield the mean of each over the seeds."""
    kept = read(options.csv)
    for name in options.sets:
        for seed in options.seeds:
            bench = Bench(name, seed, folder_of(options))
            task = bench.task("gcd")
            for arm in options.arms:
                key = "gcd", name, str(seed), arm
                if key in kept:
                    continue
                started = time.process_time()
                values = scores(bench, task, found_by(bench, task, arm))
                seconds = round(time.process_time() - started, 1)
                cells = [*key, *(f"{values[score]:.4f}" for score in SCORES), seconds, commit()]
                kept[key] = dict(zip(COLUMNS, map(str, cells), strict=True))
                append(options.csv, cells)
        yield from means(name, options, kept)


def means(
    name: str, options: Namespace, kept: Mapping[tuple[str, ...], Mapping[str, str]]
) -> Iterator[Row]:
    """Yield the mean scores of each arm of a set, and the half length of the interval of `all`."""
    for arm in options.arms:
        rows = [kept["gcd", name, str(seed), arm] for seed in options.seeds]
        values = {score: float(np.mean([float(row[score]) for row in rows])) for score in SCORES}
        half = interval([float(row["all"]) for row in rows])[1] if len(rows) > 1 else np.nan
        more = {score: value for score, value in values.items() if score != "all"}
        yield Row(
            f"{name}: {arm}", values["all"], "of all", rounds=len(rows), more={"±": half, **more}
        )


def read(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of a table by mode, data, seed and arm."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(r["mode"], r["data"], r["seed"], r["arm"]): r for r in csv.DictReader(file)}


def append(path: Path, cells: Sequence[object]) -> None:
    """Append a row to a table, if there is one."""
    if path == Path():
        return
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, cells] if new else [cells])
