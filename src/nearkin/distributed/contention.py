"""How much other processes slow this one down, as Linux counts it."""

import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from nearkin.distributed.devices import bound_cpus

PROC: Final = Path("/proc")


@dataclass(frozen=True)
class CpuTime:
    """Seconds that have passed by the clock and on CPUs; the difference of two measures a work.

    Where the system does not count it, other processes take nothing.
    """

    clock: float
    computed: float  # CPU time of this thread
    waited: float  # Time in which threads of this process wanted a CPU and had none
    others: float  # CPU time of other processes, on the CPUs that this one may use

    @classmethod
    def now(cls) -> "CpuTime":
        """Read all clocks. Processes that were started from here are others until they end."""
        return cls(time.perf_counter(), time.thread_time(), waited(PROC), others(PROC))

    def __sub__(self, start: "CpuTime") -> "CpuTime":
        return CpuTime(*(b - a for a, b in zip(astuple(start), astuple(self), strict=True)))

    @property
    def taken(self) -> float:
        """The share of the CPUs that other processes take, from 0 to 1."""
        return min(1.0, max(0.0, self.others / (self.clock * max(1, len(bound_cpus())))))

    @property
    def slowdown(self) -> float:
        """How many times as long the work takes as it would without other processes.

        A thread that waits for a CPU may wait for another one of this process, too: never longer
        for others than they compute. Of several threads that wait at once each counts, so that
        the difference may be too large; this thread's own computing is left in any case.
        """
        delay = max(0.0, min(self.waited, self.others))
        alone = max(self.clock - delay, self.computed)
        return max(1.0, self.clock / alone)


def waited(proc: Path) -> float:
    """Return the seconds that threads of this process have waited for a CPU."""
    total = 0
    for thread in (proc / "self/task").glob("*/schedstat"):
        try:
            total += int(thread.read_text(encoding="utf-8").split()[1])  # nanoseconds
        except (OSError, ValueError, IndexError):  # it has just ended, or its time is not counted
            continue
    return total / 1e9


def others(proc: Path) -> float:
    """Return the CPU seconds of other processes, since the start, on the CPUs of this one."""
    own = os.times()
    try:
        lines = (proc / "stat").read_text(encoding="utf-8").splitlines()
        fields = {name: values for name, *values in map(str.split, lines)}
        # user, nice, system, not idle, not iowait, irq, softirq, steal
        own_cpus = (fields[f"cpu{cpu}"] for cpu in bound_cpus())
        ticks = sum(int(tick) for times in own_cpus for tick in (*times[:3], *times[5:8]))
    except (OSError, ValueError, KeyError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") - sum(own[:4])
