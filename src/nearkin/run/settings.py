"""What was requested becomes what is trained: options, values of `auto`, the method itself."""

import copy
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import nn

from nearkin.config import Config, DiscoverConfig, EmbedConfig, Settings, TrainConfig
from nearkin.data.augmentations import AUGMENTATIONS, Augment, augmentation
from nearkin.data.batches import CenterCrops
from nearkin.data.cache import cache_for, free_disk, free_memory
from nearkin.data.images import Images
from nearkin.data.labels import composed
from nearkin.data.stores import window_for
from nearkin.data.views import View
from nearkin.distributed import cpus_per_process, native_precision, num_processes
from nearkin.errors import DataError, UsageError
from nearkin.extensions import absolute, is_reference, label, load_extension, source_of
from nearkin.method import Defaults, Method
from nearkin.methods import method_class, option_types, parameters
from nearkin.networks.backbone import (
    SMALL,
    SMALL_IMAGE,
    build_backbone,
    split_channels,
    with_channels,
)
from nearkin.networks.branch import Backbone, as_backbone, should_compile
from nearkin.pace import count
from nearkin.schema import (
    BatchGroups,
    MemorySize,
    Value,
    as_typed,
    check_value,
    from_text,
    metadata,
    option,
    suggestion,
)
from nearkin.types import UNKNOWN


def default_options(cls: type[Method[Any]]) -> dict[str, Any]:
    """A method's options where the user gives none: its `defaults`, or else its constructor's."""
    papers = {key: parameter.default for key, parameter in parameters(cls).items()}
    return papers | dict(cls.defaults.options)


def fitted_options(cls: type[Method[Any]]) -> dict[str, MemorySize | BatchGroups]:
    """The options that `auto` fits to the number of images or to the batch, with their marks."""
    kinds = option_types(cls)
    marks = {
        key: metadata(kinds[key], MemorySize) or metadata(kinds[key], BatchGroups)
        for key in parameters(cls)
    }
    return {key: mark for key, mark in marks.items() if mark}


def checked_options(
    name: str,
    requested: Mapping[str, Value],
    kind: type[TrainConfig | DiscoverConfig] = TrainConfig,
) -> dict[str, Any]:
    """Return options as a method's constructor takes them, or raise UsageError.

    A suggestion for an unknown one may also be a setting of `kind`.
    """
    cls = method_class(name)
    options, kinds = parameters(cls), option_types(cls)
    checked = {}
    for key, value in requested.items():
        if key not in options:
            near = suggestion(key, [*options, *kind.__dataclass_fields__])
            raise UsageError(
                f"unknown option {option(key)} for {label(name)}.{near} "
                f"`nearkin config {name}` lists them"
            )
        given = from_text(value, kinds[key]) if isinstance(value, str) else value
        checked[key] = check_value(key, given, kinds[key])
    return checked


