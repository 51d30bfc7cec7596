"""Exceptions with their exit codes. A message is one line: what failed, on what, what to do."""


def redacted(text: str) -> str:
    """A URL without user, password, query and fragment, which may be secrets; others as they are.

    >>> redacted("https://me:secret@host/0.tar?X-Amz-Signature=1f")
    'https://host/0.tar'
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    host, slash, path = rest.partition("#")[0].partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


class NearkinError(Exception):
    """An expected failure. Its class sets the exit code of the command."""

    exit_code = 1


class UsageError(NearkinError):
    """An invalid option or configuration."""

    exit_code = 2


class DataError(NearkinError):
    """Images or labels that cannot be used."""

    exit_code = 3


class OutputError(NearkinError):
    """An output folder or file that cannot be written, or must not be overwritten."""

    exit_code = 4


class CheckpointError(NearkinError):
    """No checkpoint, a damaged one, or one of another run."""

    exit_code = 5


class DivergedError(NearkinError):
    """A loss that is not finite."""

    exit_code = 6


class CollapsedError(NearkinError):
    """Collapsed embeddings, in a run with `--on-collapse stop`."""

    exit_code = 7


class ResourceError(NearkinError):
    """Not enough disk, memory or another resource of the machine."""

    exit_code = 8


class WorkerError(NearkinError):
    """A failed or hanging loader worker or rank."""

    exit_code = 9


class PortError(NearkinError):
    """A port that is not available."""

    exit_code = 10


class StoppedError(NearkinError):
    """The run was stopped by a signal, after saving a checkpoint.

    Args:
        message: What stopped it and how to resume.
        exit_code: 128 plus the number of the signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


TOGETHER = (StoppedError, CollapsedError, DivergedError)
"""What all processes of a training meet in the same step, and end by."""
