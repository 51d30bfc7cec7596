"""The options of a command: the parameters of its function, with what docstrings say of them."""

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter as Argument
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from cyclopts import Group, Parameter
from msgspec import inspect

from nearkin.config import COMMON, GROUPS, TRUST, RunConfig
from nearkin.schema import as_typed, described, option, parameter_docs, types_of

NAMES: Final[Mapping[str, str | tuple[str, ...]]] = {
    "output": ("--output", "-o"),
    "quiet": ("--quiet", "-q"),
    "config_file": "--config",
}
"""Options that are not called as the parameter is."""
CONFIG_FILE: Final = (
    "A TOML file of settings, such as the config.toml of a run, or recipe:NAME, as "
    "recipe:cifar10/moco. Options take precedence."
)
RARE: Final = (
    *("allow_partial", TRUST, "image_size", "seed", "device", "devices", "workers", "one_file"),
    *("shard_size", "shard", "engine", "i_know", "url"),
)
"""Parameters of functions that only `--help-all` lists."""
GIVEN: Final = ("config", "typed", "verbose")
"""Parameters that a command makes of what is typed."""
PANELS: Final = {title: Group(title, sort_key=place) for place, title in enumerate(GROUPS)}
OUTPUT: Final = PANELS["Output"]
OPTIONS: Final = Group("Options", sort_key=-1)


def settings_of(function: Callable[..., Any]) -> type[RunConfig] | None:
    """The class of a function's settings, if it has some."""
    config = types_of(function).get("config")
    return next((each for each in get_args(config) if each is not type(None)), config)


def parameters_of(function: Callable[..., Any], *, everything: bool) -> list[Argument]:
    """The parameters of a command, words before options."""
    kind, hints = settings_of(function), types_of(function)
    own = [*_own(function, kind, everything)]
    words = [each for each in own if each.kind is not Argument.KEYWORD_ONLY]
    options = [each for each in own if each.kind is Argument.KEYWORD_ONLY]
    options.append(_flag("json", "Print the result as JSON."))
    if "verbose" in hints:
        options.append(_flag("quiet", "Show no progress."))
    if kind is None:
        return [*words, *options]
    file = _option("config_file", Path | None, None, CONFIG_FILE, PANELS["Data"])
    settings = [*_settings(kind, {*hints}, everything), file, *options]
    if "options" in kind.__dataclass_fields__:  # of the method, by names that are its own
        any_option = Annotated[Any, Parameter(show=False)]
        settings.append(Argument("options", Argument.VAR_KEYWORD, annotation=any_option))
    return [*words, *settings]


def _own(
    function: Callable[..., Any], kind: type[RunConfig] | None, everything: bool
) -> Iterator[Argument]:
    hints, docs = types_of(function), parameter_docs(function)
    for each in signature(function).parameters.values():
        name, default = each.name, each.default
        if name in GIVEN:
            continue
        if each.kind is Argument.KEYWORD_ONLY:
            yield _option(
                name,
                _typed(hints[name]),
                default,
                docs[name],
                OUTPUT if kind else OPTIONS,
                negative="" if default is False else None,
                show=everything or name not in RARE,
                show_default=as_typed if default not in (None, False, "") else False,
            )
        elif is_list(hints[name]):
            words: Any = Annotated[str, Parameter(help=docs[name])]
            yield Argument(name, Argument.VAR_POSITIONAL, annotation=words)
        else:  # a file of settings may have what a command with settings is not given
            default, typed = (None, str | None) if kind else (default, _typed(hints[name]))
            word: Any = Annotated[typed, Parameter(help=docs[name])]
            yield Argument(name, Argument.POSITIONAL_ONLY, default=default, annotation=word)


def _settings(kind: type[RunConfig], taken: set[str], everything: bool) -> Iterator[Argument]:
    """The fields of a settings class, by group."""
    hints, docs = types_of(kind), parameter_docs(kind)
    default = vars(kind())
    for title, names in GROUPS.items():
        for name in sorted(default.keys() & {*names} - taken, key=names.index):
            limits = _limits(hints[name])
            yield _option(
                name,
                _typed(hints[name]),
                default[name],
                docs[name] + limits,
                PANELS[title],
                show=everything or name in COMMON,
                show_default=as_typed if default[name] not in ("", ()) else False,
                show_choices=not limits,
                negative="" if getattr(kind, name, None) is False else None,  # not of `report`
            )


def _option(name: str, kind: Any, default: Any, text: str, group: Group, **shown: Any) -> Argument:
    called = NAMES.get(name, option(name))
    annotation: Any = Annotated[kind, Parameter(name=called, help=text, group=group, **shown)]
    if kind in (str, str | None) and default not in (None, Argument.empty):
        default = as_typed(default)  # cyclopts checks its type where pydantic has been imported
    return Argument(name, Argument.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(name: str, text: str) -> Argument:
    return _option(name, bool, False, text, OUTPUT, negative="", show_default=False)


def _typed(kind: Any) -> Any:
    """A type as it is parsed: numbers, paths, lists and what Python takes beside text are text."""
    members = get_args(kind) or (kind,)
    if {Any, Path, str} & {*members} or is_list(kind) or is_number(kind):
        return str | None if {Any, type(None)} & {*members} else str
    return kind


def is_list(kind: Any) -> bool:
    """Whether a type holds several values, which are typed one after the other."""
    return _holds(kind, inspect.ListType)


def is_number(kind: Any) -> bool:
    """Whether a type holds numbers, which are parsed as Python's are: 1.5 is no whole one."""
    return _holds(kind, inspect.IntType) or _holds(kind, inspect.FloatType)


def _holds(kind: Any, member: type[inspect.Type]) -> bool:
    try:
        whole = inspect.type_info(kind)
    except TypeError:  # of what only Python gives, such as an array
        return False
    members = whole.types if isinstance(whole, inspect.UnionType) else (whole,)
    bare = (each.type if isinstance(each, inspect.Metadata) else each for each in members)
    return any(isinstance(each, member) for each in bare)


def _limits(kind: Any) -> str:
    """What a number allows, in brackets; nothing for other types."""
    text = described(kind)
    return f" [{text}]" if "number" in text and "text" not in text else ""
