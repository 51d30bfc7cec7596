"""Pictures small enough to stand in a page."""

import base64
import io
from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from nearkin.data.centered import Pixels
from nearkin.data.images import SMALL_SIDE, Images

QUALITY: Final = 80
"""Of WebP: 4 KB for a photograph of 96 pixels."""


def thumbnails(
    images: Images, rows: Int[np.ndarray, " rows"], side: int = 96, workers: int = 0
) -> dict[int, str]:
    """The central squares of some pictures as `data:` URIs, by their rows.

    PNG up to 64 pixels, else WebP. Pictures that cannot be read are left out.

    Args:
        images: The pictures.
        rows: Which of them, in any order; to name one twice is to name it once.
        side: Pixels on a side. Where all pictures are smaller, the largest keeps its own size:
            it is for the page to enlarge them without blur.
        workers: Processes that decode photographs.
    """
    return {row: _uri(square) for row, square in squares(images, rows, side, workers)}


def squares(
    images: Images, rows: Int[np.ndarray, " rows"], side: int, workers: int
) -> Iterator[tuple[int, UInt8[Tensor, "3 side side"]]]:
    """The middle of each readable picture after its row, all of one size."""
    rows = np.unique(rows)
    if not len(rows):
        return
    some = images.subset(rows)
    pixels = Pixels(some, min(side, int(some.sizes.min(axis=1).max())), workers=workers)
    shown = (square for batch in pixels for square in batch)
    for place, square in enumerate(shown):
        if place not in pixels.bad:
            yield int(rows[place]), square


def _uri(square: UInt8[Tensor, "3 side side"]) -> str:
    file, kind = io.BytesIO(), "png" if square.shape[-1] <= SMALL_SIDE else "webp"
    Image.fromarray(square.permute(1, 2, 0).numpy()).save(file, kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
