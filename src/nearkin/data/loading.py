"""What worker processes load ahead; they may die or hang without changing a bit of it."""

import signal
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Loaded = TypeVar("Loaded")

PATIENCE: Final = 120
"""Seconds after which a worker hangs; more for very large batches."""


def worker_lost(error: Exception) -> bool:
    """Whether an error says that a worker died or hung, not that what it computed failed."""
    if isinstance(error, ConnectionError | EOFError):  # while it was handing something over
        return "Caught" not in str(error)
    return str(error).startswith("DataLoader worker (pid")


def first_sentence(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def prefetch(
    data: Dataset[Loaded], start: int, stop: int, workers: int, *, images: int
) -> Iterator[Loaded]:
    """The items of the steps from `start` to before `stop`, in order.

    If a worker dies or hangs, all are replaced, once, and go on from the same step: a step
    depends on none before it, so the result is the same.

    Args:
        data: What to load; its items are steps.
        start: The first step.
        stop: The step after the last.
        workers: Processes; with 0, this one loads what it needs.
        images: How many images a step reads; more may take longer before a worker hangs.

    Raises:
        RuntimeError, ConnectionError, EOFError: If workers are lost a second time.
    """
    seconds = max(PATIENCE, images // 4)
    step, replaced = start, False
    while step < stop:
        loaded, processes = _started(data, range(step, stop), workers)
        try:
            for item in _in_time(loaded, processes, seconds):
                yield item
                step += 1
        except (RuntimeError, ConnectionError, EOFError) as error:
            _kill(processes)  # torch only asks them to end, and waits
            if replaced or not worker_lost(error):
                raise
            replaced = True
            warnings.warn(
                f"{first_sentence(error)}; workers are replaced at step {step}", stacklevel=2
            )


def _started(
    data: Dataset[Loaded], steps: range, workers: int
) -> tuple[Iterator[Loaded], set[BaseProcess]]:
    """What loads the steps, and the processes that it has started."""
    loader: Any = DataLoader(
        data,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # or iterating would draw from the global one
    )
    # torch lets a dead worker raise wherever the main thread is, such as amid an optimizer's
    # step. Without its handler the same is found out when the next step is asked for.
    before, others = signal.getsignal(signal.SIGCHLD), set(active_children())
    loaded: Iterator[Loaded] = iter(loader)
    if threading.current_thread() is threading.main_thread():
        theirs = getattr(before, "__module__", "").startswith("torch.")  # of an earlier loader
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if theirs else before)
    return loaded, set(active_children()) - others


def _as_it_is(item: Loaded) -> Loaded:
    # At the top of a module, as it must be to reach a worker that is not a fork.
    return item


def _in_time(
    loaded: Iterator[Loaded], processes: set[BaseProcess], seconds: int
) -> Iterator[Loaded]:
    """The same, but workers that take too long for a step are killed.

    torch's own limit does not hold while a worker hands memory over.
    """
    while True:
        limit = threading.Timer(seconds, _kill, [processes])
        limit.daemon = True
        if processes:
            limit.start()
        try:
            item = next(loaded)
        except StopIteration:
            return
        finally:
            limit.cancel()
        yield item


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
