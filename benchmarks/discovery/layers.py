"""Does training the last block of the network beat a layer on frozen features?

    python benchmarks/discovery/layers.py FOLDER -o docs/discovery/layers.csv

FOLDER holds the data and, in runs/NAME, an encoder of each, as for compare.py beside this file,
whose splits and scores these are. The objective is the first that `--objective auto` tries, with
its default. `hidden` is what `nearkin discover` decides by: the accuracy on known classes that
were hidden, in one fold. A row is written once its arm is done.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare import CPU, SETS, Bench, scores

from nearkin.config import DiscoverConfig
from nearkin.discovery.classifier import head_clustering
from nearkin.discovery.data import Mode
from nearkin.discovery.features import DiscoveryEncoder, FinetunedEncoder
from nearkin.discovery.layers import last_block
from nearkin.discovery.stages import Stage, class_stage, known_stage, stage_init
from nearkin.discovery.trials import Trials, shorter, usual
from nearkin.run.settings import precision_of
from nearkin.tables import read_csv, write_csv

COLUMNS = (
    "mode", "data", "seed", "layers", "objective", "hidden", "all", "known", "novel", "aware",
    "train", "cpu_seconds",
)  # fmt: skip
Row = dict[str, Any]


def whole(stage: Stage, name: str) -> None:
    """Train all steps."""
    del name
    stage.try_out()


def arms(bench: Bench) -> Mapping[str, DiscoveryEncoder]:
    """What may learn, by the value of --train-layers."""
    block = last_block(bench.encoder_file.backbone)
    config = DiscoverConfig(train_layers=block, num_views=8)
    base = replace(bench.base, precision=precision_of(CPU))
    finetuned = FinetunedEncoder(bench.encoder_file, bench.images, config, base, CPU)
    return {"top": bench.encoder, block: finetuned}


def row_of(bench: Bench, mode: Mode, layers: str, encoder: DiscoveryEncoder) -> Row:
    """Train an arm, and score it on the images that were held out."""
    task, chosen = bench.task(mode), usual(DiscoverConfig(mode=mode))
    finetuned = isinstance(encoder, FinetunedEncoder)
    base = encoder.base if isinstance(encoder, FinetunedEncoder) else bench.base
    began = time.process_time()
    folder = bench.folder / ("finetuned" if finetuned else "trials") / f"{bench.name}-{bench.seed}"
    train = whole if finetuned else shorter
    every = Trials(encoder, task, base, mode, folder, {}, "clusters", train=train)
    (trial,) = every.run([chosen], num_folds=1)
    known = known_stage(encoder, task, base)
    known.try_out()
    init = stage_init(encoder, known.method, task, bench.seed, "clusters")
    options = chosen.options(mode, task.num_novel)
    stage = class_stage(encoder, task, base, init, chosen.method, options)
    stage.try_out()
    seconds = round(time.process_time() - began)
    found = head_clustering(encoder, stage.method, task.num_known)
    named = {"mode": mode, "data": bench.name, "seed": bench.seed, "layers": layers}
    more = {"objective": str(chosen), "hidden": trial.accuracy, "cpu_seconds": seconds}
    return named | more | scores(bench, task, found, mode)


def rows(options: argparse.Namespace, done: set[tuple[str, ...]]) -> Iterator[Row]:
    """Run the arms that are not done."""
    for name in options.sets:
        bench = Bench(name, options.seed, options.folder)
        for mode in options.modes:
            for layers, encoder in arms(bench).items():
                if (mode, name, str(options.seed), layers) not in done:
                    yield row_of(bench, mode, layers, encoder)


def main() -> None:
    """Run what is missing in a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["digits", "cifar10"])
    parser.add_argument("--modes", nargs="+", choices=["gcd", "ncd"], default=["gcd", "ncd"])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    table: list[Row] = []
    if options.output.exists():
        table = [dict(row) for row in read_csv(options.output)]
    done = {tuple(str(row[column]) for column in COLUMNS[:4]) for row in table}
    for row in rows(options, done):
        cells = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
        print(cells, flush=True)
        table.append(cells)
        write_csv(options.output, COLUMNS, [[one[c] for c in COLUMNS] for one in table])


if __name__ == "__main__":
    main()
