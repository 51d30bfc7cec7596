"""An approximate index of features for `nearkin neighbors --index`, by faiss; held in memory."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.table import EmbeddingTable
from nearkin.evaluation.vectors import ROOM
from nearkin.files import replace_text, sha256, usable, whole, writing

FLAT: Final = 50_000  # Below so many images, all are compared; above, those of the nearest lists
MOST_LISTS: Final = 65_536
TRAINED: Final = 50  # Images per list, and per code, to learn from; faiss asks for 39 at least
CODES: Final = 64  # Bytes, at most, that an image takes in the index, beside 8 for its place
PROBES: Final = 64  # Lists that a search scans
SHORTLIST: Final = 10  # Candidates per requested image, compared by their true features


@dataclass(frozen=True)
class Note:
    """The description of an index, which is stored beside it."""

    kind: str  # As the index_factory of faiss reads it
    images: int
    dim: int
    vectors: str  # The fingerprint of the indexed vectors
    index: str  # The SHA-256 of its file


def kind_of_index(count: int, dim: int) -> tuple[str, int]:
    """Return the kind of index for a number of images, and how many of them train it.

    `Flat` compares all. Above, inverted lists of product codes (Jégou et al. 2011): four times
    the root of the number of images, as faiss advises, and as many bytes for an image as its
    features can be cut into equal pieces, up to 64. Features that cannot be cut get a byte each.
    `np` leaves out what only a search by Hamming distance needs, and most of the time went to.

    >>> kind_of_index(1_000_000, 512)
    ('IVF4000,PQ64np', 200000)
    """
    if count < FLAT:
        return "Flat", 0
    lists = min(MOST_LISTS, 4 * math.isqrt(count))
    pieces = max(number for number in range(1, CODES + 1) if dim % number == 0)
    codes = f"PQ{pieces}np" if 32 * pieces >= dim else "SQ8"
    return f"IVF{lists},{codes}", TRAINED * lists


def shortlist(
    path: Path, table: EmbeddingTable, queries: Float[Tensor, "queries dim"], top: int
) -> Int[np.ndarray, " places"]:
    """Return the positions of likely neighbors, ascending, by an index that is made if absent.

    Raises:
        UsageError: If the name is not one of an index, or faiss is not installed.
        CheckpointError: If the index is damaged, or of other vectors.
        OutputError: If it cannot be written.
    """
    if path.suffix != ".faiss":
        raise UsageError(f"{path.name} is no name of an index; give one that ends in .faiss")
    if not path.exists() and not _note(path).exists():
        write_index(path, table)
    index = _open(path, table, queries.shape[1])
    _, places = index.search(queries.numpy(), min(SHORTLIST * top, index.ntotal))
    return np.unique(places[places >= 0])


def write_index(path: Path, table: EmbeddingTable) -> None:
    """Make an index of a table, and note beside it what it is of."""
    faiss, count = _faiss(), len(table)
    if not count:
        raise DataError(f"{table.path} has no image; give vectors of some")
    dim = next(table.blocks()).shape[1]
    kind, sample = kind_of_index(count, dim)
    index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
    if sample:
        if hasattr(index, "pq"):
            index.pq.cp.max_points_per_centroid = TRAINED
        chosen = np.random.default_rng(0).choice(count, min(sample, count), replace=False)
        index.train(table.gather(np.sort(chosen)).numpy())
    for block in table.blocks():
        index.add(block.numpy())
    with writing(path, ROOM):
        with whole(path) as partial, partial.open("wb") as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
        note = Note(kind, count, dim, table.fingerprint, sha256(path))
        replace_text(_note(path), json.dumps(asdict(note), indent=2) + "\n")


def _open(path: Path, table: EmbeddingTable, dim: int) -> Any:
    """Read the index of a table."""
    faiss, again = _faiss(), f"remove {path} and {_note(path).name}: it is made again"
    with usable(_note(path), again):
        noted = json.loads(_note(path).read_text(encoding="utf-8"))
        note = Note(**{name: kind(noted[name]) for name, kind in Note.__annotations__.items()})
    if (note.vectors, note.dim) != (table.fingerprint, dim):
        raise CheckpointError(f"{path} is not of {table.path} as it is now; {again}")
    with usable(path, again), path.open("rb") as file:
        if sha256(path) != note.index:
            raise ValueError("it is not the file that is noted beside it")
        index = faiss.read_index(faiss.PyCallbackIOReader(file.read))
        if hasattr(index, "nprobe"):
            index.nprobe = PROBES
    return index


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UsageError(
            "an index needs faiss, which is not installed; pip install 'nearkin[faiss]'"
        ) from error
    return faiss
