"""How a run tells what it does, without printing: the command line decides what is shown."""

import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from nearkin.tables import printable


@runtime_checkable
class Reporter(Protocol):
    """Someone who wants to know how a run goes."""

    def line(self, text: str) -> None:
        """Something worth a line."""

    def progress(self, done: int, total: int, text: str) -> None:
        """So many of all steps or images are done; see `nearkin.pace.ProgressCallback`."""


class Silent:
    """A reporter that shows nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Nothing."""


class Logger:
    """A reporter that also writes its lines, with the time, to a file."""

    def __init__(self, reporter: Reporter, path: Path) -> None:
        self._reporter = reporter
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def __enter__(self) -> "Logger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.note("".join(traceback.format_exception(kind, error, trace)))
        with suppress(OSError):
            self._file.close()

    def line(self, text: str) -> None:
        """Show a line and write it down."""
        self._reporter.line(text)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line down without showing it."""
        with suppress(OSError):  # a full disk must cost no more than a line
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")
            self._file.flush()

    def progress(self, done: int, total: int, text: str) -> None:
        """Show progress."""
        self._reporter.progress(done, total, text)
