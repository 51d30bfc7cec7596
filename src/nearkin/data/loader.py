"""Items of a data set that are prepared ahead by workers, which are replaced if they are lost."""

import multiprocessing
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nearkin.errors import NearkinError, WorkerError

Loaded = TypeVar("Loaded")

PATIENCE: Final = 120  # Seconds after which a worker counts as hung; more for very large batches


class WorkersLostError(WorkerError):
    """Loader workers that died or hung, and then their replacements."""


def _is_lost(error: Exception) -> bool:
    """Whether an error says that a worker died or hung, not that what it computed failed."""
    if isinstance(error, ConnectionError | EOFError):  # while it was sending a result
        return "Caught" not in str(error)
    return str(error).startswith("DataLoader worker (pid")


def first_sentence(error: Exception) -> str:
    """The first sentence of an error; and what to do if it is for want of shared memory."""
    first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return f"{first}; {ENLARGE}" if "shared memory" in str(error) else first


SHARED: Final = Path("/dev/shm")
ENLARGE: Final = f"enlarge {SHARED}, as by docker run --shm-size=2g"
HELD: Final = 2  # Items that a worker prepares; torch's default


def workers_that_fit(workers: int, item_bytes: int) -> int:
    """The same number of workers, or none, with a warning, if their items do not fit.

    Items leave a worker by shared memory, of which a container has 64 MB by default. A worker that
    finds none left only prints so, and the training waits for what never comes.
    """
    if not (workers and SHARED.exists()):
        return workers
    needed, free = (HELD * workers + 1) * item_bytes, shutil.disk_usage(SHARED).free
    if needed <= free:
        return workers
    warnings.warn(
        f"{workers} workers would need {needed / 1e6:.0f} MB of shared memory, and {SHARED} has "
        f"{free / 1e6:.0f} MB, so that images are loaded by this process; {ENLARGE}, or give "
        "fewer --workers",
        stacklevel=3,
    )
    return 0


def patience(images: int) -> int:
    """Seconds for an item: one for each image, as a PNG of 12 million pixels takes."""
    return max(PATIENCE, images)


def prefetch(
    data: Dataset[Loaded], start: int, stop: int, workers: int, *, images: int
) -> Iterator[Loaded]:
    """The items of the steps from `start` to before `stop`, in order.

    If a worker dies or hangs, all are replaced, once, and continue at the same step: no step
    depends on another, so the result is the same. With 0 workers, and in a daemonic process, which
    may start none, this process loads each item when it is needed. Many `images` per step may
    take longer before a worker counts as hung.
    """
    workers = 0 if multiprocessing.current_process().daemon else workers
    seconds = patience(images)
    step, replaced = start, False
    while step < stop:
        items, processes = _start_workers(data, range(step, stop), workers)
        try:
            for item in _with_timeout(items, processes, seconds):
                yield item
                step += 1
        except NearkinError as error:
            if processes:  # torch puts the traceback of the worker into the message
                kind = type(error).__name__
                raise type(error)(str(error).strip().rpartition(f"{kind}: ")[2]) from None
            raise
        except (RuntimeError, ConnectionError, EOFError) as error:
            _kill(processes)  # torch only asks them to end, and waits
            if not processes or not _is_lost(error):
                raise
            reason = first_sentence(error)
            if replaced:
                raise WorkersLostError(f"loader workers failed twice ({reason})") from error
            replaced = True
            warnings.warn(f"{reason}; workers are replaced at step {step}", stacklevel=2)


def _start_workers(
    data: Dataset[Loaded], steps: range, workers: int
) -> tuple[Iterator[Loaded], set[BaseProcess]]:
    """An iterator over the steps, and the processes that it has started."""
    loader: Any = DataLoader(
        data,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        collate_fn=_identity,
        generator=torch.Generator(),  # or iterating would draw from the global one
    )
    # torch's handler raises wherever the main thread is when a worker dies, such as in the middle
    # of an optimizer's step. Without it, the next request for an item finds out.
    ended = getattr(signal, "SIGCHLD", None)  # Windows has none
    before = ended and signal.getsignal(ended)
    items: Iterator[Loaded] = iter(loader)
    if ended and threading.current_thread() is threading.main_thread():
        # Of an earlier loader, or none of Python: it cannot be put back.
        replaced = before is None or getattr(before, "__module__", "").startswith("torch.")
        signal.signal(ended, signal.SIG_DFL if replaced else before)
    return items, set(getattr(items, "_workers", ()))  # other threads may start processes, too


def _identity(item: Loaded) -> Loaded:
    # At the top of a module, so that it can be pickled for a worker that is not a fork.
    return item


def _with_timeout(
    items: Iterator[Loaded], processes: set[BaseProcess], seconds: int
) -> Iterator[Loaded]:
    """The same items; kills workers that take longer for one."""
    while True:  # torch's own timeout does not hold while a worker sends shared memory
        loaded = threading.Event()
        if processes:
            given = loaded, processes, seconds
            threading.Thread(target=_kill_unless, args=given, daemon=True).start()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            loaded.set()
        yield item


def _kill_unless(loaded: threading.Event, processes: set[BaseProcess], seconds: int) -> None:
    """Kill workers that take too many seconds, but those in which this process was stopped."""
    if not any(loaded.wait(1) for _ in range(seconds)):  # of a stop, one wait is all that counts
        _kill(processes)


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
