"""`nearkin export --format atlas`: the images of a run as a table for Embedding Atlas."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Int
from PIL import Image

from nearkin.data.batches import squares
from nearkin.data.images import Images
from nearkin.distributed import available_cpus
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.layout import NEIGHBORS, coordinates, landmark_rows
from nearkin.evaluation.table import read_embeddings
from nearkin.files import creating, whole
from nearkin.metrics.neighbors import nearest
from nearkin.report.image_map import encoded
from nearkin.run.edits import class_names
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv
from nearkin.text import as_text

SIDE: Final = 48


def write_atlas(folder: RunFolder, images: Images, path: Path) -> str:
    """Write the images of a finished run as a table for Embedding Atlas; return how many of all.

    The columns are image (a small PNG, and the path), x, y, label, split, neighbors (rows of this
    table, and cosine distances) and, of a discovery, cluster and score. Of very many images, the
    landmarks of the map are written.
    """
    from pyarrow import parquet

    embeddings = read_embeddings(folder.embeddings, images)
    rows = landmark_rows(embeddings.class_names)
    table = _table(folder, embeddings.subset(rows), images, rows)
    with creating(path), whole(path) as partial, partial.open("wb") as file:
        parquet.write_table(table, file)  # which takes no path that is not UTF-8
    left_out = len(rows) < len(embeddings)
    return f"{len(rows):,} of {len(embeddings):,}" if left_out else f"{len(rows):,}"


def _table(
    folder: RunFolder, embeddings: Embeddings, images: Images, rows: Int[np.ndarray, " rows"]
) -> Any:
    from pyarrow import array, binary, float32, int64, list_, string, struct, table

    xy = coordinates(folder, embeddings.vectors, rows).astype(np.float32)
    vectors = embeddings.tensor
    similarity, neighbors = nearest(vectors, vectors, NEIGHBORS, exclude_self=True)
    near = [
        {"ids": ids, "distances": distances}
        for ids, distances in zip(neighbors.tolist(), (1 - similarity).tolist(), strict=True)
    ]
    shown = squares(images, embeddings.rows, SIDE, available_cpus())
    pngs = {row: encoded(Image.fromarray(square), "png") for row, square in shown}
    files = [  # without bytes where an image is no longer readable
        {"bytes": pngs.get(number), "path": name}
        for number, name in zip(embeddings.rows.tolist(), embeddings.paths, strict=True)
    ]
    columns = {
        "image": array(files, struct({"bytes": binary(), "path": string()})),
        "x": xy[:, 0],
        "y": xy[:, 1],
        "label": embeddings.class_names.tolist(),
        "split": embeddings.splits.tolist(),
        **_discovered(folder, [*map(as_text, embeddings.paths)]),
        "neighbors": array(near, struct({"ids": list_(int64()), "distances": list_(float32())})),
    }
    return table(columns)


def _discovered(folder: RunFolder, names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of a discovery: '' and None for labeled images."""
    classes = {as_text(path): name for path, name in class_names(folder).items()}
    if not classes:
        return {}
    rows = read_csv(folder.assignments)
    scores = {as_text(row["path"]): float(row["score"] or "nan") for row in rows}
    return {
        "cluster": [classes.get(name, "") for name in names],
        "score": [*map(scores.get, names)],
    }
