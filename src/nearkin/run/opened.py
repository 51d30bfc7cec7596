"""Taking a run folder into use: which one it is, and that nobody else writes there."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any, TextIO

from nearkin.errors import OutputError, UsageError
from nearkin.run.folder import STAGES, RunFolder, data_name
from nearkin.sealed import remove_partial


def default_folder(data: Any, method: str, *, resume: bool) -> Path:
    """`runs/DATA-METHOD`, with a number behind it: the next that is free, or the newest."""
    stem = Path(data_name(data)).name.split(".")[0].replace(":", "-")
    first = Path("runs") / f"{stem}-{method}"
    taken = list(takewhile(_used, chain([first], _numbered(first))))
    if resume and taken:
        return taken[-1]
    return next(islice(chain([first], _numbered(first)), len(taken), None))


def _used(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or _occupied(RunFolder(path)))


def _numbered(first: Path) -> Iterator[Path]:
    return (first.with_name(f"{first.name}-{number}") for number in count(2))


@contextmanager
def opened(path: Path, *, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
    """A run folder for writing, which no other process can open meanwhile.

    Raises:
        OutputError: If it cannot be written, is in use, or is not empty and neither `resume`
            nor `overwrite` was asked for.
    """
    run = RunFolder(path)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    with locked(run):
        if _occupied(run) and not (resume or overwrite):
            raise OutputError(
                f"{path} is not empty; continue it with --resume, or replace it with --overwrite"
            )
        if overwrite and _occupied(run) and not run.data.exists():
            raise OutputError(
                f"{path} is no run, so --overwrite spares it; empty it or choose another --out"
            )
        for folder in (path, *path.glob(f"{STAGES}/**/")):
            remove_partial(folder)
        run.checkpoints.mkdir(exist_ok=True)
        run.plots.mkdir(exist_ok=True)
        yield run


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keep all others who would do so from writing to a run folder that is there.

    Raises:
        OutputError: If it cannot be written, or is in use.
        UsageError: If this system cannot tell.
    """
    try:
        import fcntl
    except ModuleNotFoundError as error:  # on Windows, which can train in its Linux
        raise UsageError(
            f"this system has no locks to keep other runs out of {run.path}; run it under WSL"
        ) from error
    try:
        lock = run.lock.open("a+")
    except OSError as error:
        raise _unwritable(run.path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise OutputError(
                f"{run.path} is in use by {lock.readline().strip() or 'another run'}; "
                "wait for it or choose another --out"
            ) from error
        _sign(lock)
        yield


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to {path}: {error.strerror}; choose another --out")


def _occupied(run: RunFolder) -> bool:
    """Whether there is anything that a run that failed before its first step does not leave."""
    left = {run.lock.name, run.log.name, run.bad_files.name}
    empty = {folder for folder in (run.checkpoints, run.plots) if not any(folder.glob("*"))}
    return any(entry.name not in left and entry not in empty for entry in run.path.iterdir())


def _sign(lock: TextIO) -> None:
    """Write down who holds the lock, for those who wait; the lock itself does not need it."""
    holder = f"process {os.getpid()} on {platform.node()}, started {time.ctime()}\n"
    with suppress(OSError):  # on a full disk
        lock.truncate(0)
        os.write(lock.fileno(), holder.encode())
