"""Embeddings on disk: a file, or a folder of parts that other tools read as one table.

A file that is written may be .parquet, .npz, or .npy with a .csv beside it; a part, and whatever
is read, is .parquet: whole by `read_embeddings`, and block by block where it is more than memory
holds.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.labels import numbered
from nearkin.encoders.inference import Inference, Precision
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings, embed_images, embeddings_of
from nearkin.files import PARTIAL, replace_text, usable, whole, writing
from nearkin.metrics.neighbors import nearest
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, under
from nearkin.run.data import write_bad_files
from nearkin.run.failures import resource_errors
from nearkin.schema import Auto, suggestion
from nearkin.tables import write_csv

SUFFIX: Final = ".parquet"  # Of what is read
FORMATS: Final = (SUFFIX, ".npz", ".npy")  # What `write_embeddings` writes
COLUMNS: Final = ("path", "label", "vector")  # A table of another program needs no more
TEXT: Final = ("path", "label", "split")
BAD: Final = b"nearkin.bad"  # Where a part notes its bad images, so that both appear at once
ENCODER: Final = "nearkin.encoder"  # Where a file notes the digest of the encoder that it is from
BLOCK_SIZE: Final = 4_096  # Images that can be read from a file at once
AGAIN: Final = "write it again with nearkin embed"
ROOM: Final = "make room, or choose another -o"

Read = TypeVar("Read")


# Files


def write_embeddings(path: Path, embeddings: Embeddings, encoder: str = "") -> None:
    """Write a file whose ending says how: .parquet, .npz, or .npy with a .csv beside it.

    `encoder` is the digest of the encoder, which a .parquet and an .npz note.
    """
    check_format(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == SUFFIX:
            _write_parquet(path, embeddings, encoder)
        elif path.suffix == ".npz":
            columns = _text(embeddings) | {ENCODER: [encoder]}
            np.savez(path, allow_pickle=False, **columns, vector=embeddings.vectors)
        else:
            np.save(path, embeddings.vectors)
            text = _text(embeddings)
            rows = zip(*text.values(), strict=True)
            write_csv(path.with_suffix(".csv"), tuple(text), rows)


def check_format(path: Path) -> None:
    """Refuse a file ending that has no writer, before anything is computed."""
    if path.suffix not in FORMATS:
        raise UsageError(
            f"cannot write embeddings as {path.name}.{suggestion(path.suffix, FORMATS)} "
            f"Give a name that ends in {', '.join(FORMATS)}, or in / for a folder of parts"
        )


def as_text(name: str) -> str:
    r"""Return a name that any file format takes: bytes that are not UTF-8 become `\xNN`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _text(embeddings: Embeddings) -> dict[str, list[str]]:
    """Return the columns beside the vectors."""
    splits, labels = embeddings.splits.tolist(), embeddings.class_names.tolist()
    columns = {"path": embeddings.paths, "split": splits, "label": labels}
    return {name: list(map(as_text, column)) for name, column in columns.items()}


def _lists(vectors: Float[np.ndarray, "n dim"]) -> Any:
    """Return the rows of a matrix as a column of a table."""
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])


def _write_parquet(path: Path, embeddings: Embeddings, encoder: str) -> None:
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        name: pyarrow.array(text, pyarrow.string()) for name, text in _text(embeddings).items()
    }
    table = pyarrow.table(
        columns | {"vector": _lists(embeddings.vectors)},
        metadata={BAD: json.dumps(embeddings.bad), ENCODER: encoder},
    )
    repeated = ["split", "label"]  # of the others, hardly two cells are equal
    with path.open("wb") as file:  # pyarrow takes no path that is not UTF-8
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
        vectors = _vectors(table)
        paths, splits, labels = (table[name].to_pylist() for name in ("path", "split", "label"))
    classes, numbers = numbered([name or "" for name in labels])
    return Embeddings(
        vectors.numpy(),
        numbers,
        rows=np.arange(len(paths)),
        paths=paths,
        classes=classes,
        splits=np.array(splits, np.str_),
    )


