"""Embeddings that `nearkin embed` has written: read whole, or searched block by block."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.data.images import Images
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings, as_text
from nearkin.evaluation.shards import BLOCK_SIZE, NOTE, digest, read_note
from nearkin.objectives import unit
from nearkin.tables import usable
from nearkin.types import UNKNOWN

COLUMNS: Final = ("path", "label", "vector")
SUFFIXES: Final = (".parquet", ".npz")
AGAIN: Final = "write it again with nearkin embed"


def read_embeddings(path: Path, images: Images) -> Embeddings:
    """Read a run's embeddings: those of the given images, in their order, normalized.

    Raises:
        CheckpointError: If the file is damaged.
        DataError: If it has none of the images.
    """
    from pyarrow import parquet

    blocks = list(open_table(path).blocks())
    with usable(path, AGAIN), path.open("rb") as file:  # pyarrow takes no path that is not UTF-8
        splits = parquet.read_table(file, columns=["split"])["split"].to_pylist()
    paths = [name for block in blocks for name in block.paths.to_pylist()]
    labels = [name or "" for block in blocks for name in block.labels.to_pylist()]
    position = {as_text(name): row for row, name in enumerate(images.names)}
    rows = np.array([position.get(name, -1) for name in paths], np.int64)
    order = np.argsort(rows, kind="stable")
    order = order[rows[order] >= 0]
    if not len(order):
        raise DataError(
            f"none of the {len(paths)} images of {path} is among these {len(images)}; "
            "give the images of the run"
        )
    # No label is the empty text, which sorts before every class.
    classes, numbers = np.unique(np.array(["", *labels], np.str_), return_inverse=True)
    return Embeddings(
        torch.cat([block.vectors for block in blocks]).numpy()[order],
        numbers[1:][order] + UNKNOWN,
        rows=rows[order],
        paths=tuple(paths[row] for row in order.tolist()),
        classes=tuple(classes[1:].tolist()),
        splits=np.array(splits, np.str_)[order],
    )


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a table of more images than memory holds, which is why it is not `Embeddings`.

    Its text stays as pyarrow has it: of a million rows, a search needs the paths of ten.
    """

    rows: Int[np.ndarray, " rows"]  # Their positions in the table, ascending
    vectors: Float[Tensor, "rows dim"]  # Each of length one
    paths: Any
    labels: Any

    def subset(self, chosen: Int[np.ndarray, " chosen"]) -> "Block":
        """Return the rows at these positions of the block."""
        vectors = self.vectors[torch.from_numpy(chosen)]
        text = (column.take(chosen) for column in (self.paths, self.labels))
        return Block(self.rows[chosen], vectors, *text)


@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings on disk, of which nothing is in memory: a folder of parts, .parquet or .npz."""

    path: Path
    files: tuple[Path, ...]  # In the order of the images
    encoder: str = ""  # The SHA-256 of the encoder that they are from, if that is known

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the file, or of what a folder is of."""
        return digest(self.path / NOTE if self.path.is_dir() else self.path)

    def __len__(self) -> int:
        return sum(count for file in self.files for count, _ in _groups(file))

    def blocks(self, rows: Int[np.ndarray, " rows"] | None = None) -> Iterator[Block]:
        """Yield all rows, or these ascending ones, in order, at most `BLOCK_SIZE` at once.

        An .npz is in memory whole. A file that is no such table is a CheckpointError.
        """
        start = 0
        for file in self.files:
            for count, read in _groups(file):
                within = None if rows is None else _between(rows, start, start + count)
                if within is None or len(within):
                    yield from _blocks(file, read, start, within)
                start += count


def open_table(path: Path) -> EmbeddingTable:
    """Open a table of embeddings, of which nothing is read yet; refuse an incomplete folder."""
    if path.is_dir():
        note = read_note(path)
        if missing := note.missing(path):
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {note.num_parts} parts; let nearkin embed go on"
            )
        files = tuple(path / note.part(number) for number in range(note.num_parts))
        return EmbeddingTable(path, files, note.encoder)
    if not path.exists():
        raise UsageError(f"{path} does not exist; nearkin embed writes such files")
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"{path} is no table of features; give a folder that nearkin embed has made, or a "
            f"file that ends in {' or '.join(SUFFIXES)}"
        )
    return EmbeddingTable(path, (path,))


Read = Callable[[], Iterator[Any]]  # Reads a row group of a file as record batches


def _groups(file: Path) -> Iterator[tuple[int, Read]]:
    """Yield how many rows each row group of a file has, and a way to read it."""
    with usable(file, AGAIN), file.open("rb") as opened:
        yield from (_npz_groups if file.suffix == ".npz" else _parquet_groups)(opened)


