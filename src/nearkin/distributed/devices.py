"""Devices, CPUs and memory: which there are, what they can do, and copies between them."""

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from nearkin.distributed.ranks import env_number, rank_info
from nearkin.errors import UsageError
from nearkin.pace import count

STAGED: Final = 2**16
"""Bytes that CUDA copies at once. A larger tensor has to be pinned for an asynchronous copy."""

LITTLE: Final = 2**19
"""Values of a matrix up to which two threads multiply it hardly faster than one.

Measured by L-BFGS on 10 and on 99 classes, in CPU time of the main thread; docs/benchmarks.md."""


def choose_device(name: str) -> torch.device:
    """Return the device of that name; `auto` takes this rank's GPU, Apple's, or else the CPU.

    `auto` warns of a GPU that cannot be used, unless other ranks may have one that can be.
    A GPU becomes the current one: some of torch's code allocates there. TF32 is switched off in
    convolutions: float32 means float32 in training and evaluation, as it does in PyTorch's matrix
    products. Both are undone by `torch_defaults`.
    """
    here, auto = rank_info(), name == "auto"
    if auto:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and torch.backends.mps.is_available():
            name = "mps"
    local = here.local_rank if here else env_number("LOCAL_RANK", 0)
    if name == "cuda" and local:  # a process may see one GPU, or all of them
        name = f"cuda:{local % max(1, torch.cuda.device_count())}"
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        problem = f"device {name} cannot be used here ({str(error).splitlines()[0]})"
        # A GPU that is full or taken for now is no reason to compute for days without it.
        for_now = isinstance(error, torch.OutOfMemoryError) or "busy" in str(error)
        if here or not auto or for_now:
            raise UsageError(f"{problem}; give --device cpu") from error
        warnings.warn(f"{problem}, so the CPU computes", stacklevel=2)
        name = "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        if device.index is not None:
            torch.cuda.set_device(device)
    return device


@contextmanager
def _outside_autocast() -> Iterator[None]:
    """Leave all autocast of the caller in a `with` block.

    A block within another one would keep the weights that it has cast, whatever becomes of them:
    only the outermost one forgets them at its end.
    """
    enabled = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
    depth = torch.autocast_increment_nesting() - 1
    torch.clear_autocast_cache()
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute as torch does where nothing has been set, in a `with` block; then as before.

    Callers may have switched gradients off, autocast on, or another type or device of new tensors.
    Their random numbers, and what `choose_device` has set, are as before, too.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    tf32 = None
    with suppress(RuntimeError):  # torch has two ways of setting it, and where both were used
        tf32 = torch.backends.cudnn.allow_tf32  # does not say what it is
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.inference_mode(mode=False))  # gradients are on again, too
            stack.enter_context(_outside_autocast())
            if device.type != "cpu":  # a device that is set slows each operation a little
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(current)
            if tf32 is not None:
                torch.backends.cudnn.allow_tf32 = tf32


def check_gpus(device: torch.device, devices: int) -> None:
    """Refuse to train by more processes than the device has GPUs, as each takes one.

    A launcher may show each process another one, so what it has started is not counted.
    """
    if device.type == "cpu" or rank_info() is not None:
        return
    every = device.type == "cuda" and device.index is None
    there = torch.cuda.device_count() if every else 1
    if devices > there:
        raise UsageError(
            f"--devices {devices} takes {devices} GPUs, and --device {device} has {there}; give "
            f"--devices {there}, or --device cpu"
        )


def device_name(device: torch.device) -> str:
    """Return a readable name of the device."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {count(torch.get_num_threads(), 'thread')}"


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Let cuDNN try out which kernel is the fastest for each new shape within a `with` block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device, without waiting for a GPU."""
    if device.type != "cuda":
        return x.to(device)
    large = x.nbytes > STAGED
    return (x.pin_memory() if large else x).to(device, non_blocking=True)


