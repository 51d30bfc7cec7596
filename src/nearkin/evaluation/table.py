"""Features on disk that may be more than memory holds: read and searched block by block."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.labels import grouped, numbered
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.shards import NOTE, ShardFolder
from nearkin.evaluation.vectors import AGAIN, BLOCK_SIZE, COLUMNS, ENCODER, REMOVED, SUFFIX
from nearkin.files import usable
from nearkin.metrics.neighbors import Nearest
from nearkin.objectives import unit
from nearkin.text import as_text

Read = TypeVar("Read")


@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings on disk, of which nothing is in memory: a folder of shards, or a .parquet."""

    path: Path
    files: tuple[Path, ...]  # In the order of the images
    encoder: str = ""  # The digest of the encoder that they are from, if that is known
    removed: str = ""  # The column that `embed` has removed from them; empty for none

    def __len__(self) -> int:
        return sum(count for file in self.files for count, _ in _row_groups(file))

    def blocks(
        self, rows: Int[np.ndarray, " rows"] | None = None
    ) -> Iterator[Float[Tensor, "rows dim"]]:
        """Yield the unit vectors of all rows, or of these ascending ones, in order.

        There are at most `BLOCK_SIZE` at once.

        A file that is no such table is a CheckpointError.
        """
        return self._blocks(COLUMNS, rows, unit_vectors)

    def _blocks(
        self,
        columns: Iterable[str],
        rows: Int[np.ndarray, " rows"] | None,
        vectors_of: Callable[[Any], Float[Tensor, "rows dim"]],
    ) -> Iterator[Float[Tensor, "rows dim"]]:
        dim = 0
        for block in self._read(columns, rows, vectors_of):
            dim = dim or block.shape[1]
            if block.shape[1] != dim:
                several = f"{dim} features and of {block.shape[1]}"
                raise CheckpointError(f"{self.path} has vectors of {several}; {AGAIN}")
            yield block

    def _read(
        self,
        columns: Iterable[str],
        rows: Int[np.ndarray, " rows"] | None,
        convert: Callable[[Any], Read],
    ) -> Iterator[Read]:
        """Yield what these columns of all rows, or of ascending ones, convert to, in batches."""
        start = 0
        for file in self.files:
            for count, batches in _row_groups(file, columns):
                position, start = start, start + count
                if rows is not None and not np.diff(np.searchsorted(rows, (position, start)))[0]:
                    continue
                with usable(file, AGAIN):
                    for batch in batches:
                        part = batch
                        if rows is not None:
                            inside = np.searchsorted(rows, (position, position + len(batch)))
                            part = batch.take(rows[slice(*inside)] - position)
                        position += len(batch)
                        if len(part):
                            yield convert(part)

    def gather(self, rows: Int[np.ndarray, " rows"] | None = None) -> Float[Tensor, "rows dim"]:
        """Return the unit vectors of all rows, or of these ascending ones."""
        return self._joined(self.blocks(rows), len(self) if rows is None else len(rows))

    def _joined(
        self, blocks: Iterable[Float[Tensor, "rows dim"]], count: int
    ) -> Float[Tensor, "all dim"]:
        vectors, start = torch.empty(0, 0), 0
        for block in blocks:
            if not start:  # once the dimension is known: joining blocks would hold all of it twice
                vectors = torch.empty(count, block.shape[1])
            vectors[start : start + len(block)] = block
            start += len(block)
        if not start:
            raise DataError(f"{self.path} has no image; give vectors of some")
        return vectors

    def write_vectors(self, file: Path, rows: Int[np.ndarray, " rows"]) -> None:
        """Write the unit vectors of these ascending rows, block by block; see `map_vectors`.

        Not through the map: a full disk is an error here, and there the end of the process.
        """
        with file.open("wb") as written:
            for block in self.blocks(rows):
                written.write(block.numpy().tobytes())

    def texts(self, column: str, rows: Int[np.ndarray, " rows"] | None = None) -> list[str]:
        """Return a column, such as path or label, of all rows, or of these ascending ones.

        Empty where it says nothing, as a table of another program on the split.
        """
        pieces = self._read(("path", column), rows, lambda batch: _cells(batch, column))
        return [cell for piece in pieces for cell in piece.to_pylist()]

    def codes(self, column: str) -> tuple[list[str], Int[np.ndarray, " rows"]]:
        """Return the distinct texts of a column, such as label, and which of them each row has.

        Numbers take a part of the memory of texts; empty where the column says nothing.
        """
        import pyarrow

        kind = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        pieces = self._read(
            ("path", column), None, lambda of: _cells(of, column).dictionary_encode()
        )
        coded = pyarrow.chunked_array([*pieces], kind).unify_dictionaries().combine_chunks()
        return coded.dictionary.to_pylist(), coded.indices.to_numpy()

    def read(self) -> Embeddings:
        """Read the whole of the table, with vectors of length one."""
        cells: dict[str, list[str]] = {"path": [], "split": [], "label": [], "group": []}

        def vectors_of(batch: Any) -> Float[Tensor, "rows dim"]:
            vectors = unit_vectors(batch)
            for name, column in cells.items():
                column += _cells(batch, name).to_pylist()
            return vectors

        # In one pass: what replaces the file meanwhile must not be half of what is returned.
        vectors = self._joined(self._blocks(("vector", *cells), None, vectors_of), len(self))
        paths, splits, labels, groups = cells.values()
        classes, numbers = numbered(labels)
        return Embeddings(
            vectors.numpy(),
            numbers,
            groups=grouped(groups) if any(groups) else None,
            rows=np.arange(len(paths)),
            paths=paths,
            classes=classes,
            splits=np.array(splits, np.str_),
            encoder=self.encoder,
            removed=self.removed,
            group_names=groups if any(groups) else (),
        )

    def nearest(self, queries: Float[Tensor, "queries dim"], k: int) -> Nearest:
        """Return the `k` rows most similar to each unit query, and the cosines, largest first.

        Equal cosines are in the order of the table. A product of matrices rounds by their shapes,
        so that equal rows of two blocks, or at the edge of one, come out unequal. Those of float64
        are equal once they are rounded to float32.

        Raises:
            CheckpointError: If the vectors have another dimension.
            DataError: If there is none.
        """
        k, start = min(k, len(self)), 0
        best = torch.full((len(queries), k), -torch.inf)
        found = torch.zeros(len(queries), k, dtype=torch.int64)
        for block in self.blocks():
            if (dim := block.shape[1]) != queries.shape[1]:
                raise CheckpointError(
                    f"the vectors have {dim} features and the encoder gives {queries.shape[1]}; "
                    "give vectors that `nearkin embed` has made of this run"
                )
            similarity = (queries.double() @ block.double().T).float()
            index = torch.arange(start, start + len(block)).expand_as(similarity)
            start += len(block)
            better = similarity.amax(dim=1) > best[:, -1]  # most blocks have nothing better
            values = torch.cat([best[better], similarity[better]], dim=1)
            values, order = values.sort(dim=1, descending=True, stable=True)
            places = torch.cat([found[better], index[better]], dim=1).gather(1, order[:, :k])
            best[better], found[better] = values[:, :k], places
        if not start:
            raise DataError("there is no image to compare with; give vectors of some")
        return best, found


