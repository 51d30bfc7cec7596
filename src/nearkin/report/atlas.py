"""The table of images that Embedding Atlas reads."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image

from nearkin.data.batches import squares
from nearkin.data.images import Images
from nearkin.distributed import available_cpus
from nearkin.errors import OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import read_embeddings
from nearkin.measures.neighbors import nearest
from nearkin.report.mapping import MOST, NEIGHBORS, balanced, places
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv

if TYPE_CHECKING:
    import pyarrow

SIDE: Final = 48


def write_atlas(folder: RunFolder, images: Images, output: Path) -> int:
    """Write the images of a run, their places and their neighbors, as a Parquet table.

    Its columns are image (a small PNG, and the path), x, y, label, split, neighbors (rows of this
    table, and 1 less the cosine) and, of a discovery, cluster and score.

    Args:
        folder: The run.
        images: Its images.
        output: A name that ends in .parquet.

    Returns:
        How many images it has: of very many, as many as the map shows.

    Raises:
        UsageError: For another ending.
        OutputError: If it cannot be written.
    """
    if output.suffix != ".parquet":
        raise UsageError(f"{output} does not end in .parquet; give such a name")
    from pyarrow import parquet

    found = read_embeddings(folder.embeddings, images)
    made = _table(folder, found, images, balanced(found.class_names, MOST))
    try:
        with output.open("wb") as file:  # pyarrow takes no path that is not UTF-8
            parquet.write_table(made, file)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}; choose another -o") from error
    return len(made)


def _table(
    folder: RunFolder, found: Embeddings, images: Images, rows: Int[np.ndarray, " rows"]
) -> "pyarrow.Table":
    import pyarrow

    place = places(folder, found.vectors[rows], rows).astype(np.float32)
    vectors = torch.from_numpy(found.vectors[rows])
    similarity, neighbors = nearest(vectors, vectors, NEIGHBORS, exclude_self=True)
    near = zip(neighbors.tolist(), (1 - similarity).tolist(), strict=True)
    shown = dict(squares(images, found.rows[rows], SIDE, available_cpus()))
    encoded = [
        {"bytes": _png(shown.get(int(found.rows[row]))), "path": found.paths[row]}
        for row in rows.tolist()
    ]
    columns = {
        "image": pyarrow.array(encoded, _struct(bytes=pyarrow.binary(), path=pyarrow.string())),
        "x": place[:, 0],
        "y": place[:, 1],
        "label": found.class_names[rows].tolist(),
        "split": found.splits[rows].tolist(),
        **_assigned(folder, [found.paths[row] for row in rows.tolist()]),
        "neighbors": pyarrow.array(
            [{"ids": ids, "distances": distances} for ids, distances in near],
            _struct(
                ids=pyarrow.list_(pyarrow.int64()), distances=pyarrow.list_(pyarrow.float32())
            ),
        ),
    }
    return pyarrow.table(columns)


def _struct(**fields: "pyarrow.DataType") -> "pyarrow.DataType":
    import pyarrow

    return pyarrow.struct(list(fields.items()))


def _png(square: torch.Tensor | None) -> bytes | None:
    """Nothing of an image that cannot be read any longer."""
    if square is None:
        return None
    file = io.BytesIO()
    Image.fromarray(square.permute(1, 2, 0).numpy()).save(file, "png")
    return file.getvalue()


def _assigned(folder: RunFolder, names: list[str]) -> dict[str, list[str] | list[float | None]]:
    """The classes that a discovery found, as they are called now; '' of labeled images."""
    if not folder.assignments.exists():
        return {}
    called = {row["cluster"]: row["name"].strip() for row in read_csv(folder.clusters)}
    rows = {row["path"]: row for row in read_csv(folder.assignments)}
    cluster = [rows[name]["cluster"] if name in rows else "" for name in names]
    score = [float(rows[name]["score"] or "nan") if name in rows else None for name in names]
    return {"cluster": [called.get(name) or name for name in cluster], "score": score}