def to_host_async(x: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the CPU; return a function that waits for it and returns it.

    Work that a GPU is given in between goes on: only what came before the copy is waited for.
    """
    if x.device.type != "cuda":
        return x.cpu
    copy = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, by affinity and control groups.

    A container often may use a fraction of the machine's; a quota is rounded up.
    """
    cpus = len(bound_cpus()) or os.cpu_count() or 1
    return max(1, math.ceil(min(cpus, cpu_quota())))


def cpus_per_process(devices: int = 1) -> int:
    """Return this process's share of the CPUs: one of `devices`, unless a launcher started it."""
    if rank_info() is not None:  # srun gives each process CPUs of its own
        devices = env_number("LOCAL_WORLD_SIZE", 1)
    return max(1, available_cpus() // devices)


@contextmanager
def cpu_affinity(threads: int, rank: int, ranks: int) -> Iterator[None]:
    """Compute with `threads` threads on this rank's share of the CPUs in a `with` block.

    Left alone, the system now and then moves processes that wait for each other to one CPU.
    Threads are not bound where there is a GPU.
    """
    before = torch.get_num_threads()
    cpus = [] if torch.cuda.is_available() else sorted(bound_cpus())
    first, end = rank * len(cpus) // ranks, (rank + 1) * len(cpus) // ranks
    torch.set_num_threads(threads)
    _bind(cpus[first : max(first + 1, end)])
    try:
        yield
    finally:
        _bind(cpus)
        torch.set_num_threads(before)


def threads_for(size: int) -> AbstractContextManager[Any]:
    """Compute with one thread in a `with` block, if it is about a matrix of few values.

    For work of many short products, such as k-means. Threads that meet after each of them gain
    little on an idle machine, and on a busy one wait for the one that has no core.
    """
    torch.get_num_threads()  # the first call, here or by an operation, undoes earlier limits
    return threadpool_limits(1) if size <= LITTLE else nullcontext()


def bound_cpus() -> set[int]:
    """Numbers of the CPUs that this process is bound to; none outside of Linux."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()


def _bind(cpus: list[int]) -> None:
    """Bind all threads of this process to CPUs, if any are given; new threads inherit it."""
    for thread in Path("/proc/self/task").iterdir() if cpus else ():
        with suppress(OSError):  # the thread has just ended, or the system forbids it
            os.sched_setaffinity(int(thread.name), cpus)


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs the control groups of a process allow; infinity without a limit."""
    limits = _limits(root, "cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    return min((quota / period for _, (quota, period) in limits if quota > 0), default=math.inf)


def free_memory(root: Path = Path("/")) -> int:
    """Free bytes of the machine and of the control group; 0 where no cache in memory can be."""
    meminfo = root / "proc/meminfo"
    free = re.search(r"MemAvailable:\s*(\d+)", meminfo.read_text()) if meminfo.exists() else None
    if free is None or not hasattr(os, "memfd_create"):
        return 0
    limits = _limits(root, "memory", ["memory.max"], ["memory.limit_in_bytes"])
    left = (limit - _memory_in_use(group) for group, (limit,) in limits)
    return max(1, min(1024 * int(free[1]), *left, 2**62))


def _memory_in_use(group: Path) -> int:
    """Return the bytes that a control group holds, without files that were read some time ago."""
    names = ("memory.current", "memory.usage_in_bytes", "memory.stat")  # of both versions
    text = "\n".join((group / name).read_text() for name in names if (group / name).exists())
    used = re.search(r"^\d+$", text, re.MULTILINE)
    # The first version lists what is in the group itself, and then the total of those within.
    *_, given_up = 0, *re.findall(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return int(used[0]) - int(given_up) if used else 0


def _limits(root: Path, controller: str, *versions: list[str]) -> Iterator[tuple[Path, list[int]]]:
    """Yield the control groups of a process, and those around them, that have limits, with these.

    The controller is that of a resource; the files that have a limit are those of each version.
    """
    groups, mounted = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        own = PurePosixPath(path.lstrip("/"))
        # A container may see only the last part of the path, as the top.
        for group, names in product((own, *own.parents), versions):
            with suppress(OSError, ValueError):  # not here, or "max"
                texts = [(top / group / name).read_text(encoding="utf-8") for name in names]
                yield top / group, [int(number) for text in texts for number in text.split()]


def native_precision(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device computes it natively, float32 elsewhere."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        able = torch.cpu.get_capabilities()
        native = any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def has_amx(device: torch.device) -> bool:
    """Whether this is a CPU that multiplies tiles of matrices in bfloat16: Intel's AMX."""
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16"))