def are_vectors(path: Path) -> bool:
    """Return whether a path is one of vectors, not of an encoder."""
    return path.suffix == SUFFIX or (path / NOTE).exists()


def open_table(path: Path) -> EmbeddingTable:
    """Open a table of embeddings, of which no row is read yet; refuse an incomplete folder."""
    from pyarrow import parquet

    if path.is_dir():
        folder = ShardFolder.open(path)
        if missing := folder.missing():
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {folder.note.num_shards} shards; "
                "let `nearkin embed` go on"
            )
        return EmbeddingTable(path, folder.files, folder.note.encoder)
    if not path.exists():
        raise UsageError(f"{path} does not exist; `nearkin embed` writes such files")
    if path.suffix != SUFFIX:
        raise UsageError(
            f"{path} is no table of features; give a folder that `nearkin embed` has made, or a "
            f"file that ends in {SUFFIX}"
        )
    with usable(path, AGAIN), path.open("rb") as file:
        noted = parquet.read_metadata(file).metadata or {}  # other tools note nothing
        notes = [str(noted.get(name.encode(), b""), "utf-8") for name in (ENCODER, REMOVED)]
    return EmbeddingTable(path, (path,), *notes)


def read_embeddings(path: Path, images: Images) -> Embeddings:
    """Read a run's embeddings: those of the given images, in their order, normalized.

    Raises:
        CheckpointError: If the file is damaged.
        DataError: If it has none of the images.
    """
    stored = open_table(path).read()
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


def stored_labels(path: Path) -> dict[str, str]:
    """Return the labels of a run's embeddings, by path, both as `as_text` writes them."""
    table = open_table(path)
    return dict(zip(table.texts("path"), table.texts("label"), strict=True))


def unit_vectors(batch: Any) -> Float[Tensor, "rows dim"]:
    """Return the unit vectors of a batch; ValueError if it is of no such table."""
    from pyarrow import compute, types

    if absent := [name for name in COLUMNS if name not in batch.schema.names]:
        raise ValueError(f"it has no column {absent[0]}")
    for name in ("path", "label"):
        kind = batch[name].type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise ValueError(f"its column {name} is of type {kind}")
    vectors = batch["vector"]
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
    return unit(features)


def _cells(batch: Any, column: str) -> Any:
    """Return the cells of a column as text; other programs write groups as numbers, or none."""
    import pyarrow

    if column not in batch.schema.names:
        return pyarrow.array([""] * len(batch))
    return batch[column].cast("string").fill_null("")


def map_vectors(file: Path, dim: int) -> Float[np.ndarray, "rows dim"]:
    """Map a file of vectors into memory, which then holds what is in use; write nothing there."""
    if not file.stat().st_size:
        return np.empty((0, dim), np.float32)
    return np.memmap(file, np.float32, mode="r+").reshape(-1, dim)


def _row_groups(file: Path, columns: Iterable[str] = ()) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yield how many rows each row group of a file has, and batches of its columns, unread."""
    from pyarrow import parquet

    with usable(file, AGAIN), file.open("rb") as opened:  # pyarrow takes no path beyond UTF-8
        table = parquet.ParquetFile(opened)
        for group in range(table.num_row_groups):
            batches = table.iter_batches(BLOCK_SIZE, [group], list(columns))
            yield table.metadata.row_group(group).num_rows, batches
