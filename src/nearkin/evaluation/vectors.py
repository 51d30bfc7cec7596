"""Features of images as a file that other tools read as a table.

A file that is written may be .parquet, .npz, or .npy with a .csv beside it. A file that is read is
.parquet.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.data.arrays import numbers
from nearkin.data.images import Images
from nearkin.data.labels import grouped, numbered
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.files import creating, usable, whole
from nearkin.objectives import unit
from nearkin.schema import suggestion
from nearkin.tables import write_csv
from nearkin.text import as_text

SUFFIX: Final = ".parquet"  # Of what is read
FORMATS: Final = (SUFFIX, ".npz", ".npy")  # What `write_embeddings` writes
COLUMNS: Final = ("path", "label", "vector")  # A table of another program needs no more
BAD: Final = b"nearkin.bad"  # Where a file notes its bad images, so that both appear at once
ENCODER: Final = "nearkin.encoder"  # Where a file notes the digest of the encoder that it is from
REMOVED: Final = "nearkin.removed"  # Where a file notes the column that is removed from features
BLOCK_SIZE: Final = 4_096  # Images that can be read from a file at once
ROOM: Final = "make room, or choose another -o"
AGAIN: Final = "write it again with nearkin embed"


def write_embeddings(path: Path, embeddings: Embeddings, encoder: str = "") -> None:
    """Write a file whose ending says how: .parquet, .npz, or .npy with a .csv beside it.

    A file is whole, or as it was. `encoder` is the digest of the encoder, which a .parquet and an
    .npz note, with the column that is removed.
    """
    check_format(path)
    with creating(path), whole(path) as partial, partial.open("wb") as file:
        if path.suffix == SUFFIX:
            write_parquet(file, embeddings, encoder)
        elif path.suffix == ".npz":
            columns = _text(embeddings) | {ENCODER: [encoder], REMOVED: [embeddings.removed]}
            np.savez(file, allow_pickle=False, **columns, vector=embeddings.vectors)
        else:
            np.save(file, embeddings.vectors)
            text = _text(embeddings)
            rows = zip(*text.values(), strict=True)
            write_csv(path.with_suffix(".csv"), tuple(text), rows)


def check_format(path: Path) -> None:
    """Refuse a file ending that has no writer, before anything is computed."""
    if path.suffix not in FORMATS:
        raise UsageError(
            f"cannot write embeddings as {path.name}.{suggestion(path.suffix, FORMATS)} "
            f"Give a name that ends in {', '.join(FORMATS)}, or, with --shard-size, a folder"
        )


def _text(embeddings: Embeddings) -> dict[str, list[str]]:
    """Return the columns beside the vectors; images without a path are numbered."""
    splits = embeddings.splits.tolist() or [""] * len(embeddings)
    paths = embeddings.paths or numbers(len(embeddings))
    columns = {"path": paths, "split": splits, "label": embeddings.class_names.tolist()}
    columns["group"] = embeddings.named_groups
    return {name: list(map(as_text, column)) for name, column in columns.items()}


def _lists(vectors: Float[np.ndarray, "n dim"]) -> Any:
    """Return the rows of a matrix as a column of a table."""
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])


def write_parquet(file: IO[bytes], embeddings: Embeddings, encoder: str) -> None:
    """Write a .parquet, which notes the encoder and the images that cannot be read."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        name: pyarrow.array(text, pyarrow.string()) for name, text in _text(embeddings).items()
    }
    table = pyarrow.table(
        columns | {"vector": _lists(embeddings.vectors)},
        metadata={
            BAD: json.dumps(embeddings.bad),
            ENCODER: encoder,
            REMOVED: as_text(embeddings.removed),
        },
    )
    repeated = ["split", "label", "group"]  # of the others, hardly two cells are equal
    # Into an open file, since pyarrow takes no path that is not UTF-8.
    parquet.write_table(table, file, row_group_size=BLOCK_SIZE, use_dictionary=repeated)


def read_embeddings(path: Path, images: Images) -> Embeddings:
    """Read a run's embeddings: those of the given images, in their order, normalized.

    Raises:
        CheckpointError: If the file is damaged.
        DataError: If it has none of the images.
    """
    stored = read_all(path)
    position = {as_text(name): row for row, name in enumerate(images.names)}
    rows = np.array([position.get(name, -1) for name in stored.paths], np.int64)
    order = np.argsort(rows, kind="stable")
    order = order[rows[order] >= 0]
    if not len(order):
        raise DataError(
            f"none of the {len(stored)} images of {path} is among these {len(images)}; "
            "give the images of the run"
        )
    return replace(stored, rows=rows).subset(order)


def read_all(path: Path) -> Embeddings:
    """Read the whole of a run's embeddings, normalized; for errors see `read_embeddings`."""
    from pyarrow import parquet

    if not path.exists():
        raise UsageError(f"{path} does not exist; nearkin embed writes such files")
    with usable(path, AGAIN), path.open("rb") as file:
        table = parquet.read_table(file)
        vectors = unit_vectors(table)
        paths, splits, labels = (table[name].to_pylist() for name in ("path", "split", "label"))
        groups = table["group"].to_pylist() if "group" in table.schema.names else []
    classes, numbers = numbered([name or "" for name in labels])
    return Embeddings(
        vectors.numpy(),
        numbers,
        groups=grouped(groups) if any(groups) else None,
        rows=np.arange(len(paths)),
        paths=paths,
        classes=classes,
        splits=np.array(splits, np.str_),
    )


def unit_vectors(table: Any) -> Float[Tensor, "rows dim"]:
    """Return the unit vectors of a table or a record batch; ValueError if it is no such table."""
    return unit(matrix(table))


def matrix(table: Any) -> Float[Tensor, "rows dim"]:
    """Return the vectors of a table as they are; ValueError if it is no such table."""
    from pyarrow import compute, types

    if absent := [name for name in COLUMNS if name not in table.schema.names]:
        raise ValueError(f"it has no column {absent[0]}")
    for name in ("path", "label"):
        kind = table[name].type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise ValueError(f"its column {name} is of type {kind}")
    vectors = table["vector"]
    lists = types.is_fixed_size_list, types.is_list, types.is_large_list
    is_list = any(each(vectors.type) for each in lists)
    if not is_list or not types.is_floating(vectors.type.value_type):
        raise ValueError(f"its column vector is of type {vectors.type}")
    flat = compute.list_flatten(vectors)
    lengths = np.unique(compute.list_value_length(vectors).to_numpy(zero_copy_only=False))
    if vectors.null_count or flat.null_count or len(lengths) != 1:
        raise ValueError("its vectors are not all there, or not all of one length")
    numbers = np.array(flat.to_numpy(zero_copy_only=False), np.float32)
    features = torch.from_numpy(numbers.reshape(len(vectors), int(lengths[0])))
    if not features.isfinite().all():
        raise ValueError("some of its numbers are not finite")
    return features


def read_footer(path: Path) -> tuple[int, Mapping[str, str]]:
    """Return how many images a shard has, and its unreadable ones with the reason."""
    from pyarrow import parquet

    with usable(path, "remove it and run nearkin embed again"), path.open("rb") as file:
        footer = parquet.read_metadata(file)
        bad = json.loads(footer.metadata[BAD])
        return footer.num_rows, {str(name): str(reason) for name, reason in bad.items()}
