"""What can go wrong, and the exit code each kind of failure has.

Every message is one line that says what went wrong, with which file or value, and what to do.
"""


class NearkinError(Exception):
    """A failure that nearkin foresees. Its class decides the exit code of the command."""

    exit_code = 1


class UsageError(NearkinError):
    """An option or a configuration that cannot be carried out."""

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
    """Embeddings that have become alike, in a run that was to stop then."""

    exit_code = 7


class ResourceError(NearkinError):
    """Too little disk, memory or something else of the machine."""

    exit_code = 8


class WorkerError(NearkinError):
    """A loader worker or a rank that failed or hung."""

    exit_code = 9


class PortError(NearkinError):
    """A port that cannot be listened on."""

    exit_code = 10


class StoppedError(NearkinError):
    """The run was asked to stop, and saved what it had done.

    Args:
        message: What stopped it and how to go on.
        exit_code: 128 plus the number of the signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
