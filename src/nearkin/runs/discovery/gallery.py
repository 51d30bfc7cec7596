"""Pictures of a class that was found: for the page, and as a sheet of its own."""

import base64
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from nearkin.data.centered import Pixels
from nearkin.data.images import SMALL_SIDE, Images
from nearkin.runs.training.pictures import save_sheet

COLUMNS: Final = 12
"""Pictures in a row of a sheet."""
SHEET_SIDE: Final = 96
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
    return {row: _uri(square) for row, square in _squares(images, rows, side, workers)}


def class_sheet(
    images: Images,
    groups: Mapping[str, Int[np.ndarray, " members"]],
    path: Path,
    workers: int = 0,
) -> Path:
    """Show a class as rows of pictures, each group of them with its name in front.

    Args:
        images: The pictures.
        groups: Rows of the pictures of each group, such as `border`, in the order to be shown.
            Those that cannot be read are left out.
        path: The file.
        workers: Processes that decode photographs.
    """
    rows = np.concatenate(list(groups.values()))
    shown = dict(_squares(images, rows, SHEET_SIDE, workers))
    side = next((square.shape[-1] for square in shown.values()), SHEET_SIDE)
    grids: list[Float[Tensor, "lines columns 3 side side"]] = []
    labels: list[str] = []
    for name, members in groups.items():
        tiles = [shown[row] for row in members.tolist() if row in shown]
        lines = max(1, math.ceil(len(tiles) / COLUMNS))
        grid = torch.ones(lines * COLUMNS, 3, side, side)
        for place, tile in enumerate(tiles):
            grid[place] = tile / 255
        grids.append(grid.unflatten(0, (lines, COLUMNS)))
        labels += [name, *[""] * (lines - 1)]
    return save_sheet(torch.cat(grids).unbind(dim=1), path, labels)


def _squares(
    images: Images, rows: Int[np.ndarray, " rows"], side: int, workers: int
) -> Iterator[tuple[int, UInt8[Tensor, "3 side side"]]]:
    """The middle of each readable picture after its row, all of one size."""
    rows = np.unique(rows)
    if not len(rows):
        return
    some = images.subset(rows)
    pixels = Pixels(some, min(side, int(some.sizes.min(axis=1).max())), workers=workers)
    squares = (square for batch in pixels for square in batch)
    for place, square in enumerate(squares):
        if place not in pixels.bad:
            yield int(rows[place]), square


def _uri(square: UInt8[Tensor, "3 side side"]) -> str:
    file, kind = io.BytesIO(), "png" if square.shape[-1] <= SMALL_SIDE else "webp"
    Image.fromarray(square.permute(1, 2, 0).numpy()).save(file, kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
