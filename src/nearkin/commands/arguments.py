"""The arguments of commands from Python, checked as those of the command line are."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from nearkin.commands.settings import PathLike, stored
from nearkin.errors import UsageError
from nearkin.places import user_path
from nearkin.schema import check_value, option, types_of

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

PLAIN = (int, float, bool, str, NoneType)


def command(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Check the arguments of a function by its annotations, before it does anything.

    Numbers are within their limits, choices among those that there are, and objects of their
    class. A leading `~` of a path is the home folder; where several are asked for, one alone is a
    list of one. Arguments of type `Any` are as given.

    Raises:
        UsageError: At the call, if an argument is of another type or out of range.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        given = signature.bind(*args, **kwargs)
        kinds = _kinds(function)
        for name in given.arguments.keys() & kinds.keys():
            given.arguments[name] = _argument(name, given.arguments[name], kinds[name])
        return function(*given.args, **given.kwargs)

    return checked


@cache
def _kinds(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of parameters that are checked: of one value each, and not of any type."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    kinds = types_of(function)
    return {
        each.name: kinds[each.name]
        for each in parameters
        if each.kind not in several and kinds[each.name] is not Any
    }


def _argument(name: str, value: Any, kind: Any) -> Any:
    if _is_plain(kind):
        return check_value(name, stored(name, value), kind)
    if kind == Sequence[PathLike]:
        return _paths(name, value)
    members = get_args(kind) or (kind,)
    classes = tuple(get_origin(each) or each for each in members)
    if not isinstance(value, classes):
        raise UsageError(
            f"{option(name)} is of type {type(value).__name__}; give {_named(classes)}"
        )
    return _path(value) if isinstance(value, str | os.PathLike) else value


def _paths(name: str, value: Any) -> list[PathLike]:
    """Paths as a list, of what may be one path or can be iterated once only."""
    alone = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
    paths = [value] if alone else list(value)
    for each in paths:
        if not isinstance(each, str | os.PathLike):
            raise UsageError(f"{option(name)}: of type {type(each).__name__}; give paths")
    return [_path(each) for each in paths]


def _path(value: PathLike) -> PathLike:
    """A path with the home folder in place of `~`; a run stays one."""
    return user_path(os.fspath(value)) if os.fspath(value).startswith("~") else value


def _is_plain(kind: Any) -> bool:
    """Whether a type is one of settings: numbers, text, choices, or lists of them."""
    origin = get_origin(kind)
    if origin in (Union, UnionType) or origin is Sequence:
        return all(map(_is_plain, get_args(kind)))
    return kind in PLAIN or origin is Literal or getattr(kind, "__origin__", None) in PLAIN


def _named(classes: Iterable[type]) -> str:
    words = {str: "text", os.PathLike: "a path", NoneType: "None"}
    return " or ".join(words.get(each, each.__name__) for each in classes)
