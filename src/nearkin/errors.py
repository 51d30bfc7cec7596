"""Exceptions with their exit codes. A message is one line: what failed, on what, what to do.

Messages name options and commands as they are typed. Python reads them in its own words, unless
the command line runs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

FLAGS: Final = (
    "resume",
    "overwrite",
    "write",
    "allow_partial",
    "trust_remote_code",
    "dynamic_size",
    "i_know",
)
"""Options without a value."""
OPTION: Final = re.compile(r"(?<![^\s(;,])(?:--([a-z][a-z-]*[a-z])|-(o))(?![\w-])")
COMMAND: Final = re.compile(r"`nearkin ([a-z]+)((?: [^`]+)?)`")
_TYPED: Final = ContextVar("typed", default=False)


@contextmanager
def as_typed_words() -> Iterator[None]:
    """Let messages in a `with` block be those of the command line."""
    token = _TYPED.set(True)
    try:
        yield
    finally:
        _TYPED.reset(token)


def worded(text: str) -> str:
    """A message with parameters and functions of Python, unless the command line runs.

    >>> print(worded("--batch-size 1 is too small; `nearkin doctor RUN` or another -o"))
    batch_size 1 is too small; `nearkin.doctor(run)` or another output
    >>> print(worded("continue it with --resume, or `nearkin train DATA --lora 4`"))
    continue it with resume=True, or `nearkin.train(data, lora=4)`
    """
    if _TYPED.get():
        return text
    return OPTION.sub(_parameter, COMMAND.sub(_call, text))


def _parameter(found: re.Match[str]) -> str:
    name = (found[1] or "output").replace("-", "_")
    has_value = found.string[found.end() :].startswith((" true", " false"))
    return f"{name}=True" if name in FLAGS and not has_value else name


def _call(found: re.Match[str]) -> str:
    """A command as a call: words in capitals are arguments, and options have values."""
    verb, words = found[1], found[2].split()
    if verb == "list":
        verb = f"list_{words.pop(0)}"
    elif verb == "embed" and words and "-o" not in words:
        verb = "embed_run"  # which the command makes unless it is given a file
    called = ""
    for word in words:
        text = word.lower() if word.isupper() else word if word.isdecimal() else repr(word)
        if option := OPTION.fullmatch(word):
            name = _parameter(option)
            text = name if "=" in name else f"{name}="
        called += text if not called or called.endswith("=") else f", {text}"
    brackets = f"({called})" if called or verb.startswith("list_") else ""
    return f"`nearkin.{verb}{brackets}`"


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

    def __str__(self) -> str:
        """The message, in the words of Python or of the command line."""
        return worded(super().__str__())


class UsageError(NearkinError, ValueError):
    """An invalid argument, option or configuration."""

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


class UnsavedError(ResourceError):
    """Checkpoints that cannot be written, so that a training ends."""


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


TOGETHER = (StoppedError, CollapsedError, DivergedError, UnsavedError)
"""What all processes of a training meet in the same step, and end by."""
