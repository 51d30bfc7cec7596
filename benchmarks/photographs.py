"""Photos decoded and cropped per second on one core: nearkin, nearkin from its cache, and PIL.

    python benchmarks/photographs.py IMAGES [--enlarged 1600] [--size 224] [--count 300]

Two views of each image, as in SimCLR. The variants take turns, so that a busy machine slows all of
them alike, and all use the same crops.

- full: the whole image decoded, then PIL's crop and resize, as torchvision's RandomResizedCrop.
- ours: decoded at the smallest scale that the crops need.
- cached: cropped from the pixels of `--cache ram`; `filling` is the first time.

IMAGES is what `nearkin train` takes. The same images are measured again as JPEGs with a longer
side of `--enlarged` pixels, a usual size of cameras and the web.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nearkin.data.augmentations import views_of
from nearkin.data.batches import ViewSampler
from nearkin.data.cache import Cache
from nearkin.data.decode import crops, decode
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.order import Order

ROUNDS = 5


def full(images: Images, row: int, boxes: np.ndarray, size: int) -> None:
    """Decode a whole image, then crop."""
    held = images.read(row)
    assert isinstance(held, bytes)
    with Image.open(io.BytesIO(held)) as opened:
        image = opened.convert("RGB")
    limits = np.tile(image.size, 2)
    for box in np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1) * limits:
        left, top, right, bottom = (round(edge) for edge in box.tolist())
        cut = image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        np.asarray(cut.resize((size, size), Image.Resampling.BICUBIC))


def compare(name: str, images: Images, size: int) -> None:
    """Measure all variants in turns and print medians."""
    sampler = ViewSampler(
        images, views_of("simclr"), image_size=size, order=Order(len(images), 1, seed=0)
    )
    rows = np.arange(len(images))
    boxes = np.stack([params.box for params in sampler.sample(0, rows)], axis=1)
    cache = Cache(images, size, "ram")
    ways: dict[str, Callable[[int], object]] = {
        "filling": cache.read,
        "full": lambda row: full(images, row, boxes[row], size),
        "ours": lambda row: crops(images.read(row), boxes[row], [size] * 2),
        "cached": lambda row: crops(cache.read(row), boxes[row], [size] * 2),
    }
    laps: dict[str, list[float]] = {way: [] for way in ways}
    for lap in range(ROUNDS):
        for way, look in ways.items():
            if way != "filling" or lap == 0:
                start = time.process_time()
                for row in rows.tolist():
                    look(row)
                laps[way].append(time.process_time() - start)
    rates = {way: len(images) / statistics.median(times) for way, times in laps.items()}
    side = np.median(images.sizes, axis=0).astype(int)
    shown = ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
    print(f"{name}, median {side[0]}x{side[1]}, views of {size}: images/s per core: {shown};")
    print(f"    ours / full {rates['ours'] / rates['full']:.2f}, ", end="")
    print(f"cached / ours {rates['cached'] / rates['ours']:.2f}, ", end="")
    print(f"kept {cache.num_bytes / len(images) / 1000:.0f} kB per image")


def enlarge(images: Images, folder: Path, side: int) -> None:
    """Save the images as JPEGs with a longer side of `side` pixels."""
    for row in range(len(images)):
        held = images.read(row)
        assert isinstance(held, bytes)
        image = decode(held)
        scale = side / max(image.size)
        width, height = (round(scale * edge) for edge in image.size)
        image.resize((width, height)).save(folder / f"{row:05d}.jpg", quality=90)


def main() -> None:
    """Compare on the original and on enlarged images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("images")
    parser.add_argument("--enlarged", type=int, default=1600)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = open_images(options.images, cache=False).spread(options.count)
    compare("as they are", images, options.size)
    with tempfile.TemporaryDirectory() as folder:
        enlarge(images, Path(folder), options.enlarged)
        compare("enlarged", open_images(folder, cache=False), options.size)


if __name__ == "__main__":
    main()