def method_options(
    name: str,
    requested: Mapping[str, Value],
    num_images: int,
    batch_size: int,
    chunk_size: int = 0,
) -> dict[str, Value]:
    """Return all options of a method: as requested, or its defaults, fitted to data and batch.

    Chunks of a batch, where it is run in some, are the groups of its batch statistics. A value
    that does not fit is a UsageError.
    """
    cls = method_class(name)
    options = default_options(cls) | checked_options(name, requested)
    half = num_images // 2
    for key, mark in fitted_options(cls).items():
        value = options[key]
        if isinstance(mark, BatchGroups):
            if key in requested:
                _check_groups(key, value, batch_size)
            else:
                options[key] = _fitting_groups(value, batch_size, chunk_size)
        elif key in requested:
            most = max(half, parameters(cls)[key].default)
            _check_memory(key, value, num_images, batch_size if mark.holds_batch else 0, most)
        else:
            options[key] = min(value, half // batch_size * batch_size or half)
    return options


def _check_memory(key: str, size: int, num_images: int, batch_size: int, most: int) -> None:
    """Refuse a memory beyond half of the images and beyond the paper's, or below a batch."""
    if size > most:
        raise UsageError(
            f"{option(key)} {size} is more than half of the {num_images} images; "
            f"give at most {most}"
        )
    if size < batch_size:
        raise UsageError(
            f"{option(key)} {size} does not hold a batch of {batch_size}; give at least that"
        )


SMALLEST_GROUP = 2  # Images that batch statistics can be taken over
USUAL_GROUP = 16  # Images in a group that `auto` leaves at least


def _check_groups(key: str, groups: int, batch_size: int) -> None:
    """Refuse groups that do not divide the batch, or hold a single image."""
    if batch_size % groups or batch_size // groups < SMALLEST_GROUP:
        raise UsageError(
            f"{option(key)} {groups} does not divide a batch of {batch_size} into equal parts of "
            f"{SMALLEST_GROUP} images or more; change one of them"
        )


def _fitting_groups(groups: int, batch_size: int, chunk_size: int) -> int:
    """The chunks of the batch, or the most groups of enough images that divide it."""
    if chunk_size:
        return max(1, batch_size // chunk_size)
    fitting = [g for g in range(1, groups + 1) if batch_size % g == 0]
    return max(g for g in fitting if g == 1 or batch_size // g >= USUAL_GROUP)


def known_classes(config: TrainConfig) -> list[str]:
    """Return the names given with `--known`, in their order, or raise UsageError."""
    names = [composed(name) for name in config.known]
    if len(set(names)) < len(names):
        raise UsageError(f"--known {as_typed(config.known)} names a class twice; name each once")
    uses = method_class(config.method).uses_labels
    if uses and not names:
        raise UsageError(f"{config.method} learns from known classes; name them with --known A,B")
    if names and not uses:
        raise UsageError(f"{config.method} uses no labels; leave --known out")
    return names


def check_teacher(config: TrainConfig) -> None:
    """Refuse a method without the teacher it learns from, and a teacher without such a method."""
    uses = method_class(config.method).uses_teacher
    if uses and not config.teacher:
        raise UsageError(
            f"{label(config.method)} learns from a teacher; name an encoder with --teacher, such "
            "as dinov2-small or a run"
        )
    if not uses and (config.teacher or config.teacher_views not in ("auto", 0)):
        what = "--teacher" if config.teacher else "--teacher-views"
        raise UsageError(f"{label(config.method)} has no teacher; leave {what} out")


FEW_VIEWS = 4  # Epochs, at least, before the views of a student repeat


def teacher_views_for(config: TrainConfig) -> int:
    """Epochs of different views: a tenth of all, so that the teacher's share of the time is small.

    With --max-time the number of epochs is measured after the teacher has done its part.
    """
    if not method_class(config.method).uses_teacher:
        return 0
    if config.max_time:
        return FEW_VIEWS
    epochs = int(config.epochs)
    return min(epochs, max(FEW_VIEWS, epochs // 10))


def known_labels(config: TrainConfig, images: Images) -> Int64[np.ndarray, " images"] | None:
    """Labels of the known classes, numbered in their order; `UNKNOWN` for all other images.

    None for a method that does not use labels: it never meets one.
    """
    names = known_classes(config)
    if not names:
        return None
    labels = np.full(len(images), UNKNOWN)
    for position, name in enumerate(names):
        if name not in images.classes:
            near = suggestion(name, images.classes)
            raise UsageError(f"--known {name} is no class of the data.{near}")
        labels[images.labels == images.classes.index(name)] = position
    return labels


SIZES = (32, 64, 96, 128, 160, 192, 224)  # Sides of views of photographs in pixels, for `auto`
# The largest of these by device; on a CPU 64 px got further than 96 (docs/lab.md).
LARGEST = {"cpu": 64, "mps": 128, "cuda": 224}
USUAL_BATCH = 256
# What `--epochs auto` aims at where there is no GPU: as long as somebody waits for a first result.
AUTO_TIME = "30m"
MAX_EVALUATIONS = 20  # During training
MOST_EPOCHS = 400  # Within that time: few small images have learned what they can by then


def resolve(config: TrainConfig, images: Images, device: torch.device) -> TrainConfig:
    """Replace every `auto`, and the method's data-dependent sizes among them.

    Raises:
        UsageError: If an explicit setting does not fit the method or the data.
        DataError: If there are too few images to train on.
    """
    if len(images) < 2:
        raise DataError(f"{len(images)} image to train on; contrast needs 2 or more")
    check_teacher(config)
    chosen = method_class(config.method).defaults
    size = _or(config.image_size, lambda: image_size(images, device))
    processes = num_processes(config.devices)
    most = min(USUAL_BATCH, len(images))
    batch = _or(config.batch_size, lambda: max(most // processes, 1) * processes)
    if config.fsdp and processes == 1:
        raise UsageError("--fsdp divides networks among processes; give --devices 2 or more")
    check_batch(batch, len(images), processes)
    config = with_planned_length(config, chosen, device)
    optimizer = _or(config.optimizer, lambda: usable_optimizer(chosen, config))
    lr = chosen.lr if optimizer == chosen.optimizer else Defaults.lr
    growth = math.sqrt(batch / 256) if optimizer in ADAPTIVE else batch / 256
    backbone = _or(config.backbone, lambda: backbone_for(size, device))
    if not config.init_from:
        backbone = with_channels(backbone, images.num_channels)
    resolved = replace(
        config,
        image_size=size,
        view_sizes=_or(config.view_sizes, lambda: (view_size_for(size, backbone),)),
        batch_size=batch,
        optimizer=optimizer,
        lr=_or(config.lr, lambda: lr * growth * rate_share(config)),
        weight_decay=_or(config.weight_decay, lambda: chosen.weight_decay),
        layer_decay=_or(config.layer_decay, lambda: layer_decay(config)),
        augment=_or(config.augment, lambda: stored_views(augment_for(chosen, images, size))),
        backbone=backbone,
        workers=_or(
            config.workers,
            lambda: 0 if images.held_side(size) else cpus_per_process(config.devices),
        ),
        # Each process keeps images of its own in memory, and all share a disk.
        cache=_or(
            config.cache,
            lambda: cache_for(images, size, memory=free_memory() // processes, disk=free_disk()),
        ),
        shuffle_window=_or(config.shuffle_window, lambda: window_for(images)),
        options=method_options(
            config.method, config.options, len(images), batch, config.chunk_size
        ),
        precision=_or(config.precision, lambda: precision_of(device)),
    )
    views = _or(config.teacher_views, lambda: teacher_views_for(config))
    resolved = replace(resolved, teacher_views=views)
    if config.max_time:  # the rest once the number of epochs is known
        return resolved
    return with_length(resolved, int(config.epochs), len(images) // batch, device)


def with_planned_length(
    config: TrainConfig, chosen: Defaults, device: torch.device
) -> TrainConfig:
    """Replace `auto` of `--epochs`, where no time is given.

    On a GPU it is the length of the paper's main result, elsewhere the epochs that fit into
    `AUTO_TIME`, which is a time to be measured yet.
    """
    if config.epochs != "auto" or config.max_time:
        return config
    if device.type == "cuda":
        return replace(config, epochs=chosen.epochs)
    return replace(config, epochs=MOST_EPOCHS, max_time=AUTO_TIME)


def with_length(
    config: TrainConfig, epochs: int, steps_per_epoch: int, device: torch.device
) -> TrainConfig:
    """Replace every `auto` that depends on the number of epochs, which is known now."""
    config = with_frozen_epochs(replace(config, epochs=epochs, max_time=""))
    every = _or(config.evaluate_every, lambda: math.ceil(epochs / MAX_EVALUATIONS))
    whole = not config.chunk_size and not config.grad_checkpointing
    alone = num_processes(config.devices) == 1
    pays = alone and whole and should_compile(device, epochs * steps_per_epoch)
    compiled = _or(config.compile, lambda: "on" if pays else "off")
    return replace(config, evaluate_every=every, compile=compiled)


CONTINUED_RATE = 0.25
"""Peak learning rate of a continued training, as a share of that of one from random weights.

With AdamW it is 5e-4 for a batch of 256, as BEiT and MAE are fine-tuned (Bao et al. 2022,
appendix H; He et al. 2022, table 9). LoRA keeps the whole rate: its matrices
are new, and learn best at about ten times the rate of full fine-tuning (Biderman et al. 2024,
arXiv:2405.09673, section 4).
"""
LAYER_DECAY = 0.75
"""Of a continued training: that of MAE's fine-tuning, between BEiT's .65 and ConvNeXt's .8."""
ADAPTIVE = ("adamw", "muon")  # Optimizers whose steps do not depend on the loss's scale
FROZEN_SHARE = 20  # `auto` freezes the backbone for one epoch in so many, but for the last one


def rate_share(config: TrainConfig) -> float:
    """The learning rate of a training as a share of the method's own."""
    return CONTINUED_RATE if config.init_from and not config.lora else 1.0


def layer_decay(config: TrainConfig) -> float:
    """What `auto` means for `--layer-decay`: only weights that have learned differ by layer."""
    return LAYER_DECAY if config.init_from and not config.lora else 1.0


def with_frozen_epochs(config: TrainConfig) -> TrainConfig:
    """Replace `auto` of `--freeze-epochs`, for the number of epochs that is known now.

    New heads send gradients of no use into a backbone that has learned (Kumar et al. 2022,
    Fine-tuning can distort pretrained features, arXiv:2202.10054).
    """
    epochs, frozen = int(config.epochs), config.freeze_epochs
    if frozen == "auto":
        most = max(1, epochs // FROZEN_SHARE) if config.init_from else 0
        return replace(config, freeze_epochs=min(most, epochs - 1))
    if frozen and frozen >= epochs:
        raise UsageError(
            f"--freeze-epochs {frozen} of {count(epochs, 'epoch')} leaves none for the backbone "
            "to learn in; give fewer, or more --epochs"
        )
    return config


def check_batch(batch: int, num_images: int, processes: int) -> None:
    """Refuse a batch of more than all images, or one that processes cannot share evenly."""
    if batch > num_images:
        raise UsageError(
            f"--batch-size {batch} is more than the {num_images} images; give at most that"
        )
    if batch % processes:
        raise UsageError(
            f"--batch-size {batch} cannot be divided evenly among {processes} processes; give a "
            f"multiple of {processes}"
        )


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precision_of(device: torch.device) -> Literal["fp32", "bf16"]:
    """The name of the arithmetic that the device computes natively."""
    return "bf16" if native_precision(device) == PRECISIONS["bf16"] else "fp32"


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
    changed = dict[str, Any]()
    if isinstance(config, TrainConfig | DiscoverConfig):
        method_class(config.method)
        changed["method"] = absolute(config.method)
    changed["augment"] = stored_views(config.augment)
    if isinstance(config, TrainConfig):
        changed["backbone"] = absolute(config.backbone)
        changed["teacher"] = config.teacher
        if config.teacher and Path(config.teacher).exists():
            changed["teacher"] = str(Path(config.teacher).resolve())
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


def usable_optimizer(
    chosen: Defaults, config: TrainConfig
) -> Literal["sgd", "lars", "adamw", "muon"]:
    """The method's optimizer, or AdamW where Muon cannot be used, or was not measured.

    Muon needs whole matrices, which --fsdp divides. Continued trainings were measured with AdamW.
    """
    left = config.fsdp or config.init_from
    return "adamw" if chosen.optimizer == "muon" and left else chosen.optimizer


def view_size_for(size: int, backbone: str) -> int:
    """Three quarters of sides up to 64 px, of 20 px at least, for networks of nearkin.

    Nearly twice as many steps fit into the same time, and objects that are enlarged in crops have
    the size in such views that they have in whole images (docs/lab.md). Those of other networks
    may be built for one size.
    """
    smaller = 4 * round(0.75 * size / 4)
    own = split_channels(backbone)[0] in SMALL
    return smaller if own and smaller >= 20 and size <= SMALL_IMAGE else size


def view_sides(config: TrainConfig) -> list[int]:
    """The sides in pixels of the views of a resolved configuration, one per part of training."""
    if config.view_sizes == "auto":  # of a run from before there was a choice
        return [int(config.image_size)]
    return list(config.view_sizes)


def is_gray(images: Images) -> bool:
    """Whether images of 8 bits have no color, by a look at some of them."""
    if images.channels:
        return False
    batches = CenterCrops(images.spread(64), 16)
    return all(bool((batch == batch[:, :1]).all()) for batch in batches)  # unreadable: gray


def backbone_for(size: int, device: torch.device) -> str:
    """The network that gets furthest on such images in the time people have."""
    if size <= 16:
        return "tiny"
    if device.type == "cpu":
        return "small"
    return "resnet18"


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
    resized = (
        f"views of {config.view_sizes} px, " if view_sides(config) != [config.image_size] else ""
    )
    augmentation = views if isinstance(views, str) else f"of {len(views)} views of your own"
    return (
        f"recipe {label(config.method)} ({options}), {config.backbone}, {config.image_size} px, "
        f"{resized}"
        f"augmentation {augmentation}, batch {config.batch_size} (global), {config.optimizer} "
        f"lr {config.lr:.4g}, weight decay {config.weight_decay:g}, "
        f"{count(int(config.epochs), 'epoch')}, {config.precision}; all of it in config.toml"
    )


def length(planned: TrainConfig, config: TrainConfig) -> list[str]:
    """A line on the length of a training, where neither epochs nor a time were given."""
    if planned.epochs == "auto" or not planned.max_time or config.epochs == planned.epochs:
        return []
    return [
        f"note   {count(int(config.epochs), 'epoch')}, planned for {planned.max_time}; a longer "
        "training learns more: give --max-time 2h, or --epochs"
    ]


def shrunk(config: TrainConfig, num_images: int) -> list[str]:
    """A line for each size that `auto` has reduced, or that is large for so few images."""
    lines = []
    if config.batch_size == num_images < USUAL_BATCH:
        lines.append(f"note   --batch-size {config.batch_size}: there are no more images")
    cls = method_class(config.method)
    usual = default_options(cls)
    for key, mark in fitted_options(cls).items():
        if isinstance(mark, MemorySize) and int(config.options[key]) > num_images // 2:
            # The papers' sizes are allowed, but hold old entries of most images.
            lines.append(
                f"warning: {option(key)} {config.options[key]} is more than half of the "
                f"{num_images} images"
            )
        if config.options[key] < usual[key]:
            why = "at most half of the images"
            if isinstance(mark, BatchGroups) and config.chunk_size:
                why = "one for each chunk of the batch"
            elif isinstance(mark, BatchGroups):
                why = f"equal parts of the batch, of {USUAL_GROUP} images or more"
            lines.append(f"note   {option(key)} {config.options[key]} for {usual[key]}: {why}")
    return lines


NEEDS = {"teacher_views": "teacher", "freeze_epochs": "init_from"}
"""Settings that have no effect without another one."""


def command(data: str, config: Config) -> str:
    """Return the command that repeats a run: every setting in effect that is not the default."""
    encoder = [config.encoder] if isinstance(config, EmbedConfig) else []
    words = ["nearkin", config.verb, *encoder, data]
    for name, default in vars(type(config)()).items():
        value = getattr(config, name)
        in_effect = name not in NEEDS or getattr(config, NEEDS[name])
        if name not in ("options", "encoder") and value != default and in_effect:
            words += [f"--no-{name}"] if value is False else [option(name), as_typed(value)]
    for name, value in getattr(config, "options", {}).items():
        words += [option(name), str(value)]
    return shlex.join(words)
