"""Images that show little or that stick out: blank, dark, bright, blurred, of odd shape or size.

The kinds are those of cleanvision (https://github.com/cleanlab/cleanvision), which has further
ones; measures and bounds are our own.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

from nearkin.data.channels import preview
from nearkin.data.decode import as_image
from nearkin.data.images import Images
from nearkin.data.index import by_range, indexed
from nearkin.pace import ProgressCallback

SIDE: Final = 128  # Shorter side in pixels of larger images, as they are measured
NOISE: Final = 2.0  # Gray levels: the deviation of an image that shows nothing
DARK: Final = 40.0  # Gray levels that 95 % of the pixels of a dark image are below
BRIGHT: Final = 215.0  # Gray levels that 95 % of the pixels of a bright image are above
BLURRED: Final = 0.1  # Contrast of neighbors, over that of the image, of a blurred one
TYPICAL: Final = 0.5  # The same, over that of the median image: others are soft, too
ODD: Final = 3.0  # How many times as long, or as large in both directions, as the median image
MEASURES: Final = np.dtype([("low", "f4"), ("high", "f4"), ("spread", "f4"), ("sharp", "f4")])
"""The 5th and 95th percentile of brightness, its deviation, and the share of neighbors in it."""


class BadQuality(NamedTuple):
    """An image that may not be worth learning from."""

    row: int
    kind: str  # blank, dark, bright, blurred, odd shape or odd size
    value: float  # What its kind is decided by


def _measures(images: Images, row: int) -> tuple[float, float, float, float]:
    image = as_image(images.read(row), min_side=SIDE)
    bright = preview(np.asarray(image)).mean(axis=2, dtype=np.float32)
    scale = max(1.0, min(bright.shape) / SIDE)
    width, height = (max(2, round(edge / scale)) for edge in bright.shape[::-1])
    gray = np.asarray(Image.fromarray(bright).resize((width, height), Image.Resampling.BOX))
    low, high = np.percentile(gray, (5, 95))
    across, down = np.diff(gray, axis=1), np.diff(gray, axis=0)
    step = np.sqrt((np.square(across).mean() + np.square(down).mean()) / 2)
    spread = float(gray.std())
    return float(low), float(high), spread, float(step) / max(spread, NOISE)


def find_bad(images: Images, progress: ProgressCallback) -> list[BadQuality]:
    """Find images that show little, or differ in shape and size from most; one kind of each."""
    read, found = partial(_measures, images), dict[int, BadQuality]()
    name = by_range("quality", images)
    known, bad = indexed(images, name, MEASURES, read, "looking at images", progress)
    for kind, flagged, value in _kinds(images, known):
        for row in np.flatnonzero(flagged).tolist():
            if row not in bad:
                found.setdefault(row, BadQuality(row, kind, round(float(value[row]), 3)))
    return sorted(found.values(), key=lambda each: (each.kind, each.row))


def _kinds(images: Images, known: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each kind, which images are of it, and by what; the first kind of an image counts."""
    spread, sharp, detailed = known["spread"], known["sharp"], known["spread"] > NOISE
    yield "blank", ~detailed, spread
    yield "dark", known["high"] < DARK, known["high"]
    yield "bright", known["low"] > BRIGHT, known["low"]
    usual = np.median(sharp[detailed]) if detailed.any() else 0.0
    yield "blurred", (sharp < BLURRED) & (sharp < TYPICAL * usual), sharp
    width, height = images.sizes.T.astype(np.float64)
    for kind, value in (("odd shape", width / height), ("odd size", np.sqrt(width * height))):
        ratio = np.abs(np.log(value / np.median(value)))
        yield kind, ratio > np.log(ODD), value
