"""Processes that train together: started here, by torchrun, or by SLURM.

All run the same program. The main process, rank 0, writes files and prints; the others are
workers, which run a function that the main process names.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from nearkin.distributed.ranks import UNSET, RankInfo, all_reduce_max, rank_info, slurm_env
from nearkin.errors import TOGETHER, UsageError, WorkerError

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

    `devices` is their number on this machine. Unless a launcher has started them they are started
    here, and run `worker`, an importable function that enters a `training_group` itself.

    Raises:
        WorkerError: If another process fails, is killed or hangs.
    """
    here = rank_info()
    if here is not None:
        with _as_worker_error(None), _joined(*_met(here)):
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
            with (
                _as_worker_error(started),
                cpu_affinity(threads, 0, devices),
                _joined(store, 0, devices, started),
            ):
                yield
        finally:
            for process in started.processes:
                process.kill()
                process.join()


def _met(here: RankInfo) -> tuple[Store, int, int]:
    """Return the store where the processes of a launcher meet, this one's rank, and their number.

    It is logged, as variables that are left in a shell name processes that never come.
    """
    name = "WORLD_SIZE" if os.environ.get("WORLD_SIZE") else "SLURM_STEP_NUM_TASKS"
    os.environ.update(slurm_env(os.environ))
    logging.getLogger("nearkin").warning(
        "process %d waits for all %d (%s) at %s:%s",
        *(here.rank, here.world_size, name),
        *map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")),
    )
    try:
        launched = rendezvous("env://", here.rank, here.world_size, timeout=START_TIMEOUT)
        store, rank, ranks = next(launched)
    except ValueError as error:  # of a variable that is not there, or no number
        raise UsageError(f"{error}; {UNSET}") from error
    return store, rank, ranks


@contextmanager
def _joined(
    store: Store, rank: int, world_size: int, started: ProcessContext | None = None
) -> Iterator[None]:
    """Train with the others, which were `started` here or by a launcher, in a `with` block.

    They meet through a key-value store, which needs no collective call while the main process is
    busy elsewhere. At the end the main process waits until the workers have left.
    """
    workers = range(1, world_size)
    # A launcher's store outlives a training: all have joined one before any joins the next.
    number = (store.add("joined", 1) - 1) // world_size
    store = PrefixStore(f"training {number}", store)
    store.set(f"ready {rank}", "")
    while not store.check(["ready 0"]):
        time.sleep(0.1)  # no signal would interrupt the store's own waiting
    while started is not None and not store.check([f"ready {worker}" for worker in workers]):
        started.join(timeout=0.1)  # raises if a worker is lost, instead of waiting for it
    group = process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        with group:
            yield
    finally:
        with suppress(dist.DistError):  # the other processes may be gone
            store.set(f"left {rank}", "")
    if started is not None:
        started.join(timeout=TIMEOUT.seconds)
    elif rank == 0:
        store.wait([f"left {worker}" for worker in workers], TIMEOUT)


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
