"""Measure how many images a discovery flags as unlike: of its classes, and of none of them.

    python benchmarks/discovery/strangers.py FOLDER -o docs/discovery/strangers.csv

FOLDER is that of compare.py. The seed draws a novel class that is left out: the discovery never
sees it. Counted are held-out images of the other classes, all images of that class, images of
other data sets, and noise. A discovery is the usual one of its mode, on a frozen encoder.
Protocol: docs/discovery.md.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from compare import CPU, SETS, Bench
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.config import DiscoverConfig
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.discovery.classifier import head_clustering
from nearkin.discovery.data import DiscoveryTask, Mode
from nearkin.discovery.features import Extraction, ViewSettings
from nearkin.discovery.outcome import learned_reference
from nearkin.discovery.stages import class_stage, known_stage, stage_init
from nearkin.discovery.trials import usual
from nearkin.measures.intervals import wilson
from nearkin.tables import write_csv

OTHERS: Final = (
    "digits",
    "fashion",
    "omniglot",
    "cifar10",
)  # Data sets whose images are strangers
COUNT: Final = 500  # Images of each of them, and of noise
COLUMNS = ("mode", "data", "seed", "images", "count", "flagged", "rate", "low", "high")


def main() -> None:
    """Write the table of all data sets, modes and seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=OTHERS, default=["digits", "cifar10"])
    parser.add_argument("--modes", nargs="+", choices=["ncd", "gcd"], default=["gcd", "ncd"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options = parser.parse_args()
    rows = []
    for name in options.sets:
        for seed in options.seeds:
            bench = Bench(name, seed, options.folder)
            strangers = dict(features_of_strangers(bench))
            for mode in options.modes:
                for cells in measured(bench, mode, strangers):
                    print(*cells, flush=True)
                    rows.append(cells)
                write_csv(options.output, COLUMNS, rows)


def measured(
    bench: Bench, mode: Mode, strangers: dict[str, Float[Tensor, "_ dim"]]
) -> Iterator[list[Any]]:
    """Yield a row for each kind of images."""
    task, left_out = without_a_class(bench, bench.task(mode))
    features, truth = bench.encoder.cached.center, bench.truth
    reference = learned_reference(features, discovered(bench, task, mode), task)
    held_out = bench.held_out & (truth != left_out)
    images = {
        "known classes, held out": features[held_out & (truth < task.num_known)],
        "novel classes, held out": features[held_out & (truth >= task.num_known)],
        "class left out": features[truth == left_out],
        **strangers,
    }
    for kind, each in images.items():
        flagged, count = int(reference.unlike(each).sum()), len(each)
        shares = flagged / count, *wilson(flagged, count)
        yield [mode, bench.name, bench.seed, kind, count, flagged, *(f"{x:.4f}" for x in shares)]


def without_a_class(bench: Bench, task: DiscoveryTask) -> tuple[DiscoveryTask, int]:
    """Return the task without the images of a novel class that the seed draws, and the class."""
    drawn = np.random.default_rng(bench.seed).integers(task.num_novel)
    left_out = task.num_known + int(drawn)
    rows = task.rows[bench.truth[task.rows] != left_out]
    return replace(task, rows=rows, num_novel=task.num_novel - 1), left_out


def discovered(bench: Bench, task: DiscoveryTask, mode: Mode) -> Int64[np.ndarray, " images"]:
    """Return the class of each image by the usual discovery of a mode."""
    known = known_stage(bench.encoder, task, bench.base)
    known.try_out()
    init = stage_init(bench.encoder, known.method, task, bench.seed, "clusters")
    candidate = usual(DiscoverConfig(mode=mode))
    options = candidate.options(mode, task.num_novel)
    stage = class_stage(bench.encoder, task, bench.base, init, candidate.method, options)
    stage.try_out()
    return head_clustering(bench.encoder, stage.method, task.num_known).of(mode)


def features_of_strangers(bench: Bench) -> Iterator[tuple[str, Float[Tensor, "_ dim"]]]:
    """Yield features of images of the other data sets, and of noise."""
    rng, encoder = np.random.default_rng(bench.seed), bench.encoder_file
    noise = rng.integers(0, 256, (COUNT, encoder.image_size, encoder.image_size), dtype=np.uint8)
    strangers: dict[str, Images] = {"noise": open_images(noise, labels="none")}
    for name in OTHERS:
        path = bench.folder / SETS[name].data
        if name != bench.name and (path.exists() or name == "digits"):
            every = open_images(str(path) if path.exists() else name)
            strangers[name] = every.subset(np.sort(rng.permutation(len(every))[:COUNT]))
    drawn = ViewSettings(bench.base.augment, 0, bench.seed)
    for name, images in strangers.items():
        yield name, Extraction(encoder, images, drawn, CPU, 0).compute()[0].center


if __name__ == "__main__":
    main()
