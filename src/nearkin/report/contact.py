"""Images beside those that they are most similar to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.data.decode import MIDDLE_GRAY, BadImage, center
from nearkin.data.images import Images
from nearkin.data.sheets import pixels_of, save_sheet
from nearkin.errors import DataError, OutputError
from nearkin.evaluation.embeddings import Embeddings, as_text
from nearkin.evaluation.table import Neighbors
from nearkin.measures.neighbors import nearest

EXAMPLES: Final = 8
NEIGHBORS: Final = 8
SIDE: Final = 112
"""Of an image whose name stands below it."""
SMALL: Final = 80


def neighbor_sheet(found: Embeddings, images: Images, path: Path) -> Path | None:
    """Show held-out images, each beside the training images it is most like.

    One row per image: itself, then its nearest neighbors, most similar first, with their
    classes, if they have any, and their similarity. Nothing is drawn if no image is held out.

    Args:
        found: The embeddings of the run.
        images: Its images.
        path: The file.
    """
    train, test = (np.flatnonzero(found.splits == part) for part in ("train", "test"))
    if not len(train) or not len(test):
        return None
    test = test[np.linspace(0, len(test) - 1, min(EXAMPLES, len(test))).astype(int)]
    bank, queries = (torch.from_numpy(found.vectors[rows]) for rows in (train, test))
    similarity, ranks = nearest(bank, queries, NEIGHBORS)
    nearest_rows = train[ranks.numpy()]
    side = _side(images.subset(found.rows[train]), SMALL)
    columns = [pixels_of(images, found.rows[rows], side) for rows in (test, *nearest_rows.T)]
    labels = found.class_names
    captions = [
        [
            _lines(labels[row], "held out"),
            *(_lines(labels[n], f"{s:.3f}") for n, s in zip(near, similar, strict=True)),
        ]
        for row, near, similar in zip(test, nearest_rows, similarity.tolist(), strict=True)
    ]
    return save_sheet(columns, path, captions=captions)


def _lines(*lines: str) -> list[str]:
    return [line for line in lines if line]


def _side(images: Images, most: int) -> int:
    """Of a tile; images that are all smaller keep the size of the largest."""
    return min(most, int(images.sizes.min(axis=1).max()))


def contact_sheet(found: Sequence[Neighbors], images: Images, path: Path) -> Path:
    """Show images, each beside its neighbors, with names and similarities.

    Args:
        found: What is most similar to what.
        images: Those that were looked among. Which is no longer there, or cannot be read, is gray.
        path: The file.

    Raises:
        DataError: If none of the neighbors is among these images.
        OutputError: If it cannot be written.
    """
    row = {as_text(name): number for number, name in enumerate(images.names)}
    if not any(near.path in row for one in found for near in one.neighbors):
        raise DataError("none of the neighbors is among these images; give --data those of them")
    side = _side(images, SIDE)
    tiles = [
        [
            _square(Path(one.image).read_bytes(), side),
            *(
                _square(images.read(row[near.path]) if near.path in row else b"", side)
                for near in one.neighbors
            ),
        ]
        for one in found
    ]
    captions = [
        [
            (Path(one.image).name, "looked for"),
            *((near.path, f"{near.similarity:.3f}") for near in one.neighbors),
        ]
        for one in found
    ]
    sheet = torch.stack([torch.stack(line) for line in tiles])
    try:
        return save_sheet(sheet.unbind(dim=1), path, captions=captions)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path} ({error}); give --sheet a name.png") from error


def _square(image: bytes | np.ndarray, side: int) -> Float[Tensor, "3 side side"]:
    try:
        shown = center(image, side)
    except BadImage:
        shown = np.full((side, side, 3), MIDDLE_GRAY, np.uint8)
    return torch.from_numpy(shown).movedim(2, 0) / 255
