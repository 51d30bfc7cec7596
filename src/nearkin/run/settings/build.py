"""From settings to objects: the values of `auto`, the method with its networks, a description."""

import copy
import inspect
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from nearkin.config import Config, DiscoverConfig, MemorySize, TrainConfig, metadata, option
from nearkin.data.augmentations import AUGMENTATIONS, Augment, augmentation, views_of
from nearkin.data.batches import CenterCrops
from nearkin.data.cache import cache_for, free_disk, free_memory
from nearkin.data.images import Images
from nearkin.data.views import View
from nearkin.distributed import cpus_per_process, native_precision, num_processes
from nearkin.errors import DataError, UsageError
from nearkin.extensions import absolute, is_reference, label, load_extension, source_of
from nearkin.method import Defaults, Method
from nearkin.methods import method_class, option_types
from nearkin.networks.backbone import SMALL_IMAGE, build_backbone
from nearkin.networks.branch import Backbone, as_backbone
from nearkin.networks.compilation import should_compile
from nearkin.run.settings.options import (
    USUAL_GROUP,
    default_options,
    fitted_options,
    known_classes,
    method_options,
)

Settings = TypeVar("Settings", TrainConfig, DiscoverConfig)

SIZES = (32, 64, 96, 128, 160, 192, 224)  # Sides of views of photographs in pixels, for `auto`
LARGEST = {"cpu": 96, "mps": 128, "cuda": 224}  # The largest of these by device
USUAL_BATCH = 256
# What `--epochs auto` aims at, some hours at most; ten times as many if they are small.
IMAGES_TO_TRAIN = {"cpu": 200_000, "mps": 1_000_000, "cuda": 20_000_000}


