"""Settings as TOML files: recipes, files of users, the config.toml of a run; resuming from it."""

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from nearkin.config import TRUST, Duration, RunConfig, Settings, TrainConfig, seconds
from nearkin.errors import UsageError
from nearkin.schema import Value, as_typed, option, suggestion
from nearkin.version import check_format

RECIPE: Final = "recipe:"  # How the name of a recipe begins
PLANNED_FOR: Final = "planned_for"  # The entry of a run's file with the time that it was given
MAX_BYTES: Final = 1_000_000  # of a file of settings
FORMATS: Final = (1,)
"""Formats of run folders that are read; the last is written into their config.toml."""


def toml_value(value: Value | Sequence[Value]) -> str:
    r"""A value as TOML writes it.

    >>> print(toml_value(True), toml_value('a "b"'), toml_value(1e-4))
    true "a \"b\"" 0.0001
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_toml(path: Path, what: str = "the configuration") -> dict[str, Any]:
    """The content of a file, which a message calls `what`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError("it is too large for one")
        content = tomllib.loads(raw.decode("utf-8", "surrogateescape"))  # as paths are written
        str(content)  # or no message could show a value: one too deep, or a number too long
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {what} {path}: {error}") from error
    return content


def recipe_files() -> dict[str, Path]:
    """The recipes inside the package, settings of papers, by their names without `recipe:`."""
    home = Path(__file__).parent / "recipes"
    files = sorted(home.glob("*/*.toml"))
    return {file.relative_to(home).with_suffix("").as_posix(): file for file in files}


def settings_file(path: Path) -> Path:
    """The file that `--config` names: by its path, or as `recipe:NAME` of one of `recipe_files`.

    >>> settings_file(Path("recipe:cifar10/moco")).name
    'moco.toml'
    """
    if not str(path).startswith(RECIPE):
        return path
    name, known = path.as_posix().removeprefix(RECIPE), recipe_files()
    if name not in known:
        within = [each for each in known if name in each]
        near = (within or difflib.get_close_matches(name, known))[:5]
        meant = near and f" Did you mean {', '.join(near)}?"
        raise UsageError(
            f"there is no recipe {name}.{meant or ''} `nearkin list recipes` lists them"
        )
    return known[name]


def read_toml(path: Path, kind: type[Any] = TrainConfig) -> dict[str, Any]:
    """The settings in a file: names of that kind, `data`, and the tables `options` and `views`.

    A file without a format is of the newest one, without a kind of this: people leave them out.
    """
    settings = load_toml(path)
    try:
        check_format(settings.pop("format", FORMATS[-1]), FORMATS)
        settings.pop(PLANNED_FOR, None)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}; take the release that wrote it") from error
    if (verb := settings.pop("kind", kind.verb)) != kind.verb:
        raise UsageError(f"{path} is of `nearkin {verb}`, not of `nearkin {kind.verb}`")
    if "views" in settings:
        if "augment" in settings:
            raise UsageError(f"{path} has both augment and views; give one")
        settings["augment"] = settings.pop("views")
    known = {"data", *(f.name for f in fields(kind))} - {TRUST}
    for key in settings:
        if key not in known:
            raise UsageError(f"{path} has an unknown key {key}.{suggestion(key, known)}")
    if not isinstance(settings.get("options", {}), dict):
        raise UsageError(f"--options {settings['options']} is not a table")
    return settings


def to_toml(config: RunConfig, data: str, planned_for: Duration = "") -> str:
    """A file that repeats the run, by `--config config.toml`; its length need not be the same.

    `planned_for` is the `--max-time` that has become its number of epochs, if one has.
    """
    lines = [f"format = {FORMATS[-1]}", f"kind = {toml_value(config.verb)}"]
    lines += [f"data = {toml_value(data)}"]
    lines += [f"{PLANNED_FOR} = {toml_value(planned_for)}"] if planned_for else []
    views = () if isinstance(config.augment, str) else config.augment
    tables = {"options", *(["augment"] if views else [])}
    names = [entry.name for entry in fields(config) if entry.name not in {*tables, TRUST}]
    lines += [f"{name} = {toml_value(getattr(config, name))}" for name in names]
    options = [("[options]", getattr(config, "options", {}))] * hasattr(config, "options")
    for title, table in [*options, *(("[[views]]", view) for view in views)]:
        lines += ["", title, *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _by_name(config: RunConfig) -> dict[str, Any]:
    """The settings of a run, and the options of its method, by name."""
    settings = dict(vars(config))
    options: dict[str, Any] = settings.pop("options", {})
    return settings | options


FREE = (
    "save_every", "workers", "max_bad", "on_collapse", "devices", "fsdp", "compile", "report",
    "track", "copy_to", TRUST,
)  # fmt: skip
"""Settings that may change when a run is resumed: at most, they change rounding."""


def continued(requested: Settings, stored: Settings, planned_for: Duration = "") -> Settings:
    """The stored settings of a run, if those that are requested now do not contradict them.

    What is left to `auto` is taken from the run, so that the same command continues it. So are the
    folder of copies, if none is named, and the time that its number of epochs was `planned_for`,
    which the stored settings have no more.
    """
    differences, free, settings = [], dict[str, Any](), _by_name(stored)
    for name, mine in _by_name(requested).items():
        theirs = settings.get(name)
        if name == "max_time":
            theirs = theirs or planned_for or "none"
            if not mine or (theirs != "none" and seconds(mine) == seconds(theirs)):
                continue
        if mine == "auto" or (name == "copy_to" and not mine):
            continue
        if name in FREE:
            free[name] = mine
            continue
        if mine != theirs:
            differences.append(f"{option(name)} {as_typed(theirs)} became {as_typed(mine)}")
    if differences:
        raise UsageError(
            f"the run was started with other settings ({'; '.join(differences)}); "
            "repeat its own command, or choose another -o"
        )
    return replace(stored, **free)
