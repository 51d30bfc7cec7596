"""Features that `nearkin embed` has written, read again a few at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.parts import GROUP, NOTE, digest, read_note
from nearkin.objectives import unit
from nearkin.tables import usable

COLUMNS: Final = ("path", "label", "vector")
KINDS: Final = (".parquet", ".npz")


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a table."""

    places: Int[np.ndarray, " rows"]
    """Where they are in the table, ascending."""
    vectors: Float[Tensor, "rows dim"]
    """Each of length one."""
    paths: Any
    """Text, as pyarrow has it."""
    labels: Any

    def rows(self, chosen: Int[np.ndarray, " chosen"]) -> "Block":
        """These of the rows."""
        vectors = self.vectors[torch.from_numpy(chosen)]
        text = (column.take(chosen) for column in (self.paths, self.labels))
        return Block(self.places[chosen], vectors, *text)


@dataclass(frozen=True)
class Vectors:
    """A table of features: a folder of parts, a .parquet, or an .npz."""

    path: Path
    files: tuple[Path, ...]
    """In the order of the images."""
    encoder: str = ""
    """The SHA-256 of the encoder that they are from, if that is known."""

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the file, or of what a folder is of."""
        return digest(self.path / NOTE if self.path.is_dir() else self.path)

    def __len__(self) -> int:
        return sum(count for file in self.files for count, _ in _pieces(file))

    def blocks(self, wanted: Int[np.ndarray, " wanted"] | None = None) -> Iterator[Block]:
        """The rows in order, at most `GROUP` at once; of an .npz, all are in memory.

        Args:
            wanted: Only those at these places, which ascend.

        Raises:
            CheckpointError: If a file is no such table.
        """
        start = 0
        for file in self.files:
            for count, read in _pieces(file):
                within = None if wanted is None else _between(wanted, start, start + count)
                if within is None or len(within):
                    yield from _blocks(file, read, start, within)
                start += count


def open_vectors(path: Path) -> Vectors:
    """A table of features, of which nothing is read yet.

    Raises:
        UsageError: If there is none.
        CheckpointError: If it is a folder that lacks some of its parts.
    """
    if path.is_dir():
        note = read_note(path)
        if missing := note.missing(path):
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {note.num_parts} parts; let nearkin embed go on"
            )
        files = tuple(path / note.part(number) for number in range(note.num_parts))
        return Vectors(path, files, note.encoder)
    if not path.exists():
        raise UsageError(f"{path} does not exist; nearkin embed writes such files")
    if path.suffix not in KINDS:
        raise UsageError(
            f"{path} is no table of features; give a folder that nearkin embed has made, or a "
            f"file that ends in {' or '.join(KINDS)}"
        )
    return Vectors(path, (path,))


Read = Callable[[], Iterator[Any]]
"""Gives a piece of a file as record batches."""


def _pieces(file: Path) -> Iterator[tuple[int, Read]]:
    """How many rows each piece of a file has, and a way to read it."""
    with _usable(file), file.open("rb") as opened:
        yield from (_of_npz if file.suffix == ".npz" else _of_parquet)(opened)


def _usable(file: Path) -> AbstractContextManager[None]:
    return usable(file, "write it again with nearkin embed")


def _of_parquet(file: BinaryIO) -> Iterator[tuple[int, Read]]:
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    if absent := [name for name in COLUMNS if name not in table.schema_arrow.names]:
        raise ValueError(f"it has no column {absent[0]}")
    for group in range(table.num_row_groups):
        read = partial(table.iter_batches, GROUP, [group], list(COLUMNS))
        yield table.metadata.row_group(group).num_rows, read


def _of_npz(file: BinaryIO) -> Iterator[tuple[int, Read]]:
    import pyarrow

    with np.load(file, allow_pickle=False) as stored:
        paths = stored["path"]

        def read() -> Iterator[Any]:
            vectors = stored["vector"]
            if vectors.ndim != 2:
                raise ValueError("its vectors are not rows of a matrix")
            rows = pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])
            found = {"path": paths, "label": stored["label"], "vector": rows}
            return iter(pyarrow.table(found).to_batches(GROUP))

        yield len(paths), read


def _blocks(
    file: Path, read: Read, start: int, wanted: Int[np.ndarray, " wanted"] | None
) -> Iterator[Block]:
    """A piece of a file that begins at a place, or only what is wanted of it."""
    with _usable(file):
        for batch in read():
            end = start + batch.num_rows
            chosen = None if wanted is None else _between(wanted, start, end) - start
            if batch.num_rows if chosen is None else len(chosen):
                block = _block(batch, np.arange(start, end))
                yield block if chosen is None else block.rows(chosen)
            start = end


def _between(
    places: Int[np.ndarray, " places"], start: int, end: int
) -> Int[np.ndarray, " between"]:
    """Those of the places, which ascend, that are in a range."""
    first, last = np.searchsorted(places, (start, end))
    return places[first:last]


def _block(batch: Any, places: Int[np.ndarray, " rows"]) -> Block:
    """A record batch as it must be.

    Raises:
        ValueError: If it is not so.
    """
    from pyarrow import compute, types

    paths, labels, vectors = (batch.column(name) for name in COLUMNS)
    for name, column in zip(COLUMNS, (paths, labels), strict=False):
        if not (types.is_string(column.type) or types.is_large_string(column.type)):
            raise ValueError(f"its column {name} is of type {column.type}")
    if not (types.is_fixed_size_list(vectors.type) or types.is_list(vectors.type)) or (
        not types.is_floating(vectors.type.value_type)
    ):
        raise ValueError(f"its column vector is of type {vectors.type}")
    flat = vectors.flatten()
    lengths = np.unique(compute.list_value_length(vectors).to_numpy(zero_copy_only=False))
    if vectors.null_count or flat.null_count or len(lengths) != 1:
        raise ValueError("its vectors are not all there, or not all of one length")
    numbers = np.array(flat.to_numpy(zero_copy_only=False), np.float32)
    found = torch.from_numpy(numbers.reshape(len(places), int(lengths[0])))
    if not found.isfinite().all():
        raise ValueError("some of its numbers are not finite")
    return Block(places, unit(found), paths, labels)


SLACK: Final = 1e-3
"""What a cosine similarity in float32 is never off by, with up to 16,000 features."""


@dataclass(frozen=True)
class Neighbor:
    """An image of a table, and how similar it is."""

    similarity: float
    """The cosine."""
    path: str
    label: str
    """Empty where unknown."""


@dataclass(frozen=True)
class Neighbors:
    """The images of a table that an image is most similar to."""

    image: str
    neighbors: list[Neighbor]
    """The most similar first; equals in the order of the table."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        found = [f"  {n.similarity:6.3f}  {n.path}  {n.label}".rstrip() for n in self.neighbors]
        return [self.image, *found]


