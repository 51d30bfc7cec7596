"""Being asked to stop: the step under way is finished and saved first."""

import signal
import threading
from types import FrameType
from typing import Any

from nearkin.errors import StoppedError

WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notes the first SIGINT or SIGTERM within a `with` block; a second one acts at once.

    Outside of the main thread, where Python allows no handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self._asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in WATCHED}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        return self._asked is not None

    def stop(self, step: int) -> None:
        """Raise what ends the run after `step` steps, which are saved."""
        assert self._asked is not None
        raise StoppedError(
            f"stopped by {self._asked.name} after step {step}, which is saved; "
            "the same command with --resume goes on",
            128 + self._asked,
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._asked = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
