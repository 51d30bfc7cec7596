"""Where two images are alike: is the place that both have in common the highest of the map?

The middle of a photograph is pasted into two others, at places and sizes that are drawn. A map
hits if its highest value lies in the pasted square, or half a cell from it. Beside it stands the
share of the image that this is. The interval is of the rate.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from benchmarks.discovery.sets import LITE0
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.seeds import interval
from nearkin.data.decode import as_image
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import Encoder, load
from nearkin.encoders.likeness import likeness

OPTIONS: Final = (
    Option("encoder", LITE0, "with {folder} for --data", "timm:resnet18?pretrained=false"),
    Option("photographs", "caltech99.tar", "below --data", "digits"),
    Option("seeds", [11, 12, 13], "each draws photographs and places", [0, 1]),
    Option("pairs", 60, "of images for each seed", 2),
)


def run(options: Namespace) -> Iterator[Row]:
    """Yield the rate of hits."""
    folder = Path(options.data)
    images = open_images(str(folder / options.photographs))
    encoder = load(options.encoder.format(folder=folder))
    found = [hits(encoder, images, seed, options.pairs) for seed in options.seeds]
    rates, shares = np.array(found).T
    mean, half = interval(rates.tolist())
    yield Row(
        "maps that hit",
        mean,
        "of all",
        against="chance",
        other=float(shares.mean()),
        ratio=float(shares.mean()) / mean,
        interval=(mean - half, mean + half),
        rounds=len(options.seeds),
    )


def hits(encoder: Encoder, images: Images, seed: int, pairs: int) -> tuple[float, float]:
    """Return the share of maps that hit, and the mean share of an image that counts as one."""
    rng, size = np.random.default_rng(seed), encoder.image_size
    hit, share = list[bool](), list[float]()
    for _ in range(pairs):
        first, second, pasted = (drawn(images, rng, size) for _ in range(3))
        middle = pasted.crop((size // 7, size // 7, size - size // 7, size - size // 7))
        boxes = [paste(middle, onto, rng) for onto in (first, second)]
        for heat, (left, top, side) in zip(likeness(encoder, first, second), boxes, strict=True):
            cell = size / len(heat)
            row, column = divmod(int(heat.argmax()), len(heat))
            place = (np.array([column, row]) + 0.5) * cell - (left, top)
            hit.append(bool((-cell / 2 <= place).all() and (place <= side + cell / 2).all()))
            share.append(min(1.0, (side + cell) ** 2 / size**2))
    return float(np.mean(hit)), float(np.mean(share))


def drawn(images: Images, rng: np.random.Generator, size: int) -> Image.Image:
    """Return a photograph as a square."""
    image = as_image(images.read(int(rng.integers(len(images)))))
    assert isinstance(image, Image.Image)
    return image.resize((size, size))


def paste(
    middle: Image.Image, onto: Image.Image, rng: np.random.Generator
) -> tuple[int, int, int]:
    """Paste an image at a drawn place, a quarter to .4 as wide; return left, top and side."""
    side = int(rng.integers(onto.width // 4, 2 * onto.width // 5))
    left, top = map(int, rng.integers(0, onto.width - side, 2))
    onto.paste(middle.resize((side, side)), (left, top))
    return left, top, side
