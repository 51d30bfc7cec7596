"""Log lines and progress of a run: what receives them, and the file of those of a run."""

import logging
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from nearkin.errors import worded
from nearkin.files import writing
from nearkin.text import printable

SELDOM: Final = 10.0  # Seconds between lines on progress


@runtime_checkable
class Reporter(Protocol):
    """Receives the log lines and the progress of a run."""

    def info(self, text: str) -> None:
        """Receive a log line."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Receive the number of steps or images that are done, of a total; see `Pace`."""


class Silent:
    """A reporter that ignores everything."""

    def info(self, text: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Nothing."""


class Logged:
    """A reporter to the logger `nearkin` of the standard library.

    Where nobody has configured logging, its lines go to standard error.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("nearkin")
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)
        self._shown = time.monotonic()

    def info(self, text: str) -> None:
        """Log a line."""
        line = worded(printable(text))
        if self._logger.hasHandlers():
            self._logger.info("%s", line)
        elif self._logger.isEnabledFor(logging.INFO):
            with suppress(OSError, ValueError, AttributeError):  # closed, or its reader is gone
                sys.stderr.write(f"{line}\n")
        self._shown = time.monotonic()

    def progress(self, done: int, total: int, text: str) -> None:
        """Log a line every `SELDOM` seconds."""
        if time.monotonic() - self._shown >= SELDOM:
            self.info(f"{100 * done // total}%  {text}")


def reporter_of(verbose: bool | Reporter) -> Reporter:
    """Return what receives progress: the logger `nearkin`, nothing, or what is given."""
    if isinstance(verbose, bool):
        return Logged() if verbose else Silent()
    return verbose


class Logger:
    """A reporter that also writes log lines, with the time, to a file."""

    def __init__(self, reporter: Reporter, path: Path) -> None:
        self._reporter = reporter
        self._start = time.monotonic()
        with writing(path):
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.debug("".join(traceback.format_exception(error)))
        with suppress(OSError):
            self._file.close()

    @property
    def seconds(self) -> float:
        """Seconds since the log was opened."""
        return time.monotonic() - self._start

    def info(self, text: str) -> None:
        """Pass a log line on, and write it to the file."""
        self._reporter.info(text)
        self.debug(text)

    def debug(self, text: str) -> None:
        """Write a log line to the file only."""
        with suppress(OSError):  # a full disk must cost no more than a line
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")
            self._file.flush()

    def progress(self, done: int, total: int, text: str) -> None:
        """Pass progress on."""
        self._reporter.progress(done, total, text)
