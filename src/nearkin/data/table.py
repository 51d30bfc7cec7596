"""Labels, groups and splits in a CSV or Parquet file, which may also be the list of images."""

import csv
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from nearkin.data.folder import Folder, state
from nearkin.data.labels import SIDES, Said
from nearkin.data.sources import BadFile, Files, Found, Listing
from nearkin.errors import DataError

TABLES: Final = (".csv", ".parquet")


class Row(NamedTuple):
    """What a table says about one image; '' where it says nothing."""

    label: str
    group: str
    split: str
    line: int
    """Where it says so: in a CSV the line, in Parquet the row, counted from 1."""


def read_table(path: Path, required: Sequence[str] = ("path",)) -> dict[str, Row]:
    """Read the columns path, label, group and split; a row's key is its path.

    A CSV is UTF-8, with commas or semicolons. Cells are text and nothing else: no formula is
    ever evaluated. An image listed twice alike counts once.

    Raises:
        DataError: the file cannot be read, lacks a required column or contradicts itself.
    """
    rows: dict[str, Row] = {}
    read = _parquet if path.suffix.lower() == ".parquet" else _csv
    for line, cells in read(path, required):
        side = cells.get("split", "").strip().lower()
        if side and side not in SIDES:
            raise DataError(f"{path}, line {line}: split {side!r}; say train, val or test")
        if not cells["path"]:
            raise DataError(f"{path}, line {line}: no path; give every image its own")
        label, group = (cells.get(column, "").strip() for column in ("label", "group"))
        row = Row(label, group, SIDES.get(side, ""), line)
        first = rows.setdefault(cells["path"].removeprefix("./"), row)
        if first[:3] != row[:3]:
            raise DataError(
                f"{path}: {cells['path']!r} is described in line {first.line} and, differently, "
                f"in line {line}; keep one of them"
            )
    if not rows:
        raise DataError(f"{path}: no rows; give one per image")
    return rows


def _csv(path: Path, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            heading = file.readline()
            file.seek(0)
            delimiter = ";" if heading.count(";") > heading.count(",") else ","
            reader = csv.reader(file, delimiter=delimiter)
            columns = [cell.strip().lower() for cell in next(reader, [])]
            _check_columns(path, columns, required)
            for cells in filter(None, reader):
                if len(cells) > len(columns):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells for {len(columns)} "
                        "columns; put quotes around cells that hold the separator"
                    )
                yield reader.line_num, dict(zip_longest(columns, cells, fillvalue=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV ({error}); save it as UTF-8") from error


def _parquet(path: Path, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
        _check_columns(path, schema.names, required)
        wanted = [name for name in ("path", "label", "group", "split") if name in schema.names]
        table: Any = parquet.read_table(path, columns=wanted)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); write it anew") from error
    for line, cells in enumerate(table.to_pylist(), start=1):
        yield line, {name: "" if cell is None else str(cell) for name, cell in cells.items()}


def _check_columns(path: Path, columns: Sequence[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in columns]
    if missing:
        found = ", ".join(columns)[:200] or "none"
        raise DataError(f"{path}: no column {missing[0]!r} among: {found}; add it to the heading")


def list_table(path: Path, rows: Mapping[str, Row]) -> tuple[Listing, dict[str, Row]]:
    """The images that a table lists, by paths relative to its own folder.

    Returns:
        The images, and the rows under the images' names.

    Raises:
        DataError: a path leads out of the folder, or to no file.
    """
    root = path.resolve().parent
    named = {_name(path, written, row): row for written, row in rows.items()}
    missing = [name for name in named if not os.path.lexists(root / name)]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(named)} files do not exist below {root}, such as "
            f"{_examples(missing)}; give paths relative to the table"
        )
    files, bad = Found(2), list[BadFile]()
    for name in named:
        found = state(root, name)
        if isinstance(found, BadFile):
            bad.append(found)
        elif stat.S_ISREG(found.st_mode):
            files.add(name, found.st_size, found.st_mtime_ns)
        else:
            bad.append(BadFile(name, "not a regular file", 0))
    listed = Files(*files.in_order())
    return Listing(str(path.resolve()), Folder(root), listed, bad), named


def _name(path: Path, written: str, row: Row) -> str:
    root = path.resolve().parent
    name = written.removeprefix(f"{root}/")
    if "\\" in name and not os.path.lexists(root / name):
        name = name.replace("\\", "/")
    if name.startswith("/") or ".." in name.split("/"):
        raise DataError(
            f"{path}, line {row.line}: {written!r} leads out of the table's folder; "
            "move the table above the images"
        )
    return name


def match(
    path: Path, rows: Mapping[str, Row], names: Collection[str]
) -> tuple[dict[str, Row], tuple[str, ...]]:
    """Look the rows of a table of labels up among the images; no file is opened.

    Returns:
        The rows by image, and a note if there are rows that belong to none.

    Raises:
        DataError: no row belongs to any image.
    """
    known = frozenset(names)
    written = {(name if name in known else name.replace("\\", "/")): name for name in rows}
    found = {name: rows[written[name]] for name in written.keys() & known}
    if not found:
        raise DataError(
            f"{path}: labels {_examples(rows)}, but the images are called "
            f"{_examples(names)}; write the paths as they are below the data"
        )
    stray = [name for name in written if name not in known]
    if not stray:
        return found, ()
    note = f"{path}: {len(stray)} of {len(rows)} rows belong to no usable image"
    return found, (f"{note}, such as {_examples(stray)}",)


def said_by_rows(rows: Mapping[str, Row], names: Sequence[str]) -> Said:
    """What a table says about these images."""
    silent = Row("", "", "", 0)
    said = [rows.get(name, silent) for name in names]
    return Said([r.label for r in said], [r.group for r in said], [r.split for r in said])


def _examples(names: Iterable[str]) -> str:
    return ", ".join(map(repr, islice(names, 3)))
