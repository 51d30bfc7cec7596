"""Processes that train together: started here, by torchrun, or by SLURM.

One program runs in all of them, but only the first writes files and speaks; the others follow.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from nearkin.distributed.ranks import agreed
from nearkin.errors import CollapsedError, DivergedError, StoppedError, UsageError, WorkerError

PATIENCE: Final = timedelta(minutes=30)
"""After this long a process that is waited for hangs. Looks and checkpoints are shorter."""

GRACE: Final = 5
"""Seconds in which a process that was lost has ended."""

READY: Final = timedelta(days=1)
"""How long the others wait until the first has looked at all pictures."""

PORTS: Final = range(20_000, 30_000)
"""Where processes that SLURM has started meet, by the number of their job."""


@dataclass(frozen=True)
class Place:
    """Which process this is of several that were started to train together."""

    rank: int
    world: int
    local: int
    """The number of the process on its machine, and of its GPU."""


def place() -> Place | None:
    """What the environment says of this process; nothing if it was started alone."""
    env = {**os.environ, **_from_slurm(os.environ)}
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank = int(env["RANK"])
    return Place(rank, int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", rank)))


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    here = place()
    return here is None or here.rank == 0


def num_processes(devices: int) -> int:
    """How many processes share a batch: those that there are, or as many as are asked for.

    Raises:
        UsageError: If both are given and differ.
    """
    here = place()
    if here is None:
        return devices
    if devices not in (1, here.world):
        raise UsageError(
            f"--devices {devices}, but {here.world} processes were started; leave --devices out"
        )
    return here.world


def _from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would say of a process that `srun` has started with others, if it has.

    Nothing where torchrun has spoken: `srun` may have started it, once on each machine.
    """
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return {}
    # n[001-004,7],m2 begins with n001
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"], count=1)
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": first.partition(",")[0],
        "MASTER_PORT": str(PORTS[int(env["SLURM_JOB_ID"]) % len(PORTS)]),
    }


@contextmanager
def process_group(backend: str, **rendezvous: Any) -> Iterator[None]:
    """Join the other processes for the length of a `with` block."""
    dist.init_process_group(backend, **rendezvous)
    try:
        with _together_to_the_end():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _together_to_the_end() -> Iterator[None]:
    """Wait for the others after a `with` block, or whoever is done hangs up on one that is not."""
    try:
        yield
    except (StoppedError, CollapsedError, DivergedError):  # all of them come to such an end
        agreed(0)
        raise
    agreed(0)


@contextmanager
def together(devices: int, follow: Callable[..., object], *args: Any) -> Iterator[None]:
    """Train with others for the length of a `with` block.

    Args:
        devices: How many processes there are to be on this machine, unless they were started by
            somebody else.
        follow: What the others do, within a block of this kind, if they are started here. It has
            a name that can be imported.
        args: For `follow`.

    Raises:
        WorkerError: If one of the others fails, is killed or hangs.
    """
    here = place()
    if here is not None:
        os.environ.update(_from_slurm(os.environ))
        with _noticed(None), process_group(_backend(), **_rendezvous(here)):
            yield
    elif devices == 1:
        yield
    else:
        store = TCPStore("127.0.0.1", 0, devices, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        before = torch.get_num_threads()
        threads = max(1, before // devices)
        env = {**meeting, "WORLD_SIZE": str(devices), "THREADS": str(threads)}
        helpers = start_processes(_help, (env, follow, args), devices - 1, join=False)
        torch.set_num_threads(threads)
        try:
            with _noticed(helpers), process_group(_backend(), **_group(store, 0, devices)):
                yield
            helpers.join(timeout=PATIENCE.seconds)
        finally:
            torch.set_num_threads(before)
            for process in helpers.processes:
                process.kill()
                process.join()


def _help(
    number: int, env: Mapping[str, str], follow: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """What a process does that was started here."""
    rank = str(number + 1)
    torch.set_num_threads(int(env["THREADS"]))
    os.environ.update(env, RANK=rank, LOCAL_RANK=rank)
    follow(*args)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _rendezvous(here: Place) -> dict[str, Any]:
    """Where processes meet that somebody else has started, once the first of them is there."""
    store, rank, world = next(rendezvous("env://", here.rank, here.world, timeout=READY))
    if rank:
        store.wait(["ready"], READY)
    return _group(store, rank, world)


def _group(store: Store, rank: int, world: int) -> dict[str, Any]:
    if rank == 0:
        store.set("ready", "")
    return {"store": store, "rank": rank, "world_size": world, "timeout": PATIENCE}


@contextmanager
def _noticed(helpers: ProcessContext | None) -> Iterator[None]:
    """Tell of a process that is lost, within a `with` block, as what it is."""
    try:
        yield
    except RuntimeError as error:  # which those of torch.distributed are, too
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise WorkerError(
            f"{_fate(helpers)}; the same command with --resume goes on from the last checkpoint"
        ) from error


def _fate(helpers: ProcessContext | None) -> str:
    """What became of the processes that were started here, in words."""
    try:
        if helpers is not None:
            helpers.join(timeout=GRACE, grace_period=GRACE)
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        return f"process {error.error_index + 1} of this training was ended by {how}"
    except ProcessRaisedException as error:
        reason = error.msg.strip().splitlines()[-1]
        return f"process {error.error_index + 1} of this training failed ({reason})"
    return "another process of this training was lost, or hangs"
