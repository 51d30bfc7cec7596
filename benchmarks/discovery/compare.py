"""Compare methods of novel class discovery on the same features, images and steps.

    python benchmarks/discovery/compare.py cifar10 --folder RUNS -o docs/discovery/cifar10.csv

RUNS holds, for every seed, images drawn by images.py (cifar10-1.npz) and an encoder trained on
them without labels (runs/cifar10-1). Seed 0 only chooses the tuned setting of each arm,
by hiding known classes; the others are reported. A row is written once its arm is done, so a
stopped comparison goes on where it was. Protocol: docs/discovery.md.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from nearkin.config import TrainConfig, Value
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.discovery.classifier import (
    Clustering,
    head_clustering,
    kmeans_clustering,
    top_features,
)
from nearkin.discovery.data import DiscoveryTask, Mode
from nearkin.discovery.features import (
    CachedFeatures,
    FrozenEncoder,
    ViewSettings,
    extract_features,
)
from nearkin.discovery.pipeline import BASE_LOSS
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import StageInit, class_stage, known_stage, stage_init
from nearkin.discovery.trials import (
    MODE_RECIPES,
    Trials,
    best,
    tuned_options,
)
from nearkin.encoders.encoder import load
from nearkin.measures.matching import cluster_accuracy, right
from nearkin.run.settings import resolve
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNKNOWN

CPU = torch.device("cpu")
SEEDS = {"first": (1, 2, 3, 4, 5), "odd": (1, 2), "mixed": (1, 2)}
"""The reported seeds of each split into known and novel classes."""
GCD_SEEDS = (1, 2, 3, 4, 5)
NOVEL = {"first": (5, 6, 7, 8, 9), "odd": (1, 3, 5, 7, 9), "mixed": (2, 3, 5, 8, 9)}
"""Novel classes of each split, fixed beforehand; `first` is the usual one."""
CONTRAST: dict[str, Value] = {"known_weight": 0.0}
ARMS: dict[str, dict[str, Value]] = {
    "rank statistics": BASE_LOSS | {"pseudo_labels": "ranks"},
    "base": BASE_LOSS,
    "self-contrast": CONTRAST | {"own_weight": 1.0},
    "NCL": CONTRAST,
    "NCL+SCL": {},
    "base, clusters": BASE_LOSS,
    "NCL+SCL, clusters": {},
    "NCL+SCL+HNG": {"num_hard": 400, "num_easy": 50},
}
"""Options of NCL. Only the tuned setting is chosen, and rank statistics have none."""
GCD_ARMS: dict[str, dict[str, Value]] = {
    "SimGCD": {},
    "SimGCD, no entropy term": {"entropy_weight": 0.0},
    "SimGCD, clusters": {},
}
"""Options of SimGCD."""
COLUMNS = (
    "mode", "split", "seed", "arm", "tuned", "train", "train_known", "train_novel", "test",
    "known_test", "nmi", "ari", "k_means", "seconds",
)  # fmt: skip
SLOW = "NCL+SCL+HNG"
"""Hard negatives take four times as long, so only the first split has them."""
VIEWS = 4
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Bench:
    """The images of one seed and their features."""

    name: str
    seed: int
    folder: Path

    @cached_property
    def images(self) -> Images:
        """Return the images with all labels: known ones for training, novel ones for scoring."""
        return open_images(self.folder / f"{self.name}-{self.seed}.npz")

    @cached_property
    def base(self) -> TrainConfig:
        """Return the settings shared by all stages."""
        encoder = load(self._run)
        asked = TrainConfig(
            method="ncl",
            backbone="small",
            image_size=encoder.image_size,
            batch_size=128,
            seed=self.seed,
            precision="fp32",
        )
        resolved = resolve(asked, self.images, CPU)
        return replace(resolved, epochs="auto", options={})

    @property
    def _run(self) -> Path:
        return self.folder / "runs" / f"{self.name}-{self.seed}"

    @cached_property
    def encoder(self) -> FrozenEncoder:
        """The frozen encoder; what it sees is computed once and kept."""
        path = self._run / "cached-features.safetensors"
        if not path.exists():
            encoder = load(self._run)
            features, bad = extract_features(
                encoder, self.images, ViewSettings(self.base.augment, VIEWS, self.seed), CPU, 0
            )
            features.write(path, bad)
        kept = CachedFeatures.read(path, len(self.images))[0]
        return FrozenEncoder(replace(kept, views=kept.views[:VIEWS]), CPU)

    def truth(self, novel: tuple[int, ...]) -> Int64[np.ndarray, " images"]:
        """Return the classes, known ones first."""
        order = [number for number in range(10) if number not in novel] + list(novel)
        return np.asarray(np.argsort(order)[self.images.labels], np.int64)

    def task(self, novel: tuple[int, ...], mode: Mode) -> DiscoveryTask:
        """Return the task: novel classes are unlabeled, in mode gcd half of the known ones too."""
        label = self.truth(novel)
        label[label >= 10 - len(novel)] = UNKNOWN
        if mode == "gcd":
            chosen = np.random.default_rng(self.seed).permutation(len(label)) % 2 == 0
            label[chosen] = UNKNOWN
        train = np.flatnonzero(self.images.splits == "train")
        held_out = np.flatnonzero(self.images.splits == "test")
        label[held_out] = UNKNOWN
        return DiscoveryTask(label, train, 10 - len(novel), len(novel))


def starts_of(arm: str) -> str:
    """Return how the classes of an arm are initialized."""
    return "clusters" if "clusters" in arm else "random"


def value_of(bench: Bench, mode: Mode, arm: str, options: dict[str, Value]) -> float:
    """What hiding known classes of the usual split says, for one arm."""
    task = bench.task(NOVEL["first"], "ncd")  # all known images have their label
    folder = bench.folder / "trials" / bench.name / arm.replace(" ", "-")
    every = Trials(bench.encoder, task, bench.base, mode, folder, options, starts_of(arm))
    trials = list(every.run(MODE_RECIPES[mode].candidates))
    for value in MODE_RECIPES[mode].candidates:
        found = [trial.accuracy for trial in trials if trial.value == value]
        print(f"{bench.name} {mode} {arm}: value {value:g}", np.round(found, 3), flush=True)
    return best(trials)


def measured(
    bench: Bench,
    task: DiscoveryTask,
    truth: Int64[np.ndarray, " images"],
    arm: Clustering,
    mode: Mode,
) -> dict[str, float]:
    """Return the accuracy of an arm on unlabeled and on test images."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    rows, test = task.unlabeled, np.flatnonzero(bench.images.splits == "test")
    found, matched = (arm.joint, joint_match) if mode == "gcd" else (arm.novel, novel_match)
    if mode == "ncd":
        test = test[truth[test] >= task.num_known]
    y, x, z, w = truth[rows], found[rows], truth[test], found[test]
    correct = right(y, x, matched(y, x, task.num_known))
    row = {
        "train": correct.mean(),
        "test": right(z, w, matched(z, w, task.num_known)).mean(),
        "nmi": normalized_mutual_info_score(y, x),
        "ari": adjusted_rand_score(y, x),
    }
    if mode == "gcd":
        row["train_known"] = correct[y < task.num_known].mean()
        row["train_novel"] = correct[y >= task.num_known].mean()
    old = np.flatnonzero((bench.images.splits == "test") & (truth < task.num_known))
    row["known_test"] = (arm.joint[old] == truth[old]).mean()
    return row


