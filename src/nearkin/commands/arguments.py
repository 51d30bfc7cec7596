"""What Python gives to commands: checked as the command line is, and as files hold it."""

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from types import NoneType, UnionType
from typing import Any, Final, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import nn

from nearkin.config import Settings, settings_from
from nearkin.data.augmentations import stored_views
from nearkin.data.remote import is_url
from nearkin.distributed import cpus_per_process, torch_defaults
from nearkin.encoders.encoder import Encoder, object_name
from nearkin.errors import UsageError, redacted
from nearkin.evaluation.embeddings import Embeddings
from nearkin.extensions import forget_edited
from nearkin.methods import method_name
from nearkin.places import user_path
from nearkin.run.failures import resource_errors
from nearkin.run.opening import TAKEN
from nearkin.schema import Auto, check_value, option, types_of

PathLike = str | os.PathLike[str]
"""A path; a `Run` is that of its folder."""
EncoderLike = PathLike | Encoder
"""An encoder: a run, a name, a file, or one that `nearkin.load` has returned."""

WRITTEN: Final = ("output", "page", "apply", "copy_to")
"""Arguments that name what a command writes."""
RUNS: Final = ("run", "runs")
"""Arguments that name runs, which are folders on this machine."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

PLAIN = (int, float, bool, str, NoneType)


def command(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Check the arguments of a function by its annotations, before it does anything.

    Numbers are within their limits, choices among those that there are, and objects of their
    class. A leading `~` of a path is the home folder; where several are asked for, one alone is a
    list of one. Arguments of type `Any` are as given. Python files that were edited since the last
    command are read again. What the caller has set in torch has no effect. Want of memory or disk
    is an error with advice; see `resource_errors`.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                f"{function.__name__} is called while a process of an earlier call imports this "
                'script; put what the script does below `if __name__ == "__main__":`'
            )
        forget_edited()
        given = signature.bind(*args, **kwargs)
        for name, kind in types_of(function).items():
            if name in given.arguments and kind is not Any:
                given.arguments[name] = _argument(name, given.arguments[name], kind)
        with torch_defaults(), resource_errors():
            return function(*given.args, **given.kwargs)

    return checked


def _argument(name: str, value: Any, kind: Any) -> Any:
    if _is_plain(kind):
        return check_value(name, stored(name, value), kind)
    if kind == Sequence[PathLike]:  # which one path may stand for
        alone = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
        return [_argument(name, each, PathLike) for each in ([value] if alone else value)]
    members = get_args(kind) or (kind,)
    classes = tuple(get_origin(each) or each for each in members)
    if not isinstance(value, classes):
        raise UsageError(
            f"{option(name)} is of type {type(value).__name__}; give {_named(classes)}"
        )
    is_path = isinstance(value, str | os.PathLike)
    if is_path:
        _check_place(name, os.fspath(value))
    at_home = is_path and os.fspath(value).startswith("~")  # a run stays one
    return user_path(os.fspath(value)) if at_home else value


def _is_plain(kind: Any) -> bool:
    """Whether a type is one of settings: numbers, text, choices, or lists of them."""
    origin = get_origin(kind)
    if origin in (Union, UnionType) or origin is Sequence:
        return all(map(_is_plain, get_args(kind)))
    return kind in PLAIN or origin is Literal or getattr(kind, "__origin__", None) in PLAIN


def _named(classes: Iterable[type]) -> str:
    words = {str: "text", os.PathLike: "a path", NoneType: "None"}
    return " or ".join(words.get(each, each.__name__) for each in classes)


def _check_place(name: str, path: str) -> None:
    """Refuse an address where only a path can be."""
    if name in WRITTEN:
        check_is_local(name, path)
    if name in RUNS and is_url(path):
        raise UsageError(f"{redacted(path)} is an address; copy the run to this machine")


def check_is_local(name: str, path: str) -> None:
    """Refuse to write to an address, which is a folder on this machine to all that writes."""
    if is_url(path):
        what = "-o" if name == "output" else option(name)
        raise UsageError(
            f"{what} {redacted(path)} is an address, and what is written is on this machine; "
            "give a path, and copy it from there"
        )


def given(
    kind: type[Settings], config: Settings | None, settings: Mapping[str, Any]
) -> tuple[Settings, nn.Module | None]:
    """Return settings as a run stores them, and a network of one's own if `backbone` is one.

    Paths, devices, encoders and runs become text, methods and views what names them. A leading `~`
    of a path is the home folder. What is no setting is an option of the method. `config` has the
    settings that the keywords do not name.
    """
    values = {name: stored(name, value) for name, value in settings.items()}
    takes_one = "backbone" in kind.__dataclass_fields__
    network = None
    if takes_one and isinstance(values.get("backbone"), nn.Module):
        network = values.pop("backbone")
    found = settings_from(kind, vars(config) if config else {}, values)
    named = {name: getattr(found, name, "") for name in (*TAKEN, "copy_to")}
    paths: dict[str, Any] = {
        name: str(user_path(path)) for name, path in named.items() if path.startswith("~")
    }
    check_is_local("copy_to", named["copy_to"])
    return replace(found, **paths), network


def name_of(encoder: EncoderLike | Embeddings) -> str:
    """The text that stands for an encoder in settings and files; `nearkin.load` takes it.

    An encoder has a name as long as it is in memory, so the caller keeps it. Features are refused.
    """
    if isinstance(encoder, Embeddings):
        raise UsageError("these are features; give an encoder")
    return object_name(encoder) if isinstance(encoder, Encoder) else os.fspath(encoder)


def stored(name: str, value: Any) -> Any:
    """A setting as files hold it.

    >>> from pathlib import Path
    >>> stored("out", Path("a/b")), stored("known", ["cat"])
    ('a/b', ['cat'])
    """
    if isinstance(value, os.PathLike | Encoder):
        return name_of(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, type):
        return method_name(value)
    return stored_views(value) if name == "augment" and not isinstance(value, str) else value


def refuse(why: str, **given: bool) -> None:
    """Refuse the options that are given, for a reason that all have."""
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{option(name)} is {why}")


def processes(workers: int | Auto) -> int:
    """How many processes decode photographs; `auto`: one per CPU that this one may use."""
    return cpus_per_process() if workers == "auto" else workers
