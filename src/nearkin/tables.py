"""Files: CSV tables, atomic writes, checksums, and the journal of metrics."""

import contextlib
import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from nearkin.errors import CheckpointError, OutputError, ResourceError

PARTIAL: Final = ".partial."  # Marks the temporary file of an atomic write: `.NAME.partial.NUMBER`
SEAL: Final = b"nearkin\n"
SEAL_SIZE: Final = len(SEAL) + 8 + hashlib.sha256().digest_size
WRITTEN: Final = ("label", "group", "split", "name")  # Columns that people write
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # How cells begin that spreadsheets take for formulas


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a header line."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)


def read_csv(path: Path) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a table with a header line, as dictionaries; see `csv_rows`."""
    with path.open("rb") as file:
        for _, cells in csv_rows(file):
            yield cells


def csv_rows(table: io.BufferedReader) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the last line and the cells of each row of a table with a header line.

    Spreadsheets may have put a mark before it, capitals in it, and semicolons or tabs for commas.
    A name of a file may be any bytes; what people write is UTF-8.

    Raises:
        ValueError: If it is no such table, with the line.
        OSError: If it cannot be read.
    """
    with io.TextIOWrapper(table, "utf-8-sig", "surrogateescape", newline="") as file:
        header = file.readline()
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=header.count), strict=True)
        line = 0
        try:
            columns = [cell.strip().lower() for cell in next(reader, [])]
            line = reader.line_num
            own = [name for name in columns if name in ("path", *WRITTEN)]
            if not (header.strip() and in_utf8(header) and len(set(own)) == len(own)):
                raise ValueError("line 1: no header of different names; save it as UTF-8")
            for cells in reader:
                if cells:
                    yield reader.line_num, _row(columns, cells, reader.line_num)
                line = reader.line_num
        except csv.Error as error:
            raise ValueError(f"line {line + 1}: {error}; close every quote") from error


def _row(columns: Sequence[str], cells: Sequence[str], line: int) -> dict[str, str]:
    if len(cells) > len(columns):
        raise ValueError(
            f"line {line}: {len(cells)} cells for {len(columns)} columns; put quotes around cells "
            "that hold the separator"
        )
    row = dict(zip_longest(columns, map(_text, cells), fillvalue=""))
    for column in WRITTEN:
        if not in_utf8(row.get(column, "")):
            raise ValueError(f"line {line}: the {column} is not in UTF-8; save the table as UTF-8")
    return row


def in_utf8(text: str) -> bool:
    """Whether text that was read from a file was valid UTF-8 there."""
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)


def read_numbers(path: Path) -> list[dict[str, float]]:
    """Read a table of numbers, each row without its empty cells."""
    return [{name: float(cell) for name, cell in row.items() if cell} for row in read_csv(path)]


def _cell(value: object) -> object:
    """Escape what a spreadsheet takes for a formula: a file may be called `=cmd|...`."""
    if isinstance(value, str) and value.lstrip("'").startswith(FORMULAS):
        return "'" + value
    return value


