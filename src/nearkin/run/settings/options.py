"""The options of methods: their constructors are the schema, and there is no other."""

import inspect
import math
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args, get_origin

import numpy as np
from jaxtyping import Int64

from nearkin.config import DiscoverConfig, TrainConfig, Value, fits, option, spelled, suggestion
from nearkin.data.images import Images
from nearkin.errors import UsageError
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.run.settings.recipes import recipe
from nearkin.types import UNKNOWN


def method_class(name: str) -> type[Method[Any]]:
    """The method of that name.

    Raises:
        UsageError: If there is none.
    """
    if name not in METHODS:
        raise UsageError(
            f"unknown method {name}.{suggestion(name, METHODS)} "
            f"`nearkin methods` lists them: {', '.join(METHODS)}"
        )
    return METHODS[name]


def method_parameters(name: str) -> dict[str, inspect.Parameter]:
    """The options of a method that a user may set, from its constructor."""
    return _parameters(method_class(name))


def _parameters(cls: type[Method[Any]]) -> dict[str, inspect.Parameter]:
    given_by_the_run = ("self", "backbone", "num_images", "num_known_classes")
    parameters = inspect.signature(cls.__init__).parameters
    return {key: value for key, value in parameters.items() if key not in given_by_the_run}


def default_options(name: str) -> dict[str, Any]:
    """A method's options where the user says nothing: the recipe's, or else the paper's."""
    papers = {key: parameter.default for key, parameter in method_parameters(name).items()}
    return papers | dict(recipe(name).options)


def checked_options(
    name: str,
    asked: Mapping[str, Value],
    kind: type[TrainConfig | DiscoverConfig] = TrainConfig,
) -> dict[str, Any]:
    """Options as the method's constructor wants them, from text if need be.

    Args:
        name: Of the method.
        asked: The options.
        kind: The settings beside them, among which a slip of the pen may be meant.

    Raises:
        UsageError: For an unknown option or a value of the wrong kind.
    """
    parameters = method_parameters(name)
    for key in asked:
        if key not in parameters:
            known = [*parameters, *kind.__dataclass_fields__]
            raise UsageError(
                f"unknown option {option(key)} for {name}.{suggestion(key, known)} "
                f"`nearkin config {name}` shows them"
            )
    types = typing.get_type_hints(method_class(name).__init__)
    return {key: _checked(name, key, value, types[key]) for key, value in asked.items()}


def method_options(
    name: str, asked: Mapping[str, Value], num_images: int, batch_size: int, chunk_size: int = 0
) -> dict[str, Value]:
    """All options of a method: as asked, or the paper's, or as much as the data allow.

    Chunks of a batch, where it is run in some, are the groups of its batch statistics.

    Raises:
        UsageError: For an unknown option, a value of the wrong kind, a memory larger than half of
            the images or smaller than a batch, or groups that do not divide the batch.
    """
    options = default_options(name) | checked_options(name, asked)
    half = num_images // 2
    most = half // batch_size * batch_size or half
    for key in method_class(name).memory_sizes:
        if key not in asked:
            options[key] = min(options[key], most)
        elif options[key] > half:
            raise UsageError(
                f"{option(key)} {options[key]} is more than half of the {num_images} images; "
                f"give at most {half}"
            )
        elif options[key] < batch_size and key in QUEUES:
            raise UsageError(
                f"{option(key)} {options[key]} does not hold a batch of {batch_size}; "
                "give at least that"
            )
    if "bn_groups" in options:
        groups, given = options["bn_groups"], "bn_groups" in asked
        options["bn_groups"] = _bn_groups(groups, batch_size, chunk_size, given)
    return options


def shrink(cls: type[Method[Any]]) -> tuple[str, ...]:
    """The options of a method that, left alone, shrink to what data and batch allow."""
    return (*cls.memory_sizes, *(["bn_groups"] if "bn_groups" in _parameters(cls) else []))


QUEUES = ("queue_size", "support_size")
"""Options that say how many keys are kept from batch to batch."""
SMALLEST_GROUP = 2
"""Images that batch statistics can be taken over."""
USUAL_GROUP = 16
"""Images in a group that `auto` leaves at least."""


