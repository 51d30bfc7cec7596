"""The command line: parse, call one function of `runs`, print. The only package that prints.

Importing it loads neither torch nor any other heavy library, so that `--help` is instant.
"""

import os
import sys

from cyclopts import CycloptsError
from rich.console import Console

from nearkin.cli import discovery, information, training  # noqa: F401 (they add their commands)
from nearkin.cli.app import app
from nearkin.errors import NearkinError, UsageError
from nearkin.tables import printable
from nearkin.terminal import err


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; see docs/exit-codes.md."""
    try:
        app(
            arguments,
            console=Console(soft_wrap=True, highlight=False),
            error_console=err,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (CycloptsError, NearkinError) as error:
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return error.exit_code if isinstance(error, NearkinError) else UsageError.exit_code
    except BrokenPipeError:  # whoever read the output has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("error: stopped at once; nothing since the last checkpoint is kept", file=sys.stderr)
        return 130
    except Exception as error:
        if "NEARKIN_TRACEBACK" in os.environ:
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = "see the train.log of a run, or set NEARKIN_TRACEBACK=1, and please report it"
        print(f"error: a bug in nearkin: {printable(what)}; {hint}", file=sys.stderr)
        return NearkinError.exit_code
    return 0
