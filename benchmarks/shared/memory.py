"""Memory and time of a function in a process of its own, and of processes with all children."""

import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost(Generic[Result]):
    """What a function took, and what it returned."""

    seconds: float
    cpu_seconds: float  # of its process and all children that have ended
    megabytes: float  # peak of its process, above that before the call
    result: Result


def peak() -> float:
    """Return the peak memory of this process in megabytes. Linux.

    That of `getrusage` is no measure: a new process begins with the peak of its parent.
    """
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split("\nVmHWM:")[1].split()[0]) / 2**10


def forget_peak() -> None:
    """Begin the peak anew, from what this process holds."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def alone(function: Callable[..., Result], *values: Any) -> Cost[Result]:
    """Call a function in a new process, whose memory holds the imports of its module alone."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measured, function, *values).result()


def measured(function: Callable[..., Result], *values: Any) -> Cost[Result]:
    """Call a function in this process."""
    forget_peak()
    before, start, cpu = peak(), time.perf_counter(), _cpu_seconds()
    result = function(*values)
    seconds = time.perf_counter() - start
    return Cost(seconds, _cpu_seconds() - cpu, peak() - before, result)


def _cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Watch:
    """The largest memory of this process and all that descend from it, while a block runs.

    Pages that several processes share count in parts, and pages of mapped files not at all: the
    system takes those back at need. It looks ten times a second. Linux.
    """

    def __enter__(self) -> "Watch":
        self.before = self.megabytes = total_megabytes()
        self._stop = Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self.megabytes = max(self.megabytes, total_megabytes())


def total_megabytes() -> float:
    """Return the memory of this process and its descendants."""
    return sum(map(_anonymous, family())) / 2**10


def _anonymous(process: str) -> int:
    """Return the kilobytes of a process that are of no file."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:  # it has just ended
        return 0
    kinds = ("Pss_Anon", "Pss_Shmem")
    return sum(int(text.split(f"\n{kind}:")[1].split()[0]) for kind in kinds)


def family() -> list[str]:
    """Return the processes that descend from this one, itself first."""
    found = [str(os.getpid())]
    for process in found:  # it grows
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += file.read_text(encoding="utf-8").split()
            except OSError:
                continue
    return found