def _text(cell: str) -> str:
    """Undo `_cell`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(FORMULAS) else cell


def check_unpacked(file: Any, most: int) -> None:
    """Raise an error of any kind for a zip that is damaged, or unpacks to more bytes than `most`.

    Its list of contents tells: what unpacks to more than is stated there is not read further.
    """
    with zipfile.ZipFile(file) as packed:
        unpacked = sum(member.file_size for member in packed.infolist())
    if 0 < most < unpacked:
        raise ValueError(f"it unpacks to {unpacked / 1e6:,.0f} MB, and {most / 1e6:,.0f} are free")


def read_arrays(file: Any, most: int, names: Collection[str] = ()) -> dict[str, Any]:
    """Read arrays of an .npz; nothing is unpickled, and a small file stays small.

    Args:
        file: The file.
        most: Bytes that all arrays may take; 0 for any number.
        names: Which are read; all if empty.

    Raises:
        Exception: Of many kinds if it is damaged, or unpacks to more.
    """
    import numpy as np  # here, so that the command line starts without it

    check_unpacked(file, most)
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files if not names or name in names}


def printable(text: str) -> str:
    r"""Escape control characters and broken bytes, which names of files may hold.

    >>> print(printable("a\x1b[31mred"))
    a\x1b[31mred
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def abridged(names: Sequence[str], most: int) -> list[str]:
    """Return the first of many names, and how many more there are.

    >>> ", ".join(abridged(["a", "b", "c"], 1))
    'a, and 2 more'
    """
    more = len(names) - most
    return [*names[:most], f"and {more} more"] if more > 0 else list(names)


@contextlib.contextmanager
def usable(path: Path, remedy: str) -> Iterator[None]:
    """Turn any error in a `with` block that reads a file of a run into one line.

    The file may be damaged, or of somebody else.

    Raises:
        CheckpointError: With the reason, and `remedy`, which says what to do.
    """
    try:
        yield
    except Exception as error:  # of any kind: the file may hold anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} cannot be used ({reason}); {remedy}") from error


@contextlib.contextmanager
def writing(path: Path, remedy: str = "choose another -o") -> Iterator[None]:
    """Turn an operating system's error in a `with` block that writes a file into one line.

    Raises:
        OutputError: With the reason, and `remedy`, which says what to do.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def check_new(path: Path, *, overwrite: bool = False) -> None:
    """Refuse to replace a file, before anything is computed.

    Raises:
        OutputError: If there is one.
    """
    if not overwrite and os.path.lexists(path):
        raise OutputError(f"{path} exists, and may have been edited; choose another name")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write a file under, then rename it: an atomic write.

    The bytes reach the disk before the name does.

    Raises:
        OSError: If that fails. The old file is still there, and no temporary one.
    """
    # Not the process id: two machines that share a disk may have the same.
    partial = path.with_name(f".{path.name}{PARTIAL}{uuid4().int}")
    try:
        yield partial
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: Path, *parts: bytes) -> None:
    """Write a file of these parts, whole or not at all."""
    with whole(path) as partial, partial.open("xb") as file:
        file.writelines(parts)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, text.encode("utf-8", "surrogateescape"))


def remove_partial(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder that nobody writes to."""
    for partial in folder.glob(f"*{PARTIAL}[0-9]*"):
        partial.unlink(missing_ok=True)


def seal(content: bytes) -> bytes:
    """Return what ends a sealed file: "nearkin", the length of the content, and its SHA-256."""
    return SEAL + len(content).to_bytes(8, "big") + hashlib.sha256(content).digest()


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file that is verified when it is read, whole or not at all."""
    write_whole(path, content, seal(content))


def read_sealed(path: Path) -> bytes | None:
    """Return the content of a sealed file; None if it is damaged, absent, or was never sealed."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # another rank has set it aside since it was listed
        return None
    content = raw[:-SEAL_SIZE]
    return content if raw[-SEAL_SIZE:] == seal(content) else None


class Journal:
    """A CSV file with a row per training step, which can be cut back to a step.

    The first column is the step. Numbers are written in full, so equal runs have equal files.
    """

    def __init__(self, path: Path, columns: Sequence[str], upto: int) -> None:
        """Open the file, without the rows after step `upto`.

        Raises:
            CheckpointError: If what is there are not rows of these columns.
        """
        self.path = path
        self.columns = tuple(columns)
        with usable(path, "put back a copy or remove it; the training itself needs none of it"):
            rows = [line for line in self._lines() if self._step(line) <= upto]
        replace_text(path, "\n".join([",".join(self.columns), *rows]) + "\n")
        self._size = path.stat().st_size
        self._waiting: list[str] = []

    def _lines(self) -> list[str]:
        """Read the complete rows: one that a kill cut short has no line end."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()[1:]

    def _step(self, line: str) -> float:
        """Return the step of a row, whose cells must all be numbers or empty."""
        cells = line.split(",")
        if len(cells) != len(self.columns):
            raise ValueError(f"a row has {len(cells)} cells, not {len(self.columns)}")
        step, *_ = (float(cell) for cell in cells if cell)
        return step

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; columns it does not name stay empty."""
        cells = ("" if row.get(name) is None else repr(row[name]) for name in self.columns)
        self._waiting.append(",".join(cells) + "\n")

    def flush(self) -> None:
        """Bring all rows to the disk, so that no checkpoint is newer than its rows.

        Raises:
            ResourceError: If they cannot be written. The next call tries again.
        """
        try:
            with self.path.open("r+b") as file:
                file.seek(self._size)
                file.truncate()  # what a failed attempt has left
                file.write("".join(self._waiting).encode())
                file.flush()
                os.fsync(file.fileno())
                self._size = file.tell()
        except OSError as error:
            raise ResourceError(
                f"cannot write {self.path} ({error.strerror}); make room or allow writing there"
            ) from error
        self._waiting.clear()

    def rows(self) -> list[dict[str, float]]:
        """Return all rows so far, without their empty cells."""
        self.flush()
        return read_numbers(self.path)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ResourceError):  # what ended the run is the error to report
            self.flush()
