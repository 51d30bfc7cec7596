"""What all commands share: the application, flags, and how results are printed."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

from cyclopts import App, Parameter
from cyclopts.config import Env

from nearkin.tables import printable
from nearkin.version import __version__

HELP = """Learn from images without labels which are alike.

nearkin demo

nearkin train PICTURES --epochs 100

nearkin discover PICTURES --labeled SOME_CLASSES
"""
app = App(name="nearkin", version=__version__, help=HELP, config=Env("NEARKIN_", command=False))

Flag = Annotated[bool, Parameter(negative="")]


NO_SETTINGS: Final = ("NEARKIN_TORCHVISION", "NEARKIN_TRACEBACK")
"""Variables of the environment that are read elsewhere."""


class Given:
    """Settings that remember which of them were given, since these go before a file's."""

    given: frozenset[str]

    def __new__(cls, **given: Any) -> "Given":
        """Note the names; the data class does the rest."""
        typed = super().__new__(cls)
        object.__setattr__(typed, "given", frozenset(given))
        return typed


def merged(
    stored: Mapping[str, Any], typed: Given | None, options: Mapping[str, str]
) -> dict[str, Any]:
    """Settings of a file, under what was typed: settings, and options of a method."""
    given = {name: getattr(typed, name) for name in typed.given} if typed else {}
    named = {name.replace("-", "_"): value for name, value in options.items()}
    for variable in NO_SETTINGS:  # cyclopts takes whatever begins with NEARKIN_ for an option
        if variable in os.environ:
            named.pop(variable.removeprefix("NEARKIN_").lower(), None)
    return {**stored, **given, "options": {**stored.get("options", {}), **named}}


def alone() -> bool:
    """Whether to do what takes one process: of several that were started, the others say so."""
    from nearkin.distributed import is_first

    if not is_first():
        print("this command takes one process; the first does it, this one ends", file=sys.stderr)
    return is_first()


def show(value: Any, as_json: bool, lines: list[str]) -> None:
    """Print a result: as JSON, or as lines for people, each of them one line whatever it names."""
    if as_json:
        print(json.dumps(value))
    else:
        print("\n".join(printable(line).replace("\n", r"\n") for line in lines))
