"""Classes, groups and splits of images, read from folders, tables and files beside the images."""

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple
from unicodedata import normalize

import numpy as np
from jaxtyping import Int64

from nearkin.data.images import in_bytes
from nearkin.data.notes import Note, named
from nearkin.data.remote import RemoteFile, is_url, remote_file
from nearkin.errors import DataError
from nearkin.places import user_path
from nearkin.types import UNKNOWN

SIDES: Final = {
    "train": "train",
    "training": "train",
    "test": "test",
    "val": "test",
    "valid": "test",
    "validation": "test",
}
"""Folder and table words for the two sides of a split."""


class Annotations(NamedTuple):
    """Label, group and split of each image, '' where there is none."""

    labels: Sequence[str]
    groups: Sequence[str]
    splits: Sequence[str]

    def or_else(self, other: "Annotations") -> "Annotations":
        """This, with the values of the other where this has none."""
        columns = zip(self, other, strict=True)
        return Annotations(*([a or b for a, b in zip(*each, strict=True)] for each in columns))

    def numbered(self) -> tuple[tuple[str, ...], Int64[np.ndarray, " images"]]:
        """The class names, whole numbers by value, others by bytes; each image's position."""
        names = set(self.labels) - {""}
        if all(name.isascii() and name.isdecimal() for name in names):
            classes = sorted(names, key=lambda name: (int(name), name))
        else:
            classes = sorted(names, key=in_bytes)
        number = {name: i for i, name in enumerate(classes)} | {"": UNKNOWN}
        return tuple(classes), np.array([number[name] for name in self.labels], np.int64)

    def grouped(self) -> Int64[np.ndarray, " images"]:
        """Each image's group: the row of the group's first image, its own by default."""
        first: dict[str, int] = {}
        rows = enumerate(self.groups)
        return np.array([first.setdefault(g, i) if g else i for i, g in rows], np.int64)


def annotations_from_folders(names: Sequence[str], labels: str) -> Annotations:
    """Labels and splits from the folders that images lie in.

    A single folder around everything is skipped. If all top-level folders are then called train,
    val, test or the like, they are the splits. Of what remains, an image's folder is its label, if
    the folders look like classes: every image lies in one, all equally deep, at least two of
    them, with two images or more on average. A .tar shard is no folder. `labels` is "auto",
    "folders" to insist on classes, or "none" for splits alone.
    """
    folders = [name.rpartition("/")[0] for name in names]
    distinct = list(dict.fromkeys(folders))
    parts = ([part for part in folder.split("/") if part] for folder in distinct)
    paths = _unwrapped([[part for part in p if not part.lower().endswith(".tar")] for p in parts])
    sided = all(path and path[0].lower() in SIDES for path in paths)
    splits = [SIDES[path[0].lower()] if sided else "" for path in paths]
    classes = [path[1:] if side else path for path, side in zip(paths, splits, strict=True)]
    if labels == "folders" and not all(classes):
        stray = names[folders.index(distinct[classes.index([])])]
        raise DataError(f"{stray}: lies in no class folder; move it, or do not ask for folders")
    if labels == "none" or (labels == "auto" and not _are_classes(classes, len(names))):
        classes = [[]] * len(classes)
    label_of = dict(zip(distinct, map("/".join, classes), strict=True))
    split_of = dict(zip(distinct, splits, strict=True))
    return Annotations(
        [label_of[folder] for folder in folders],
        [""] * len(names),
        [split_of[folder] for folder in folders],
    )


def _unwrapped(paths: list[list[str]]) -> list[list[str]]:
    while all(len(path) > 1 and path[0] == paths[0][0] for path in paths):
        if paths[0][0].lower() in SIDES:
            break
        paths = [path[1:] for path in paths]
    return paths


def _are_classes(classes: list[list[str]], images: int) -> bool:
    distinct = set(map(tuple, classes))
    depths = set(map(len, distinct))
    return len(depths) == 1 and depths != {0} and 2 <= len(distinct) <= images / 2


TABLES: Final = (".csv", ".parquet")
File = Path | RemoteFile  # Of this machine, or of a store


def file_at(place: str) -> File:
    """The file at a path, which need not exist, or at an address; a DataError if there is none."""
    return remote_file(place) if is_url(place) else user_path(place)


class Row(NamedTuple):
    """What is said of an image; '' where a cell is empty or its column is missing."""

    label: str = ""
    group: str = ""
    split: str = ""
    line: int = 0  # In a CSV the line, in Parquet the row, from 1


def read_table(path: File, required: Sequence[str] = ("path",)) -> dict[str, Row]:
    """Read the columns path, label, group and split, by path; an image listed twice counts once.

    A CSV is UTF-8, with commas or semicolons. Cells are text: no formula is ever evaluated.
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


def _csv(path: File, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with (
            path.open("rb") as binary,
            io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file,
        ):
            header = file.readline()
            file.seek(0)
            delimiter = ";" if header.count(";") > header.count(",") else ","
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
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); give another file"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV ({error}); save it as UTF-8") from error


def _parquet(path: File, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            schema = parquet.read_schema(file)
            _check_columns(path, schema.names, required)
            columns = [
                name for name in ("path", "label", "group", "split") if name in schema.names
            ]
            table: Any = parquet.read_table(file, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); write it anew") from error
    for line, cells in enumerate(table.to_pylist(), start=1):
        yield line, {name: "" if cell is None else str(cell) for name, cell in cells.items()}


def _check_columns(path: File, columns: Sequence[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in columns]
    if missing:
        present = ", ".join(columns)[:200] or "none"
        raise DataError(f"{path}: no column {missing[0]!r} among: {present}; add it to the header")


def match(
    path: File, rows: Mapping[str, Row], names: Collection[str]
) -> tuple[dict[str, Row], tuple[Note, ...]]:
    """The rows of a table of labels by image name, and a note on rows without an image."""
    known = frozenset(names)
    written = {(name if name in known else name.replace("\\", "/")): name for name in rows}
    matched = {name: rows[written[name]] for name in written.keys() & known}
    if not matched:
        raise DataError(
            f"{path}: labels {named(rows)}, but the images are called "
            f"{named(names)}; write the paths as they are below the data"
        )
    stray = [name for name in written if name not in known]
    if not stray:
        return matched, ()
    text = f"{len(stray)} of {len(rows)} rows of {path}, which belong to no usable image"
    return matched, (Note("left out", text, len(stray), tuple(stray[:3])),)


def annotations_from_rows(rows: Mapping[str, Row], names: Sequence[str]) -> Annotations:
    """The annotations of these images in a table."""
    absent = Row()
    own = [rows.get(name, absent) for name in names]
    return Annotations([r.label for r in own], [r.group for r in own], [r.split for r in own])


def spellings(classes: Iterable[str]) -> list[Note]:
    """Note classes whose names differ by case alone: most often they are one."""

    def folded(name: str) -> str:
        return normalize("NFC", name).casefold()

    ordered = sorted(classes, key=lambda name: (folded(name), name))
    groups = [list(names) for _, names in groupby(ordered, key=folded)]
    alike = [name for names in groups if len(names) > 1 for name in names]
    text = f"{len(alike)} names of classes that differ by case alone are classes of their own"
    return [Note("guessed", text, len(alike), tuple(alike[:4]))] if alike else []