Found = tuple[float, int, Neighbor]
"""Less the similarity, and the place: tuples of this kind sort as neighbors do."""


def most_similar(
    blocks: Iterable[Block], queries: Float[Tensor, "queries dim"], top: int
) -> list[list[Neighbor]]:
    """The `top` rows most similar to each query, as if all blocks were one.

    A product of matrices rounds by their shapes, so that equal rows of two blocks, or at the edge
    of one, come out unequal. It only decides which rows are looked at again, in float64 and each
    for itself. Similarities are those, in float32; equal ones are ordered by place.

    Args:
        blocks: In the order of their places.
        queries: Of length one.
        top: How many, at least 1.

    Raises:
        CheckpointError: If the rows have another number of features.
        DataError: If there are none.
    """
    best: list[list[Found]] = [[] for _ in queries]
    for block in blocks:
        dim = block.vectors.shape[1]
        if dim != queries.shape[1]:
            raise CheckpointError(
                f"the vectors have {dim} features and the encoder gives {queries.shape[1]}; give "
                "vectors that nearkin embed has made of this run"
            )
        for query, rough, found in zip(queries, queries @ block.vectors.T, best, strict=True):
            found += _looked_at_again(block, query, _promising(rough, found, top), top)
            found.sort(key=lambda one: one[:2])
            del found[top:]
    if not best[0]:
        raise DataError("there is no image to compare with; give vectors of some")
    return [[neighbor for _, _, neighbor in found] for found in best]


def _promising(
    rough: Float[Tensor, " rows"], found: Sequence[Found], top: int
) -> Int[Tensor, " promising"]:
    """The rows of a block that may be among the most similar so far."""
    least = float(rough.topk(min(top, len(rough))).values[-1])
    if len(found) == top:
        least = max(least, -found[-1][0])
    return (rough >= least - SLACK).nonzero().squeeze(1)


def _looked_at_again(
    block: Block, query: Float[Tensor, " dim"], rows: Int[Tensor, " promising"], top: int
) -> list[Found]:
    """The most similar of these rows of a block."""
    exact = (block.vectors[rows].double() * query.double()).sum(dim=1).float()
    similarity, order = exact.sort(descending=True, stable=True)
    chosen = block.rows(rows[order[:top]].numpy())
    columns = (chosen.paths.to_pylist(), chosen.labels.to_pylist())
    rest = zip(similarity[:top].tolist(), chosen.places.tolist(), *columns, strict=True)
    return [(-s, place, Neighbor(s, path or "", label or "")) for s, place, path, label in rest]
