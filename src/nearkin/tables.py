"""CSV tables with a header line, as spreadsheets and people write them."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final

from nearkin.files import whole

WRITTEN: Final = ("label", "group", "split", "name")  # Columns that people write
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # How cells begin that spreadsheets take for formulas


def write_csv(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    to_edit: bool = False,
) -> None:
    """Write a table with a header line, whole or not at all.

    One that people edit begins with the mark by which spreadsheets know UTF-8. Others do not: it
    would be a part of the first column's name to programs that read plain UTF-8.
    """
    encoding = "utf-8-sig" if to_edit else "utf-8"
    with (
        whole(path) as partial,
        partial.open("w", newline="", encoding=encoding, errors="surrogateescape") as file,
    ):
        plain = csv.writer(file, lineterminator="\n")
        quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
        plain.writerow(columns)
        for row in rows:
            cells = [_cell(value) for value in row]
            # A line may end there to readers, but the writer quotes its own end of a line alone.
            breaks = any(isinstance(cell, str) and "\r" in cell for cell in cells)
            (quoted if breaks else plain).writerow(cells)


def read_csv(path: Path) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a table with a header line, as dictionaries; see `csv_rows`."""
    with path.open("rb") as file:
        for _, cells in csv_rows(file):
            yield cells


def csv_rows(table: io.BufferedReader, column: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the last line and the cells of each row of a table with a header line.

    Of the columns that are read, of which `column` may be one more, none may be there twice.

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
            own = [name for name in columns if name in ("path", *WRITTEN, column or "path")]
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
