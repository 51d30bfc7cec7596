"""The options of a command: the parameters of its function, with what docstrings say of them."""

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter as Argument
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from cyclopts import Group, Parameter
from msgspec import inspect

from nearkin.config import COMMON, GROUPS, TRUST, RunConfig, defaults
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
GIVEN: Final = ("config", "verbose")
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
    own = [*_own(function, hints, kind, everything)]
    words = [each for each in own if each.kind is not Argument.KEYWORD_ONLY]
    options = [each for each in own if each.kind is Argument.KEYWORD_ONLY]
    options.append(_flag("json", "Print the result as JSON."))
    if "verbose" in hints:
        options.append(_flag("quiet", "Show no progress."))
    if kind is None:
        return [*words, *options]
    shown = Parameter(name=NAMES["config_file"], help=CONFIG_FILE, group=PANELS["Data"])
    file = _optional("config_file", Annotated[Path | None, shown])
    settings = [*_settings(kind, {*hints}, everything), file, *options]
    if "options" in kind.__dataclass_fields__:  # of the method, by names that are its own
        any_option = Annotated[Any, Parameter(show=False)]
        settings.append(Argument("options", Argument.VAR_KEYWORD, annotation=any_option))
    return [*words, *settings]


def _own(
    function: Callable[..., Any],
    hints: Mapping[str, Any],
    kind: type[RunConfig] | None,
    everything: bool,
) -> Iterator[Argument]:
    """The parameters that a function declares."""
    docs = parameter_docs(function)
    for each in signature(function).parameters.values():
        if each.name in GIVEN:
            continue
        name, annotation = each.name, _typed(hints[each.name])
        if each.kind is Argument.POSITIONAL_OR_KEYWORD:
            shown = Parameter(help=docs[name])
            if is_list(hints[name]):
                yield Argument(name, Argument.VAR_POSITIONAL, annotation=Annotated[str, shown])
            else:  # a file of settings may have what a command with settings is not given
                default, annotation = (None, str | None) if kind else (each.default, annotation)
                yield _optional(name, Annotated[annotation, shown], default, word=True)
            continue
        shown = Parameter(
            name=_name(name),
            help=docs[name],
            negative="" if each.default is False else None,
            show=everything or name not in RARE,
            show_default=as_typed if each.default not in (None, False, "") else False,
            group=OUTPUT if kind else OPTIONS,
        )
        yield _optional(name, Annotated[annotation, shown], each.default)


def _settings(kind: type[RunConfig], taken: set[str], everything: bool) -> Iterator[Argument]:
    """The fields of a settings class, by group."""
    hints, docs = types_of(kind), parameter_docs(kind)
    default = defaults(kind)
    for title, names in GROUPS.items():
        for name in sorted(default.keys() & {*names} - taken, key=names.index):
            limits = _limits(hints[name])
            shown = Parameter(
                name=_name(name),
                group=PANELS[title],
                help=docs[name] + limits,
                show=everything or name in COMMON,
                show_default=as_typed if default[name] not in ("", ()) else False,
                show_choices=not limits,
                negative="" if getattr(kind, name, None) is False else None,  # not of `report`
            )
            yield _optional(name, Annotated[_typed(hints[name]), shown], default[name])


def _optional(name: str, annotation: Any, default: Any = None, *, word: bool = False) -> Argument:
    kind = Argument.POSITIONAL_ONLY if word else Argument.KEYWORD_ONLY
    return Argument(name, kind, default=default, annotation=annotation)


def _flag(name: str, text: str) -> Argument:
    shown = Parameter(name=_name(name), help=text, negative="", show_default=False, group=OUTPUT)
    return _optional(name, Annotated[bool, shown], False)


def _name(name: str) -> str | tuple[str, ...]:
    return NAMES.get(name, option(name))


def _typed(kind: Any) -> Any:
    """A type as it is parsed: numbers, paths, lists and what Python takes beside text are text."""
    members = get_args(kind) or (kind,)
    if kind is Any or {Path, str} & {*members} or is_list(kind) or is_number(kind):
        return str | None if type(None) in members else str
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
