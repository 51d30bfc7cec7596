"""What is left to `auto` in the settings of a training: values that fit images and machine."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data.augmentations import REDUCED, stored_views
from nearkin.data.batches import CenterCrops
from nearkin.data.cache import cache_for, free_disk
from nearkin.data.images import Images
from nearkin.data.members import window_for
from nearkin.data.views import View
from nearkin.distributed import cpus_per_process, free_memory, native_precision, num_processes
from nearkin.errors import DataError, ResourceError, UsageError
from nearkin.extensions import label
from nearkin.method import Defaults
from nearkin.methods import method_class
from nearkin.networks.backbone import SMALL, SMALL_IMAGE, split_options, with_channels
from nearkin.networks.branch import should_compile
from nearkin.pace import count
from nearkin.run.options import (
    USUAL_GROUP,
    check_teacher,
    default_options,
    fitted_options,
    kinds_of_views,
    method_options,
)
from nearkin.schema import MemorySize, as_typed, option

SIZES = (32, 64, 96, 128, 160, 192, 224)  # Sides of views of photographs in pixels, for `auto`
# The largest of these by device; on a CPU 64 px got further than 96 (docs/lab.md).
LARGEST = {"cpu": 64, "mps": 128, "cuda": 224}
USUAL_BATCH = 256
# What `--epochs auto` aims at where there is no GPU: as long as somebody waits for a first result.
AUTO_TIME = "30m"
MOST_EPOCHS = 400  # Within that time: few small images have learned what they can by then
MAX_EVALUATIONS = 20  # During training
FEW_VIEWS = 4  # Epochs, at least, before the views of a student repeat
CONTINUED_RATE = 0.25
"""Peak learning rate of a continued training, as a share of that of one from random weights.

