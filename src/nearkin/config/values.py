"""Values of settings: what fits, how it is spelled, and which name was meant."""

import ast
import difflib
import inspect
import json
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from nearkin.errors import UsageError

Auto = Literal["auto"]
Value = str | int | float | bool
Mark = TypeVar("Mark")

MAX: Final = 1e9
"""The largest value of a setting without a bound of its own; sums of such values stay finite."""
MAX_IMAGE_SIZE: Final = 4096  # side in pixels of the largest views a network is built for


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value of a number, in `Annotated[int, Range(1)]`."""

    low: int | float
    high: int | float = math.inf

    def __str__(self) -> str:
        unlimited = self.high in (MAX, math.inf)
        return f"at least {self.low:g}" if unlimited else f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class MemorySize:
    """Marks an option that `auto` reduces to a multiple of the batch within half of the images."""

    holds_batch: bool = True
    """Whether every step writes a whole batch, so that less than a batch is refused."""


@dataclass(frozen=True)
class BatchGroups:
    """Marks a number of equal parts of a batch, which `auto` fits to the batch."""


@dataclass(frozen=True)
class EMA:
    """Marks a coefficient of an exponential moving average."""

    unit: str = "steps"  # what its half-life is counted in


Count = Annotated[int, Range(1)]
Dim = Annotated[int, Range(1)]
DimOrZero = Annotated[int, Range(0)]  # a width whose 0 has a meaning of its own
Weight = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Momentum = Annotated[float, Range(0, 1), EMA()]
Temperature = Annotated[float, Range(1e-3)]
QueueSize = Annotated[int, Range(1), MemorySize()]


def metadata(kind: Any, mark: type[Mark]) -> Mark | None:
    """The first annotation of that type in `Annotated[...]`, or None.

    >>> metadata(Temperature, Range), metadata(int, Range)
    (Range(low=0.001, high=inf), None)
    """
    return next(
        (each for each in getattr(kind, "__metadata__", ()) if isinstance(each, mark)), None
    )


def check_value(name: str, value: object, kind: Any) -> None:
    """Refuse a value of the wrong type or out of range."""
    if not fits(value, kind):
        near = suggestion(str(value), choices(kind))
        raise UsageError(f"{option(name)} {value} is not {spelled(kind)}{near and '.' + near}")
    limits = metadata(kind, Range) or Range(-math.inf)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{option(name)} {value} is not a finite number")
    if isinstance(value, int | float) and not limits.low <= value <= limits.high:
        raise UsageError(f"{option(name)} {value} is not {limits}")


def check_settings(config: Any) -> None:
    """Refuse the first field of a data class that has the wrong type or is out of range."""
    kinds = get_type_hints(type(config), include_extras=True)
    for entry in fields(config):
        check_value(entry.name, getattr(config, entry.name), kinds[entry.name])


MILESTONES: Final = r"(0?\.\d+(, *0?\.\d+)*)?"  # how shares of a training are written


def check_milestones(milestones: str) -> None:
    """Refuse what are no shares of a training."""
    if not re.fullmatch(MILESTONES, milestones):
        raise UsageError(f"--lr-milestones {milestones} are not shares; write them as 0.6,0.8")


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of the type a setting is annotated with; an int is a float too.

    >>> fits(3, float), fits("auto", int | Auto), fits(True, int), fits("x", Auto)
    (True, True, False, False)
    """
    if get_origin(kind) is Annotated:
        return fits(value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, each) for each in get_args(kind))
    if get_origin(kind) is not None:
        return isinstance(value, get_origin(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, alone or in a union; none for other types.

    >>> choices(int | Auto), choices(float)
    (('auto',), ())
    """
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for each in get_args(kind) for choice in choices(each))


def spelled(kind: Any) -> str:
    """A type as a person would say it.

    >>> spelled(int | Auto), spelled(Literal["fp32", "bf16"])
    ('a whole number or auto', 'fp32 or bf16')
    """
    if get_origin(kind) is Annotated:
        return spelled(get_args(kind)[0])
    if get_args(kind) and get_origin(kind) in (Union, UnionType, Literal):
        return " or ".join(spelled(each) for each in get_args(kind))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return kind if isinstance(kind, str) else names.get(kind, "a table")


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a data class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for entry, note in zip(body.body, body.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(note, ast.Expr):
            assert isinstance(entry.target, ast.Name)
            assert isinstance(note.value, ast.Constant)
            notes[entry.target.id] = str(note.value.value)
    return notes


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


def toml_value(value: Value | Sequence[float]) -> str:
    r"""A value as TOML writes it.

    >>> print(toml_value(True), toml_value('a "b"'), toml_value(1e-4))
    true "a \"b\"" 0.0001
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
