"""A sheet of query images, each beside its nearest neighbors."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.data.channels import preview
from nearkin.data.decode import MIDDLE_GRAY, BadImage, center
from nearkin.data.images import Images
from nearkin.errors import DataError, OutputError
from nearkin.run.sheets import save_sheet
from nearkin.text import as_text

SIDE: Final = 112  # Wide enough for the file names below


def contact_sheet(
    results: Sequence[tuple[str, Sequence[tuple[str, float]]]], images: Images, path: Path
) -> Path:
    """Save a sheet of query images, one per row, beside their neighbors."""
    row = {as_text(name): number for number, name in enumerate(images.names)}
    if not any(name in row for _, neighbors in results for name, _ in neighbors):
        raise DataError("none of the neighbors is among these images; give --data those of them")
    # Images that are all smaller keep the size of the largest of them.
    side = min(SIDE, int(images.sizes.min(axis=1).max()))
    sheet, captions = [], []
    contents = [Path(query).read_bytes() for query, _ in results]
    try:
        for content, (query, neighbors) in zip(contents, results, strict=True):
            sources = (content, *(row.get(name) for name, _ in neighbors))
            sheet.append(torch.stack([_square(images, each, side) for each in sources]))
            found = [(name, f"{similarity:.3f}") for name, similarity in neighbors]
            captions.append([(Path(query).name, "query"), *found])
        return save_sheet(torch.stack(sheet).unbind(dim=1), path, captions=captions)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"cannot write {path} ({why}); choose another -o") from error


def _square(images: Images, source: int | bytes | None, side: int) -> Float[Tensor, "3 s s"]:
    """The central square of an image, by its row or its file; gray if missing or unreadable."""
    pixels = np.full((side, side, 3), MIDDLE_GRAY, np.uint8)
    with suppress(BadImage):
        if source is not None:
            stored = source if isinstance(source, bytes) else images.stored(source)
            pixels = preview(center(images.scaled(stored), side))
    return torch.from_numpy(pixels).movedim(2, 0) / 255
