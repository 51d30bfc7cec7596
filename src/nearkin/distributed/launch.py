"""Processes that train together: started here, by torchrun, or by SLURM.

All run the same program. The main process, rank 0, writes files and prints; the others are
workers, which run a function that the main process names.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from nearkin.choices import SLEEPING_THREADS
from nearkin.distributed.devices import cpu_affinity
from nearkin.distributed.ranks import all_reduce_max, rank_info, slurm_env
from nearkin.errors import TOGETHER, WorkerError

TIMEOUT: Final = timedelta(minutes=30)
"""A process that is waited for longer than this hangs: evaluations and checkpoints are shorter."""

EXIT_SECONDS: Final = 5
"""Seconds within which a process that was lost has ended."""

START_TIMEOUT: Final = timedelta(days=1)
"""How long workers wait for the main process, which reads all images before it meets them."""

# A training that failed leaves its group in a cycle of its error. A fork that frees it waits for
# ever for the group's threads, which it lacks; so a fork frees nothing that was there before it.
if sys.platform != "win32":
    os.register_at_fork(after_in_child=gc.freeze)


@contextmanager
def process_group(backend: str, **rendezvous: Any) -> Iterator[None]:
    """Join a group of torch.distributed for the length of a `with` block.

    Processes leave it together: one that leaves early breaks connections that others still use.
    """
    dist.init_process_group(backend, **rendezvous)
    try:
        yield
        all_reduce_max(0)
    except TOGETHER:
        all_reduce_max(0)
        raise
    finally:
        dist.destroy_process_group()


@contextmanager
def training_group(devices: int, worker: Callable[..., object], *args: Any) -> Iterator[None]:
    """Train together with other processes for the length of a `with` block.

    Args:
        devices: Number of processes on this machine, unless a launcher has started them.
        worker: What the others run, if they are started here: an importable function that enters
            a `training_group` itself.
        args: For `worker`; workers of a `worker_group` have their own.

    Raises:
        WorkerError: If another process fails, is killed or hangs.
    """
    with ExitStack() as stack:
        if _group.get() is None:
            stack.enter_context(worker_group(devices, worker, *args))
        if (group := _group.get()) is not None:
            stack.enter_context(group.rendezvous(worker))
        yield


@contextmanager
def worker_group(devices: int, worker: Callable[..., object], *args: Any) -> Iterator[None]:
    """Keep workers for the length of a `with` block, for any number of `training_group`s.

    For the arguments and errors see `training_group`.
    """
    here = rank_info()
    if here is not None:
        os.environ.update(slurm_env(os.environ))
        with _as_worker_error(None):
            launched = rendezvous("env://", here.rank, here.world_size, timeout=START_TIMEOUT)
            with WorkerGroup(*next(launched)):
                yield
    elif devices == 1:
        yield
    else:
        store = TCPStore("127.0.0.1", 0, devices, is_master=True, wait_for_workers=False)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        env["WORLD_SIZE"] = str(devices)
        threads = max(1, torch.get_num_threads() // devices)
        with sleeping_threads():
            started = start_processes(
                _start_worker, (env, threads, worker, args), devices - 1, join=False
            )
        try:
            with _as_worker_error(started), WorkerGroup(store, 0, devices, started, threads):
                yield
        finally:
            for process in started.processes:
                process.kill()
                process.join()


@dataclass
class WorkerGroup:
    """Processes that train together, once or several times, as a `with` block.

    Every training has a torch.distributed group of its own. The workers learn of it through a
    key-value store, which needs no collective call while the main process is busy elsewhere. At
    the end of the block the main process waits until the workers have left theirs.
    """

    store: Store
    rank: int
    world_size: int
    started: ProcessContext | None = None
    """The workers, if they were started here."""
    threads: int | None = None
    """Threads of this process in a training; None if they are set already."""
    num_trainings: int = 0

    def __enter__(self) -> "WorkerGroup":
        _group.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _group.set(None)
        left = [f"left {rank}" for rank in range(1, self.world_size)]
        with suppress(dist.DistError):  # the other processes may be gone
            self.store.set(left[self.rank - 1] if self.rank else self._next, "")
        if self.rank or kind is not None:
            return
        if self.started is not None:
            self.started.join(timeout=TIMEOUT.seconds)
        else:
            self.store.wait(left, TIMEOUT)

    @property
    def _next(self) -> str:
        return f"training {self.num_trainings}"

    def wait_for_call(self) -> str:
        """Return the name of the worker function that the main process calls next."""
        while not self.store.check([self._next]):
            time.sleep(0.1)  # no signal would interrupt the store's own waiting
        return self.store.get(self._next).decode()

    @contextmanager
    def rendezvous(self, worker: Callable[..., object]) -> Iterator[None]:
        """Train with the others, who are called to run `worker`."""
        key = self._next
        self.store.set(f"{key} {self.rank}" if self.rank else key, _name(worker))
        self.wait_for_call()
        others = [f"{key} {rank}" for rank in range(1, self.world_size)]
        while self.started is not None and not self.store.check(others):
            self.started.join(timeout=0.1)  # raises if a worker is lost, instead of waiting for it
        self.num_trainings += 1
        with ExitStack() as stack:
            if self.threads is not None:
                stack.enter_context(cpu_affinity(self.threads, self.rank, self.world_size))
            group = process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=PrefixStore(key, self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=TIMEOUT,
            )
            stack.enter_context(group)
            yield


_group: ContextVar[WorkerGroup | None] = ContextVar("worker group", default=None)


def _name(worker: Callable[..., object]) -> str:
    return f"{worker.__module__}.{worker.__qualname__}"


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Let the threads of processes that a `with` block starts sleep while they wait."""
    before = {**os.environ}
    os.environ.update({**SLEEPING_THREADS, **before})
    try:
        yield
    finally:
        for name in SLEEPING_THREADS.keys() - before.keys():
            del os.environ[name]


def _start_worker(
    number: int, env: Mapping[str, str], threads: int, worker: Callable[..., object], args: Any
) -> None:
    """Run a worker in a process that was started here."""
    rank = number + 1
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    with cpu_affinity(threads, rank, int(env["WORLD_SIZE"])):
        worker(*args)


@contextmanager
def _as_worker_error(started: ProcessContext | None) -> Iterator[None]:
    """Raise the loss of a process within a `with` block as a WorkerError."""
    try:
        yield
    except (RuntimeError, ProcessException) as error:  # torch.distributed raises the former
        if not (isinstance(error, ProcessException | dist.DistError) or "gloo" in str(error)):
            raise
        raise WorkerError(
            f"{_reason(started, error)}; the same command with --resume goes on from the last "
            "checkpoint"
        ) from error


def _reason(started: ProcessContext | None, error: Exception) -> str:
    """Return how a process was lost, in words."""
    try:
        if started is not None:
            started.join(timeout=EXIT_SECONDS, grace_period=EXIT_SECONDS)
    except ProcessException as lost:
        error = lost
    if isinstance(error, ProcessExitedException):
        how = error.signal_name or f"exit code {error.exit_code}"
        return f"process {error.error_index + 1} of this training was ended by {how}"
    if isinstance(error, ProcessRaisedException):
        reason = error.msg.strip().splitlines()[-1]
        return f"process {error.error_index + 1} of this training failed ({reason})"
    return "another process of this training was lost, or hangs"