def _vectors(table: Any) -> Float[Tensor, "rows dim"]:
    """Return the unit vectors of a table or a record batch; ValueError if it is no such table."""
    return unit(_matrix(table))


def _matrix(table: Any) -> Float[Tensor, "rows dim"]:
    """Return the vectors of a table as they are; ValueError if it is no such table."""
    from pyarrow import compute, types

    if absent := [name for name in COLUMNS if name not in table.schema.names]:
        raise ValueError(f"it has no column {absent[0]}")
    for name in ("path", "label"):
        kind = table[name].type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise ValueError(f"its column {name} is of type {kind}")
    vectors = table["vector"]
    if not (types.is_fixed_size_list(vectors.type) or types.is_list(vectors.type)) or (
        not types.is_floating(vectors.type.value_type)
    ):
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


# Folders of parts

# What a folder is of. Readers of Parquet folders pass over names that begin so.
NOTE: Final = "_parts.json"
BAD_FILES: Final = "_bad_files.csv"
SHARD: Final = 65_536  # Images of a part
MOST: Final = 1_000_000  # Parts; from there on, their names are not in the order of the images


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Note:
    """What the parts of a folder are computed from."""

    encoder: str  # Its digest
    data: str  # The fingerprint of the images, their labels and their splits
    images: int
    shard: int  # Images of a part; the last may have fewer
    precision: Precision | Auto = "fp32"  # Of the encoder, as chosen

    @property
    def num_parts(self) -> int:
        """The number of files once all are written."""
        return -(-self.images // self.shard)


def note_on(encoder: str, images: Images, shard: int, precision: Precision | Auto) -> Note:
    """Return the note of a folder of the embeddings of these images, by that encoder."""
    labels, names = hashlib.sha256(images.labels.tobytes()), [*images.classes, *images.splits]
    labels.update("\0".join(names).encode(errors="surrogatepass"))
    return Note(
        encoder, f"{images.fingerprint}-{labels.hexdigest()}", len(images), shard, precision
    )


@dataclass(frozen=True)
class PartsWritten:
    """Progress of a folder of parts."""

    path: Path
    now: int  # Parts that were made just now
    missing: int  # Parts that other processes have yet to make
    num_parts: int
    count: int = 0  # Images with features, once no part is missing
    bad: int = 0  # Unreadable images, once no part is missing

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """Lines of text."""
        lines = [f"{self.now} of {self.num_parts} parts written: {self.path}"]
        if self.missing:
            return [*lines, f"{self.missing} parts are still missing; others are to make them"]
        lines.append(f"{self.count} images have features")
        if self.bad:
            lines.append(f"left out {self.bad} that cannot be read: see {BAD_FILES}")
        return lines


@dataclass(frozen=True)
class PartFolder:
    """A folder of Parquet files, each of which is there whole or not at all."""

    path: Path
    note: Note

    @classmethod
    def open(cls, path: Path) -> "PartFolder":
        """Open a folder of parts; CheckpointError if its note is damaged."""
        if not (path / NOTE).exists():
            raise UsageError(f"{path} has no {NOTE}; give a folder that nearkin embed has made")
        with usable(path / NOTE, f"remove {path} and run nearkin embed again"):
            note = msgspec.json.decode((path / NOTE).read_bytes(), type=Note)
            if min(note.shard, note.images) < 1 or note.num_parts > MOST:
                raise ValueError("it speaks of impossible numbers")
        return cls(path, note)

    @classmethod
    def precision(cls, path: Path) -> Precision | Auto:
        """The precision that a folder was begun with; `auto` if it is new."""
        return cls.open(path).note.precision if (path / NOTE).exists() else "auto"

    @classmethod
    def claim(cls, path: Path, note: Note) -> "PartFolder":
        """Write the note of a new folder, or refuse an old one that has another, or none."""
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            others = [file.name for file in path.iterdir() if PARTIAL not in file.name]
        if not (path / NOTE).exists():  # checked last: other processes may have started meanwhile
            if others:
                raise OutputError(
                    f"{path} is not empty and has no {NOTE}; choose a new folder with -o"
                )
            with writing(path / NOTE, ROOM):
                replace_text(path / NOTE, json.dumps(asdict(note), indent=2) + "\n")
        earlier = cls.open(path).note
        if earlier != note:
            kinds = {
                "encoder": "encoder",
                "data": "data",
                "shard": f"--shard, {earlier.shard}",
                "precision": f"--precision, {earlier.precision}",
            }
            then, now = vars(earlier), vars(note)
            changed = [kind for name, kind in kinds.items() if then[name] != now[name]]
            differs = " and another ".join(changed or ["number of images"])
            raise OutputError(
                f"{path} was begun with another {differs}; choose a new folder with -o"
            )
        return cls(path, note)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The file of each part, there or not. Names are in the order of the images."""
        numbers = range(self.note.num_parts)
        return tuple(self.path / f"part-{number:06}.parquet" for number in numbers)

    def _rows(self, number: int) -> Int[np.ndarray, " rows"]:
        """The images of a part."""
        start = number * self.note.shard
        return np.arange(start, min(self.note.images, start + self.note.shard))

    def missing(self) -> list[int]:
        """The parts that are not there yet."""
        there = set(self.path.glob("part-*.parquet"))
        return [number for number, file in enumerate(self.files) if file not in there]

    def write(self, number: int, embeddings: Embeddings) -> None:
        """Write one part, and in it which of its images could not be read."""
        path = self.files[number]
        with writing(path, ROOM), whole(path) as partial:
            _write_parquet(partial, embeddings, self.note.encoder)

    def compute(
        self,
        numbers: Sequence[int],
        by: Inference,
        images: Images,
        *,
        workers: int,
        normalized: bool = True,
        on_progress: ProgressCallback = ignore_progress,
    ) -> Iterator[tuple[str, int]]:
        """Write these parts of the embeddings of all images, with only one of them in memory.

        A part that another process has written meanwhile is not made again.

        Yields:
            After each part, its name and how many images it has.
        """
        for number in numbers:
            name = f"part {number + 1} of {self.note.num_parts}"
            if self.files[number].exists():
                yield name, _read_footer(self.files[number])[0]
                continue
            with resource_errors():
                embeddings = embed_images(
                    by,
                    images.subset(self._rows(number)),
                    workers=workers,
                    on_progress=under(name, on_progress),
                    allow_none=True,
                )
            self.write(number, embeddings.normalized() if normalized else embeddings)
            count = len(embeddings)
            del embeddings  # or there would be two while the next is computed
            yield name, count

    def read(self, images: Images) -> Embeddings:
        """Read all parts as one, with their vectors as they were written.

        Raises:
            CheckpointError: If a part is missing or damaged.
            DataError: If no image could be read.
        """
        from pyarrow import parquet

        bad, rows, vectors = dict[str, str](), list[np.ndarray](), list[np.ndarray]()
        for number, path in enumerate(self.files):
            with usable(path, "remove it, and the same command with --resume makes it again"):
                count, unread = _read_footer(path)
                bad |= unread
                inside = self._rows(number).tolist()
                rows.append(np.array([i for i in inside if images.names[i] not in bad], np.int64))
                if len(rows[-1]) != count:
                    raise ValueError("it is of other images")
                if count:
                    with path.open("rb") as file:
                        vectors.append(_matrix(parquet.read_table(file)).numpy())
        readable = np.concatenate(rows)
        if not len(readable):
            raise DataError(f"none of the {len(images)} images can be read; look at the files")
        return embeddings_of(
            images.subset(readable), np.concatenate(vectors), readable, dict(sorted(bad.items()))
        )

    def finish(self, images: Images, now: int) -> PartsWritten:
        """Return the progress, with `now` new parts; whoever sees all parts lists bad images."""
        if missing := len(self.missing()):
            return PartsWritten(self.path.resolve(), now, missing, self.note.num_parts)
        total, bad = 0, dict[str, str]()
        for file in self.files:
            count, unread = _read_footer(file)
            total += count
            bad.update(unread)
        if images.bad or bad:
            path = self.path / BAD_FILES
            with writing(path, ROOM), whole(path) as partial:
                write_bad_files(partial, images, bad)
        for partial in self.path.glob(f".part-*{PARTIAL}*"):  # of killed processes
            partial.unlink(missing_ok=True)
        if not total:
            raise DataError(f"none of the {len(images)} images can be read; look at the files")
        return PartsWritten(
            self.path.resolve(), now, 0, self.note.num_parts, total, len(images.bad) + len(bad)
        )


def _read_footer(path: Path) -> tuple[int, Mapping[str, str]]:
    """Return how many images a part has, and its unreadable ones with the reason."""
    from pyarrow import parquet

    with usable(path, "remove it and run nearkin embed again"), path.open("rb") as file:
        footer = parquet.read_metadata(file)
        bad = json.loads(footer.metadata[BAD])
        return footer.num_rows, {str(name): str(reason) for name, reason in bad.items()}


# Block by block


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a table of more images than memory holds, which is why it is not `Embeddings`.

    Its text stays as pyarrow has it: of a million rows, a search needs the paths of ten.
    """

    vectors: Float[Tensor, "rows dim"]  # Each of length one
    text: Any  # A record batch of the columns path and label, and split if there is one


@dataclass(frozen=True)
class EmbeddingTable:
    """Embeddings on disk, of which nothing is in memory: a folder of parts, or a .parquet."""

    path: Path
    files: tuple[Path, ...]  # In the order of the images
    encoder: str = ""  # The digest of the encoder that they are from, if that is known

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the file, or of what a folder is of."""
        return digest(self.path / NOTE if self.path.is_dir() else self.path)

    def __len__(self) -> int:
        return sum(count for file in self.files for count, _ in _row_groups(file))

    def blocks(self, rows: Int[np.ndarray, " rows"] | None = None) -> Iterator[Block]:
        """Yield all rows, or these ascending ones, in order, at most `BLOCK_SIZE` at once.

        A file that is no such table is a CheckpointError.
        """
        dim = 0
        for block in self._read((*TEXT, "vector"), rows, _block):
            dim = dim or block.vectors.shape[1]
            if block.vectors.shape[1] != dim:
                several = f"{dim} features and of {block.vectors.shape[1]}"
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
        vectors, start = torch.empty(0, 0), 0
        for block in self.blocks(rows):
            if not start:  # once the dimension is known: joining blocks would hold all of it twice
                count = len(self) if rows is None else len(rows)
                vectors = torch.empty(count, block.vectors.shape[1])
            vectors[start : start + len(block.vectors)] = block.vectors
            start += len(block.vectors)
        if not start:
            raise DataError(f"{self.path} has no image; give vectors of some")
        return vectors

    def write_vectors(self, file: Path, rows: Int[np.ndarray, " rows"]) -> None:
        """Write the unit vectors of these ascending rows, block by block; see `map_vectors`.

        Not through the map: a full disk is an error here, and there the end of the process.
        """
        with file.open("wb") as written:
            for block in self.blocks(rows):
                written.write(block.vectors.numpy().tobytes())

    def texts(self, column: str, rows: Int[np.ndarray, " rows"] | None = None) -> list[str]:
        """Return the column path, label or split of all rows, or of these ascending ones.

        Empty where it says nothing, as a table of another program on the split.
        """

        def cells(batch: Any) -> list[str]:
            absent = column not in batch.schema.names
            return [""] * len(batch) if absent else batch[column].to_pylist()

        pieces = self._read(dict.fromkeys(("path", column)), rows, cells)
        return [cell or "" for piece in pieces for cell in piece]

    def codes(self, column: str) -> tuple[list[str], Int[np.ndarray, " rows"]]:
        """Return the distinct texts of the column label or split, and which of them each row has.

        Numbers take a part of the memory of texts; empty where the column says nothing.
        """
        number, pieces = dict[str, int](), [np.zeros(0, np.int32)]

        def coded(batch: Any) -> Int[np.ndarray, " rows"]:
            if column not in batch.schema.names:
                return np.full(len(batch), number.setdefault("", len(number)), np.int32)
            encoded = batch[column].fill_null("").dictionary_encode()
            names = encoded.dictionary.to_pylist()
            own = [number.setdefault(name, len(number)) for name in names]
            return np.asarray(np.array(own, np.int32)[encoded.indices.to_numpy()])

        pieces += self._read(dict.fromkeys(("path", column)), None, coded)
        return list(number), np.concatenate(pieces)

    def nearest(
        self, queries: Float[Tensor, "queries dim"], k: int
    ) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
        """Return the `k` rows most similar to each query, and the cosines, most similar first."""
        best, rows, start = torch.empty(len(queries), 0), torch.empty(0), 0
        for block in self.blocks():
            similarity, index = nearest(block.vectors, queries, k)
            joined = torch.cat([best, similarity], dim=1)
            best, order = joined.topk(min(k, joined.shape[1]))
            rows = (torch.cat([rows, index + start], dim=1) if start else index).gather(1, order)
            start += len(block.vectors)
        return best, rows


def are_vectors(path: Path) -> bool:
    """Return whether a path is one of vectors, not of an encoder."""
    return path.suffix == SUFFIX or (path / NOTE).exists()


def open_table(path: Path) -> EmbeddingTable:
    """Open a table of embeddings, of which no row is read yet; refuse an incomplete folder."""
    if path.is_dir():
        folder = PartFolder.open(path)
        if missing := folder.missing():
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {folder.note.num_parts} parts; "
                "let nearkin embed go on"
            )
        return EmbeddingTable(path, folder.files, folder.note.encoder)
    if not path.exists():
        raise UsageError(f"{path} does not exist; nearkin embed writes such files")
    if path.suffix != SUFFIX:
        raise UsageError(
            f"{path} is no table of features; give a folder that nearkin embed has made, or a "
            f"file that ends in {SUFFIX}"
        )
    return EmbeddingTable(path, (path,), _encoder_of(path))


def _encoder_of(file: Path) -> str:
    """Return the digest of the encoder that a file notes; empty if none, as of other tools."""
    from pyarrow import parquet

    with usable(file, AGAIN), file.open("rb") as opened:
        noted = parquet.read_metadata(opened).metadata or {}
        return str(noted.get(ENCODER.encode(), b""), "utf-8")


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


def _block(batch: Any) -> Block:
    """Return a batch with its vectors as a matrix; ValueError if it is of no such table."""
    return Block(_vectors(batch), batch.select([n for n in TEXT if n in batch.schema.names]))


# Search


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


def most_similar(
    blocks: Iterable[Block], queries: Float[Tensor, "queries dim"], top: int
) -> list[list[Neighbor]]:
    """Return the `top` rows most similar to each unit query, as if all blocks were one.

    A product of matrices rounds by their shapes, so that equal rows of two blocks, or at the edge
    of one, come out unequal. Those of float64 are equal once they are rounded to float32.
    """
    best: list[list[Neighbor]] = [[] for _ in queries]
    for block in blocks:
        dim = block.vectors.shape[1]
        if dim != queries.shape[1]:
            raise CheckpointError(
                f"the vectors have {dim} features and the encoder gives {queries.shape[1]}; give "
                "vectors that nearkin embed has made of this run"
            )
        similarity = (queries.double() @ block.vectors.double().T).float()
        largest = similarity.amax(dim=1).tolist()
        for row, most, neighbors in zip(similarity, largest, best, strict=True):
            if len(neighbors) == top and most <= neighbors[-1].similarity:
                continue  # most blocks have nothing better
            values, order = row.sort(descending=True, stable=True)
            text = block.text.take(order[:top].numpy())
            columns = (values[:top].tolist(), text["path"].to_pylist(), text["label"].to_pylist())
            neighbors += [Neighbor(s, p or "", n or "") for s, p, n in zip(*columns, strict=True)]
            neighbors.sort(key=lambda each: -each.similarity)  # equals stay in their order
            del neighbors[top:]
    if not best[0]:
        raise DataError("there is no image to compare with; give vectors of some")
    return best
