"""Seconds and memory until images are indexed and the first batch is there, up to a million.

    python benchmarks/index.py [--counts 1000 10000 100000 1000000] [--folder FOLDER]

The files are hard links to a few dozen images, a thousand to a folder, in FOLDER (by default a
temporary one); they are removed afterwards. Each count is measured in processes of its own: cold,
that is without an index, and warm, with the one that the cold start left. Memory is the largest of
the process above what it has once everything is imported. A busy machine takes longer: processor
time is printed too, of the process and its workers together.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH, SIZE = 256, 224


def fill(folder: Path, count: int) -> None:
    """Make a folder of so many files."""
    from PIL import Image

    rng = np.random.default_rng(0)
    (folder / "kept").mkdir()
    kept = [str(folder / "kept" / f"{number}.jpg") for number in range(48)]
    for path in kept:
        noise = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC).save(path)
    for first in range(0, count, 1000):
        below = folder / "data" / f"{first // 100_000:02d}" / f"{first // 1000:04d}"
        below.mkdir(parents=True)
        for number in range(first, min(first + 1000, count)):
            os.link(kept[number % len(kept)], f"{below}/{number:07d}.jpg")


def measure(folder: str) -> None:
    """Open the images and make the first batch, in this process."""
    import torch

    from nearkin.data.augmentations import views_of
    from nearkin.data.batches import Batches
    from nearkin.data.images import open_images
    from nearkin.data.order import Order
    from nearkin.distributed import available_cpus

    imported, start = peak(), time.perf_counter()
    images = open_images(folder)
    opened, memory = time.perf_counter(), peak() - imported
    workers = available_cpus()
    batches = Batches(
        images,
        views_of("simclr"),
        image_size=SIZE,
        order=Order(len(images), BATCH, seed=0),
        device=torch.device("cpu"),
        workers=workers,
    )
    images.fingerprint  # noqa: B018  (as every run notes it before its first step)
    next(batches.between(0, 1))
    first, whole = time.perf_counter(), peak() - imported
    spent = sum(sum(resource.getrusage(who)[:2]) for who in WHO)
    print(
        f"{opened - start:7.1f} s and {memory:4.0f} MB to index, {first - opened:5.1f} s more to "
        f"the first batch ({whole:4.0f} MB), {spent:6.1f} s of processor time"
    )


WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def peak() -> float:
    """The largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure every count, cold and warm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    for count in options.counts:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            fill(Path(folder), count)
            environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
            command = [sys.executable, __file__, "--measure", f"{folder}/data"]
            for state in ("cold", "warm"):
                print(f"{count:8} {state}: ", end="", flush=True)
                subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
