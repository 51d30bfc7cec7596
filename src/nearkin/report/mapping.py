"""The map of a run's pictures: where they lie, what is near them, and how they can be colored."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int

from nearkin.data.images import Images
from nearkin.distributed import available_cpus
from nearkin.evaluation.parts import digest
from nearkin.measures.neighbors import nearest
from nearkin.report.coloring import colorings
from nearkin.report.embedded import Embedded
from nearkin.report.page.layout import lay_out
from nearkin.report.page.map import PictureMap
from nearkin.report.tiles import COLUMNS, PER_SHEET, tiles
from nearkin.run.folder import RunFolder
from nearkin.tables import usable, write_whole

MOST: Final = 20_000
"""Pictures on a page; of more, a sample is shown that has as many of every class as it can."""
NEIGHBORS: Final = 12
FEW: Final = 10_000
"""Pictures up to which one thread finds their places as fast as several."""


def picture_map(folder: RunFolder, found: Embedded, images: Images) -> PictureMap | None:
    """What the map of a run shows; nothing if fewer than two of its pictures can be.

    Places are kept in the folder, so that the map stays the same for the same embeddings.

    Args:
        folder: The run.
        found: Its embeddings.
        images: Its pictures.
    """
    if len(found.number) < 2:
        return None
    rows = balanced(found.labels, MOST)
    vectors = torch.from_numpy(found.vectors[rows])
    similarity, neighbors = nearest(vectors, vectors, NEIGHBORS, exclude_self=True)
    shown = images.subset(found.number[rows])
    made = tiles(shown, workers=available_cpus())
    names = tuple(found.names[row] for row in rows.tolist())
    return PictureMap(
        number=found.number[rows],
        names=names,
        place=places(folder, found.vectors[rows], rows),
        neighbors=neighbors.numpy().astype(np.int32),
        similarity=similarity.numpy(),
        colorings=colorings(folder, found, rows),
        sheets=made.sheets,
        side=made.side,
        columns=COLUMNS,
        per_sheet=PER_SHEET,
        total=len(found.number),
    )


def balanced(labels: np.ndarray, most: int) -> Int[np.ndarray, " rows"]:
    """At most so many rows, evenly spread over each class, with as many of each as there can be.

    Args:
        labels: The class of each row; rows without one are a class of their own.
        most: How many.

    >>> balanced(np.array(["a", "a", "a", "a", "b"]), 3).tolist()
    [0, 3, 4]
    """
    if len(labels) <= most:
        return np.arange(len(labels))
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    shares, left = np.zeros(len(sizes), np.int64), most
    for seen, number in enumerate(np.argsort(sizes, kind="stable")):  # small classes first
        shares[number] = min(sizes[number], left // (len(sizes) - seen))
        left -= shares[number]
    rows = [
        np.flatnonzero(class_of == number)[np.linspace(0, size - 1, share).astype(np.int64)]
        for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    return np.sort(np.concatenate(rows))


def places(
    folder: RunFolder, vectors: Float32[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n 2"]:
    """Where pictures lie: as kept in the folder, if that is of these embeddings, else anew.

    Where they cannot be kept, they are found anew each time.
    """
    of = digest(folder.embeddings)
    kept = _kept(folder.map) if folder.map.exists() else {}
    if kept.get("of") == of and np.array_equal(kept["rows"], rows):
        return np.asarray(kept["place"])
    place = lay_out(vectors, threads=available_cpus() if len(rows) > FEW else 1)
    held = io.BytesIO()
    np.savez(held, allow_pickle=False, of=np.array(of), rows=rows, place=place)
    with suppress(OSError):
        write_whole(folder.map, held.getvalue())
    return place


def _kept(path: Path) -> dict[str, Any]:
    with usable(path, "remove it, and it is made anew"), np.load(path, allow_pickle=False) as file:
        return {"of": str(file["of"]), "rows": file["rows"], "place": file["place"]}
