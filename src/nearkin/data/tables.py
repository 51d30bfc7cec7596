"""Tables that say something of images: their rows, and which image each of their paths means."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from posixpath import join, normpath, relpath, split
from typing import Any, Final
from unicodedata import normalize

from nearkin.data.boxes import SIDES, Box, region
from nearkin.data.decode import BadImage
from nearkin.data.images import Folder, Images
from nearkin.data.labels import Row, split_of
from nearkin.data.notes import Note, named, noted
from nearkin.data.remote import File, is_url, remote_file
from nearkin.errors import DataError
from nearkin.places import user_path
from nearkin.tables import csv_rows, in_utf8

TABLES: Final = (".csv", ".parquet")
COLUMNS: Final = ("path", "label", "group", "split", *SIDES)
Rows = Sequence[tuple[str, Row]]  # Of a table, with the path as it is written there


def file_at(place: str) -> File:
    """The file at a path, which need not exist, or at an address; a DataError if there is none."""
    return remote_file(place) if is_url(place) else user_path(place)


def is_table(where: str) -> bool:
    """Whether this is the path of a table."""
    return Path(where).suffix.lower() in TABLES


def read_table(path: File, column: str = "") -> Rows:
    """Read path, label (or a column that must be there), group, split; x0, y0, x1, y1 of boxes.

    A CSV is UTF-8, with commas, semicolons or tabs. No formula is ever evaluated. The header of
    either format may be in capitals.
    """
    is_parquet = path.suffix.lower() == ".parquet"
    try:
        with path.open("rb") as file:
            lines = _parquet_rows(file, column) if is_parquet else csv_rows(file, column)
            rows = [_row(path, line, cells, column) for line, cells in lines]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); give another file"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}, {error}") from error
    if not rows:
        raise DataError(f"{path}: no rows; give one per image")
    return rows


def _row(table: File, line: int, cells: Mapping[str, Any], column: str) -> tuple[str, Row]:
    if missing := [name for name in ("path", column) if name and name not in cells]:
        present = ", ".join(cells)[:200]
        raise DataError(
            f"{table}: no column {missing[0]!r} among: {present}; add it to the header"
        )
    row = Row.of(cells.get(column or "label"), cells.get("group"), cells.get("split"), line)
    try:
        row = row._replace(box=Box.of(cells))
    except ValueError as error:
        raise DataError(f"{table}, line {line}: {error}") from error
    if cells["path"] in (None, ""):
        raise DataError(f"{table}, line {line}: no path; give every image its own")
    if row.split and not split_of(row.split):
        raise DataError(f"{table}, line {line}: split {row.split!r}; say train, val or test")
    path = cells["path"]
    return path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else str(path), row


def _parquet_rows(file: io.BufferedReader, column: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a Parquet table and its number, with the cells of the columns that count."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        written = parquet.read_schema(file).names
        own = [name for name in written if name.strip().lower() in (*COLUMNS, column)]
        table: Any = parquet.read_table(file, columns=own or written)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"not a readable Parquet file ({error}); write it anew") from error
    columns = header_of(table.column_names)
    yield from enumerate(table.rename_columns([*columns]).to_pylist(), start=1)


def header_of(names: Sequence[str]) -> dict[str, str]:
    """The names of columns of Parquet by how they are meant: a header may be in capitals."""
    columns = {name.strip().lower(): name for name in names}
    if len(columns) < len(names):
        raise ValueError(f"no header of different names, but {', '.join(names)[:200]}")
    return columns


def spelled(written: str) -> Iterator[str]:
    """The ways to spell a path: as it is, as of Windows, and in Unicode's two forms."""
    for path in dict.fromkeys((written, written.replace("\\", "/"))):
        for form in dict.fromkeys((path, normalize("NFC", path), normalize("NFD", path))):
            yield normpath(form)


def existing(written: str, folders: Iterable[str]) -> str | None:
    """The absolute path of the file at a path relative to one of these folders."""
    places = product(spelled(written), filter(None, folders))
    paths = ("/" + normpath(join(folder, path)).lstrip("/") for path, folder in places)
    return next(filter(os.path.lexists, paths), None)


