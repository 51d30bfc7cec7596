"""What a run can be told, with its defaults, and the files that hold it.

One data class drives the command line, the Python call and `config.toml`. The options of a
method are not here: a method's constructor is its configuration, and they travel as `options`.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nearkin.errors import UsageError

Auto = Literal["auto"]
Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. `auto` is replaced by what the data and machine call for."""

    method: str = "simclr"
    """What to train by; `nearkin methods` lists them."""
    backbone: str = "auto"
    """The network to train; `nearkin backbones` lists them."""
    epochs: int | Auto = "auto"
    """Passes over the pictures."""
    max_time: str = ""
    """Length as time, such as 45m or 2h: turned into epochs by a measurement at the start."""
    batch_size: int | Auto = "auto"
    """Pictures per step, over all processes."""
    optimizer: Literal["auto", "sgd", "lars", "adamw"] = "auto"
    """What turns gradients into steps."""
    lr: float | Auto = "auto"
    """Peak learning rate, as it is used (not scaled by the batch)."""
    weight_decay: float | Auto = "auto"
    """Strength of weight decay."""
    lars_eta: float = 0.001
    """Trust coefficient of LARS: how far a layer moves, as a share of its norm, at rate 1."""
    lars_clip: bool = False
    """Whether LARS moves no layer faster than SGD would."""
    lars_vectors: bool = False
    """Whether LARS adapts and decays biases and norms like all other weights."""
    warmup: float = 0.1
    """Share of the training over which the learning rate rises; it then falls along a cosine."""
    warmup_start: float = 0.0
    """Share of the peak learning rate from which it rises."""
    cosine_end: float = 0.0
    """Share of the peak learning rate to which it falls."""
    drops: str = ""
    """Shares of the training, after commas, at which it drops to a tenth, instead of a cosine."""
    augment: str = "auto"
    """How views are drawn: a preset named as in the papers, or characters."""
    image_size: int | Auto = "auto"
    """Side of the views in pixels."""
    labels: str = "auto"
    """For scoring only: auto, none, folders, or a table with the columns path and label."""
    known: str = ""
    """Classes whose labels a method may learn from, by name, after commas; for ncl."""
    val: float = 0.1
    """Share of the pictures held out for scoring, where the data name no test part."""
    evaluate_every: int | Auto = "auto"
    """Epochs between looks at health and kNN accuracy; 0 means only at the end."""
    save_every: int | Auto = "auto"
    """Steps between checkpoints; auto saves once a minute."""
    seed: int = 0
    """Decides everything that is drawn."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the networks; auto is bf16 where the processor has it."""
    workers: int | Auto = "auto"
    """Processes that decode photographs."""
    max_bad: float = 0.1
    """Largest share of unreadable pictures to go on with."""
    init_from: str = ""
    """A run, or its encoder.safetensors, whose weights to start from."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method, named as in its constructor."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        for name, kind in get_type_hints(TrainConfig).items():
            value = getattr(self, name)
            if not fits(value, kind):
                raise UsageError(f"{option(name)} {value} is not {spelled(kind)}")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value != "auto" and not (low <= value <= high and value < ANY):
                raise UsageError(f"{option(name)} {value} is not from {low:g} to {high:g}")
        if not re.fullmatch(DROPS, self.drops):
            raise UsageError(f"--drops {self.drops} are not shares; write them as 0.6,0.8")
        if self.drops and self.cosine_end:
            raise UsageError("--drops and --cosine-end both say how the rate falls; give one")
        if self.max_time:
            seconds(self.max_time)


ANY = float("inf")
TINY = 1e-12
RANGES = {
    **dict.fromkeys(("epochs", "save_every"), (1, ANY)),
    **dict.fromkeys(("weight_decay", "evaluate_every", "workers"), (0, ANY)),
    **dict.fromkeys(("lr", "lars_eta"), (TINY, ANY)),
    **dict.fromkeys(("warmup_start", "cosine_end", "max_bad"), (0, 1)),
    "batch_size": (2, ANY),
    "warmup": (0, 0.99),
    "image_size": (8, ANY),
    "val": (0, 0.9),
    "seed": (0, 2**32 - 1),
}
"""Smallest and largest value of each number."""
DROPS = r"(0?\.\d+(, *0?\.\d+)*)?"
"""How shares of the training are written."""


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
    """A setting's name as it is typed.

    >>> option("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


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


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file: names of `TrainConfig`, `data`, and a table `options`.

    Raises:
        UsageError: If it cannot be read, is not TOML, or has a key that is no setting.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the configuration {path}: {error}") from error
    known = {"data", *(f.name for f in fields(TrainConfig))}
    for key in settings:
        if key not in known:
            raise UsageError(f"{path} has an unknown key {key}.{suggestion(key, known)}")
    if not isinstance(settings.get("options", {}), dict):
        raise UsageError(f"--options {settings['options']} is not a table")
    return settings


def to_toml(config: TrainConfig, data: str) -> str:
    """A file that repeats the run: `nearkin train --config config.toml`."""
    lines = [f"data = {toml_value(data)}"]
    names = [entry.name for entry in fields(config) if entry.name != "options"]
    lines += [f"{name} = {toml_value(getattr(config, name))}" for name in names]
    lines += ["", "[options]"]
    lines += [f"{name} = {toml_value(value)}" for name, value in config.options.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: Value) -> str:
    r"""A value as TOML writes it.

    >>> print(toml_value(True), toml_value('a "b"'), toml_value(1e-4))
    true "a \"b\"" 0.0001
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


FREE = ("save_every", "workers", "max_bad")
"""Settings that may change when a run is resumed: they do not touch its result."""


def continued(asked: TrainConfig, stored: TrainConfig) -> TrainConfig:
    """The stored settings of a run, if what is asked for now does not contradict them.

    What is left to `auto` is taken from the run, so that the same command continues it.

    Raises:
        UsageError: Naming every setting that differs.
    """
    differences = []
    for entry in fields(TrainConfig):
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
    free = {name: getattr(asked, name) for name in FREE if getattr(asked, name) != "auto"}
    return replace(stored, **free)
