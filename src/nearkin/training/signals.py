"""Being asked to stop, or to save: the step under way is finished first."""

import signal
import threading
from types import FrameType
from typing import Any

from nearkin.errors import CollapsedError, StoppedError

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
SAVING = "SIGUSR1"
COLLAPSE = 1_000
"""Stands where the number of a signal would: nobody but the run itself asks to stop."""


class Requests:
    """Notes what is asked by signals within a `with` block.

    SIGINT, SIGTERM and SIGHUP ask to stop; a second one acts at once. SIGUSR1 asks to save. A
    signal that is ignored, as under `nohup`, stays ignored. Outside of the main thread, where
    Python allows no handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self._save = False
        self._verdict = ""
        self._stop = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Requests":
        if threading.current_thread() is threading.main_thread():
            for name in (*STOPPING, SAVING):
                number = getattr(signal, name, None)  # Windows has fewer
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @property
    def stop(self) -> int:
        """What asks the run to stop: the number of a signal, or `COLLAPSE`; 0 if nothing does."""
        return self._stop

    def collapse(self, verdict: str) -> None:
        """Ask to stop because the embeddings have collapsed."""
        self._stop, self._verdict = COLLAPSE, verdict

    def take_save(self) -> bool:
        """Whether a checkpoint is asked for, since this was last called."""
        asked, self._save = self._save, False
        return asked

    def end(self, step: int, stop: int) -> None:
        """Raise what ends the run after `step` steps, which are saved, because of `stop`."""
        if stop == COLLAPSE:
            raise CollapsedError(
                f"{self._verdict}; stopped after step {step}, which is saved, and --resume "
                "--on-collapse warn goes on"
            )
        raise StoppedError(
            f"stopped by {signal.Signals(stop).name} after step {step}, which is saved; "
            "the same command with --resume goes on",
            128 + stop,
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if signal.Signals(number).name == SAVING:
            self._save = True
            return
        self._stop = number
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
