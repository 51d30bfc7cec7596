"""What commands return: lines of text, rows of a table, and plain values."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import override

from nearkin.errors import UsageError
from nearkin.text import aligned

SHOWN: Final = 50  # Rows of a table in a notebook, at most

Row = Mapping[str, Any]


class Result(ABC):
    """What a command returns: printed as text, shown in a notebook as a table."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Lines of text."""

    def to_dict(self) -> Mapping[str, Any]:
        """Plain values, for JSON: by default those of all fields, with paths as text."""
        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_plain)
        return values

    def records(self) -> Sequence[Row]:
        """Rows of a table, each a value by the name of its column; by default one of all."""
        return [self.to_dict()]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
            UsageError: If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise UsageError("to_pandas needs pandas; pip install pandas") from error
        return pandas.DataFrame([dict(row) for row in self.records()])

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """The rows as a table of HTML, of which a notebook shows the first."""
        rows = self.records()
        if not rows:
            return f"<pre>{escape(repr(self))}</pre>"
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows[:SHOWN])
        more = f"<p>{len(rows):,} rows</p>" if len(rows) > SHOWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


@dataclass(frozen=True)
class Frame:
    """A page of HTML, in a frame of a notebook."""

    page: Path
    height: int  # In pixels

    def _repr_html_(self) -> str:
        text = escape(self.page.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" width="100%" height="{self.height}"></iframe>'


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as Python's own; paths and all others as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _cells(row: Row) -> str:
    return "".join(f"<td>{escape(_text(value))}</td>" for value in row.values())


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


@dataclass(frozen=True, repr=False)
class Table(Result):
    """Rows that have the same columns."""

    rows: Sequence[Row]

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def lines(self) -> list[str]:
        """The names of the columns, and a line per row."""
        rows = [[_text(value) for value in row.values()] for row in self.rows]
        return aligned([list(self.rows[0]), *rows]) if rows else ["no rows"]

    @override
    def records(self) -> Sequence[Row]:
        return self.rows