def _parquet_groups(file: BinaryIO) -> Iterator[tuple[int, Read]]:
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    if absent := [name for name in COLUMNS if name not in table.schema_arrow.names]:
        raise ValueError(f"it has no column {absent[0]}")
    for group in range(table.num_row_groups):
        read = partial(table.iter_batches, BLOCK_SIZE, [group], list(COLUMNS))
        yield table.metadata.row_group(group).num_rows, read


def _npz_groups(file: BinaryIO) -> Iterator[tuple[int, Read]]:
    import pyarrow

    with np.load(file, allow_pickle=False) as stored:
        paths = stored["path"]

        def read() -> Iterator[Any]:
            vectors = stored["vector"]
            if vectors.ndim != 2:
                raise ValueError("its vectors are not rows of a matrix")
            rows = pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])
            columns = {"path": paths, "label": stored["label"], "vector": rows}
            return iter(pyarrow.table(columns).to_batches(BLOCK_SIZE))

        yield len(paths), read


def _blocks(
    file: Path, read: Read, start: int, rows: Int[np.ndarray, " rows"] | None
) -> Iterator[Block]:
    """Yield a row group that begins at a position, or only the given rows of it."""
    with usable(file, AGAIN):
        for batch in read():
            end = start + batch.num_rows
            chosen = None if rows is None else _between(rows, start, end) - start
            if batch.num_rows if chosen is None else len(chosen):
                block = _block(batch, np.arange(start, end))
                yield block if chosen is None else block.subset(chosen)
            start = end


def _between(rows: Int[np.ndarray, " rows"], start: int, end: int) -> Int[np.ndarray, " between"]:
    """Return those of the ascending rows that are in a range."""
    first, last = np.searchsorted(rows, (start, end))
    return rows[first:last]


def _block(batch: Any, rows: Int[np.ndarray, " rows"]) -> Block:
    """Check a record batch; ValueError if it is not what `nearkin embed` writes."""
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
    features = torch.from_numpy(numbers.reshape(len(rows), int(lengths[0])))
    if not features.isfinite().all():
        raise ValueError("some of its numbers are not finite")
    return Block(rows, unit(features), paths, labels)


# Search

ROUNDING: Final = 1e-3  # No cosine in float32 is off by as much, with up to 16,000 features


@dataclass(frozen=True)
class Neighbor:
    """An image of a table, and how similar it is."""

    similarity: float  # The cosine
    path: str
    label: str  # Empty where unknown


@dataclass(frozen=True)
class Neighbors:
    """The images of a table that an image is most similar to."""

    image: str
    neighbors: list[Neighbor]  # The most similar first; equals in the order of the table

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Lines of text: the image, then its neighbors."""
        rows = [f"  {n.similarity:6.3f}  {n.path}  {n.label}".rstrip() for n in self.neighbors]
        return [self.image, *rows]


# Minus the similarity, and the row: tuples of this kind sort as neighbors do.
Candidate = tuple[float, int, Neighbor]


def most_similar(
    blocks: Iterable[Block], queries: Float[Tensor, "queries dim"], top: int
) -> list[list[Neighbor]]:
    """Return the `top` rows most similar to each unit query, as if all blocks were one.

    A product of matrices rounds by their shapes, so that equal rows of two blocks, or at the edge
    of one, come out unequal. It only decides which rows are compared again, in float64 and each
    for itself. Similarities are those, in float32; equal ones are ordered by row.
    """
    best: list[list[Candidate]] = [[] for _ in queries]
    for block in blocks:
        dim = block.vectors.shape[1]
        if dim != queries.shape[1]:
            raise CheckpointError(
                f"the vectors have {dim} features and the encoder gives {queries.shape[1]}; give "
                "vectors that nearkin embed has made of this run"
            )
        for query, rough, candidates in zip(queries, queries @ block.vectors.T, best, strict=True):
            least = float(rough.topk(min(top, len(rough))).values[-1])
            if len(candidates) == top:
                least = max(least, -candidates[-1][0])
            promising = (rough >= least - ROUNDING).nonzero().squeeze(1)
            candidates += _exact(block, query, promising, top)
            candidates.sort(key=lambda one: one[:2])
            del candidates[top:]
    if not best[0]:
        raise DataError("there is no image to compare with; give vectors of some")
    return [[neighbor for _, _, neighbor in candidates] for candidates in best]


def _exact(
    block: Block, query: Float[Tensor, " dim"], rows: Int[Tensor, " promising"], top: int
) -> list[Candidate]:
    """Return the most similar of these rows of a block."""
    exact = (block.vectors[rows].double() * query.double()).sum(dim=1).float()
    similarity, order = exact.sort(descending=True, stable=True)
    chosen = block.subset(rows[order[:top]].numpy())
    columns = (chosen.paths.to_pylist(), chosen.labels.to_pylist())
    rest = zip(similarity[:top].tolist(), chosen.rows.tolist(), *columns, strict=True)
    return [(-s, row, Neighbor(s, path or "", label or "")) for s, row, path, label in rest]
