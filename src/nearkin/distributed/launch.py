"""Processes that train together: started here, by torchrun, or by SLURM.

One program runs in all of them, but only the first writes files and speaks; the others follow.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

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

from nearkin.distributed.devices import working_on
from nearkin.distributed.place import Place, from_slurm, place
from nearkin.distributed.ranks import all_reduce_max
from nearkin.errors import CollapsedError, DivergedError, StoppedError, WorkerError

Follower = TypeVar("Follower", bound=Callable[..., object])

PATIENCE: Final = timedelta(minutes=30)
"""After this long a process that is waited for hangs. Looks and checkpoints are shorter."""

GRACE: Final = 5
"""Seconds in which a process that was lost has ended."""

READY: Final = timedelta(days=1)
"""How long the others wait for the first, which looks at all images before it meets them."""


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
        all_reduce_max(0)
        raise
    all_reduce_max(0)


@contextmanager
def together(devices: int, follow: Callable[..., object], *args: Any) -> Iterator[None]:
    """Train with others for the length of a `with` block.

    Args:
        devices: How many processes there are to be on this machine, unless they were started by
            somebody else.
        follow: What the others do, within a block of this kind, if they are started here. It has
            a name that can be imported.
        args: For `follow`; those in a `company` have their own.

    Raises:
        WorkerError: If one of the others fails, is killed or hangs.
    """
    with ExitStack() as stack:
        if _company.get() is None:
            stack.enter_context(company(devices, follow, *args))
        if (found := _company.get()) is not None:
            stack.enter_context(found.meeting(follow))
        yield


@contextmanager
def company(devices: int, follow: Callable[..., object], *args: Any) -> Iterator[None]:
    """Have others at hand for the length of a `with` block, to train `together` now and then.

    In between, this process is alone, and the others wait until they are `called`.

    Args:
        devices: See `together`.
        follow: What the others do, within a block of this kind, if they are started here.
        args: For `follow`.

    Raises:
        WorkerError: If one of the others fails, is killed or hangs.
    """
    here = place()
    if here is not None:
        os.environ.update(from_slurm(os.environ))
        with _noticed(None), WorkerGroup(*_met(here)):
            yield
    elif devices == 1:
        yield
    else:
        store = TCPStore("127.0.0.1", 0, devices, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        threads = max(1, torch.get_num_threads() // devices)
        log = meeting | {"WORLD_SIZE": str(devices)}, threads, follow, args
        helpers = start_processes(_help, log, devices - 1, join=False)
        try:
            with _noticed(helpers), WorkerGroup(store, 0, devices, helpers, threads):
                yield
        finally:
            for process in helpers.processes:
                process.kill()
                process.join()


def called(*followers: Follower) -> Follower | None:
    """What the first of a company has the others do next; nothing once it needs them no more.

    Args:
        followers: What they know how to do: each is the `follow` of a `together`.
    """
    found = _company.get()
    name = found.called() if found else ""
    return next((follow for follow in followers if _name(follow) == name), None)


@dataclass
class WorkerGroup:
    """Processes that were started to train together: once, or again and again.

    They meet in a group of its own for each training. Used as a `with` block; at its end the
    first process waits until the others have left theirs.
    """

    store: Store
    rank: int
    world: int
    helpers: ProcessContext | None = None
    """The others, if they were started here."""
    threads: int | None = None
    """Of this process in a training; None if that is settled already."""
    meetings: int = 0

    def __enter__(self) -> "WorkerGroup":
        _company.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _company.set(None)
        left = [f"left {rank}" for rank in range(1, self.world)]
        with suppress(dist.DistError):  # the others may be gone
            self.store.set(left[self.rank - 1] if self.rank else self._next, "")
        if self.rank or kind is not None:
            return
        if self.helpers is not None:
            self.helpers.join(timeout=PATIENCE.seconds)
        else:
            self.store.wait(left, PATIENCE)

    @property
    def _next(self) -> str:
        return f"meeting {self.meetings}"

    def called(self) -> str:
        """The name of what is to be done next, as soon as the first has said so."""
        while not self.store.check([self._next]):
            time.sleep(0.1)  # no signal would interrupt the store's own waiting
        return self.store.get(self._next).decode()

    @contextmanager
    def meeting(self, follow: Callable[..., object]) -> Iterator[None]:
        """Train with the others, who are called to `follow`."""
        key = self._next
        self.store.set(f"{key} {self.rank}" if self.rank else key, _name(follow))
        self.called()
        others = [f"{key} {rank}" for rank in range(1, self.world)]
        while self.helpers is not None and not self.store.check(others):
            self.helpers.join(timeout=0.1)  # raises if one is lost, or it would be waited for
        self.meetings += 1
        group = {"store": PrefixStore(key, self.store), "rank": self.rank, "timeout": PATIENCE}
        with ExitStack() as stack:
            if self.threads is not None:
                stack.enter_context(working_on(self.threads, self.rank, self.world))
            stack.enter_context(process_group(_backend(), **group, world_size=self.world))
            yield


_company: ContextVar[WorkerGroup | None] = ContextVar("company", default=None)


def _name(follow: Callable[..., object]) -> str:
    return f"{follow.__module__}.{follow.__qualname__}"


def _help(
    number: int, env: Mapping[str, str], threads: int, follow: Callable[..., object], args: Any
) -> None:
    """What a process does that was started here."""
    rank = number + 1
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    with working_on(threads, rank, int(env["WORLD_SIZE"])):
        follow(*args)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _met(here: Place) -> tuple[Store, int, int]:
    """Where processes meet that somebody else has started, and which of how many this is."""
    store, rank, world = next(rendezvous("env://", here.rank, here.world, timeout=READY))
    return store, rank, world


@contextmanager
def _noticed(helpers: ProcessContext | None) -> Iterator[None]:
    """Tell of a process that is lost, within a `with` block, as what it is."""
    try:
        yield
    except (RuntimeError, ProcessException) as error:  # torch.distributed's are the former
        if not (isinstance(error, ProcessException | dist.DistError) or "gloo" in str(error)):
            raise
        raise WorkerError(
            f"{_fate(helpers, error)}; the same command with --resume goes on from the last "
            "checkpoint"
        ) from error


def _fate(helpers: ProcessContext | None, error: Exception) -> str:
    """What became of the processes that were started here, in words."""
    try:
        if helpers is not None:
            helpers.join(timeout=GRACE, grace_period=GRACE)
    except ProcessException as found:
        error = found
    if isinstance(error, ProcessExitedException):
        how = error.signal_name or f"exit code {error.exit_code}"
        return f"process {error.error_index + 1} of this training was ended by {how}"
    if isinstance(error, ProcessRaisedException):
        reason = error.msg.strip().splitlines()[-1]
        return f"process {error.error_index + 1} of this training failed ({reason})"
    return "another process of this training was lost, or hangs"