def resolve(config: TrainConfig, images: Images, device: torch.device) -> TrainConfig:
    """Replace every `auto`, and the method's data-dependent sizes among them.

    Raises:
        UsageError: If an explicit setting does not fit the method or the data.
        DataError: If there are too few images to train on.
    """
    if len(images) < 2:
        raise DataError(f"{len(images)} image to train on; contrast needs 2 or more")
    chosen = method_class(config.method).defaults
    size = _or(config.image_size, lambda: image_size(images, device))
    processes = num_processes(config.devices)
    most = min(USUAL_BATCH, len(images))
    batch = _or(config.batch_size, lambda: max(most // processes, 1) * processes)
    if config.fsdp and processes == 1:
        raise UsageError("--fsdp divides networks among processes; give --devices 2 or more")
    if batch > len(images):
        raise UsageError(
            f"--batch-size {batch} is more than the {len(images)} images; give at most that"
        )
    if batch % processes:
        raise UsageError(
            f"--batch-size {batch} cannot be divided evenly among {processes} processes; give a "
            f"multiple of {processes}"
        )
    optimizer = _or(config.optimizer, lambda: chosen.optimizer)
    growth = batch / 256 if optimizer != "adamw" else math.sqrt(batch / 256)
    resolved = replace(
        config,
        image_size=size,
        batch_size=batch,
        optimizer=optimizer,
        lr=_or(config.lr, lambda: chosen.lr * growth),
        weight_decay=_or(config.weight_decay, lambda: chosen.weight_decay),
        augment=_or(config.augment, lambda: stored_views(augment_for(chosen, images, size))),
        backbone=_or(config.backbone, lambda: backbone_for(size, device)),
        epochs=_or(config.epochs, lambda: epochs_for(len(images), size, device)),
        workers=_or(
            config.workers, lambda: 0 if images.is_small else cpus_per_process(config.devices)
        ),
        # Each process keeps images of its own in memory, and all share a disk.
        cache=_or(
            config.cache,
            lambda: cache_for(images, size, memory=free_memory() // processes, disk=free_disk()),
        ),
        options=method_options(
            config.method, config.options, len(images), batch, config.chunk_size
        ),
        precision=_or(config.precision, lambda: precision_of(device)),
    )
    every = _or(config.evaluate_every, lambda: max(1, int(resolved.epochs) // 20))
    total = int(resolved.epochs) * len(images) // batch
    pays = processes == 1 and not config.chunk_size and should_compile(device, total)
    compiled = _or(config.compile, lambda: "on" if pays else "off")
    return replace(resolved, evaluate_every=every, compile=compiled)


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precision_of(device: torch.device) -> str:
    """The name of the arithmetic that the device computes natively."""
    native = native_precision(device)
    return next(name for name, dtype in PRECISIONS.items() if dtype == native)


def _or(value: Any, automatic: Callable[[], Any]) -> Any:
    return automatic() if value == "auto" else value


def augment_for(chosen: Defaults, images: Images, size: int) -> str | tuple[View, ...]:
    """The method's augmentation for images of that size, unless they look like writing."""
    if size >= SMALL_IMAGE:
        return chosen.augment
    return "characters" if is_gray(images) else chosen.augment_small


def stored_views(augment: Augment) -> str | list[dict[str, Any]]:
    """An augmentation as config.toml holds it: a name of the package, or the views themselves."""
    if isinstance(augment, str) and augment in ("auto", *AUGMENTATIONS):
        return augment
    return [view.to_dict() for view in augmentation(augment)]


def self_contained(config: Settings) -> Settings:
    """Make the settings hold from any working directory and without other files.

    Paths of Python files become absolute, and an augmentation from a file becomes its views.
    """
    method_class(config.method)
    changed: dict[str, Any] = {
        "method": absolute(config.method),
        "augment": stored_views(config.augment),
    }
    if isinstance(config, TrainConfig):
        changed["backbone"] = absolute(config.backbone)
    return replace(config, **changed)


def sources_of(config: TrainConfig) -> dict[str, dict[str, str]]:
    """Files that define the method and the backbone, where they are the user's own."""
    used = {"method": method_class(config.method)}
    if is_reference(config.backbone):
        used["backbone"] = load_extension("backbones", config.backbone)
    return {kind: file for kind, thing in used.items() if (file := source_of(thing))}


def image_size(images: Images, device: torch.device) -> int:
    """The largest usual size that the median image fills and the device can afford."""
    side = int(np.median(images.sizes.min(axis=1)))
    if images.is_small:
        return max(8, side)
    side = min(side, LARGEST.get(device.type, LARGEST["mps"]))
    return max((size for size in SIZES if size <= side), default=SIZES[0])


def is_gray(images: Images) -> bool:
    """Whether images have no color, by a look at some of them."""
    batches = CenterCrops(images.spread(64), 16)
    return all(bool((batch == batch[:, :1]).all()) for batch in batches)  # unreadable: gray


def backbone_for(size: int, device: torch.device) -> str:
    """The network that gets furthest on such images in the time people have."""
    if size <= 16:
        return "tiny"
    if device.type == "cpu" and size < SMALL_IMAGE:
        return "small"
    return "resnet18"


def epochs_for(num_images: int, size: int, device: torch.device) -> int:
    """Passes over the images that make `IMAGES_TO_TRAIN`, between 20 and 400."""
    images = IMAGES_TO_TRAIN.get(device.type, IMAGES_TO_TRAIN["mps"])
    images *= 10 if size < SMALL_IMAGE else 1
    return min(400, max(20, images // num_images))


def views_for(method: type[Method[Any]], augment: Augment) -> tuple[View, ...]:
    """How the views of each image are drawn."""
    return views_of(augment, method.views, more=method.more_views)


def build_method(config: TrainConfig, backbone: Backbone, images: Images) -> Method[Any]:
    """The method that a resolved configuration describes, around a backbone."""
    cls = method_class(config.method)
    accepted = inspect.signature(cls.__init__).parameters
    counts = {"num_images": len(images), "num_known_classes": len(known_classes(config))}
    counts = {name: count for name, count in counts.items() if name in accepted}
    return cls(backbone, **counts, **config.options)


def named_backbone(config: TrainConfig, network: nn.Module | None) -> Backbone:
    """The backbone a resolved configuration names, or the user's own network."""
    size = int(config.image_size)
    if network is not None:
        return as_backbone(copy.deepcopy(network), size)
    return build_backbone(config.backbone, size)


def describe(config: TrainConfig) -> str:
    """The recipe in one line."""
    options = ", ".join(f"{name} {value}" for name, value in config.options.items())
    views = config.augment
    augmentation = views if isinstance(views, str) else f"of {len(views)} views of your own"
    return (
        f"recipe {label(config.method)} ({options}), {config.backbone}, {config.image_size} px, "
        f"augmentation {augmentation}, batch {config.batch_size} (global), {config.optimizer} "
        f"lr {config.lr:.4g}, weight decay {config.weight_decay:g}, {config.epochs} epochs, "
        f"{config.precision}; all of it in config.toml"
    )


def shrunk(config: TrainConfig, num_images: int) -> list[str]:
    """A line for each size that `auto` has reduced, or that is large for so few images."""
    lines = []
    if config.batch_size == num_images < USUAL_BATCH:
        lines.append(f"note   --batch-size {config.batch_size}: there are no more images")
    cls = method_class(config.method)
    usual = default_options(cls)
    kinds = option_types(cls)
    for key in fitted_options(cls):
        if metadata(kinds[key], MemorySize) and int(config.options[key]) > num_images // 2:
            # The papers' sizes are allowed, but hold old entries of most images.
            lines.append(
                f"warning: {option(key)} {config.options[key]} is more than half of the "
                f"{num_images} images"
            )
        if config.options[key] < usual[key]:
            why = "at most half of the images"
            if key == "bn_groups" and config.chunk_size:
                why = "one for each chunk of the batch"
            elif key == "bn_groups":
                why = f"equal parts of the batch, of {USUAL_GROUP} images or more"
            lines.append(f"note   {option(key)} {config.options[key]} for {usual[key]}: {why}")
    return lines


def command(verb: str, data: str, config: Config, usual: Mapping[str, Any]) -> str:
    """Return the command that repeats a run: every setting that is not the `usual` one."""
    words = ["nearkin", verb, data]
    for name, default in usual.items():
        value = getattr(config, name)
        if name != "options" and value != default:
            words += [f"--no-{name}"] if value is False else [option(name), str(value)]
    for name, value in config.options.items():
        words += [option(name), str(value)]
    return shlex.join(words)
