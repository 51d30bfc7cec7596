"""Devices and processors, and what they can do."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

import torch
from torch import Tensor

from nearkin.distributed.place import num_local, place
from nearkin.errors import UsageError

STAGED: Final = 2**16
"""Bytes that CUDA takes a copy of at once; more than that has to be where it can fetch it."""


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes this rank's GPU, Apple's, or else the processor.

    Raises:
        UsageError: If there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and torch.backends.mps.is_available():
            name = "mps"
    if name == "cuda" and (here := place()):  # which may be shown one GPU, or all
        name = f"cuda:{here.local % max(1, torch.cuda.device_count())}"
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name} cannot be used here ({reason}); try auto") from error
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """What a person calls the device."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {torch.get_num_threads()} threads"


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the processor on its way to a device; a GPU's work is not waited for."""
    if device.type != "cuda":
        return x.to(device)
    large = x.nbytes > STAGED
    return (x.pin_memory() if large else x).to(device, non_blocking=True)


def reading(x: Tensor) -> Callable[[], Tensor]:
    """Start to bring a tensor to the processor, and return what waits until it is there.

    A GPU that is given more to do in between goes on with it: only what came before is waited for.
    """
    if x.device.type != "cuda":
        return x.cpu
    copy = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(x.device))

    def read() -> Tensor:
        there.synchronize()
        return copy

    return read


def available_cpus() -> int:
    """Processors this process may use; what the machine has can be far more.

    By affinity and by the quota of its control group, rounded up, as containers have one.
    """
    cpus = len(_bound_to()) or os.cpu_count() or 1
    quota = cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, math.ceil(min(cpus, quota)))


def own_cpus(devices: int = 1) -> int:
    """This process's share of the processors, at least one.

    Args:
        devices: How many processes there are on this machine, unless somebody else started them.
    """
    return max(1, available_cpus() // num_local(devices))


@contextmanager
def working_on(threads: int, rank: int, ranks: int) -> Iterator[None]:
    """Compute with so many threads, on this rank's share of the processors, in a `with` block.

    Left to itself, the system moves processes that wait for each other to one processor now and
    then. Where there is a GPU, no thread is bound or set free.
    """
    before = torch.get_num_threads()
    cpus = [] if torch.cuda.is_available() else sorted(_bound_to())
    first, end = rank * len(cpus) // ranks, (rank + 1) * len(cpus) // ranks
    torch.set_num_threads(threads)
    _keep_to(cpus[first : max(first + 1, end)])
    try:
        yield
    finally:
        _keep_to(cpus)
        torch.set_num_threads(before)


def _bound_to() -> set[int]:
    """The processors this process is bound to, by number; nothing where there is no such call."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()


def _keep_to(cpus: list[int]) -> None:
    """Bind all threads of this process to processors, if any are given; new ones inherit it."""
    for thread in Path("/proc/self/task").iterdir() if cpus else ():
        with suppress(OSError):  # it has just ended, or the system lets nobody bind it
            os.sched_setaffinity(int(thread.name), cpus)


def cpu_quota(groups: Path, mounted: Path) -> float:
    """The processors that a process's control groups leave it; infinitely many without a limit.

    Args:
        groups: See `control_groups`.
        mounted: See there.
    """
    found = map(_quota_of, control_groups(groups, mounted, "cpu"))
    return min(found, default=math.inf)


def control_groups(groups: Path, mounted: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that limit a process, and of those around them.

    Args:
        groups: Names them, a line each, as /proc/self/cgroup does; versions 1 and 2 are known.
        mounted: Where they are, as in /sys/fs/cgroup; each group lies within its parent.
        controller: What is limited, such as cpu or memory.
    """
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        own = PurePosixPath(path.lstrip("/"))
        # In a container, only the last part of the path may be there, as the top.
        yield from (top / group for group in (own, *own.parents))


def _quota_of(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text(encoding="utf-8") for name in files)
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such group here, or "max"
        return math.inf


def native_precision(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes it natively, float32 elsewhere."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        able = torch.cpu.get_capabilities()
        native = any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    else:
        native = False
    return torch.bfloat16 if native else torch.float32
