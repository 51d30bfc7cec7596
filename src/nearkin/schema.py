"""Types of settings: which values they allow, and how that is said.

A setting is annotated with a type that msgspec checks, such as `Annotated[int, Meta(ge=1)]`, or a
union of one with `Auto`.
"""

import csv
import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from functools import cache, partial
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

import msgspec
from msgspec import Meta, inspect

from nearkin.errors import UsageError

Auto = Literal["auto"]
Value = str | int | float | bool
Mark = TypeVar("Mark")

MAX: Final = 10**9
"""The largest value of a setting without a bound of its own; sums of such values stay finite."""


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


Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]  # of things that there may be none of
Dim = Annotated[int, Meta(ge=1)]
DimOrZero = Annotated[int, Meta(ge=0)]  # a width whose 0 has a meaning of its own
Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: any that is free
Weight = Annotated[float, Meta(ge=0, le=MAX)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Momentum = Annotated[float, Meta(ge=0, le=1), EMA()]
Temperature = Annotated[float, Meta(ge=1e-3, le=MAX)]
QueueSize = Annotated[int, Meta(ge=1), MemorySize()]
NumGroups = Annotated[int, Meta(ge=1), BatchGroups()]
VisitMomentum = Annotated[float, Meta(ge=0, le=1), EMA("visits")]  # of a row of a memory bank
Factor = Annotated[float, Meta(ge=1e-9)]  # of a loss
Softness = Annotated[float, Meta(ge=1e-3)]  # of Sinkhorn's codes


def metadata(kind: Any, mark: type[Mark]) -> Mark | None:
    """The first annotation of that type in `Annotated[...]`, or None.

    >>> metadata(QueueSize, MemorySize), metadata(int, MemorySize)
    (MemorySize(holds_batch=True), None)
    """
    return next(
        (each for each in getattr(kind, "__metadata__", ()) if isinstance(each, mark)), None
    )


types_of: Callable[[Any], Mapping[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""The types of a class's fields, or of a function's parameters and result, with their marks."""


def check_value(name: str, value: object, kind: Any) -> Any:
    """Return a value as its type holds it, a list as a tuple; of NumPy's as well.

    Raises:
        UsageError: If it is of another type, out of range, or not finite.
    """
    value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{option(name)} {value} is not a finite number")
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        named = choices(kind) or [each for item in get_args(kind) for each in choices(item)]
        near = suggestion(as_typed(value), map(str, named))
        end = near and f".{near}"
        raise UsageError(
            f"{option(name)} {as_typed(value)} is not {described(kind)}{end}"
        ) from error
    return tuple(converted) if isinstance(converted, list) else converted


def _plain(value: Any) -> Any:
    """A value as files hold it, alone, in a list or a table: of NumPy, a path, a duration."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):  # whose order is another in each process
        return sorted(map(_plain, value), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def as_typed(value: object) -> str:
    """A value as it is typed.

    >>> print(as_typed(("cat", "tench, Tinca tinca")), as_typed(True))
    cat,"tench, Tinca tinca" true
    """
    if isinstance(value, tuple | list):
        return ",".join(f'"{each}"' if "," in str(each) else str(each) for each in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_text(text: str, kind: Any) -> Any:
    """Text of the command line as a value of that type; the text itself where it is none.

    The values of a list are separated by commas; one that has a comma itself stands in quotes.

    >>> from_text(".5", Fraction), from_text("1e3", Count), from_text("true", bool)
    (0.5, 1000, True)
    >>> from_text("1.5", Count), from_text("16", Count | str)
    ('1.5', '16')
    >>> from collections.abc import Sequence
    >>> from_text('cat,"tench, Tinca tinca"', Sequence[str])
    ['cat', 'tench, Tinca tinca']
    """
    listed = [each.strip() for each in next(csv.reader([text], skipinitialspace=True), [])]
    for value in (text, _number(text), listed, [*map(_number, listed)]):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(value, kind, strict=False)
    return text


def _number(text: str) -> int | float | str:
    """Text as the number that Python reads in it, if any: .5, 1e3."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def choices(kind: Any) -> tuple[Any, ...]:
    """The values of a Literal, alone or in a union; none for other types.

    >>> choices(int | Auto), choices(float)
    (('auto',), ())
    """
    if get_origin(kind) is Literal:
        return get_args(kind)
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return tuple(value for part in parts for value in choices(part))


def described(kind: Any) -> str:
    """What a type allows, in words.

    >>> described(Annotated[int, Meta(ge=1)] | Auto), described(Literal["fp32", "bf16"])
    ('auto or a whole number of at least 1', 'fp32 or bf16')
    >>> from collections.abc import Sequence
    >>> described(Sequence[Fraction]), described(Sequence[Literal["a", "b"]])
    ('a list of numbers from 0 to 1', 'a list of a, b')
    """
    whole = inspect.type_info(kind)
    members = whole.types if isinstance(whole, inspect.UnionType) else (whole,)
    others = [each for each in members if not isinstance(each, inspect.LiteralType)]
    *some, last = [*map(str, choices(kind)), *map(_words, others)]
    return f"{', '.join(some)} or {last}" if some else last


PLAIN: Final = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
}


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _words(kind.type)
        case inspect.LiteralType():
            return ", ".join(map(str, kind.values))
        case inspect.ListType():
            return f"a list of {_plural(kind.item_type)}"
        case inspect.TupleType():
            return f"{len(kind.item_types)} {_plural(kind.item_types[0])}"
        case inspect.IntType() | inspect.FloatType():
            return PLAIN[type(kind)] + _limits(kind.ge, kind.le)
    return PLAIN.get(type(kind), "a table")


def _plural(kind: inspect.Type) -> str:
    return _words(kind).removeprefix("a ").replace("number", "numbers").replace("table", "tables")


def _limits(low: int | float | None, high: int | float | None) -> str:
    if low is None:
        return ""
    unlimited = high is None or high == MAX
    return f" of at least {low:.10g}" if unlimited else f" from {low:.10g} to {high:.10g}"


def option(name: str) -> str:
    """A setting's name as it is typed.

    >>> option("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean x?`, where something known begins like that or is close; else nothing.

    What stands before a colon is not compared: all names of a library have it in common.

    >>> suggestion("epocs", ["epochs", "seed"])
    ' Did you mean epochs?'
    >>> suggestion("timm: vit_tiny", ["timm:gcvit_tiny", "timm:vit_tiny_patch16_224"])
    ' Did you mean timm:vit_tiny_patch16_224?'
    """
    known = list(known)
    library, _, bare = (part.strip().casefold() for part in name.rpartition(":"))
    within = [each for each in known if each.startswith(library)] or known
    own = {each.rpartition(":")[2].casefold(): each for each in reversed(within)}
    longer = sorted((each for each in reversed(own) if each.startswith(bare)), key=len)
    close = longer if len(bare) > 2 and longer else difflib.get_close_matches(bare, own, n=1)
    return f" Did you mean {own[close[0]]}?" if close else ""


def parameter_docs(described: Any) -> dict[str, str]:
    """What docstrings say of a function's parameters, or of a class's fields, by name."""
    sources = reversed(described.__mro__[:-1]) if isinstance(described, type) else [described]
    parameters = [each for source in sources for each in _documented(source)]
    return {each.arg_name: " ".join((each.description or "").split()) for each in parameters}


@cache
def _documented(source: Any) -> Any:
    """The parameters in one docstring, or the fields of one class."""
    from docstring_parser import parse, parse_from_object

    # Sentences below fields are in the source of a class alone, which takes long to parse.
    found = parse_from_object(source) if is_dataclass(source) else parse(source.__doc__ or "")
    return found.params
