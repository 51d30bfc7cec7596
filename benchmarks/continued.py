"""Trainings that continue an encoder: is the result better than its start, and never worse?

Each case is a start, a data set and the size of images, which is that of the start too. The start
is trained on by the defaults of `nearkin train --init-from` for a few epochs, and kNN accuracy (k
20) on held-out images is compared with the start's, image by image, as the run itself does it. A
row has the difference with its 95 % interval.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Shaped

import nearkin
from benchmarks.discovery.sets import LITE0, SETS
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.data.batches import CenterCrops
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load, write_encoder
from nearkin.evaluation.metrics import KNN

LITE1: Final = LITE0.replace("lite0", "lite1")
OURS: Final = "{folder}/runs/"
GRAY: Final = "-gray"  # Of a set whose colors are taken away


@dataclass(frozen=True)
class Case:
    """What is trained on, from which start, at which side in pixels."""

    start: str
    data: str
    side: int
    epochs: int = 5
    batch: int = 64
    images: int = 1300  # Of which `TEST` are held out


TEST: Final = 500
CASES: Final[dict[str, Case]] = {
    "Lite0 to flowers": Case(LITE0, "flowers", 64),
    "Lite0 to Caltech-99": Case(LITE0, "caltech", 64),
    "Lite0 to gray Caltech-99": Case(LITE0, "caltech-gray", 64),
    "Lite0 to TrashNet": Case(LITE0, "trash", 64),
    "Lite0 to CIFAR-10": Case(LITE0, "cifar10", 64),
    "Lite0 to Omniglot": Case(LITE0, "omniglot", 64),
    "Lite1 to Caltech-99": Case(LITE1, "caltech", 64),
    "Lite1 to Fashion-MNIST": Case(LITE1, "fashion", 64),
    "Fashion-MNIST to CIFAR-10": Case(OURS + "fashion", "cifar10", 28, 8, 128, 2500),
    "Fashion-MNIST to Omniglot": Case(OURS + "fashion", "omniglot", 28, 8, 128, 2500),
    "Omniglot to Fashion-MNIST": Case(OURS + "omniglot", "fashion", 28, 8, 128, 2500),
    "Omniglot to digits": Case(OURS + "omniglot", "digits", 16, 20, 128, 1797),
    "digits to Omniglot": Case(OURS + "digits", "omniglot", 16, 20, 128, 4000),
    "digits to Fashion-MNIST": Case(OURS + "digits", "fashion", 16, 20, 128, 4000),
}
OPTIONS: Final = (
    Option("cases", [*CASES], "of these", ["digits to Fashion-MNIST"]),
    Option("epochs", 0, "of each training; 0: those of the case", 2),
)


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each case."""
    folder = Path(options.data)
    for name in options.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            yield _row(name, continued(case, folder, Path(scratch), options.epochs))


def continued(case: Case, folder: Path, scratch: Path, epochs: int) -> dict[str, Any]:
    """Train a case; return the summary of the run."""
    start = load(case.start.format(folder=folder), image_size=case.side)
    file = scratch / "start.safetensors"
    write_encoder(file, start.backbone, start.details, start.preprocessing)
    pixels, labels = drawn(case, folder)
    trained = nearkin.train(
        (pixels, labels),
        out=scratch / "run",
        init_from=str(file),
        val=TEST / len(pixels),
        epochs=epochs or case.epochs,
        batch_size=case.batch,
        evaluate_every=0,
        report=False,
        device="cpu",
    )
    return dict(trained.summary)


def drawn(
    case: Case, folder: Path
) -> tuple[Shaped[np.ndarray, "n side side 3"], Shaped[np.ndarray, " n"]]:
    """Return images of a set at the side of a case, and their labels."""
    name = case.data.removesuffix(GRAY)
    path = folder / SETS[name].data
    every = open_images(str(path) if path.exists() else SETS[name].data, cache=False)
    rows = np.sort(np.random.default_rng(0).permutation(len(every))[: case.images])
    images = every.subset(rows)
    pixels = torch.cat(list(CenterCrops(images, case.side))).permute(0, 2, 3, 1).numpy()
    if case.data != name:
        gray = pixels.mean(axis=-1, keepdims=True).round().astype(np.uint8)
        pixels = np.repeat(gray, 3, axis=-1)
    return pixels, images.labels


def _row(name: str, summary: dict[str, Any]) -> Row:
    found = next(each for each in summary["differences"]["start"] if each["name"] == KNN)
    more = {
        "start": found["second"],
        "encoder": found["first"],
        "share": summary["average"]["share"],
        "view retrieval": summary["average"]["values"],
        "verdict": summary["comparison"]["verdict"],
    }
    return Row(
        name,
        found["first"] - found["second"],
        "kNN above the start",
        interval=(found["low"], found["high"]),
        rounds=found["n"],
        more=more,
    )
