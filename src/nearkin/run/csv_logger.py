"""The metrics of a training: a CSV file with a row per step."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkin.errors import ResourceError
from nearkin.files import replace_text, usable
from nearkin.tables import read_numbers


class CSVLogger:
    """A CSV file with a row per training step, which can be cut back to a step.

    The first column is the step. Numbers are written in full, so equal runs have equal files.
    """

    def __init__(self, path: Path, columns: Sequence[str], upto: int) -> None:
        """Open the file, which holds rows of these columns, without those after step `upto`."""
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
        header, *rows = text[: text.rfind("\n") + 1].splitlines() or [""]
        if rows and header != ",".join(self.columns):
            raise ValueError(f"its columns are {header}")
        return rows

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
        """Bring all rows to the disk, so that no checkpoint is newer; if not, call it again."""
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

    def __enter__(self) -> "CSVLogger":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ResourceError):  # what ended the run is the error to report
            self.flush()
