"""Images in a column of Parquet and Arrow files, as those of Hugging Face's datasets."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np

from nearkin.data.labels import Row
from nearkin.data.members import Member, Place
from nearkin.data.notes import Note, noted
from nearkin.data.remote import File, readable
from nearkin.data.tables import COLUMNS, header_of
from nearkin.data.unpacked import kept, unpacked, write_unpacked
from nearkin.errors import DataError
from nearkin.places import cache_folder, is_file

COLUMN_TABLES: Final = (".parquet", ".arrow")
ROWS: Final = 256  # Rows that are copied at a time
IMAGES: Final = ("image", "img")  # Which of several columns with bytes is taken


def image_column(schema: Any) -> str | None:
    """The column that holds encoded images, as bytes or as `datasets` stores them."""
    import pyarrow as pa

    def holds_bytes(cells: Any) -> bool:
        if pa.types.is_struct(cells):
            return cells.get_field_index("bytes") >= 0 and holds_bytes(cells.field("bytes").type)
        return bool(pa.types.is_binary(cells) or pa.types.is_large_binary(cells))

    others = _columns(schema).values()  # paths and labels may be bytes, too
    binary = [each.name for each in schema if holds_bytes(each.type) and each.name not in others]
    named = [name for name in IMAGES if name in binary]
    return next(iter(named or (binary if len(binary) == 1 else [])), None)


def has_images(table: File) -> bool:
    """Whether a table holds the images themselves, and not their paths."""
    if table.suffix.lower() == ".arrow":
        return True
    with _readable(table):
        schema = _schema(table)
        return "path" not in _columns(schema) or image_column(schema) is not None


def may_have_images(shard: File) -> bool:
    """Whether a shard is an archive, or a table with a column of images."""
    return shard.suffix.lower() not in COLUMN_TABLES or image_column(_schema(shard)) is not None


def _schema(table: File) -> Any:
    with _readable(table), table.open("rb") as file:
        return _batches(table, file)[0]


def list_column(table: File) -> tuple[Path, list[Member]]:
    """An Arrow file with the images of a table, and what lies where in it, row by row.

    That is the table itself if it is one, on this machine and uncompressed; otherwise a copy.
    """
    with _readable(table):
        if isinstance(table, Path) and table.suffix.lower() == ".arrow":
            cells = _cells(table, table)
            if cells is not None:
                return table, cells
        copy = unpacked(table, ".arrow", lambda file, new: _write(*_batches(table, file), new))
        return copy, _cells(copy, table) or []


def copied_dataset(dataset: Any) -> Path:
    """A `datasets.Dataset`, or a stream of one, read once, to its end, as an Arrow file."""
    if dataset.features is None:
        raise DataError("the dataset does not say what its columns are; cast it to its Features")
    tables = dataset.with_format("arrow").iter(batch_size=ROWS)
    schema = dataset.features.arrow_schema
    content = hashlib.sha256(schema.serialize())  # batches have no names, of columns or classes

    def batches() -> Iterator[Any]:
        for table in tables:
            for written in table.cast(schema).combine_chunks().to_batches():
                batch = _with_bytes(written, image_column(schema))
                content.update(batch.serialize())
                yield batch

    new = cache_folder("tables") / f"stream-{uuid4().hex}.arrow"
    write_unpacked(new, lambda path: _write(schema, batches(), path))
    copy = new.with_name(f"{content.hexdigest()[:32]}.arrow")
    if copy.exists():  # the time of its last write stays
        new.unlink()
    else:
        new.replace(copy)
    return kept(copy)


def _with_bytes(batch: Any, column: str | None) -> Any:
    """The rows with the bytes of images of which they have the path of a file only."""
    import pyarrow as pa

    if column is None or not pa.types.is_struct((images := batch.column(column)).type):
        return batch
    if not images.field("bytes").null_count:
        return batch
    cells = images.to_pylist()
    for cell in cells:
        path = cell and cell.get("bytes") is None and cell.get("path")
        if path and is_file(path):  # else the row is listed as one without bytes
            cell["bytes"] = Path(path).read_bytes()
    at = batch.schema.names.index(column)
    return batch.set_column(at, batch.schema.field(at), pa.array(cells, images.type))


def _readable(table: File) -> AbstractContextManager[None]:
    import pyarrow as pa

    what = f"{table.suffix[1:].capitalize()} file"
    return readable(table, what, "write it anew", OSError, ValueError, pa.ArrowException)


def _batches(table: File, file: Any) -> tuple[Any, Iterable[Any]]:
    """The schema of an open table, and its rows."""
    if table.suffix.lower() == ".parquet":
        from pyarrow import parquet

        opened = parquet.ParquetFile(file)
        return opened.schema_arrow, opened.iter_batches(ROWS)
    import pyarrow as pa

    return _stream(pa.PythonFile(file, "r"))


def _stream(file: Any) -> tuple[Any, Iterable[Any]]:
    """The same of an Arrow file, in either of its two formats."""
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(file)
        return stream.schema, stream
    except pa.ArrowInvalid:
        file.seek(0)
        opened = pa.ipc.open_file(file)
        return opened.schema, map(opened.get_batch, range(opened.num_record_batches))


def _write(schema: Any, batches: Iterable[Any], path: Path) -> None:
    """Write batches as an uncompressed Arrow file."""
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            batch.validate(full=True)
            stream.write_batch(batch)


def _cells(copy: Path, table: File) -> list[Member] | None:
    """What lies where in an Arrow file, the copy of a table; None if it is compressed."""
    import pyarrow as pa

    with pa.memory_map(str(copy)) as mapped:
        whole = mapped.read_buffer()
    schema, batches = _stream(pa.BufferReader(whole))
    name = image_column(schema)
    if name is None:
        raise DataError(
            f"{table}: no column of images among: {', '.join(schema.names)[:200]}; give one with "
            "bytes, called image, or a table with the column path"
        )
    cells = list[Member]()
    for batch in batches:
        batch.validate(full=True)  # or lengths that lie would be read behind the memory's end
        content, ends, there = _values(batch.column(name))
        start = content.address - whole.address
        if not 0 <= start < whole.size:
            return None
        sizes = np.diff(ends).tolist()
        entries = zip((ends + start).tolist(), sizes, there, _rows(batch, schema), strict=False)
        for offset, size, valid, row in entries:
            refusal = "" if valid else "no bytes in the table"
            place = Place(offset, size, size)
            cells.append(Member(f"{len(cells):08}", place, refusal, row=row))
    return cells


def _values(column: Any) -> tuple[Any, np.ndarray, list[bool]]:
    """The buffer of all images of a column, where each ends, and which of them there are."""
    import pyarrow as pa

    there = column.is_valid()
    if pa.types.is_struct(column.type):
        column = column.field("bytes")
        there = pa.compute.and_(there, column.is_valid())
    _, ends, content = column.buffers()
    dtype = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    places = np.frombuffer(ends, dtype)[column.offset :][: len(column) + 1].astype(np.int64)
    return content or ends, places, there.to_pylist()


def _rows(batch: Any, schema: Any) -> Iterator[Row]:
    """What the columns label (or the only one with named classes), group and split say."""
    classes = _named_classes(schema)
    columns = {"label": next(iter(classes)) if len(classes) == 1 else ""} | _columns(schema)

    def cells(meaning: str) -> list[Any]:
        column = columns.get(meaning)
        return batch.column(column).to_pylist() if column else [None] * len(batch)

    def named(meaning: str) -> list[Any]:
        names = classes.get(columns.get(meaning, ""))
        if names is None:
            return cells(meaning)
        numbers = range(len(names))  # which floats of a whole number are in, too
        return [names[int(n)] if n in numbers else None for n in cells(meaning)]

    names = classes.get(columns["label"])
    rows = map(Row.of, cells("label"), named("group"), named("split"))
    yield from rows if names is None else (row.named(names) for row in rows)


def undecided(tables: Iterable[File]) -> list[Note]:
    """Note the columns of named classes of Arrow files in which several could be the labels."""
    found = dict[str, None]()
    for table in tables:
        if table.suffix.lower() == ".arrow":
            schema = _schema(table)
            classes = _named_classes(schema)
            if len(classes) > 1 and "label" not in _columns(schema):
                found |= dict.fromkeys(classes)
    text = "columns of classes, of which none is called label; rename the one that is meant"
    return noted("left out", [*found], text)


def _columns(schema: Any) -> dict[str, str]:
    """The names of the columns that count, by how they are meant."""
    return header_of([name for name in schema.names if name.strip().lower() in COLUMNS])


def _named_classes(schema: Any) -> dict[str, list[str]]:
    """The names of the classes of each column of `ClassLabel`, as `datasets` notes them."""
    try:
        described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = described["info"]["features"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        column: said["names"]
        for column, said in features
        if column in schema.names  # which a table has lost that was cut by another tool
        if isinstance(said, dict) and said.get("_type") == "ClassLabel"
        if isinstance(said.get("names"), list)
    }
