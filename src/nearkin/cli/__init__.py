"""The command line: parse, call one function of `commands`, print. The only package that prints.

Importing it loads neither torch nor any other heavy library, so that `--help` is instant.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError
from cyclopts.help.formatters import DefaultFormatter

from nearkin.choices import SLEEPING_THREADS
from nearkin.cli.app import COMPLETION, application, method_options
from nearkin.cli.command import is_first
from nearkin.cli.terminal import Output, err, say
from nearkin.errors import TOGETHER, NearkinError, UsageError, as_typed_words
from nearkin.places import system_error
from nearkin.schema import suggestion

EVERYTHING = "--help-all"  # Help with all options, not only the common ones


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; see docs/reference.md."""
    os.environ.update({**SLEEPING_THREADS, **os.environ})
    _open_streams()
    with as_typed_words():
        return _flushed(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that its encoding cannot spell
    try:
        with _unwound_by_signals():
            _answer(arguments)
    except (CycloptsError, NearkinError) as error:
        return _failed(error)
    except BrokenPipeError:  # whoever read the output has heard enough
        return 0
    except SystemExit as error:
        return _exited(error.code)
    except Exception as error:
        refused = system_error(error)
        if refused is None and os.environ.get("NEARKIN_TRACEBACK"):
            raise
        return _failed(refused or _bug(error))
    return 0


def _flushed(code: int) -> int:
    """Write what is buffered, or it would be written at the end, and decide the exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not (code or isinstance(error, BrokenPipeError)):
            return _failed(system_error(error) or _bug(error))
    return code


def _open_streams() -> None:
    """Open standard streams that are closed, or files would be opened in their place."""
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w", errors="backslashreplace"))


def _exited(code: object) -> int:
    """Say why a command has ended itself, or code of the user's it: text is an error in Python."""
    if isinstance(code, int) and code > 128:  # cyclopts turns Ctrl-C into one, too
        say("error: stopped at once; a run goes on with --resume from what it has saved")
    if isinstance(code, int | None):
        return code or 0
    return _failed(NearkinError(str(code)))


def _failed(error: CycloptsError | NearkinError) -> int:
    """Print the one line of an error, and return its exit code.

    What several processes meet together is said by the first.
    """
    if not isinstance(error, TOGETHER) or is_first():
        text = str(error) if isinstance(error, NearkinError) else _misread(error)
        say(f"error: {' '.join(text.split())}")
    return error.exit_code if isinstance(error, NearkinError) else UsageError.exit_code


def _misread(error: CycloptsError) -> str:
    """Say what of a command line is not understood, and where to read what is."""
    text = str(error)
    if isinstance(error, UnusedCliTokensError):
        extra = " ".join(map(repr, error.unused_tokens or []))
        text = f"too many arguments: {extra}; a name with spaces takes quotes"
    elif isinstance(error, UnknownOptionError):
        text = _unknown(error)
    verb = " ".join(error.command_chain or ())
    return f"{text.rstrip('.')}; `nearkin {verb} --help` shows what it takes" if verb else text


def _unknown(error: UnknownOptionError) -> str:
    """Say which option may be meant, or which argument; cyclopts compares the dashes, too."""
    typed = (error.token.keyword or error.token.value).partition("=")[0]
    name = typed.lstrip("-")
    names = [each for argument in error.argument_collection for each in argument.names]
    if name.upper() in names:
        return f"unknown option {typed}: {name.upper()} stands alone, without a name before it"
    known = [each.removeprefix("--") for each in names if each.startswith("--")]
    return f"unknown option {typed}.{suggestion(name, known)}"


def _bug(error: Exception) -> NearkinError:
    what = f"{type(error).__name__}: {error}"
    hint = "see the train.log of a run, or set NEARKIN_TRACEBACK=1, and please report it"
    return NearkinError(f"a bug in nearkin: {what}; {hint}")


def _answer(arguments: list[str]) -> None:
    """Run a command. Below help, the options of the method that is named beside it."""
    words = (each for each in arguments if each == COMPLETION or not each.startswith("-"))
    verb = next(words, "")
    everything = EVERYTHING in arguments
    arguments = ["--help" if each == EVERYTHING else each for each in arguments]
    asked = {"--help", "-h"} & {*arguments}
    # First: a method that cannot be loaded gets no help.
    panel = method_options(verb, arguments) if asked else None
    console = Output(soft_wrap=True, highlight=False)
    application(verb, everything=everything)(
        arguments,
        console=console,
        error_console=err,
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )
    if panel is not None:
        DefaultFormatter()(console, console.options, panel)


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, unless they are ignored.

    A training handles them itself, and saves first; this is for all that comes before and after.
    """
    watched = []
    if threading.current_thread() is threading.main_thread():
        numbers = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
        watched = [n for n in numbers if n is not None and signal.getsignal(n) == signal.SIG_DFL]
    for number in watched:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in watched:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)
