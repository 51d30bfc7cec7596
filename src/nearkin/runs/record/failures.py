"""Failures of the machine, told as what they are."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nearkin.data.loading import lost, told
from nearkin.errors import ResourceError, WorkerError


@contextmanager
def foreseen(batch_size: int) -> Iterator[None]:
    """Turn what torch and the system raise within a `with` block into errors with advice.

    Raises:
        ResourceError: Out of memory, or a full disk.
        WorkerError: A loader worker that died.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ConnectionError, EOFError) as error:
        if _out_of_memory(error):
            raise ResourceError(
                f"out of memory with --batch-size {batch_size}; give about "
                f"{max(2, batch_size // 2)}, or a smaller --image-size or --backbone"
            ) from error
        if not lost(error):
            raise
        raise WorkerError(
            f"loader workers failed twice ({told(error)}); the same command with "
            "--resume goes on, with --workers 0 without them"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceError(
            f"no room left to write {error.filename or 'to the run folder'}; make room, then "
            "use --resume"
        ) from error


def _out_of_memory(error: Exception) -> bool:
    """On a processor, torch says so in an ordinary error."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
