"""Progress on standard error: a bar that is redrawn on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from nearkin.run.reporter import Silent
from nearkin.text import printable

if TYPE_CHECKING:
    from rich.live import Live


class Output(Console):
    """A console that leaves to its caller what follows when nobody reads it."""

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


err = Output(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)

OFTEN: Final = 0.1  # seconds from one drawing of the line to the next
SELDOM: Final = 30  # seconds between plain lines, where the bar cannot be redrawn
PLAIN: Final = ("NO_COLOR", "CI")  # variables of the environment that ask for plain lines
BAR_SIZE: Final = 4, 40  # characters of the bar, at least and at most
KEPT: Final = ("warning: ", "left out: ")  # how the lines begin that are printed without progress


@contextmanager
def _unheard() -> Iterator[None]:
    """Go on in silence if what is printed on standard error cannot be written."""
    try:
        yield
    except OSError:  # its reader is gone, or its disk is full
        err.quiet = True
        # What is buffered would be written at the end, and decide the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), err.file.fileno())


@_unheard()
def say(text: str) -> None:
    """Print a line on standard error."""
    err.print(printable(text))


class Quiet(Silent):
    """A reporter that prints nothing but warnings, and what is left out."""

    @override
    def info(self, text: str) -> None:
        if text.startswith(KEPT):
            say(text)


class Terminal:
    """A reporter that prints. The bar is removed from the screen, whatever ends the run."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def info(self, text: str) -> None:
        """Print a log line above the bar."""
        say(text)
        self._shown = time.monotonic()

    def progress(self, done: int, total: int, text: str) -> None:
        """Update the bar, at most every `OFTEN` seconds."""
        redrawn = can_redraw()
        if done == total:
            self._clear()
        elif time.monotonic() - self._shown >= (OFTEN if redrawn else SELDOM):
            self._shown = time.monotonic()
            if redrawn:
                ascii_only = err.options.ascii_only
                # One column less than there are, or it may wrap.
                self._draw(progress_line(done, total, text, err.width - 1, ascii_only=ascii_only))
            else:
                say(f"{_percent(done, total)}  {text}")

    @_unheard()
    def _draw(self, drawn: Text) -> None:
        if self._live is None:
            from rich.live import Live

            # Without its thread, which the workers that are forked meanwhile might wait for.
            self._live = Live(
                console=err, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
            err.show_cursor()  # which stays hidden if this process is killed
        self._live.update(drawn, refresh=True)

    @_unheard()
    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def can_redraw() -> bool:
    """Return whether this is a terminal, and no variable asks for plain lines."""
    capable = err.file.isatty() and err.is_terminal and not err.is_dumb_terminal
    return capable and not any(map(os.environ.get, PLAIN))


def progress_line(done: int, total: int, text: str, width: int, *, ascii_only: bool) -> Text:
    """Return percentage, bar and text in at most `width` characters.

    Of the parts of the text, which are two spaces apart, those that fit are shown.
    """
    least, most = BAR_SIZE
    head, tail = f"{_percent(done, total):>4} ", ""
    for part in printable(text).split("  "):
        if len(head) + least + len(tail) + 2 + len(part) > width:
            break
        tail += f"  {part}"
    size = max(0, min(most, width - len(head) - len(tail)))
    full = size * done // total
    fill, rest = "#-" if ascii_only else "━─"
    drawn = Text.assemble(head, (fill * full, "green"), (rest * (size - full), "dim"), tail)
    drawn.truncate(width, overflow="crop")
    return drawn


def _percent(done: int, total: int) -> str:
    return f"{100 * done // total}%"
