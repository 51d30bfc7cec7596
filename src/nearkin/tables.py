"""Tables as files: rows of plain values, written as CSV that other programs can open."""

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from nearkin.errors import CheckpointError, ResourceError

PARTIAL: Final = ".partial."
"""Between the name of a file that is being written, after a dot, and a number of its own."""

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""How cells begin that a spreadsheet takes for formulas."""


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a header line."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        _write_csv(file, columns, rows)


def replace_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The same, whole or not at all."""
    file = io.StringIO()
    _write_csv(file, columns, rows)
    replace_text(path, file.getvalue())


def _write_csv(
    file: io.TextIOBase, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in rows)


def read_csv(path: Path) -> Iterator[Mapping[str, str]]:
    """The rows of a table with a header line, as dictionaries."""
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        for row in csv.DictReader(file):
            yield {name: _text(cell) for name, cell in row.items()}


def read_numbers(path: Path) -> list[dict[str, float]]:
    """The rows of a table of numbers, each without its empty cells."""
    return [{name: float(cell) for name, cell in row.items() if cell} for row in read_csv(path)]


def _cell(value: object) -> object:
    """A cell no spreadsheet takes for a formula (a file may be called `=cmd|...`)."""
    if isinstance(value, str) and value.lstrip("'").startswith(FORMULAS):
        return "'" + value
    return value


def _text(cell: str | None) -> str:
    """What `_cell` was given."""
    cell = cell or ""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(FORMULAS) else cell


def printable(text: str) -> str:
    r"""The text with its control characters and broken bytes spelled out: names may hold any.

    >>> print(printable("a\x1b[31mred"))
    a\x1b[31mred
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def usable(path: Path, remedy: str) -> Iterator[None]:
    """Around the reading of a file that a run wrote, which may be damaged or a stranger's.

    Raises:
        CheckpointError: Instead of whatever else is raised; `remedy` says what to do.
    """
    try:
        yield
    except Exception as error:  # of whatever kind: nobody knows what the file holds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} cannot be used ({reason}); {remedy}") from error


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Another name to write a file under, which then gets its own name at once and for good.

    Its bytes reach the disk before its name.

    Raises:
        OSError: If that fails. What had the name before still has it, and nothing else is left.
    """
    # Not the number of the process: two machines that share a disk may have the same.
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
    """Make a file of these parts appear at once and for good; see `whole`."""
    with whole(path) as partial, partial.open("xb") as file:
        for part in parts:
            file.write(part)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, text.encode("utf-8", "surrogateescape"))


class Journal:
    """A CSV file that grows by a row per training step and can be cut back to a step.

    Its first column is the step. Numbers are written in full, so that two runs that computed
    the same wrote the same bytes.
    """

    def __init__(self, path: Path, columns: Sequence[str], upto: int) -> None:
        """Take the file up, without the rows after step `upto`."""
        self.path = path
        self.columns = tuple(columns)
        kept = [line for line in self._lines() if int(line.split(",", 1)[0]) <= upto]
        replace_text(path, "\n".join([",".join(self.columns), *kept]) + "\n")
        self._size = path.stat().st_size
        self._waiting: list[str] = []

    def _lines(self) -> list[str]:
        """Complete rows; a row cut short by a kill has no line end and is left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1].splitlines()
        return whole[1:]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; columns it does not name stay empty."""
        cells = ("" if row.get(name) is None else repr(row[name]) for name in self.columns)
        self._waiting.append(",".join(cells) + "\n")

    def flush(self) -> None:
        """Bring all rows to the disk, so that no checkpoint is newer than its rows.

        Raises:
            ResourceError: If they cannot be written. They wait for the next time.
        """
        try:
            with self.path.open("r+b") as file:
                file.seek(self._size)
                file.truncate()  # what an attempt that failed has left
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
        """All rows so far, without their empty cells."""
        self.flush()
        return read_numbers(self.path)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ResourceError):  # whatever ended the run is told instead
            self.flush()
