"""Signals: the current step is finished before a run stops or saves."""

import signal
import threading
from types import FrameType
from typing import Any

from nearkin.errors import CollapsedError, StoppedError

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
SAVING = "SIGUSR1"
COLLAPSE = 1_000  # Stands in for the number of a signal when the run stops itself


class Interrupts:
    """Collects signals within a `with` block.

    SIGINT, SIGTERM and SIGHUP stop the run; a second one acts at once. Those that are ignored, as
    under `nohup`, stay ignored. SIGUSR1 saves. Outside of the main thread, where Python allows no
    handlers, and where a program around Python has set one, which could not be put back, signals
    act as usual.
    """

    def __init__(self) -> None:
        self._save = False
        self._verdict = ""
        self.stop = 0  # The signal that stops the run, `COLLAPSE`, or 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for name in (*STOPPING, SAVING):
                number: Any = getattr(signal, name, None)  # Windows has fewer
                before = number and signal.getsignal(number)
                if before is not None and (name == SAVING or before != signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def collapse(self, verdict: str) -> None:
        """Stop because the embeddings have collapsed."""
        self.stop, self._verdict = COLLAPSE, verdict

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        requested, self._save = self._save, False
        return requested

    def end(self, step: int, stop: int) -> None:
        """Raise the error that ends the run after `step` steps, which are saved."""
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
        self.stop = number
        for each, handler in self._before.items():
            if each.name != SAVING:  # would end the process before it has saved
                signal.signal(each, handler)
