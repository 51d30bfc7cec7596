"""When checkpoints are written, and what happens when one cannot be."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from torch.optim.optimizer import Optimizer

from nearkin.distributed import all_reduce_max, is_sharded
from nearkin.errors import DivergedError, ResourceError
from nearkin.method import Method
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.tables import Journal
from nearkin.training import checkpoint

PATIENCE: Final = 3
"""How many checkpoints in a row may fail before the run stops."""

INTERVAL: Final = 60.0
"""Seconds between checkpoints, unless their number of steps is given; more if one takes long."""

SHARE: Final = 0.02
"""Of the time of a training, at most, that goes into checkpoints."""


class Saver:
    """Writes checkpoints of a training. Saving writes no state, so a clock may decide when.

    Args:
        folder: The run folder.
        method: What is trained.
        optimizer: What trains it.
        journal: The metrics, of which a checkpoint is never ahead.
        log: Who hears of a checkpoint that failed.
        every: Steps between checkpoints; `auto` is once a minute, or so rarely that saving takes
            no more than two hundredths of the time.
        done: Steps that are done.
    """

    def __init__(
        self,
        folder: RunFolder,
        method: Method[Any],
        optimizer: Optimizer,
        journal: Journal,
        log: Logger,
        every: int | str,
        done: int,
    ) -> None:
        self.folder = folder
        self.method = method
        self.optimizer = optimizer
        self.journal = journal
        self.log = log
        self.every = every
        self.done = done
        self._failures = 0
        self._last, self._pause = time.monotonic(), INTERVAL

    def after(self, done: int, *, asked: bool, last: bool) -> None:
        """Save what stands after `done` steps, if that is due.

        Args:
            done: Steps that are done.
            asked: Whether somebody asks for it.
            last: Whether no other checkpoint can follow, so that a failure is an error.

        Raises:
            ResourceError: If the last, or three in a row, cannot be written.
            DivergedError: If what stands is no longer finite.
        """
        self.done = done
        due = asked or last or self._due()
        if is_sharded(self.method):
            due = bool(all_reduce_max(int(due)))  # the others take part
        if due:
            self._save(last)

    def _due(self) -> bool:
        if self.every != "auto":
            return self.done % int(self.every) == 0
        return time.monotonic() - self._last >= self._pause

    def _save(self, last: bool) -> None:
        started = time.monotonic()
        try:
            self.journal.flush()
            checkpoint.save(self.folder.checkpoints, self.done, self.method, self.optimizer)
        except ResourceError as error:
            self._failures += 1
            if last or self._failures == PATIENCE:
                raise
            self.log.line(f"warning: {error}; training goes on, the next one may succeed")
        else:
            self._failures = 0
        self._last = time.monotonic()
        self._pause = max(INTERVAL, (self._last - started) / SHARE)

    @contextmanager
    def capturing(self) -> Iterator["Saver"]:
        """Keep the state at which a training diverges within a `with` block, for a replay."""
        try:
            yield self
        except DivergedError as error:
            state = self.method, self.optimizer
            with suppress(ResourceError):  # what has diverged is more worth telling
                checkpoint.save(self.folder.diverged, self.done, *state, keep=1, finite=False)
            raise DivergedError(
                f"{error}; nearkin replay {self.folder.path} shows where it began"
            ) from error
