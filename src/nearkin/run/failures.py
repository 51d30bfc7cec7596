"""Failures of the machine: turned into errors with advice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from nearkin.data.loader import WorkersLostError
from nearkin.distributed import free_memory
from nearkin.errors import ResourceError, WorkerError
from nearkin.places import NO_HANDLES, NO_ROOM, TOO_MANY_OPEN
from nearkin.run.reporter import Reporter


@contextmanager
def resource_errors(batch_size: int | None = None, *, resumes: bool = False) -> Iterator[None]:
    """Turn running out of memory or disk, and dead loader workers, into errors with advice.

    `batch_size` is that of a command whose memory it decides; `resumes` says whether the same
    command goes on with --resume.
    """
    try:
        yield
    except WorkersLostError as error:
        again = (
            "the same command with --resume goes on, with --workers 0 without them"
            if resumes
            else "give the same command again or, from Python, workers=0"
        )
        raise WorkerError(f"{error}; {again}") from error
    except (MemoryError, RuntimeError) as error:
        if "Too many open files" in str(error):  # torch makes a RuntimeError of it
            raise ResourceError(TOO_MANY_OPEN) from error
        kinds = (MemoryError, torch.OutOfMemoryError)
        # On a CPU, torch raises an ordinary RuntimeError.
        if isinstance(error, kinds) or "can't allocate memory" in str(error):
            raise ResourceError(f"out of memory{_smaller(batch_size)}") from error
        raise
    except OSError as error:
        if error.errno in NO_HANDLES:
            raise ResourceError(TOO_MANY_OPEN) from error
        if error.errno not in NO_ROOM:
            raise
        where = error.filename or "to the disk"
        then = "use --resume" if resumes else "try again"
        raise ResourceError(f"no room left to write {where}; make room, then {then}") from error


STATED: Final = 2**28  # Bytes from which a step says what it holds in memory


def state_memory(what: str, size: int, log: Reporter) -> None:
    """Log how many bytes a step holds in memory, if these are many; refuse more than are left."""
    free, text = free_memory(), f"{what}: {size / 1e6:,.0f} MB in memory"
    if 0 < free < size:
        raise ResourceError(
            f"{text}, and {free / 1e6:,.0f} MB are free; give fewer images, or end other programs"
        )
    if size >= STATED:
        log.info(text)


def _smaller(batch_size: int | None) -> str:
    """Return what to do when memory runs out."""
    if batch_size is None:
        return "; end other programs, or use a machine with more of it"
    return (
        f" with --batch-size {batch_size}; give about {max(2, batch_size // 2)}, or a smaller "
        "--image-size or --backbone"
    )
