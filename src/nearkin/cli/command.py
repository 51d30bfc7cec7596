"""A function of `nearkin.commands` as a command: parse, call, print what it returns."""

from collections.abc import Callable, Mapping
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import Any

from docstring_parser import parse_from_object

from nearkin.cli.declared import declared, imported
from nearkin.cli.parameters import is_list, is_number, parameters_of, settings_of
from nearkin.cli.terminal import Quiet, Terminal, say
from nearkin.config import TRUST, RunConfig, excluded, settings_from
from nearkin.errors import UsageError
from nearkin.extensions import check_trusted
from nearkin.schema import as_typed, check_value, from_text, option, types_of
from nearkin.text import aligned, json_text, printable
from nearkin.toml import read_toml, settings_file


def command_of(target: str, name: str, *, everything: bool) -> tuple[Callable[..., None], str]:
    """Return a command that calls a function and prints its result, and its help text.

    The function is imported when it is called.
    """
    function = declared(target)
    kind, hints = settings_of(function), types_of(function)
    parameters = parameters_of(function, everything=everything)
    words = [each.name for each in parameters if each.kind is Argument.POSITIONAL_ONLY]
    more = [each.name for each in parameters if each.kind is Argument.VAR_POSITIONAL]

    def run(*typed_words: Any, json: bool = False, quiet: bool = False, **typed: Any) -> None:
        given = dict(zip(words, typed_words, strict=False))
        given |= {each: typed_words[len(words) :] for each in more}
        given |= {key: _value(key, value, hints.get(key)) for key, value in typed.items()}
        if kind is not None:
            given = _configured(given, kind, f"nearkin {name}", words, hints.keys())
        if not _takes_part(name, given):
            return
        first = is_first()
        with Terminal() as terminal:
            reporter = Quiet() if quiet or json else terminal
            shown = {"verbose": first and reporter} if "verbose" in hints else {}
            result = imported(target)(**given, **shown)
        if first and result is not None:
            show(result, as_json=json)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    text = parse_from_object(function)
    parts = [text.short_description, text.long_description]
    if not everything:
        parts.append(f"`nearkin {name} --help-all` lists all options.")
    return run, "\n\n".join(part for part in parts if part)


def _value(name: str, value: Any, kind: Any) -> Any:
    """What was typed, as a number or with the parts of a list; UsageError if it is none."""
    if not (isinstance(value, str) and (is_list(kind) or is_number(kind))):
        return value
    return check_value(name, from_text(value, kind), kind)


def _configured(
    given: Mapping[str, Any], kind: type[RunConfig], called: str, words: list[str], own: Any
) -> dict[str, Any]:
    """Arguments with a `config`, of what was typed and of the file that `--config` names."""
    hints = types_of(kind)
    arguments = {name: value for name, value in given.items() if name in own}
    typed = {
        name.replace("-", "_"): _value(name, value, hints.get(name))
        for name, value in given.items()
        if name not in own and name != "config_file"
    }
    file = given.get("config_file")
    stored = read_toml(settings_file(file), kind) if file else {}
    for theirs, mine in excluded(kind, stored, typed).items():
        _say_left_out(theirs, stored.pop(theirs), file, mine)
    named = {name: value for name, value in stored.items() if name not in {**typed, **arguments}}
    check_trusted(named, file or Path(), typed.get(TRUST, False))
    arguments |= {"typed": [*typed]} if "typed" in own else {}
    for word in words:
        arguments[word] = arguments.get(word) or stored.get(word)
        if arguments[word] is None:
            what = " ".join(each.upper() for each in words)
            lacking = {"data": "images"}.get(word, word)
            raise UsageError(
                f"no {lacking} given; say {called} {what}, or --config with the key {word}"
            )
    stored.pop("data", None)
    return {**arguments, "config": settings_from(kind, stored, typed)}


def _say_left_out(theirs: str, value: Any, file: Any, mine: str) -> None:
    if is_first():
        values = value if isinstance(value, Mapping) else {theirs: value}
        text = " ".join(f"{option(name)} {as_typed(each)}" for name, each in values.items())
        what = "it" if len(values) == 1 else "them"
        say(f"left out: {text} of {file}, as {option(mine)} excludes {what}")


def is_first() -> bool:
    """Whether this is the first of the processes that a launcher has started, or the only one."""
    from nearkin.distributed import is_main_process  # which loads torch

    return is_main_process()


SEVERAL = ("train", "discover", "classify", "demo")
"""Commands that several processes run together."""


def _takes_part(name: str, given: Mapping[str, Any]) -> bool:
    """Whether this process runs a command that takes one; of several, all but the first say so."""
    if name in SEVERAL or is_first():
        return True
    from nearkin.commands.embed import makes_shards

    none = {"output": None, "shard_size": None, "shard": "", "engine": "local"}
    if name == "embed" and makes_shards(*(given.get(each, none[each]) for each in none)):
        return True
    say("this command takes one process; the first does it, this one ends")
    return False


def show(result: Any, *, as_json: bool) -> None:
    """Print a result: as JSON, or as lines for people, each of them one line whatever it names."""
    if as_json:
        print(json_text(_plain(result)))
        return
    text = [printable(line).replace("\n", r"\n") for line in _lines(result)]
    print("\n".join(text))


def _plain(result: Any) -> Any:
    """A result as JSON holds it."""
    if isinstance(result, list):
        return [_plain(each) for each in result]
    if isinstance(result, Path):
        return str(result.resolve())
    return result.to_dict() if hasattr(result, "to_dict") else result


def _lines(result: Any) -> list[str]:
    if isinstance(result, list):
        return [line for each in result for line in _lines(each)]
    if isinstance(result, dict):
        return aligned([*result.items()])
    if isinstance(result, str | Path):
        return [str(_plain(result))]
    return list(result.lines())
