"""Progress on standard error: a bar that is redrawn on a terminal, plain lines elsewhere."""

import os
import time
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from nearkin.text import printable

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult
    from rich.live import Live

err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)

OFTEN: Final = 0.1  # seconds from one drawing of the line to the next
SELDOM: Final = 30  # seconds between plain lines, where the bar cannot be redrawn
PLAIN: Final = ("NO_COLOR", "CI")  # variables of the environment that ask for plain lines
BAR_SIZE: Final = 4, 40  # characters of the bar, at least and at most


class Terminal:
    """A reporter that prints. The bar is removed from the screen, whatever ends the run."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live: Live | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def info(self, text: str) -> None:
        """Print a log line above the bar."""
        if not self._quiet:
            err.print(printable(text))
            self._shown = time.monotonic()

    def progress(self, done: int, total: int, text: str) -> None:
        """Update the bar, at most every `OFTEN` seconds."""
        redrawn = can_redraw()
        if done == total:
            self._clear()
        elif time.monotonic() - self._shown >= (OFTEN if redrawn else SELDOM) and not self._quiet:
            self._shown = time.monotonic()
            if redrawn:
                self._draw(Standing(done, total, text))
            else:
                err.print(f"{_percent(done, total)}  {printable(text)}")

    def _draw(self, standing: "Standing") -> None:
        if self._live is None:
            from rich.live import Live

            # Without its thread, which the workers that are forked meanwhile might wait for.
            self._live = Live(
                console=err, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
            err.show_cursor()  # or nobody does, should this process be killed
        self._live.update(standing, refresh=True)

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def can_redraw() -> bool:
    """Return whether this is a terminal, and no variable asks for plain lines."""
    capable = err.file.isatty() and err.is_terminal and not err.is_dumb_terminal
    return capable and not any(map(os.environ.get, PLAIN))


class Standing:
    """A progress bar and text; of its parts, two spaces apart, those that fit are shown."""

    def __init__(self, done: int, total: int, text: str) -> None:
        self.done, self.total = done, total
        self.parts = printable(text).split("  ")

    def __rich_console__(self, console: Console, options: "ConsoleOptions") -> "RenderResult":
        """Render for rich."""
        yield self.line(options.max_width - 1, ascii_only=options.ascii_only)  # 1: or it may wrap

    def line(self, width: int, *, ascii_only: bool) -> Text:
        """Return the percentage, the bar and the text in at most `width` characters."""
        least, most = BAR_SIZE
        head, tail = f"{_percent(self.done, self.total):>4} ", ""
        for part in self.parts:
            if len(head) + least + len(tail) + 2 + len(part) > width:
                break
            tail += f"  {part}"
        size = max(0, min(most, width - len(head) - len(tail)))
        full = size * self.done // self.total
        fill, rest = "#-" if ascii_only else "━─"
        bar = (fill * full, "green"), (rest * (size - full), "dim")
        line = Text.assemble(head, *bar, tail)
        line.truncate(width, overflow="crop")
        return line


def _percent(done: int, total: int) -> str:
    return f"{100 * done // total}%"