class Resolver:
    """Finds what paths in a table mean.

    A path is the name of an image in the data, relative to the folder of the table, or absolute.
    """

    def __init__(self, table: File, names: Iterable[str], images: Images | None = None) -> None:
        """For these names of images, or of bad files; without `images`, paths are names only."""
        self.table = table
        self.names = frozenset(names)
        self.images = images
        source = images and images.source
        self.root = join(str(source.root), "") if isinstance(source, Folder) else ""
        self._folder = folder_of(table) if images is not None else ""
        self._resolved = lru_cache(maxsize=2**10)(os.path.realpath)

    @cached_property
    def _composed(self) -> Mapping[str, str]:
        return {normalize("NFC", name): name for name in sorted(self.names)}

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.images.names)} if self.images else {}

    def _name(self, path: str) -> str | None:
        """The image of this name, in whatever form its letters are."""
        return path if path in self.names else self._composed.get(normalize("NFC", path))

    def named(self, written: str) -> str | None:
        """The image of this name, however it is spelled; an address is a name as it is."""
        return next(filter(None, map(self._name, (written, *spelled(written)))), None)

    def at(self, path: str) -> str | None:
        """The image at an absolute path; None if it is not one of the data."""
        folder, file = split(path)
        for place in (path, join(self._resolved(folder), file)) if self.root else ():
            name = self._name(place.removeprefix(self.root))
            if place.startswith(self.root) and name:
                return name
        return None

    def find(self, written: str) -> str | None:
        """The name of an image, or the absolute path of a file that is none of the data.

        A path that may mean either of two images is refused.
        """
        named = self.named(written)
        if named is not None and join(self._folder, "") in ("", self.root):
            return named
        beside = existing(written, (self._folder, self.root))
        inside = beside and self.at(beside)
        if named and beside and inside != named and not self._is_copy(named, Path(beside)):
            raise DataError(
                f"{self.table}: {written!r} is an image of the data and another file, {beside}; "
                "write the absolute path of the one that is meant"
            )
        return named or inside or beside

    def _is_copy(self, name: str, path: Path) -> bool:
        """Whether a file has the bytes of an image of the data; of pixels nobody can tell."""
        if self.images is None or name not in self._rows:  # a bad file
            return False
        try:
            content = self.images.stored(self._rows[name])
            return not isinstance(content, bytes) or content == path.read_bytes()
        except (BadImage, OSError):
            return False


def folder_of(table: File) -> str:
    """The folder that paths in a table may be relative to; '' in a store."""
    return str(table.resolve().parent) if isinstance(table, Path) else ""


def by_name(
    table: File, rows: Rows, find: Callable[[str], str | None]
) -> tuple[dict[str, Row], list[str]]:
    """The rows by the names that `find` gives their paths, and the paths without a name.

    Two rows that say different things of one image are refused.
    """
    found, stray = dict[str, Row](), list[str]()
    for path, row in rows:
        written = region(path, row.box)
        name = find(written)
        if name is None:
            stray.append(written)
            continue
        first = found.setdefault(name, row)
        if first._replace(line=row.line) != row:
            raise DataError(
                f"{table}: {written!r} is described in line {first.line} and, differently, in "
                f"line {row.line}; keep one of them"
            )
    _require_utf8(table, stray)
    return found, stray


def _require_utf8(table: File, stray: Iterable[str]) -> None:
    if broken := [written for written in stray if not in_utf8(written)]:
        raise DataError(f"{table}: {named(broken)} is not in UTF-8; save the table as UTF-8")


def match(
    table: File, rows: Rows, names: Iterable[str], images: Images | None = None
) -> tuple[dict[str, Row], list[Note]]:
    """The rows of a table of labels by image name, and a note on rows without an image.

    A table of which no row is of an image is refused.
    """
    resolver = Resolver(table, names, images)

    def find(written: str) -> str | None:
        name = resolver.find(written)
        return name if name in resolver.names else None

    found, stray = by_name(table, rows, find)
    if not found:
        raise DataError(
            f"{table}: labels {named(stray)}, but the images are called "
            f"{named(sorted(resolver.names))}; write the paths as they are below the data"
        )
    text = f"of {len(rows)} rows of {table}, which belong to no usable image"
    return found, noted("left out", stray, text)


def places_of(
    table: Path, written: Iterable[str], folders: Sequence[str]
) -> tuple[Path, dict[str, str]]:
    """The folder that a table's files lie below, and where below it each path leads.

    That is the table's own folder, unless files lie elsewhere; then the deepest that holds all.
    Of the folders that paths may be relative to, the first that has a file counts.
    """
    root, around = folder_of(table), f"{table.absolute().parent}/"  # which may be a link
    paths = dict.fromkeys(written)
    found = {path: existing(path.removeprefix(around), folders) for path in paths}
    if missing := [path for path, place in found.items() if place is None]:
        _require_utf8(table, missing)
        raise absent(table, missing, len(paths), root)
    places = {path: place for path, place in found.items() if place is not None}
    outside = [place for place in places.values() if not place.startswith(join(root, ""))]
    root = os.path.commonpath([root, *outside])
    return Path(root), {path: relpath(place, root) for path, place in places.items()}


def absent(table: File, missing: Sequence[str], count: int, root: str) -> DataError:
    """The error of a table that lists files which do not exist."""
    return DataError(
        f"{table}: {len(missing)} of {count} files do not exist below {root}, such as "
        f"{named(missing)}; give paths relative to the table, or absolute ones"
    )
