"""Rows of images as one image: what is said of them stands beside and below."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nearkin.data.batches import Batches, CenterCrops, squares
from nearkin.data.images import Images
from nearkin.tables import printable

MIN_SIDE: Final = 64
"""Smaller images are enlarged to about this many pixels, for people to see."""
COLUMNS: Final = 12
"""Images in a row of a class."""
SIDE: Final = 96
LINE: Final = 15
"""Pixels between two lines of text."""
LABEL, CAPTION = 14, 11
"""Sizes of letters."""
LONGEST: Final = 40
"""Characters of a label."""
Lines = Sequence[str]


def save_sheet(
    columns: Sequence[Float[Tensor, "rows 3 _ _"]],
    path: Path,
    labels: Sequence[str] = (),
    captions: Sequence[Sequence[Lines]] = (),
) -> Path:
    """Save columns of images as one, small ones enlarged and a column's own size kept.

    Args:
        columns: Images in [0, 1], each with its own side.
        path: The file.
        labels: What to write in front of each row.
        captions: What to write below the images of each row; long lines are shortened.
    """
    side = max(column.shape[-1] for column in columns)
    tiles = torch.stack([_padded(column, side) for column in columns], dim=1)
    tiles = torch.nn.functional.pad(tiles, (2, 2, 2, 2), value=1.0)
    scale = max(1, MIN_SIDE // side)
    rows = [_enlarged(torch.cat(tuple(row), dim=2), scale) for row in tiles]
    _written(rows, [shortened(label, LONGEST) for label in labels], captions).save(path)
    return path


def _padded(view: Tensor, side: int) -> Tensor:
    missing = side - view.shape[-1]
    return torch.nn.functional.pad(view, (0, missing, 0, missing), value=1.0)


def _enlarged(row: Float[Tensor, "3 height width"], scale: int) -> Image.Image:
    image = Image.fromarray((row.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def _written(
    rows: Sequence[Image.Image], labels: Sequence[str], captions: Sequence[Sequence[Lines]]
) -> Image.Image:
    """Rows one below the other, with room for what is written."""
    font, small = _font(LABEL), _font(CAPTION)
    width, height = rows[0].size
    margin = int(max(map(font.getlength, labels))) + 16 if labels else 0
    lines = max((len(caption) for row in captions for caption in row), default=0)
    strip = LINE * lines + 6 if lines else 0
    sheet = Image.new("RGB", (margin + width, (height + strip) * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        top = number * (height + strip)
        sheet.paste(row, (margin, top))
        if labels:
            draw.text((8, top + height / 2), labels[number], "black", font, anchor="lm")
        below = captions[number] if captions else ()
        cell = width / max(1, len(below))
        for column, caption in enumerate(below):
            for line, said in enumerate(caption):
                place = margin + (column + 0.5) * cell, top + height + line * LINE
                draw.text(place, _fitted(said, small, cell - 4), "black", small, anchor="ma")
    return sheet


def _font(size: int) -> ImageFont.FreeTypeFont:
    """Letters of most alphabets; Pillow's own are Latin."""
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def _fitted(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """As much of a text as there is room for."""
    most = min(len(text), int(width))  # no letter is narrower than a pixel
    while font.getlength(said := shortened(text, most)) > width and most > 1:
        most -= 1
    return said


def shortened(text: str, most: int) -> str:
    r"""At most so many characters of a name, less its middle; none that cannot be seen.

    >>> shortened("flowers/2024-05-01/tulip.jpg", 15)
    'flowers\u2026lip.jpg'
    >>> print(shortened("a\nb", 15))
    a\nb
    """
    seen = printable(text).replace("\n", r"\n")
    if len(seen) <= most:
        return seen
    return seen[: most // 2] + "…" + seen[len(seen) - (most - 1) // 2 :]


def pixels_of(
    images: Images, rows: Int[np.ndarray, " rows"], side: int
) -> Float[Tensor, "rows 3 {side} {side}"]:
    """The middles of images in the order of `rows`, which may name one twice, in [0, 1]."""
    unique, places = np.unique(rows, return_inverse=True)
    batches = list(CenterCrops(images.subset(unique), side))
    return torch.cat(batches)[torch.from_numpy(places)] / 255


def class_sheet(
    images: Images,
    groups: Mapping[str, Int[np.ndarray, " members"]],
    path: Path,
    workers: int = 0,
) -> Path:
    """Show groups of images in rows, each with its name in front.

    Args:
        images: The images.
        groups: Rows of the images of each group, such as `border`, in the order to be shown.
            Those that cannot be read are left out.
        path: The file.
        workers: Processes that decode photographs.
    """
    rows = np.concatenate(list(groups.values()))
    shown = dict(squares(images, rows, SIDE, workers))
    side = next((square.shape[-1] for square in shown.values()), SIDE)
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


EXAMPLES = 8
DRAWS = 4
"""Epochs shown: each image is drawn anew in every one of them."""


def augmentation_sheet(batches: Batches, path: Path) -> Path:
    """Show images of the first step beside the views that training will see of them.

    One row per image: itself, then every view in each of the first epochs. Made before the
    first step, since a wrong augmentation is the commonest silent mistake.
    """
    rows = np.sort(batches.order.rows(0))[:EXAMPLES]
    columns = [pixels_of(batches.images, rows, batches.sizes[0])]
    for epoch in range(DRAWS):
        columns += [view.cpu() for view in batches.views(epoch, rows)]
    return save_sheet(columns, path)