def _bn_groups(groups: int, batch_size: int, chunk_size: int, asked: bool) -> int:
    """Groups of a batch for batch statistics: as asked, or its chunks, or of enough images.

    Raises:
        UsageError: If the batch cannot be divided as asked.
    """
    if chunk_size and not asked:
        return max(1, batch_size // chunk_size)
    if not asked:
        fitting = [g for g in range(1, groups + 1) if batch_size % g == 0]
        return max(g for g in fitting if g == 1 or batch_size // g >= USUAL_GROUP)
    if batch_size % groups or batch_size // groups < SMALLEST_GROUP:
        raise UsageError(
            f"--bn-groups {groups} does not divide a batch of {batch_size} into equal parts of "
            f"{SMALLEST_GROUP} images or more; change one of them"
        )
    return groups


LIMITS: Final = {
    "hidden_dim": (0.0, math.inf),
    "num_hard": (0.0, math.inf),
    **dict.fromkeys(("own_weight", "positive_rate", "sup_weight"), (0.0, 1.0)),
    "threshold": (-1.0, 1.0),
    "epsilon": (1e-3, math.inf),
    "scale": (1e-9, math.inf),
}
"""Smallest and largest value of options with a meaning of their own."""


def limits(key: str) -> tuple[float, float]:
    """Smallest and largest value of a number among methods' options, by its name."""
    if key in LIMITS:
        return LIMITS[key]
    if key.endswith("temperature"):
        return 1e-3, math.inf
    if key.endswith(("momentum", "_from", "_until")):  # the last two are shares of training
        return 0.0, 1.0
    counts = key.startswith(("num_", "top_")) or key.endswith(("size", "dim", "groups"))
    return (1.0 if counts else 0.0), math.inf


def _checked(method: str, key: str, value: Value, kind: Any) -> Value:
    """A value of an option as its constructor wants it, from text if need be."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(
                f"{option(key)} {value} is none of {', '.join(get_args(kind))} ({method})"
                f"{suggestion(str(value), get_args(kind))}"
            )
        return value
    try:
        checked: Any = _from_text(value, kind) if isinstance(value, str) else value
    except (ValueError, KeyError) as error:
        raise UsageError(f"{option(key)} {value} is not {spelled(kind)} ({method})") from error
    if not fits(checked, kind):
        raise UsageError(f"{option(key)} {value} is not {spelled(kind)} ({method})")
    low, high = limits(key)
    if not isinstance(checked, bool | str) and not (low <= checked <= high and checked < math.inf):
        raise UsageError(f"{option(key)} {value} is not from {low:g} to {high:g} ({method})")
    fitting: Value = checked
    return fitting


def _from_text(value: str, kind: Any) -> Value:
    if kind is bool:
        return {"true": True, "false": False}[value.lower()]
    converted: Value = kind(value)
    return converted


def known_classes(config: TrainConfig) -> list[str]:
    """The names given with `--known`, in their order.

    Raises:
        UsageError: If the method uses labels and none are named, or the other way around, or if
            a class is named twice.
    """
    names = [name.strip() for name in config.known.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise UsageError(f"--known {config.known} names a class twice; name each once")
    uses = method_class(config.method).uses_labels
    if uses and not names:
        raise UsageError(f"{config.method} learns from known classes; name them with --known A,B")
    if names and not uses:
        raise UsageError(f"{config.method} uses no labels; leave --known out")
    return names


def known_labels(config: TrainConfig, images: Images) -> Int64[np.ndarray, " images"] | None:
    """Labels of the known classes, numbered in their order; `UNKNOWN` for all other images.

    Returns:
        None for a method that does not use labels: it never meets one.

    Raises:
        UsageError: If a name is not that of a class.
    """
    names = known_classes(config)
    if not names:
        return None
    numbers = {name: number for number, name in enumerate(images.classes)}
    labels = np.full(len(images), UNKNOWN)
    for position, name in enumerate(names):
        if name not in numbers:
            raise UsageError(f"--known {name} is no class of the data.{suggestion(name, numbers)}")
        labels[images.labels == numbers[name]] = position
    return labels
