"""Thumbnails in a page: single ones as `data:` URIs, and those of the map on sheets."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from nearkin.data.batches import CenterCrops, squares
from nearkin.data.decode import MIDDLE_GRAY
from nearkin.data.images import SMALL_SIDE, Images

QUALITY: Final = 80
"""Of WebP: 4 KB for a photograph of 96 pixels."""
SIDE: Final = 48
COLUMNS: Final = 16
PER_SHEET: Final = COLUMNS**2
MAX_BYTES: Final = 9_000_000
"""Of all sheets: a page of 20,000 images must stay below 15 MB, and base64 adds a third."""
QUALITIES: Final = (60, 35, 15)
"""Of WebP, tried in turn until all sheets are small enough."""


def thumbnails(
    images: Images, rows: Int[np.ndarray, " rows"], side: int = 96, workers: int = 0
) -> dict[int, str]:
    """Return the central squares of images as `data:` URIs, by row.

    PNG up to 64 pixels, else WebP. Unreadable images are left out.

    Args:
        images: The images.
        rows: Which of them, in any order.
        side: Pixels on a side; smaller images keep the size of the largest of them.
        workers: Processes that decode photographs.
    """
    return {row: _uri(square) for row, square in squares(images, rows, side, workers)}


def _uri(square: UInt8[Tensor, "3 side side"]) -> str:
    file, kind = io.BytesIO(), "png" if square.shape[-1] <= SMALL_SIDE else "webp"
    Image.fromarray(square.permute(1, 2, 0).numpy()).save(file, kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True, eq=False)
class Tiles:
    """The central squares of images, in their order."""

    sheets: tuple[bytes, ...]
    """WebP images of `PER_SHEET` tiles, `COLUMNS` in a row; the last one may have fewer."""
    side: int
    """Pixels on a side of a tile."""


def tiles(images: Images, workers: int = 0) -> Tiles:
    """Return tiles of all images, gray for unreadable ones.

    Images that are all smaller than a tile keep the size of the largest of them.
    """
    side = min(SIDE, int(images.sizes.min(axis=1).max()))
    arrays = list(_sheets(images, side, workers))
    for quality in QUALITIES:
        sheets = tuple(_webp(sheet, quality, side) for sheet in arrays)
        if sum(map(len, sheets)) <= MAX_BYTES:
            break
    return Tiles(sheets, side)


def _sheets(
    images: Images, side: int, workers: int
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    for batch in CenterCrops(images, side, batch_size=PER_SHEET, workers=workers):
        rows = -(-len(batch) // COLUMNS)
        sheet = np.full((rows * COLUMNS, side, side, 3), MIDDLE_GRAY, np.uint8)
        sheet[: len(batch)] = batch.permute(0, 2, 3, 1).numpy()
        grid = sheet.reshape(rows, COLUMNS, side, side, 3).swapaxes(1, 2)
        yield grid.reshape(rows * side, COLUMNS * side, 3)


def _webp(sheet: UInt8[np.ndarray, "height width 3"], quality: int, side: int) -> bytes:
    file = io.BytesIO()
    # Of very small images every pixel counts, so they are stored without loss.
    Image.fromarray(sheet).save(file, "webp", quality=quality, lossless=side <= SIDE // 2)
    return file.getvalue()