def rows_of(
    bench: Bench, split: str, mode: Mode, values: dict[str, float], done: set[str]
) -> Iterator[Row]:
    """Run the missing arms of one seed and one split."""
    arms = {arm: options for arm, options in arms_of(mode, split).items() if arm not in done}
    task, truth = bench.task(NOVEL[split], mode), bench.truth(NOVEL[split])
    common = {"mode": mode, "split": split, "seed": bench.seed}
    if "k-means" not in done:
        clustered = kmeans_clustering(bench.encoder.cached.center, task, bench.seed)
        yield common | {"arm": "k-means"} | measured(bench, task, truth, clustered, mode)
    if not arms:
        return
    known = known_stage(bench.encoder, task, bench.base)
    known.try_out()
    heads = stage_init(bench.encoder, known.method, task, bench.seed, "clusters").heads
    for arm, options in arms.items():
        started = time.perf_counter()
        value = values.get(arm, MODE_RECIPES[mode].default)
        chosen = tuned_options(mode, value, task.num_novel) | options
        init = StageInit(known.method, heads if starts_of(arm) == "clusters" else None)
        stage = class_stage(
            bench.encoder, task, bench.base, init, MODE_RECIPES[mode].method, chosen
        )
        stage.try_out()
        seconds = time.perf_counter() - started
        found = head_clustering(bench.encoder, stage.method, task.num_known)
        row = common | {"arm": arm, "tuned": value, "seconds": round(seconds, 1)}
        row |= measured(bench, task, truth, found, mode)
        if mode == "ncd":
            after = top_features(bench.encoder, stage.method)
            novel = kmeans_clustering(after, task, bench.seed).novel[task.unlabeled]
            row["k_means"] = cluster_accuracy(truth[task.unlabeled], novel)[0]
        yield row


def arms_of(mode: Mode, split: str = "first") -> dict[str, dict[str, Value]]:
    """Return the trained arms with their options."""
    if mode == "ncd":
        return {arm: ARMS[arm] for arm in ARMS if arm != SLOW or split == "first"}
    return GCD_ARMS


def chosen_values(name: str, folder: Path, mode: Mode) -> dict[str, float]:
    """The tuned setting of each arm that has one, by the seed that is not reported."""
    bench = Bench(name, 0, folder)
    untuned = {"rank statistics", "SimGCD, no entropy term"}
    return {
        arm: value_of(bench, mode, arm, options)
        for arm, options in arms_of(mode).items()
        if arm not in untuned
    }


def main() -> None:
    """Compare on one data set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mode", choices=list(MODE_RECIPES), default="ncd")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    mode: Mode = options.mode
    rows: list[Row] = []
    if options.output.exists():
        rows = [dict(row) for row in read_csv(options.output)]
    values = chosen_values(options.name, options.folder, mode)
    plan = SEEDS if mode == "ncd" else {"first": GCD_SEEDS}
    for split, seeds in plan.items():
        for seed in seeds:
            done = {r["arm"] for r in rows if r["split"] == split and int(r["seed"]) == seed}
            bench = Bench(options.name, seed, options.folder)
            for row in rows_of(bench, split, mode, values, done):
                print(row, flush=True)
                rows.append(row)
                cells = [[_cell(one.get(column, "")) for column in COLUMNS] for one in rows]
                write_csv(options.output, COLUMNS, cells)


def _cell(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
