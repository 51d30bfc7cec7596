"""Photos decoded and cropped on one core: nearkin, nearkin from its cache, and PIL.

    python -m benchmarks photographs [--data IMAGES] [--enlarged 1600] [--size 224] [--count 300]

Two views of each image, as in SimCLR, in CPU time. The variants take turns, and all use the same
crops.

- nearkin: decoded at the smallest scale that the crops need.
- PIL: the whole image decoded, then PIL's crop and resize, as torchvision's RandomResizedCrop.
- cached: cropped from the pixels of `--cache ram`; `filling` is the first time.

IMAGES is what `nearkin train` takes. The same images are measured again as JPEGs with a longer
side of `--enlarged` pixels, a usual size of cameras and the web.
"""

import io
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from benchmarks.shared.datasets import photographs
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import against_all, turns
from nearkin.data.augmentations import views_of
from nearkin.data.batches import ViewDataset
from nearkin.data.cache import Cache
from nearkin.data.decode import crops, decode
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler

OPTIONS: Final = (
    Option("enlarged", 1600, "longer side of the enlarged images", quick=640),
    Option("size", 224, "side of the views", quick=64),
    Option("count", 300, "images", quick=4),
)


def encoded(images: Images, row: int) -> bytes:
    """Return the content of a file."""
    held = images.read(row)
    assert isinstance(held, bytes)
    return held


def full(images: Images, row: int, boxes: np.ndarray, size: int) -> None:
    """Decode a whole image, then crop."""
    with Image.open(io.BytesIO(encoded(images, row))) as opened:
        image = opened.convert("RGB")
    limits = np.tile(image.size, 2)
    for box in np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1) * limits:
        left, top, right, bottom = (round(edge) for edge in box.tolist())
        cut = image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        np.asarray(cut.resize((size, size), Image.Resampling.BICUBIC))


def compare(case: str, images: Images, size: int, rounds: int) -> Iterator[Row]:
    """Measure all variants in turns."""
    dataset = ViewDataset(
        images,
        views_of("simclr"),
        image_size=size,
        sampler=RandomBatchSampler(len(images), 1, seed=0),
    )
    rows = np.arange(len(images))
    boxes = np.stack([params.box for params in dataset.sample(0, rows)], axis=1)
    cache = Cache(images, size, "ram")

    def every(look: Callable[[int], object]) -> None:
        for row in rows.tolist():
            look(row)

    start = time.process_time()
    every(cache.read)
    filling = time.process_time() - start
    ways: dict[str, Callable[[int], object]] = {
        "nearkin": lambda row: crops(images.read(row), boxes[row], [size] * 2),
        "PIL": lambda row: full(images, row, boxes[row], size),
        "cached": lambda row: crops(cache.read(row), boxes[row], [size] * 2),
    }
    laps = turns(
        {way: partial(every, look) for way, look in ways.items()}, rounds, time.process_time
    )
    kilobytes = cache.num_bytes / len(images) / 1000
    width, height = np.median(images.sizes, axis=0).astype(int)
    case = f"{case}, {width}x{height}"
    yield from against_all(case, laps, filling=filling, cached_kb=kilobytes, images=len(images))


def enlarge(images: Images, folder: Path, side: int) -> None:
    """Save the images as JPEGs with a longer side of `side` pixels."""
    for row in range(len(images)):
        image = decode(encoded(images, row))
        scale = side / max(image.size)
        width, height = (round(scale * edge) for edge in image.size)
        image.resize((width, height)).save(folder / f"{row:05d}.jpg", quality=90)


def run(options: Namespace) -> Iterator[Row]:
    """Compare on the original and on enlarged images."""
    with photographs(options.data, options.count) as data, tempfile.TemporaryDirectory() as folder:
        images = open_images(data, cache=False).spread(options.count)
        yield from compare("as they are", images, options.size, options.rounds)
        enlarge(images, Path(folder), options.enlarged)
        larger = open_images(folder, cache=False)
        yield from compare("enlarged", larger, options.size, options.rounds)
