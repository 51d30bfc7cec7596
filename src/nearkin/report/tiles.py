"""Small versions of many pictures, side by side in a few large ones."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from nearkin.data.centered import Pixels
from nearkin.data.images import Images

SIDE: Final = 48
COLUMNS: Final = 16
PER_SHEET: Final = COLUMNS**2
MOST_BYTES: Final = 9_000_000
"""Of all sheets: a page of 20,000 pictures is to stay below 15 MB, and base64 adds a third."""
QUALITIES: Final = (60, 35, 15)
"""Of WebP, tried in turn until all sheets are small enough."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """The central squares of pictures, in their order."""

    sheets: tuple[bytes, ...]
    """WebP pictures of `PER_SHEET` tiles, `COLUMNS` in a row; the last one may have fewer."""
    side: int
    """Pixels on a side of a tile."""


def tiles(images: Images, workers: int = 0) -> Tiles:
    """Tiles of all pictures.

    Pictures that are all smaller than a tile keep the size of the largest: it is for the page
    to enlarge them without blur. Those that cannot be read are gray.

    Args:
        images: The pictures.
        workers: Processes that decode photographs.
    """
    side = min(SIDE, int(images.sizes.min(axis=1).max()))
    shown = list(_sheets(images, side, workers))
    for quality in QUALITIES:
        sheets = tuple(_webp(sheet, quality, side) for sheet in shown)
        if sum(map(len, sheets)) <= MOST_BYTES:
            break
    return Tiles(sheets, side)


def _sheets(
    images: Images, side: int, workers: int
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    batches = Pixels(images, side, batch_size=PER_SHEET, workers=workers)
    for batch in batches:
        squares = batch.permute(0, 2, 3, 1).numpy()
        rows = -(-len(squares) // COLUMNS)
        sheet = np.full((rows * COLUMNS, side, side, 3), 128, np.uint8)
        sheet[: len(squares)] = squares
        grid = sheet.reshape(rows, COLUMNS, side, side, 3).swapaxes(1, 2)
        yield grid.reshape(rows * side, COLUMNS * side, 3)


def _webp(sheet: UInt8[np.ndarray, "height width 3"], quality: int, side: int) -> bytes:
    """Lossy, but of pictures so small that every pixel is to be seen."""
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, "webp", quality=quality, lossless=side <= SIDE // 2)
    return file.getvalue()
