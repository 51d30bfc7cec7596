"""Compare what the last stage of a discovery may minimize, on the same features, images and steps.

    python benchmarks/discovery/compare.py FOLDER -o docs/discovery/mixed.csv --checkouts CHECKOUTS

FOLDER holds the data (see `SETS`) and, in runs/NAME, an encoder trained on each without labels.
CHECKOUTS, if given, holds checkouts NCL, UNO and SimGCD of the authors' code. Scored are images
that were held out, of known and novel classes mixed. A row is written once its arm is done, so a
stopped comparison goes on where it was. Sets whose name ends in _tail have classes of very
different size, and are run if they are named. Protocol: docs/discovery.md.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import official
import torch
from jaxtyping import Bool, Int64

from nearkin.config import DiscoverConfig, TrainConfig, Value
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.discovery.classifier import Clustering, head_clustering, kmeans_clustering
from nearkin.discovery.data import DiscoveryTask, Mode
from nearkin.discovery.features import (
    CachedFeatures,
    Extraction,
    FrozenEncoder,
    ViewSettings,
)
from nearkin.discovery.pipeline import BASE_LOSS
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import class_stage, known_stage, stage_init
from nearkin.discovery.trials import Candidate, Trials, best, candidates, shorter
from nearkin.encoders.encoder import Encoder, load
from nearkin.measures.matching import right
from nearkin.run.settings import resolve
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNKNOWN

Novel = Callable[[Sequence[str], np.random.Generator], Sequence[int]]
"""Chooses novel classes among the names of all of them."""


def last(names: Sequence[str], rng: np.random.Generator) -> Sequence[int]:
    """The second half of the classes, as in the papers."""
    del rng
    return range(len(names) // 2, len(names))


def drawn(names: Sequence[str], rng: np.random.Generator) -> Sequence[int]:
    """Thirty classes at random."""
    return np.sort(rng.permutation(len(names))[:30]).tolist()  # type: ignore[no-any-return]


def alphabets(names: Sequence[str], rng: np.random.Generator) -> Sequence[int]:
    """The characters of three alphabets."""
    del rng
    novel = ("Japanese_(katakana)", "Sanskrit", "Tagalog")
    return [number for number, name in enumerate(names) if name.startswith(novel)]


@dataclass(frozen=True)
class DataSet:
    """A data set: what to open, and which of its classes are novel."""

    data: str
    novel: Novel
    per_class: tuple[int, int] | None = None
    """Images of each class to learn from and to hold out; None: all, a fifth held out."""
    tail: float = 1.0
    """How many times as many images to learn from the largest class has as the smallest."""


SETS = {
    "digits": DataSet("digits", last),
    "fashion": DataSet("fashion.npz", last, (1000, 200)),
    "cifar10": DataSet("cifar10.npz", last, (1000, 200)),
    "omniglot": DataSet("omniglot", alphabets),
    "caltech": DataSet("caltech99.tar", drawn),
    "digits_tail": DataSet("digits", last, tail=50),
    "cifar10_tail": DataSet("cifar10.npz", last, (1000, 200), tail=50),
}
WHOLE = [name for name, each in SETS.items() if each.tail == 1]
FEWEST = 4  # Images to learn from that the smallest class of a tail keeps
ARMS: Mapping[Mode, Mapping[str, tuple[str, dict[str, Value]]]] = {
    "ncd": {
        "base loss": ("ncl", BASE_LOSS),
        "NCL": ("ncl", {}),
        "joint NCL": ("joint_ncl", {}),
        "UNO": ("uno", {}),
    },
    "gcd": {"SimGCD": ("simgcd", {}), "UNO": ("uno", {})},
}
"""Objective and further options of each arm."""
COLUMNS = (
    "mode", "data", "seed", "arm", "setting", "chosen", "all", "known", "novel", "kept_known",
    "kept_novel", "aware", "train", "seconds",
)  # fmt: skip
CPU = torch.device("cpu")
VIEWS = 8
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Bench:
    """The images of a data set that a seed draws, and their features."""

    name: str
    seed: int
    folder: Path

    @property
    def whole(self) -> str:
        """The data set without a tail, whose encoder and features serve both."""
        return self.name.removesuffix("_tail")

    @cached_property
    def encoder_file(self) -> Encoder:
        """The encoder that all seeds share."""
        return load(self.folder / "runs" / self.whole)

    @cached_property
    def images(self) -> Images:
        """The drawn images with all labels: known ones for training, novel ones for scoring."""
        source, wanted = SETS[self.name].data, SETS[self.name].per_class
        path = self.folder / source
        every = open_images(str(path) if path.exists() else source)
        if wanted is None:
            return every
        rng, rows = np.random.default_rng(self.seed), list[Int64[np.ndarray, " some"]]()
        for number in range(len(every.classes)):
            for part, count in zip(("train", "test"), wanted, strict=True):
                of = np.flatnonzero((every.labels == number) & (every.splits == part))
                rows.append(rng.permutation(of)[:count])
        return every.subset(np.sort(np.concatenate(rows)))

    @cached_property
    def held_out(self) -> Bool[np.ndarray, " images"]:
        """Which images are scored and not learned from."""
        if SETS[self.name].per_class is not None:
            return np.asarray(self.images.splits == "test")
        rng, out = np.random.default_rng(self.seed), np.zeros(len(self.images), bool)
        for number in range(len(self.images.classes)):
            rows = rng.permutation(np.flatnonzero(self.images.labels == number))
            out[rows[: round(len(rows) / 5)]] = True
        return out

    @cached_property
    def novel(self) -> Sequence[int]:
        """The novel classes."""
        return SETS[self.name].novel(self.images.classes, np.random.default_rng(self.seed))

    @cached_property
    def truth(self) -> Int64[np.ndarray, " images"]:
        """The classes, known ones first."""
        every = range(len(self.images.classes))
        order = [number for number in every if number not in self.novel] + list(self.novel)
        return np.asarray(np.argsort(order)[self.images.labels], np.int64)

    @cached_property
    def base(self) -> TrainConfig:
        """The settings that all stages share."""
        requested = TrainConfig(
            method="ncl",
            backbone="small",
            image_size=self.encoder_file.image_size,
            batch_size=128,
            seed=self.seed,
            precision="fp32",
        )
        return replace(resolve(requested, self.images, CPU), epochs="auto", options={})

    @cached_property
    def encoder(self) -> FrozenEncoder:
        """The frozen encoder; what it sees is computed once and kept."""
        path = self.folder / "features" / f"{self.whole}-{self.seed}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = ViewSettings(self.base.augment, VIEWS, self.seed)
            features, bad = Extraction(self.encoder_file, self.images, drawn, CPU, 0).compute()
            features.write(path, bad)
        return FrozenEncoder(CachedFeatures.read(path, len(self.images))[0], CPU)

    @cached_property
    def learned(self) -> Int64[np.ndarray, " rows"]:
        """The rows to learn from.

        Of a long tail, each class has a fixed share of the images of the next larger one; the seed
        draws which class is how large.
        """
        rows, count = np.flatnonzero(~self.held_out), len(self.images.classes)
        rng, kept = np.random.default_rng(self.seed), list[Int64[np.ndarray, " some"]]()
        for place, number in enumerate(rng.permutation(count)):
            of = rng.permutation(rows[self.truth[rows] == number])
            share = SETS[self.name].tail ** (-place / (count - 1))
            kept.append(of[: max(FEWEST, round(share * len(of)))])
        return np.sort(np.concatenate(kept))

    def task(self, mode: Mode) -> DiscoveryTask:
        """The task: novel classes are unlabeled, in mode gcd half of the known ones too."""
        label, num_known = self.truth.copy(), len(self.images.classes) - len(self.novel)
        label[label >= num_known] = UNKNOWN
        if mode == "gcd":
            label[np.random.default_rng(self.seed).permutation(len(label)) % 2 == 0] = UNKNOWN
        label[self.held_out] = UNKNOWN
        return DiscoveryTask(label, self.learned, num_known, len(self.novel))


def scores(bench: Bench, task: DiscoveryTask, found: Clustering, mode: Mode) -> dict[str, float]:
    """Score an arm on held-out images.

    `all`, `known` and `novel` match clusters with classes all at once; `kept_known` and
    `kept_novel` leave known classes where they are; `aware` looks at novel images alone and knows
    that they are novel. `train` is that of unlabeled images to learn from.
    """
    y, x = bench.truth[bench.held_out], found.joint[bench.held_out]
    known = y < task.num_known
    joint = right(y, x, joint_match(y, x, task.num_known))
    kept = right(y, x, novel_match(y, x, task.num_known))
    novel = found.novel[bench.held_out][~known]
    rows = task.unlabeled
    z, w = bench.truth[rows], found.of(mode)[rows]
    match = joint_match if mode == "gcd" else novel_match
    return {
        "all": joint.mean(),
        "known": joint[known].mean(),
        "novel": joint[~known].mean(),
        "kept_known": kept[known].mean(),
        "kept_novel": kept[~known].mean(),
        "aware": right(y[~known], novel, novel_match(y[~known], novel, task.num_known)).mean(),
        "train": right(z, w, match(z, w, task.num_known)).mean(),
    }


def tuned(bench: Bench, task: DiscoveryTask, mode: Mode) -> tuple[dict[str, Candidate], str]:
    """Return the tuned candidate of each objective, and the best objective, by hidden classes."""
    folder = bench.folder / "trials" / f"{bench.name}-{bench.seed}"
    tried = candidates(DiscoverConfig(mode=mode))
    every = Trials(bench.encoder, task, bench.base, mode, folder, {}, "clusters", train=shorter)
    trials = list(every.run(tried))
    by_objective = {
        name: best([trial for trial in trials if trial.candidate.objective == name])
        for name in dict.fromkeys(each.objective for each in tried)
    }
    return by_objective, best(trials).objective


class Arm(NamedTuple):
    """What an arm minimizes, and how it was chosen."""

    candidate: Candidate
    options: Mapping[str, Value]
    chosen: int | None = None  # Whether `auto` takes it; None where nothing was tried
    official: bool = False


def every_arm(mode: Mode, done: set[str]) -> dict[str, Arm]:
    """Return all candidates of the trials that are not `done`, without trials."""
    every = candidates(DiscoverConfig(mode=mode))
    return {str(each): Arm(each, {}) for each in every if str(each) not in done}


def tuned_arms(
    bench: Bench, task: DiscoveryTask, mode: Mode, checkouts: Path | None, done: set[str]
) -> dict[str, Arm]:
    """Return the arms that are not `done`, each with what hidden classes choose for it."""
    arms = {name: arm for name, arm in ARMS[mode].items() if name not in done}
    theirs = [name for name in official.ARMS[mode] if checkouts and name not in done]
    if not arms and not theirs:
        return {}
    chosen, auto = tuned(bench, task, mode)
    if mode == "ncd":  # it has the joint loss beside it
        chosen["ncl"] = replace(chosen["joint_ncl"], objective="ncl")
    ours = {
        name: Arm(chosen[objective], more, int(objective == auto and not more))
        for name, (objective, more) in arms.items()
    }
    return ours | {
        name: Arm(chosen[official.ARMS[mode][name]], {}, 0, official=True) for name in theirs
    }


def rows_of(
    bench: Bench, mode: Mode, checkouts: Path | None, done: set[str], *, tune: bool
) -> Iterator[Row]:
    """Run the arms of one data set and seed that are not `done`."""
    task = bench.task(mode)
    common = {"mode": mode, "data": bench.name, "seed": bench.seed}
    if "k-means" not in done:
        found = kmeans_clustering(bench.encoder.cached.center, task, bench.seed)
        yield common | {"arm": "k-means"} | scores(bench, task, found, mode)
    arms = tuned_arms(bench, task, mode, checkouts, done) if tune else every_arm(mode, done)
    if not arms:
        return
    known = known_stage(bench.encoder, task, bench.base)
    known.try_out()
    init = stage_init(bench.encoder, known.method, task, bench.seed, "clusters")
    for name, arm in arms.items():
        started, candidate = time.perf_counter(), arm.candidate
        options = {**candidate.options(mode, task.num_novel), **arm.options}
        stage = class_stage(bench.encoder, task, bench.base, init, candidate.method, options)
        if arm.official and checkouts:
            stage = official.stage(stage, checkouts, candidate.value)
        stage.try_out()
        seconds = round(time.perf_counter() - started, 1)
        found = head_clustering(bench.encoder, stage.method, task.num_known)
        row = common | {"arm": name, "setting": candidate.value, "seconds": seconds}
        yield row | {"chosen": arm.chosen} | scores(bench, task, found, mode)


def main() -> None:
    """Run what is missing in a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=WHOLE)
    parser.add_argument("--modes", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument(
        "--untuned", action="store_true", help="run every candidate of the trials, without trials"
    )
    options = parser.parse_args()
    rows: list[Row] = []
    if options.output.exists():
        rows = [dict(row) for row in read_csv(options.output)]
    for seed in options.seeds:
        for name in options.sets:
            bench = Bench(name, seed, options.folder)
            for mode in options.modes:
                key = mode, name, str(seed)
                done = {r["arm"] for r in rows if (r["mode"], r["data"], str(r["seed"])) == key}
                for row in rows_of(bench, mode, options.checkouts, done, tune=not options.untuned):
                    print({key: cell(value) for key, value in row.items()}, flush=True)
                    rows.append(row)
                    cells = [[cell(one.get(column, "")) for column in COLUMNS] for one in rows]
                    write_csv(options.output, COLUMNS, cells)


def cell(value: object) -> object:
    """Return a value as it is written to a table."""
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
