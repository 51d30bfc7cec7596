"""Features of images written to a file that other tools read as a table."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from nearkin.data.arrays import numbers
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.files import creating, usable, whole
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
AGAIN: Final = "write it again with `nearkin embed`"


def write_embeddings(path: Path, embeddings: Embeddings) -> None:
    """Write a file whose ending says how: .parquet, .npz, or .npy with a .csv beside it.

    A file is whole, or as it was. A .parquet and an .npz note the digest of the encoder, and the
    column that is removed.
    """
    check_format(path)
    with creating(path), whole(path) as partial, partial.open("wb") as file:
        if path.suffix == SUFFIX:
            write_parquet(file, embeddings)
        elif path.suffix == ".npz":
            notes = {ENCODER: [embeddings.encoder], REMOVED: [embeddings.removed]}
            columns = _text(embeddings) | notes | {"vector": embeddings.vectors}
            np.savez(file, allow_pickle=False, **columns)
        else:
            np.save(file, embeddings.vectors)
            file.flush()
            os.fsync(file.fileno())  # what can fail has by now: of the two, both are replaced
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


def write_parquet(file: IO[bytes], embeddings: Embeddings) -> None:
    """Write a .parquet, which notes the encoder and the images that cannot be read."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        name: pyarrow.array(text, pyarrow.string()) for name, text in _text(embeddings).items()
    }
    flat, dim = embeddings.vectors.ravel(), embeddings.vectors.shape[1]
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, dim)
    table = pyarrow.table(
        columns,
        metadata={
            BAD: json.dumps(embeddings.bad),
            ENCODER: embeddings.encoder,
            REMOVED: as_text(embeddings.removed),
        },
    )
    repeated = ["split", "label", "group"]  # of the others, hardly two cells are equal
    # Into an open file, since pyarrow takes no path that is not UTF-8.
    parquet.write_table(table, file, row_group_size=BLOCK_SIZE, use_dictionary=repeated)


def read_footer(path: Path) -> tuple[int, Mapping[str, str]]:
    """Return how many images a shard has, and its unreadable ones with the reason."""
    from pyarrow import parquet

    with usable(path, "remove it and run `nearkin embed` again"), path.open("rb") as file:
        footer = parquet.read_metadata(file)
        bad = json.loads(footer.metadata[BAD])
        return footer.num_rows, {str(name): str(reason) for name, reason in bad.items()}
