"""Sheets: rows of images as one image, with column headings and captions."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nearkin.data.batches import Batches, CenterCrops
from nearkin.data.channels import preview
from nearkin.data.decode import MIDDLE_GRAY, BadImage, center
from nearkin.data.images import Images
from nearkin.data.views import from_zero_to_one
from nearkin.errors import DataError, UsageError
from nearkin.files import creating, whole
from nearkin.text import as_text, printable

MIN_SIDE: Final = 64  # Smaller images are enlarged to about this many pixels
GAP: Final = 2  # Pixels around each image
LINE: Final = 15  # Pixels between two lines of text
TEXT_SIZE: Final = 11  # Of the font, in pixels
Lines = Sequence[str]


def save_sheet(
    columns: Sequence[Float[Tensor, "rows _ _ _"]],
    path: Path,
    *,
    headings: Sequence[Lines] = (),
    captions: Sequence[Sequence[Lines]] = (),
) -> Path:
    """Save columns of images in [0, 1], each of a size of its own, as one image.

    `headings` stand above each column, `captions` below each image.
    """
    import matplotlib

    side = max(column.shape[-1] for column in columns)
    scale = max(1, MIN_SIDE // side)
    cell = scale * (side + 2 * GAP)
    # It has most alphabets; Pillow's own font is Latin only.
    dejavu = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    font = ImageFont.truetype(dejavu, TEXT_SIZE)
    head, strip = _text_height([headings]), _text_height(captions)
    size = cell * len(columns), head + (cell + strip) * len(columns[0])
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)

    def write(cells: Sequence[Lines], top: int) -> None:
        """Center lines of text in each column."""
        for column, lines in enumerate(cells):
            for number, line in enumerate(lines):
                at = (column + 0.5) * cell, top + number * LINE
                draw.text(at, _fitted(line, font, cell - 4), "black", font, anchor="ma")

    write(headings, 2)
    for number, row in enumerate(zip(*columns, strict=True)):
        top = head + number * (cell + strip)
        for column, view in enumerate(row):
            pixels = (view.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
            image = Image.fromarray(preview(pixels))
            # Small views stand below their heading, in the middle of the column.
            left = column * cell + scale * (GAP + (side - image.width) // 2)
            enlarged = image.resize((scale * image.width,) * 2, Image.Resampling.NEAREST)
            sheet.paste(enlarged, (left, top + scale * GAP))
        write(captions[number] if captions else (), top + cell)
    with whole(path) as partial:
        sheet.save(partial, image_format(path))
    return path


def image_format(path: Path) -> str:
    """Return what Pillow calls the format that a suffix names, if it writes such files."""
    name = Image.registered_extensions().get(path.suffix.lower(), "")
    if name not in Image.SAVE:
        raise UsageError(f"cannot write {path}; give a name that ends in .png")
    return name


def _text_height(rows: Sequence[Sequence[Lines]]) -> int:
    lines = max((len(cell) for row in rows for cell in row), default=0)
    return LINE * lines + 6 if lines else 0


def _fitted(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """A text shortened to a width in pixels."""
    most = min(len(text), width)  # no letter is narrower than a pixel
    while font.getlength(fitted := shortened(text, most)) > width and most > 1:
        most -= 1
    return fitted


def shortened(text: str, max_length: int) -> str:
    r"""Return a name with its middle cut out to a maximal length, invisible characters escaped.

    >>> shortened("flowers/2024-05-01/tulip.jpg", 15)
    'flowers\u2026lip.jpg'
    >>> print(shortened("a\nb", 15))
    a\nb
    """
    visible = printable(text).replace("\n", r"\n")
    if len(visible) <= max_length:
        return visible
    return visible[: max_length // 2] + "…" + visible[len(visible) - (max_length - 1) // 2 :]


CONTACT_SIDE: Final = 112  # Wide enough for the file names below


def contact_sheet(
    results: Sequence[tuple[str, Sequence[tuple[str, float]]]], images: Images, path: Path
) -> Path:
    """Save a sheet of query images, one per row, beside their neighbors."""
    row = {as_text(name): number for number, name in enumerate(images.names)}
    if not any(name in row for _, neighbors in results for name, _ in neighbors):
        raise DataError("none of the neighbors is among these images; give --data those of them")
    # Images that are all smaller keep the size of the largest of them.
    side = min(CONTACT_SIDE, int(images.sizes.min(axis=1).max()))
    sheet, captions = [], []
    for query, neighbors in results:
        sources = Path(query).read_bytes(), *(row.get(name) for name, _ in neighbors)
        sheet.append(torch.stack([_square(images, each, side) for each in sources]))
        found = [(name, f"{similarity:.3f}") for name, similarity in neighbors]
        captions.append([(Path(query).name, "query"), *found])
    with creating(path):
        return save_sheet(torch.stack(sheet).unbind(dim=1), path, captions=captions)


def _square(images: Images, source: int | bytes | None, side: int) -> Float[Tensor, "3 s s"]:
    """The central square of an image, by its row or its file; gray if missing or unreadable."""
    pixels = np.full((side, side, 3), MIDDLE_GRAY, np.uint8)
    with suppress(BadImage):
        if source is not None:
            stored = source if isinstance(source, bytes) else images.stored(source)
            pixels = preview(center(images.scaled(stored), side))
    return torch.from_numpy(pixels).movedim(2, 0) / 255


EXAMPLES: Final = 8
EPOCHS: Final = 4  # Epochs in the sheet of augmentations


def augmentation_sheet(batches: Batches, path: Path, side: int) -> Path:
    """Save images of the first step, one per row, beside their views in the first epochs.

    Written before the first step, because wrong augmentations are the most common silent mistake.
    """
    rows = np.sort(batches.sampler.rows(0))[:EXAMPLES]
    originals = CenterCrops(batches.images.subset(rows), batches.sizes[0])
    plan = [(epoch, rows) for epoch in range(EPOCHS)]
    shown = replace(batches.resized(side), workers=0).planned(plan)
    columns = [from_zero_to_one(torch.cat(list(originals)))]
    headings = [["", "image"]]
    for epoch, (views, _) in enumerate(shown, start=1):
        for number, view in enumerate(views, start=1):
            columns.append(view.cpu())
            own = view.shape[-1]
            size = [f"({own} px)"] if own != batches.sizes[0] else []
            headings.append([f"epoch {epoch}", f"view {number}", *size])
    return save_sheet(columns, path, headings=headings)