With AdamW it is 5e-4 for a batch of 256, as BEiT and MAE are fine-tuned (Bao et al. 2022,
appendix H; He et al. 2022, table 9). LoRA keeps the whole rate: its matrices are new, and learn
best at about ten times the rate of full fine-tuning (Biderman et al. 2024, arXiv:2405.09673,
section 4).
"""
LAYER_DECAY = 0.75
"""Of a continued training: that of MAE's fine-tuning, between BEiT's .65 and ConvNeXt's .8."""
ANCHOR = 20.0
"""Weight of a continued training's distance from its start (docs/lab.md)."""
ADAPTIVE = ("adamw", "muon")  # Optimizers whose steps do not depend on the loss's scale
USUAL_RATES = {
    "sgd": (0.03, 1e-4),  # InstDisc, MoCo, SEED
    "lars": (0.3, 1e-6),  # SimCLR, MoCo v3, DINO
    "adamw": (Defaults.lr, Defaults.weight_decay),
    "muon": (Defaults.lr, Defaults.weight_decay),  # its steps are as long as AdamW's
}
"""Peak learning rate for a batch of 256, and weight decay, for a method of another optimizer."""
FROZEN_SHARE = 20  # `auto` freezes the backbone for one epoch in so many, but for the last one
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def resolve(config: TrainConfig, images: Images, device: torch.device) -> TrainConfig:
    """Replace every `auto`, the method's data-dependent sizes among them, or refuse a setting."""
    if len(images) < 2:
        raise DataError(f"{len(images)} image to train on; contrast needs 2 or more")
    check_teacher(config)
    chosen, processes = method_class(config.method).defaults, num_processes(config.devices)
    size = _or(config.image_size, lambda: image_size(images, device))
    usual = usual_batch(kinds_of_views(config).count("reduced"))
    most = min(usual, len(images))
    batch = _or(config.batch_size, lambda: max(most // processes, 1) * processes)
    if config.fsdp and processes == 1:
        raise UsageError("--fsdp divides networks among processes; give --devices 2 or more")
    if config.compile in ("on", "graphs") and (processes > 1 or config.chunk_size):
        raise UsageError("several processes, or chunks, cannot be compiled; give --compile off")
    check_batch(batch, len(images), processes)
    config = _planned(config, chosen, device)
    optimizer = _or(config.optimizer, lambda: usable_optimizer(chosen, config))
    own = optimizer == chosen.optimizer
    lr, decay = (chosen.lr, chosen.weight_decay) if own else USUAL_RATES[optimizer]
    growth = math.sqrt(batch / usual) if optimizer in ADAPTIVE else batch / usual
    continued = config.encoder and not config.lora  # LoRA's own weights are new
    backbone = _or(config.backbone, lambda: backbone_for(size, device))
    if not config.encoder:
        backbone = with_channels(backbone, images.num_channels)
    resolved = replace(
        config,
        image_size=size,
        batch_size=batch,
        optimizer=optimizer,
        backbone=backbone,
        options=method_options(
            config.method, config.options, len(images), batch, config.chunk_size, processes
        ),
    )
    resolved = _chosen(
        resolved,
        view_sizes=lambda: (view_size_for(size, backbone),),
        lr=lambda: lr * growth * (CONTINUED_RATE if continued else 1.0),
        weight_decay=lambda: decay,
        layer_decay=lambda: LAYER_DECAY if continued else 1.0,
        anchor=lambda: anchor_weight(config),
        augment=lambda: stored_views(augment_for(chosen, images, size)),
        workers=lambda: 0 if images.held_side(size) else cpus_per_process(config.devices),
        # Each process keeps images of its own in memory, and all share a disk.
        cache=lambda: cache_for(images, size, memory=free_memory() // processes, disk=free_disk()),
        shuffle_window=lambda: window_for(images),
        precision=lambda: precision_of(device),
        teacher_views=lambda: teacher_views_for(config),
    )
    check_view_memory(resolved, images, processes)
    if config.max_time:  # the rest once the number of epochs is known
        return resolved
    return with_length(resolved, int(config.epochs), len(images) // batch, device)


def _or(value: Any, automatic: Callable[[], Any]) -> Any:
    return automatic() if value == "auto" else value


def _chosen(config: TrainConfig, **automatic: Callable[[], Any]) -> TrainConfig:
    """Replace those of the settings that are `auto`."""
    values = {name: _or(getattr(config, name), value) for name, value in automatic.items()}
    return replace(config, **values)


def _planned(config: TrainConfig, chosen: Defaults, device: torch.device) -> TrainConfig:
    """Replace `auto` of `--epochs`, where no time is given."""
    if config.epochs != "auto" or config.max_time:
        return config
    if device.type == "cuda":  # as long as the paper's main result
        return replace(config, epochs=chosen.epochs)
    return replace(config, epochs=MOST_EPOCHS, max_time=AUTO_TIME)  # whose steps are timed later


def with_length(
    config: TrainConfig, epochs: int, steps_per_epoch: int, device: torch.device
) -> TrainConfig:
    """Replace every `auto` that depends on the number of epochs, which is known now."""
    config = _with_frozen_epochs(replace(config, epochs=epochs, max_time=""))
    whole = not config.chunk_size and not config.grad_checkpointing
    alone = num_processes(config.devices) == 1
    optimizer, side = config.optimizer, max(view_sides(config))
    pays = should_compile(device, epochs * steps_per_epoch, optimizer=optimizer, side=side)
    return _chosen(
        config,
        evaluate_every=lambda: math.ceil(epochs / MAX_EVALUATIONS),
        compile=lambda: "on" if alone and whole and pays else "off",
    )


def _with_frozen_epochs(config: TrainConfig) -> TrainConfig:
    """Replace `auto` of `--freeze-epochs`, for the number of epochs that is known now.

    New heads send gradients of no use into a backbone that has learned (Kumar et al. 2022,
    Fine-tuning can distort pretrained features, arXiv:2202.10054).
    """
    epochs, frozen = int(config.epochs), config.freeze_epochs
    if frozen == "auto":
        most = max(1, epochs // FROZEN_SHARE) if config.encoder else 0
        return replace(config, freeze_epochs=min(most, epochs - 1))
    if frozen and frozen >= epochs:
        raise UsageError(
            f"--freeze-epochs {frozen} of {count(epochs, 'epoch')} leaves none for the backbone "
            "to learn in; give fewer, or more --epochs"
        )
    return config


def usual_batch(reduced: int) -> int:
    """Return how many images, with so many reduced views beside two, have the usual pixels.

    >>> usual_batch(0), usual_batch(2), usual_batch(6)
    (256, 177, 110)
    """
    return round(USUAL_BATCH / (1 + reduced * REDUCED**2 / 2))


def check_batch(batch: int, num_images: int, processes: int) -> None:
    """Refuse a batch of more than all images, or one that processes cannot share evenly."""
    if batch > num_images:
        raise UsageError(
            f"--batch-size {batch} is more than the {num_images} images; give at most that"
        )
    if batch % processes:
        raise UsageError(
            f"--batch-size {batch} cannot be divided evenly among {processes} processes; give a "
            f"multiple of {processes}, or a number of processes that divides it"
        )


def check_view_memory(config: TrainConfig, images: Images, processes: int) -> None:
    """Refuse more views of a resolved configuration than the memory has room for, as pixels."""
    side, rows, free = max(view_sides(config)), int(config.batch_size) // processes, free_memory()
    large = 4 * rows * images.num_channels * side**2  # bytes of one view in float32
    most = max(2, int(2 + (free / large - 2) / REDUCED**2))
    if free and config.num_views > most:
        raise ResourceError(
            f"--num-views {config.num_views} of {rows} images of {side} px are more than the "
            f"{free / 1e6:,.0f} MB of memory that are free; give at most {most}, or a smaller "
            "--batch-size"
        )


def image_size(images: Images, device: torch.device) -> int:
    """The largest usual size that the median image fills and the device can afford."""
    side = int(np.median(images.sizes.min(axis=1)))
    if images.is_small:
        return max(8, side)
    side = min(side, LARGEST.get(device.type, LARGEST["mps"]))
    return max((size for size in SIZES if size <= side), default=SIZES[0])


def view_size_for(size: int, backbone: str) -> int:
    """Three quarters of sides up to 64 px, of 20 px at least, for networks of nearkin.

    Nearly twice as many steps fit into the same time, and objects that are enlarged in crops have
    the size in such views that they have in whole images (docs/lab.md). Those of other networks
    may be built for one size.
    """
    smaller = 4 * round(0.75 * size / 4)
    name, _, built_for = split_options(backbone)
    own = name in SMALL and not built_for
    return smaller if own and smaller >= 20 and size <= SMALL_IMAGE else size


def view_sides(config: TrainConfig) -> list[int]:
    """The sides in pixels of the views of a resolved configuration, one per part of training."""
    assert config.view_sizes != "auto"
    return list(config.view_sizes)


def augment_for(chosen: Defaults, images: Images, size: int) -> str | tuple[View, ...]:
    """The method's augmentation for images of that size, unless they look like writing."""
    if size >= SMALL_IMAGE:
        return chosen.augment
    return "characters" if is_gray(images) else chosen.augment_small


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
    return "small" if device.type == "cpu" else "resnet18"


def usable_optimizer(
    chosen: Defaults, config: TrainConfig
) -> Literal["sgd", "lars", "adamw", "muon"]:
    """The method's optimizer, or AdamW where Muon cannot be used, or was not measured."""
    # --fsdp divides the matrices. Continued trainings were measured with AdamW.
    left = config.fsdp or config.encoder
    return "adamw" if chosen.optimizer == "muon" and left else chosen.optimizer


def anchor_weight(config: TrainConfig) -> float:
    """The usual weight for what starts from an encoder, unless it is to see as a teacher does."""
    return ANCHOR if config.encoder and not config.teacher else 0.0


def teacher_views_for(config: TrainConfig) -> int:
    """Epochs of different views: a tenth of all, as the teacher's features of views take long."""
    if not method_class(config.method).uses_teacher:
        return 0
    if config.max_time:  # the number of epochs is measured after the teacher has done its part
        return FEW_VIEWS
    epochs = int(config.epochs)
    return min(epochs, max(FEW_VIEWS, epochs // 10))


def precision_of(device: torch.device) -> Literal["fp32", "bf16"]:
    """The name of the arithmetic that the device computes natively."""
    return "bf16" if native_precision(device) == PRECISIONS["bf16"] else "fp32"


def describe(config: TrainConfig) -> str:
    """The recipe in one line."""
    options = ", ".join(f"{name} {value}" for name, value in config.options.items())
    views, sides = config.augment, view_sides(config)
    resized = f"views of {as_typed(sides)} px, " if sides != [config.image_size] else ""
    augmentation = views if isinstance(views, str) else f"of {len(views)} views of your own"
    return (
        f"recipe {label(config.method)} ({options}), {config.backbone}, {config.image_size} px, "
        f"{resized}augmentation {augmentation}, batch {config.batch_size} (global), "
        f"{config.optimizer} lr {config.lr:.4g}, weight decay {config.weight_decay:g}, "
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
    usual, processes = default_options(cls), num_processes(config.devices)
    batch, chunk = int(config.batch_size), config.chunk_size
    fitted = method_options(config.method, {}, num_images, batch, chunk, processes)
    for key, mark in fitted_options(cls).items():
        if isinstance(mark, MemorySize) and int(config.options[key]) > num_images // 2:
            # The papers' sizes are allowed, but hold old entries of most images.
            lines.append(
                f"warning: {option(key)} {config.options[key]} is more than half of the "
                f"{num_images} images"
            )
        if config.options[key] < usual[key] and config.options[key] == fitted[key]:
            why = f"equal parts of the batch, of {USUAL_GROUP} images or more, for all processes"
            if isinstance(mark, MemorySize):
                why = "at most half of the images"
            elif config.chunk_size:
                why = "one for each chunk of the batch"
            lines.append(f"note   {option(key)} {config.options[key]} for {usual[key]}: {why}")
    return lines
