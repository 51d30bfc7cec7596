"""What all commands share: the application, groups of settings, and how results are printed."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.config import Env

from nearkin.config import Config, Range, field_docs, metadata, option
from nearkin.tables import printable
from nearkin.version import __version__

HELP = """Self-supervised contrastive learning of images, and novel class discovery.

nearkin demo

nearkin train IMAGES --epochs 100

nearkin discover IMAGES --labeled SOME_CLASSES
"""
app = App(name="nearkin", version=__version__, help=HELP, config=Env("NEARKIN_", command=False))

TITLES = ("Data", "Method", "Views", "Optimization", "Evaluation", "Machine", "Output")
GROUPS: Final = {title: Group(title, sort_key=place) for place, title in enumerate(TITLES)}

Flag = Annotated[bool, Parameter(negative="", group=GROUPS["Output"])]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative="", group=GROUPS["Output"])]
Options = Annotated[str, Parameter(group=GROUPS["Method"])]

OTHER_VARIABLES: Final = ("NEARKIN_TORCHVISION", "NEARKIN_TRACEBACK")  # they are no settings


class Given:
    """Settings that remember which of them were typed, since these go before a file's."""

    given: frozenset[str]

    def __new__(cls, **given: Any) -> "Given":
        """Note the names; the data class does the rest."""
        typed = super().__new__(cls)
        object.__setattr__(typed, "given", frozenset(given))
        return typed


Typed = TypeVar("Typed", bound=Config)


def grouped(cls: type[Typed]) -> type[Typed]:
    """Give the fields of a settings class their groups, help texts and ranges on the command line.

    The titles of groups are in the class, and the help texts are the docstrings of its fields.
    """
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls.__mro__[-2])
    title, annotations = "", {}
    for entry in fields(cls):
        title = cls.groups.get(entry.name, title)
        limits = metadata(hints[entry.name], Range)
        kind = str if entry.name == "augment" else hints[entry.name]  # its tables are in files
        annotations[entry.name] = Annotated[
            kind,
            Parameter(
                name=option(entry.name),
                group=GROUPS[title],
                help=docs[entry.name] + (f" [{limits}]" if limits else ""),
                show_default=entry.default != "",
                show_choices=limits is None,
                show=entry.name != "options",  # they are typed by their own names
            ),
        ]
        default = field(default_factory=dict) if entry.default is MISSING else entry.default
        setattr(cls, entry.name, default)
    cls.__annotations__ = annotations
    return dataclass(frozen=True, kw_only=True)(cls)


def merged(
    stored: Mapping[str, Any], typed: Given | None, options: Mapping[str, str]
) -> dict[str, Any]:
    """Settings of a file, replaced by those that were typed; options of a method likewise."""
    given = {name: getattr(typed, name) for name in typed.given} if typed else {}
    named = {name.replace("-", "_"): value for name, value in options.items()}
    for variable in OTHER_VARIABLES:  # cyclopts takes every NEARKIN_ variable for an option
        if variable in os.environ:
            named.pop(variable.removeprefix("NEARKIN_").lower(), None)
    return {**stored, **given, "options": {**stored.get("options", {}), **named}}


def is_only_process() -> bool:
    """Whether this process runs a command that takes one; of several, all but the first say so."""
    from nearkin.distributed import is_main_process

    if not is_main_process():
        print("this command takes one process; the first does it, this one ends", file=sys.stderr)
    return is_main_process()


def show(value: Any, as_json: bool, lines: list[str]) -> None:
    """Print a result: as JSON, or as lines for people, each of them one line whatever it names."""
    if as_json:
        print(json.dumps(value))
    else:
        print("\n".join(printable(line).replace("\n", r"\n") for line in lines))
