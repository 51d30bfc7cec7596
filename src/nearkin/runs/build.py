"""From settings to objects: what `auto` comes to, and the method with its networks."""

import copy
import inspect
import math
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
from torch import nn

from nearkin.config import TrainConfig, Value, fits, option, spelled, suggestion
from nearkin.data.centered import Pixels
from nearkin.data.images import Images
from nearkin.distributed import available_cpus, native_precision
from nearkin.errors import DataError, UsageError
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.backbone import SMALL_IMAGE, Backbone
from nearkin.runs.recipes import recipe

SIZES = (32, 64, 96, 128, 160, 192, 224)
"""Sides of views that `auto` chooses from for photographs, in pixels."""
USUAL_BATCH = 256
PICTURES_TO_SEE = {"cpu": 200_000, "mps": 1_000_000, "cuda": 20_000_000}
"""What `--epochs auto` aims at, some hours at most; ten times as many if they are small."""
LARGEST = {"cpu": 96, "mps": 128, "cuda": 224}
"""The largest side of views that `auto` chooses, in pixels."""


def resolve(config: TrainConfig, images: Images, device: torch.device) -> TrainConfig:
    """The settings with every `auto` replaced, and the method's data-dependent sizes among them.

    Args:
        config: What was asked for.
        images: What will be trained on.
        device: Where.

    Raises:
        UsageError: If an explicit setting does not fit the method or the data.
        DataError: If there are too few pictures to train on.
    """
    if len(images) < 2:
        raise DataError(f"{len(images)} picture to train on; contrast needs 2 or more")
    chosen = recipe(config.method)
    size = config.image_size if config.image_size != "auto" else image_size(images, device)
    batch = config.batch_size if config.batch_size != "auto" else min(USUAL_BATCH, len(images))
    if batch > len(images):
        raise UsageError(
            f"--batch-size {batch} is more than the {len(images)} pictures; give at most that"
        )
    optimizer = config.optimizer if config.optimizer != "auto" else chosen.optimizer
    growth = batch / 256 if optimizer != "adamw" else math.sqrt(batch / 256)
    small = size < SMALL_IMAGE
    preset = chosen.augment_small if small else chosen.augment
    if small and config.augment == "auto" and is_gray(images):
        preset = "characters"
    resolved = replace(
        config,
        image_size=size,
        batch_size=batch,
        optimizer=optimizer,
        lr=_or(config.lr, chosen.lr * growth),
        weight_decay=_or(config.weight_decay, chosen.weight_decay),
        augment=_or(config.augment, preset),
        backbone=_or(config.backbone, backbone_for(size, device)),
        epochs=_or(config.epochs, epochs_for(len(images), size, device)),
        workers=_or(config.workers, 0 if images.is_small else available_cpus()),
        options=method_options(config.method, config.options, len(images), batch),
        precision=_or(config.precision, precision_of(device)),
    )
    look = max(1, int(resolved.epochs) // 20)
    return replace(resolved, evaluate_every=_or(config.evaluate_every, look))


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precision_of(device: torch.device) -> str:
    """The name of the arithmetic that the device computes natively."""
    native = native_precision(device)
    return next(name for name, dtype in PRECISIONS.items() if dtype == native)


def _or(value: Any, automatic: Any) -> Any:
    return automatic if value == "auto" else value


def image_size(images: Images, device: torch.device) -> int:
    """The largest usual size that the median picture fills and the device can afford."""
    side = int(np.median(images.sizes.min(axis=1)))
    if images.is_small:
        return max(8, side)
    side = min(side, LARGEST.get(device.type, LARGEST["mps"]))
    return max((size for size in SIZES if size <= side), default=SIZES[0])


def is_gray(images: Images) -> bool:
    """Whether pictures have no color, by a look at some of them."""
    batches = Pixels(images.spread(64), 16)
    return all(bool((shown == shown[:, :1]).all()) for shown in batches)  # unreadable: gray


def backbone_for(size: int, device: torch.device) -> str:
    """The network that gets furthest on such pictures in the time people have."""
    if size <= 16:
        return "tiny"
    if device.type == "cpu" and size < SMALL_IMAGE:
        return "small"
    return "resnet18"


def epochs_for(num_images: int, size: int, device: torch.device) -> int:
    """Passes that show `PICTURES_TO_SEE`, between 20 and 400."""
    pictures = PICTURES_TO_SEE.get(device.type, PICTURES_TO_SEE["mps"]) * (
        10 if size < SMALL_IMAGE else 1
    )
    return min(400, max(20, pictures // num_images))


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
    given_by_the_run = ("self", "backbone", "num_images")
    parameters = inspect.signature(method_class(name).__init__).parameters
    return {key: value for key, value in parameters.items() if key not in given_by_the_run}


def default_options(name: str) -> dict[str, Any]:
    """A method's options where the user says nothing: the recipe's, or else the paper's."""
    papers = {key: parameter.default for key, parameter in method_parameters(name).items()}
    return papers | dict(recipe(name).options)


def checked_options(name: str, asked: Mapping[str, Value]) -> dict[str, Any]:
    """Options as the method's constructor wants them, from text if need be.

    Raises:
        UsageError: For an unknown option or a value of the wrong kind.
    """
    parameters = method_parameters(name)
    for key in asked:
        if key not in parameters:
            known = [*parameters, *TrainConfig.__dataclass_fields__]
            raise UsageError(
                f"unknown option {option(key)} for {name}.{suggestion(key, known)} "
                f"`nearkin config {name}` shows them"
            )
    types = typing.get_type_hints(method_class(name).__init__)
    return {key: _checked(name, key, value, types[key]) for key, value in asked.items()}


def method_options(
    name: str, asked: Mapping[str, Value], num_images: int, batch_size: int
) -> dict[str, Value]:
    """All options of a method: as asked, or the paper's, or as much as the data allow.

    Raises:
        UsageError: For an unknown option, a value of the wrong kind, or a memory larger than
            half of the images.
    """
    options = default_options(name) | checked_options(name, asked)
    half = num_images // 2
    most = half // batch_size * batch_size or half
    for key in method_class(name).memory_sizes:
        if key not in asked:
            options[key] = min(options[key], most)
        elif options[key] > half:
            raise UsageError(
                f"{option(key)} {options[key]} is more than half of the {num_images} pictures; "
                f"give at most {half}"
            )
    return options


def limits(key: str) -> tuple[float, float]:
    """Smallest and largest value of a number among methods' options, by its name."""
    named = {
        "temperature": (1e-3, math.inf),
        "momentum": (0.0, 1.0),
        "hidden_dim": (0.0, math.inf),
    }
    counts = key.startswith("num_") or key.endswith(("size", "dim"))
    return named.get(key, (1.0 if counts else 0.0, math.inf))


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


def build_method(config: TrainConfig, backbone: Backbone, num_images: int) -> Method[Any]:
    """The method that a resolved configuration describes, around a backbone."""
    cls = method_class(config.method)
    wanted = inspect.signature(cls.__init__).parameters
    given = {"num_images": num_images} if "num_images" in wanted else {}
    return cls(backbone, **given, **config.options)


def named_backbone(config: TrainConfig, network: nn.Module | None) -> Backbone:
    """The backbone a resolved configuration names, or the user's own network."""
    from nearkin.networks.backbone import adopt, build_backbone

    size = int(config.image_size)
    return (
        adopt(copy.deepcopy(network), size)
        if network is not None
        else build_backbone(config.backbone, size)
    )
