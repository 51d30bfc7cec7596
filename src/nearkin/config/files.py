"""Files of settings, and which settings a run can be continued with."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from nearkin.config.settings import DiscoverConfig, TrainConfig
from nearkin.config.values import option, suggestion, toml_value
from nearkin.errors import UsageError

Config = TrainConfig | DiscoverConfig
Settings = TypeVar("Settings", TrainConfig, DiscoverConfig)
MAX_BYTES: Final = 1_000_000  # of a file of settings


def read_toml(path: Path, kind: type[Config] = TrainConfig) -> dict[str, Any]:
    """The settings in a file: names of that kind, `data`, and the tables `options` and `views`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError("it is too large for one")
        settings = tomllib.loads(raw.decode("utf-8"))
        str(settings)  # or no message could show a value: one too deep, or a number too long
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the configuration {path}: {error}") from error
    if "views" in settings:
        if "augment" in settings:
            raise UsageError(f"{path} has both augment and views; give one")
        settings["augment"] = settings.pop("views")
    known = {"data", *(f.name for f in fields(kind))}
    for key in settings:
        if key not in known:
            raise UsageError(f"{path} has an unknown key {key}.{suggestion(key, known)}")
    if not isinstance(settings.get("options", {}), dict):
        raise UsageError(f"--options {settings['options']} is not a table")
    return settings


def to_toml(config: Config, data: str) -> str:
    """A file that repeats the run, by `--config config.toml`."""
    lines = [f"data = {toml_value(data)}"]
    views = () if isinstance(config.augment, str) else config.augment
    tables = {"options", *(["augment"] if views else [])}
    names = [entry.name for entry in fields(config) if entry.name not in tables]
    lines += [f"{name} = {toml_value(getattr(config, name))}" for name in names]
    for title, table in [("[options]", config.options), *(("[[views]]", view) for view in views)]:
        lines += ["", title, *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


FREE = ("save_every", "workers", "max_bad", "on_collapse", "devices", "fsdp")
"""Settings that may change when a run is resumed: they do not touch its result."""


def continued(asked: Settings, stored: Settings) -> Settings:
    """The stored settings of a run, if what is asked for now does not contradict them.

    What is left to `auto` is taken from the run, so that the same command continues it.
    """
    differences = []
    for entry in fields(stored):
        mine, theirs = getattr(asked, entry.name), getattr(stored, entry.name)
        if entry.name in (*FREE, "max_time") or mine == "auto":
            continue
        if entry.name == "options":
            theirs = {name: theirs.get(name) for name in mine}
        if mine != theirs:
            differences.append(f"{option(entry.name)} {theirs} became {mine}")
    if differences:
        raise UsageError(
            f"the run was started with other settings ({'; '.join(differences)}); "
            "repeat its own command, or choose another --out"
        )
    free: dict[str, Any] = {name: getattr(asked, name, "auto") for name in FREE}
    free = {name: value for name, value in free.items() if value != "auto"}
    return replace(stored, **free)
