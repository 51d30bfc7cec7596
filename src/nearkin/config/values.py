"""Values of settings: what fits, how it is spelled, and which name was meant."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from nearkin.errors import UsageError

Auto = Literal["auto"]
Value = str | int | float | bool

ANY: Final = 1e9
"""The largest value of a setting that has none of its own; what is computed of it stays finite."""
MAX_IMAGE_SIZE: Final = 4096
"""Side in pixels of the largest views a network is built for."""


def refuse_misfits(config: Any, ranges: Mapping[str, tuple[int | float, int | float]]) -> None:
    """Refuse settings of the wrong type or out of range, before anything is read.

    Args:
        config: A data class of settings.
        ranges: Smallest and largest value of its numbers, by name.

    Raises:
        UsageError: Naming the first that cannot be carried out.
    """
    kinds = get_type_hints(type(config))
    for name in [entry.name for entry in fields(config)]:
        value = getattr(config, name)
        if not fits(value, kinds[name]):
            raise UsageError(f"{option(name)} {value} is not {spelled(kinds[name])}")
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value != "auto" and not low <= value <= high:
            raise UsageError(f"{option(name)} {value} is not from {low:g} to {high:g}")


DROPS: Final = r"(0?\.\d+(, *0?\.\d+)*)?"
"""How shares of a training are written."""


def refuse_drops(drops: str) -> None:
    """Refuse what are no shares of a training.

    Raises:
        UsageError: Saying how they are written.
    """
    if not re.fullmatch(DROPS, drops):
        raise UsageError(f"--drops {drops} are not shares; write them as 0.6,0.8")


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of the type a setting is annotated with; an int is a float too.

    >>> fits(3, float), fits("auto", int | Auto), fits(True, int), fits("x", Auto)
    (True, True, False, False)
    """
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, each) for each in get_args(kind))
    if get_origin(kind) is not None:
        return isinstance(value, get_origin(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def spelled(kind: Any) -> str:
    """A type as a person would say it.

    >>> spelled(int | Auto), spelled(Literal["fp32", "bf16"])
    ('a whole number or auto', 'fp32 or bf16')
    """
    if get_args(kind) and get_origin(kind) in (Union, UnionType, Literal):
        return " or ".join(spelled(each) for each in get_args(kind))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return kind if isinstance(kind, str) else names.get(kind, "a table")


def option(name: str) -> str:
    """A setting's name as it is typed. `from` is a word of Python's, so there it is `from_run`.

    >>> option("batch_size"), option("from_run")
    ('--batch-size', '--from')
    """
    return "--" + name.removesuffix("_run").replace("_", "-")


def seconds(duration: str) -> float:
    """A duration in seconds.

    >>> seconds("45m"), seconds("1.5h"), seconds("90")
    (2700.0, 5400.0, 90.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", duration.strip())
    if not found or float(found[1]) == 0:
        raise UsageError(f"--max-time {duration} is not a duration; write it as 45m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean x?`, where something known is close enough; else nothing.

    >>> suggestion("epocs", ["epochs", "seed"])
    ' Did you mean epochs?'
    """
    folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), list(folded), n=1)
    return f" Did you mean {folded[close[0]]}?" if close else ""


def toml_value(value: Value) -> str:
    r"""A value as TOML writes it.

    >>> print(toml_value(True), toml_value('a "b"'), toml_value(1e-4))
    true "a \"b\"" 0.0001
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
