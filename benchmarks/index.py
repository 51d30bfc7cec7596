"""Seconds and memory to index up to a million images, and to load the first batch.

    python -m benchmarks index [--counts 1000 10000 100000 1000000] [--folder FOLDER]

The files are hard links to a few dozen images, a thousand to a folder, in FOLDER (by default a
temporary one); they are removed afterwards. Each count is measured in separate processes: cold,
without an index, and warm, with the index of the cold start. Memory is the peak of the process
above its memory after all imports.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from benchmarks.shared.datasets import save_photographs
from benchmarks.shared.memory import Cost, alone, measured
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.distributed import available_cpus

BATCH, SIZE = 256, 224
OPTIONS: Final = (
    Option("counts", [10**3, 10**4, 10**5, 10**6], "numbers of files", quick=[1000]),
    Option("batch", BATCH, "images of the first batch", quick=8),
    Option("folder", "", "where the files are made"),
)


def fill(folder: Path, count: int) -> Path:
    """Make a folder of `count` files."""
    (folder / "kept").mkdir()
    kept = list(map(str, save_photographs(folder / "kept", 48)))
    for first in range(0, count, 1000):
        below = folder / "data" / f"{first // 100_000:02d}" / f"{first // 1000:04d}"
        below.mkdir(parents=True)
        for number in range(first, min(first + 1000, count)):
            os.link(kept[number % len(kept)], f"{below}/{number:07d}.jpg")
    return folder / "data"


def opened(folder: Path, batch: int, cache: str) -> tuple[float, float]:
    """Open the images and make the first batch; return seconds and megabytes of the first part."""
    os.environ["XDG_CACHE_HOME"] = cache
    cost: Cost[Images] = measured(open_images, folder)
    images = cost.result
    batches = Batches.of(
        images,
        views_of("simclr"),
        image_size=SIZE,
        sampler=RandomBatchSampler(len(images), batch, seed=0),
        device=torch.device("cpu"),
        workers=available_cpus(),
    )
    images.fingerprint  # noqa: B018  (as every run notes it before its first step)
    next(batches.load(0, 1))
    return cost.seconds, cost.megabytes


def run(options: Namespace) -> Iterator[Row]:
    """Measure every count, without and with an existing index."""
    for count in options.counts:
        with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
            data = fill(Path(folder), count)
            for state in ("cold", "warm"):
                cost = alone(opened, data, options.batch, f"{folder}/cache")
                seconds, megabytes = cost.result
                first = {"first_batch": cost.seconds - seconds, "cpu_seconds": cost.cpu_seconds}
                yield Row(f"{count} files, {state}", seconds, more=first)
                whole = {"with_first_batch": cost.megabytes}
                yield Row(f"{count} files, {state}", megabytes, "MB", more=whole)
