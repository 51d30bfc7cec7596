"""Photographs loaded ahead by worker processes, which may die or hang without changing a bit."""

import signal
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from nearkin.data.photographs import Crops, Photographs

PATIENCE: Final = 120
"""Seconds after which a worker hangs; more for very large batches."""


def lost(error: Exception) -> bool:
    """Whether an error says that a worker died or hung, not that what it computed failed."""
    if isinstance(error, ConnectionError | EOFError):  # while it was handing something over
        return "Caught" not in str(error)
    return str(error).startswith("DataLoader worker (pid")


def told(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def loaded_ahead(photographs: Photographs, start: int, stop: int, workers: int) -> Iterator[Crops]:
    """The crops of the steps from `start` to before `stop`.

    If a worker dies or hangs, all are replaced, once, and go on from the same step: a step
    depends on none before it, so the result is the same.

    Args:
        photographs: What to load.
        start: The first step.
        stop: The step after the last.
        workers: Processes; with 0, this one loads what it needs.

    Raises:
        RuntimeError, ConnectionError, EOFError: If that happens for a second time; see `lost`.
    """
    pictures = photographs.share.stop - photographs.share.start
    seconds = max(PATIENCE, pictures // 4)
    step, replaced = start, False
    while step < stop:
        loaded, processes = _started(photographs, range(step, stop), workers)
        try:
            for crops in _in_time(loaded, processes, seconds):
                yield crops
                step += 1
        except (RuntimeError, ConnectionError, EOFError) as error:
            _kill(processes)  # torch only asks them to end, and waits
            if replaced or not lost(error):
                raise
            replaced = True
            warnings.warn(f"{told(error)}; workers are replaced at step {step}", stacklevel=2)


def _started(
    photographs: Photographs, steps: range, workers: int
) -> tuple[Iterator[Crops], set[BaseProcess]]:
    """What loads the steps, and the processes that it has started."""
    loader: Any = DataLoader(
        photographs,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        generator=torch.Generator(),  # or iterating would draw from the global one
    )
    # torch lets a dead worker raise wherever the main thread is, such as amid an optimizer's
    # step. Without its handler the same is found out when the next step is asked for.
    before, others = signal.getsignal(signal.SIGCHLD), set(active_children())
    loaded: Iterator[Crops] = iter(loader)
    if threading.current_thread() is threading.main_thread():
        theirs = getattr(before, "__module__", "").startswith("torch.")  # of an earlier loader
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if theirs else before)
    return loaded, set(active_children()) - others


def _in_time(
    loaded: Iterator[Crops], processes: set[BaseProcess], seconds: int
) -> Iterator[Crops]:
    """The same, but workers that take too long for a step are killed.

    torch's own limit does not hold while a worker hands memory over.
    """
    while True:
        limit = threading.Timer(seconds, _kill, [processes])
        limit.daemon = True
        if processes:
            limit.start()
        try:
            crops = next(loaded)
        except StopIteration:
            return
        finally:
            limit.cancel()
        yield crops


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
