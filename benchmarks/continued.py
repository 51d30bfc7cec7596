"""Trainings that continue an encoder, beside their starts.

Is the result better than the start in some cases, and worse in none? Each case is a start, a data
set, and a side of images in pixels, at which the start is measured as well. It is trained on with
the defaults of `nearkin train --encoder` for some epochs. The kNN accuracy (k 20) of what is
kept on held-out images is compared with the start's, image by image, as a run does it. A row has
the difference and its 95 % interval.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.discovery.sets import CPU, LITE0, SETS
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.config import TrainConfig
from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import Encoder, load, write_encoder
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.evaluation.evaluate import label_free
from nearkin.evaluation.metrics import KNN, knn
from nearkin.evaluation.verdict import differences
from nearkin.metrics.metric import Difference
from nearkin.run.auto import resolve, view_sides
from nearkin.training.average import Average, choose_average
from nearkin.training.fit import anchor_for, optimizer_for, training_steps
from nearkin.training.session import build, growing
from nearkin.training.start import with_start

LITE1: Final = LITE0.replace("lite0", "lite1")
OURS: Final = "{folder}/runs/"
GRAY: Final = "-gray"  # Of a set whose colors are taken away


@dataclass(frozen=True)
class Case:
    """What is trained on, from which start, at which side in pixels."""

    start: str
    data: str
    side: int = 64
    epochs: int = 4
    batch: int = 32
    train: int = 600  # Images
    test: int = 400


CASES: Final[dict[str, Case]] = {
    "Lite0 to flowers": Case(LITE0, "flowers"),
    "Fashion-MNIST to CIFAR-10": Case(OURS + "fashion", "cifar10", 28, 8, 128, 1500, 1000),
    "digits to Fashion-MNIST": Case(OURS + "digits", "fashion", 16, 12, 64, 1500, 1000),
    "Lite0 to Caltech-99": Case(LITE0, "caltech"),
    "digits to Omniglot": Case(OURS + "digits", "omniglot", 16, 12, 64, 1500, 1000),
    "Lite0 to gray Caltech-99": Case(LITE0, "caltech-gray"),
    "Omniglot to digits": Case(OURS + "omniglot", "digits", 16, 12, 64, 897, 900),
    "Lite1 to TrashNet": Case(LITE1, "trash"),
    "Fashion-MNIST to Omniglot": Case(OURS + "fashion", "omniglot", 28, 8, 128, 1500, 1000),
    "Lite0 to CIFAR-10": Case(LITE0, "cifar10"),
    "Omniglot to Fashion-MNIST": Case(OURS + "omniglot", "fashion", 28, 8, 128, 1500, 1000),
    "digits to CIFAR-10": Case(OURS + "digits", "cifar10", 16, 12, 64, 1500, 1000),
    "Lite1 to Fashion-MNIST": Case(LITE1, "fashion"),
    "Lite0 to Omniglot": Case(LITE0, "omniglot"),
}
"""The first three were looked at while defaults were chosen (docs/lab.md)."""
OPTIONS: Final = (
    Option("cases", [*CASES], "of these", ["digits to Fashion-MNIST"]),
    Option("epochs", 0, "of each training; 0: those of the case", 2),
)


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each case."""
    for name in options.cases:
        train, test = drawn(CASES[name], Path(options.data))
        found, average = continued(CASES[name], Path(options.data), train, test, options.epochs)
        yield Row(
            name,
            found.value,
            "kNN above the start",
            interval=(found.low, found.high),
            rounds=found.n,
            more={"start": found.second, "encoder": found.first, **average.to_dict()},
        )


def drawn(case: Case, folder: Path) -> tuple[Images, Images]:
    """Return images to train on and held-out ones, at the side of the case."""
    name, rng = case.data.removesuffix(GRAY), np.random.default_rng(0)
    path = folder / SETS[name].data
    every = open_images(str(path) if path.exists() else SETS[name].data, cache=False)
    some = every.subset(np.sort(rng.permutation(len(every))[: case.train + case.test]))
    pixels = torch.cat(list(CenterCrops(some, case.side))).permute(0, 2, 3, 1).numpy()
    if case.data != name:
        gray = pixels.mean(axis=-1, keepdims=True).round().astype(np.uint8)
        pixels = np.repeat(gray, 3, axis=-1)
    images = open_images((pixels, some.labels), cache=False)
    test = rng.permutation(len(images)) < case.test
    return images.subset(np.flatnonzero(~test)), images.subset(np.flatnonzero(test))


def continued(
    case: Case, folder: Path, train: Images, test: Images, epochs: int = 0
) -> tuple[Difference, Average]:
    """Train a case as a run does; compare what is kept with the start, and say what that is."""
    start = load(case.start.format(folder=folder), image_size=case.side)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "start.safetensors"
        write_encoder(file, start.backbone, start.details, start.preprocessing)
        asked = TrainConfig(
            encoder=str(file), epochs=epochs or case.epochs, batch_size=case.batch, device="cpu"
        )
        config = resolve(with_start(asked, start, train), train, CPU)
        method, batches = build(config, train, CPU)
    feed = growing(config, [batches.resized(side) for side in view_sides(config)])
    optimizer, anchor = optimizer_for(method, config), anchor_for(method, config)
    total = int(config.epochs) * feed.sampler.steps_per_epoch
    for _ in training_steps(
        config, method, optimizer, feed.load(0, total), start=0, total=total, anchor=anchor
    ):
        pass
    measure = partial(
        label_free, images=test, seed=0, workers=0, augment=config.augment, device=CPU
    )
    end = method.backbone.body.state_dict()
    kept, average = choose_average(start, start, end, measure)
    tables = {"encoder": _encoded(kept, train, test), "start": _encoded(start, train, test)}
    metrics = {name: knn(*table) for name, table in tables.items()}
    (found,) = (each for each in differences(tables, metrics)["start"] if each.name == KNN)
    return found, average


def _encoded(encoder: Encoder, train: Images, test: Images) -> tuple[Embeddings, Embeddings]:
    first, second = (encode_images(encoder, part, device=CPU, workers=0) for part in (train, test))
    return first, second
