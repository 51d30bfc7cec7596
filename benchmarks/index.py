"""Seconds and memory to index up to a million images, and to load the first batch.

    python benchmarks/index.py [--counts 1000 10000 100000 1000000] [--folder FOLDER]

The files are hard links to a few dozen images, a thousand to a folder, in FOLDER (by default a
temporary one); they are removed afterwards. Each count is measured in separate processes: cold,
without an index, and warm, with the index of the cold start. Memory is the peak of the process
above its memory after all imports. CPU time of the process and its workers is printed too, since
wall time depends on other work.
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
    """Make a folder of `count` files."""
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
    from nearkin.data.opening import open_images
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
        f"the first batch ({whole:4.0f} MB), {spent:6.1f} s of CPU time"
    )


WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure every count, without and with an existing index."""
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
