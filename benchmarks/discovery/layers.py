"""Does training the last block of the network beat a layer on frozen features?

    python benchmarks/discovery/layers.py FOLDER -o docs/discovery/layers.csv

FOLDER holds the data and, in runs/NAME, an encoder of each, as for compare.py beside this file,
whose splits and scores these are. Scored are images that were held out, and what the command
decides by: known classes that were hidden, in one fold. A row is written once its arm is done.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compare import CPU, SETS, Bench, scores

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.discovery.classifier import head_clustering
from nearkin.discovery.data import Mode
from nearkin.discovery.features import DiscoveryEncoder, FinetunedEncoder
from nearkin.discovery.layers import last_block
from nearkin.discovery.stages import Stage, class_stage, known_stage, stage_init
from nearkin.discovery.trials import Candidate, Trials, usual
from nearkin.run.settings import precision_of
from nearkin.tables import read_csv, write_csv

COLUMNS = (
    "mode", "data", "seed", "layers", "scored", "objective", "share", "all", "known", "novel",
    "aware", "train", "cpu_seconds",
)  # fmt: skip
KEY = COLUMNS[:5]
SCORED = ("held-out images", "hidden classes")
Row = dict[str, Any]


def arms(bench: Bench) -> Mapping[str, DiscoveryEncoder]:
    """What may learn, by the value of --train-layers."""
    block = last_block(bench.encoder_file.backbone)
    every: dict[str, DiscoveryEncoder] = {"top": bench.encoder}
    for layers in (block, f"{block},top"):
        config = DiscoverConfig(train_layers=layers, num_views=8)
        every[layers] = FinetunedEncoder(bench.encoder_file, bench.images, config, bench.base, CPU)
    return every


@dataclass(frozen=True)
class Arm:
    """What learns, of a data set in one mode, for a share of the usual steps."""

    bench: Bench
    mode: Mode
    encoder: DiscoveryEncoder
    share: float

    @property
    def base(self) -> TrainConfig:
        """The settings of all stages."""
        finetuned = isinstance(self.encoder, FinetunedEncoder)
        return replace(self.bench.base, precision=precision_of(CPU) if finetuned else "fp32")

    def train(self, stage: Stage, name: str) -> None:
        """Train the known classes wholly, all classes for a share of the steps."""
        stage.try_out(1.0 if name == "known" else self.share)

    def held_out(self) -> Mapping[str, float]:
        """Score images that were held out, and unlabeled ones that were not."""
        task, base = self.bench.task(self.mode), self.base
        known = known_stage(self.encoder, task, base)
        self.train(known, "known")
        init = stage_init(self.encoder, known.method, task, base.seed, "clusters")
        options = self.candidate.options(self.mode, task.num_novel)
        stage = class_stage(self.encoder, task, base, init, self.candidate.method, options)
        self.train(stage, "class")
        found = head_clustering(self.encoder, stage.method, task.num_known)
        return scores(self.bench, task, found, self.mode)

    def hidden(self) -> Mapping[str, float]:
        """Score images of known classes, some of which were hidden."""
        task = self.bench.task(self.mode)
        with TemporaryDirectory() as folder:
            where = Path(folder)
            every = Trials(
                self.encoder, task, self.base, self.mode, where, {}, "clusters", train=self.train
            )
            (trial,) = every.run([self.candidate], num_folds=1)
        return {"all": trial.accuracy}

    @property
    def candidate(self) -> Candidate:
        """The first objective that `--objective auto` tries, with its default."""
        return usual(DiscoverConfig(mode=self.mode))


def rows(options: argparse.Namespace, done: set[tuple[str, ...]]) -> Iterator[Row]:
    """Run the arms that are not done."""
    for scored, name, mode in product(SCORED, options.sets, options.modes):
        bench = Bench(name, options.seed, options.folder)
        for layers, encoder in arms(bench).items():
            key = mode, name, str(options.seed), layers, scored
            if key in done:
                continue
            began, arm = time.process_time(), Arm(bench, mode, encoder, options.share)
            row = arm.held_out() if scored == SCORED[0] else arm.hidden()
            more = {"objective": arm.candidate, "share": options.share}
            seconds = {"cpu_seconds": round(time.process_time() - began)}
            yield dict(zip(KEY, key, strict=True)) | more | dict(row) | seconds


def main() -> None:
    """Run what is missing in a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["digits", "cifar10"])
    parser.add_argument("--modes", nargs="+", choices=["gcd", "ncd"], default=["gcd", "ncd"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of the last stage")
    options = parser.parse_args()
    table: list[Row] = []
    if options.output.exists():
        table = [dict(row) for row in read_csv(options.output)]
    done = {tuple(str(row[column]) for column in KEY) for row in table}
    for row in rows(options, done):
        cells = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
        print(cells, flush=True)
        table.append(cells)
        write_csv(options.output, COLUMNS, [[one.get(c, "") for c in COLUMNS] for one in table])


if __name__ == "__main__":
    main()
