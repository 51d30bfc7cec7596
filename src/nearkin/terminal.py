"""How a run shows itself: a bar on a terminal, plain lines elsewhere. On standard error."""

from typing import Any

from rich.console import Console

from nearkin.tables import printable

err = Console(stderr=True, soft_wrap=True, highlight=False)


class Terminal:
    """Shows how a run goes: a bar on a terminal, lines elsewhere. On standard error."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:  # or the cursor stays hidden
            self._bar.stop()

    def line(self, text: str) -> None:
        """Show a line above the bar."""
        if not self._quiet:
            (self._bar.console if self._bar else err).print(printable(text), markup=False)

    def progress(self, done: int, total: int, text: str) -> None:
        """Move the bar, if this is a terminal."""
        if self._quiet or not err.is_terminal:
            return
        if self._bar is None:
            from rich.progress import Progress

            self._bar = Progress(console=err, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, description=text)
        if done == total:
            self._bar.stop()
            self._bar = None
