"""Discovery of classes on features of frozen encoders, an arm at a time, beside k-means.

    python -m benchmarks discovery --data FOLDER [--sets caltech trash] [--seeds 6 7 8 9 10]
        [--arms k-means components] [--checkout SIMGCD] --csv docs/discovery/start.csv
    python -m benchmarks discovery --data FOLDER --sets digits fashion trash --seeds 6 7 8
        --tail 20 --csv docs/discovery/tails.csv

FOLDER has the data sets (`SETS` of sets.py) and, in runs/NAME, an encoder trained on each without
labels. Scored are images held out, of known and novel classes mixed. A row of the table is written
once its arm is done, so a benchmark that was stopped goes on where it was. Protocol:
docs/discovery.md. `python -m benchmarks.discovery.tables` makes its tables of the rows.
"""

import csv
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from sklearn.metrics import adjusted_rand_score

from benchmarks.discovery.official import by_authors
from benchmarks.discovery.sets import SETS, Bench
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, commit
from benchmarks.shared.seeds import interval
from nearkin.discovery.clusterings import Clustering, head_clustering, kmeans_clustering
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import Stage, class_stage, components_init, known_init
from nearkin.discovery.task import DiscoveryTask
from nearkin.metrics.clusters import right

OPTIONS: Final = (
    Option("sets", ["digits", "omniglot", "caltech", "trash", "flowers"], "data sets",
           quick=["digits"], choices=list(SETS)),
    Option("seeds", [6, 7, 8, 9, 10], "each draws novel classes, held-out images and labels",
           quick=[0]),
    Option("arms", ["k-means", "components", "known classes first"], "what is compared"),
    Option("checkout", Path(), "CVMI-Lab/SimGCD, for the arm `official`"),
    Option("tail", 1, "how many times larger the largest class is than the smallest"),
    Option("csv", Path(), "where rows are kept; nowhere if empty"),
)  # fmt: skip
SCORES: Final = ("all", "known", "novel", "aware", "train")
COLUMNS: Final = ("mode", "data", "seed", "arm", *SCORES, "seconds", "commit")
VARIANTS: Final[Mapping[str, Mapping[str, float]]] = {
    "components": {},
    "contrast at 1": {"contrast_temperature": 1.0},
    "entropy weight .5": {"entropy_weight": 0.5},
    "entropy weight 2": {"entropy_weight": 2.0},
}
"""Options of arms that start at principal components."""


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


def k_means(bench: Bench, task: DiscoveryTask) -> Clustering:
    """Semi-supervised k-means of GCD, of the frozen features."""
    return kmeans_clustering(bench.encoder.cached.center, task, bench.seed, disjoint=False)


def trained(
    bench: Bench, task: DiscoveryTask, arm: str, checkout: Path, more_seed: int = 0
) -> Clustering:
    """Train an arm and return what it finds."""
    options: dict[str, Any] = {"entropy_weight": 1.0, **VARIANTS.get(arm, {})}
    if arm == "known classes first":
        init = known_init(bench.encoder, task, bench.base, Stage.try_out)
    else:
        init = components_init(bench.encoder, task, bench.seed)
    base = replace(bench.base, seed=bench.base.seed + more_seed)
    stage = class_stage(bench.encoder, task, base, init, "simgcd", options)
    if arm == "official":
        stage = by_authors(stage, task, checkout)
    stage.try_out()
    return head_clustering(bench.encoder, stage.method, task)


def most_alike(bench: Bench, task: DiscoveryTask) -> Clustering:
    """Of three trainings, return the one whose classes the others find most alike."""
    found = [trained(bench, task, "components", Path(), more_seed) for more_seed in range(3)]
    classes = [each.joint[task.unlabeled] for each in found]
    alike = [sum(adjusted_rand_score(each, other) for other in classes) for each in classes]
    return found[int(np.argmax(alike))]


def found_by(bench: Bench, task: DiscoveryTask, arm: str, checkout: Path) -> Clustering:
    """Return what an arm finds."""
    if arm == "k-means":
        return k_means(bench, task)
    if arm == "most alike of three":
        return most_alike(bench, task)
    return trained(bench, task, arm, checkout)


def run(options: Namespace) -> Iterator[Row]:
    """Run the arms that have no row yet, and yield the mean of each over the seeds."""
    kept = read(options.csv)
    for name in options.sets:
        for seed in options.seeds:
            bench = Bench(name, seed, Path(options.data), options.tail)
            task = bench.task("gcd")
            for arm in options.arms:
                key = "gcd", name, str(seed), arm
                if key in kept:
                    continue
                started = time.process_time()
                values = scores(bench, task, found_by(bench, task, arm, options.checkout))
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
