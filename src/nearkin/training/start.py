"""What a training starts from: random weights, or an encoder whose training is continued."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from nearkin.config import AutoImageSize, TrainConfig
from nearkin.data.images import Images
from nearkin.data.preprocessing import Preprocessing
from nearkin.distributed import free_memory
from nearkin.encoders.encoder import (
    CUSTOM,
    Encoder,
    load,
    rescaled,
    resized,
    weight_bytes,
    write_encoder,
)
from nearkin.errors import ResourceError, UsageError
from nearkin.methods import method_class
from nearkin.networks.backbone import build_backbone
from nearkin.networks.blocks import checkpoint_blocks
from nearkin.networks.branch import Backbone, as_backbone
from nearkin.networks.drop_path import set_drop_path
from nearkin.networks.lora import add_lora
from nearkin.run.auto import anchor_weight, usable_optimizer
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger

OPTIMIZER_COPIES: Final = {"adamw": 2, "sgd": 1, "lars": 1, "muon": 1}
"""Numbers that an optimizer keeps for each weight."""


def load_for(
    config: TrainConfig,
    source: str | Path,
    network: nn.Module | None = None,
    image_size: AutoImageSize = "auto",
) -> Encoder:
    """Load an encoder that the settings name, or the copy of it in a run folder."""
    named = source in (config.encoder, config.teacher)
    return load(
        source,
        backbone=network,
        image_size=image_size,
        allow_partial=config.allow_partial and named,
        trust_remote_code=config.trust_remote_code,
    )


def read_start(
    folder: RunFolder,
    config: TrainConfig,
    network: nn.Module | None,
    device: torch.device,
    log: Logger,
    *,
    resume: bool,
) -> Encoder | None:
    """Return the encoder that a training starts from, or None for random weights.

    A run that has been started has a copy of it: it is resumed without the source. One that is
    replaced has that of another training.

    Raises:
        UsageError: If there is no such encoder, or it is another architecture than `--backbone`.
        ResourceError: If it does not fit into the memory.
    """
    if not config.encoder:
        return None
    if resume and folder.start.exists() and folder.config.exists():
        return load_for(config, folder.start, network)
    check_memory(config, device)
    start = load_for(config, config.encoder, network)
    name = str(start.details["backbone"])
    if config.backbone not in ("auto", CUSTOM, name):
        raise UsageError(
            f"--backbone {config.backbone} is not the architecture of {config.encoder}, which "
            f"is {name}; leave --backbone out"
        )
    for line in start.lines():
        log.info(f"start  {line}")
    if config.image_size not in ("auto", start.image_size):
        resized(start, int(config.image_size))  # refused before the images are opened
    return start


def write_start(folder: RunFolder, start: Encoder) -> None:
    """Keep the encoder that a run starts from in its folder, unless it is there.

    One that an attempt has left which failed before there were settings is replaced.
    """
    if not (folder.start.exists() and folder.config.exists()):
        write_encoder(folder.start, start.backbone, start.details, start.preprocessing)


def with_start(config: TrainConfig, start: Encoder | None) -> TrainConfig:
    """Replace `auto` by what follows from the encoder that a training starts from.

    Images have the size of that encoder, also where they have fewer pixels: at another size it is
    another start, often a worse one, and view retrieval at two sizes says little of classes.
    """
    if start is None:
        return config
    size = start.image_size if config.image_size == "auto" else int(config.image_size)
    fitted = start if size == start.image_size else resized(start, size)
    name = CUSTOM if config.backbone == CUSTOM else str(fitted.details["backbone"])
    return replace(config, image_size=size, backbone=name)


def check_memory(config: TrainConfig, device: torch.device, free: int | None = None) -> None:
    """Refuse a start whose weights alone, with all that goes with them, exceed the memory.

    They are read into a network, so they are there twice, and once more for an anchor; trained on
    a CPU, each has a gradient and the optimizer's numbers too. With LoRA hardly any has. What
    activations take is not known before the first step.

    Raises:
        ResourceError: Before anything is read, saying how much is needed and how much is free.
    """
    free = free_memory() if free is None else free
    optimizer = config.optimizer
    if optimizer == "auto":
        optimizer = usable_optimizer(method_class(config.method).defaults, config)
    frozen = config.lora or device.type != "cpu"
    copies = 2 if frozen else 2 + OPTIMIZER_COPIES[optimizer]
    copies += bool(anchor_weight(config) if config.anchor == "auto" else config.anchor)
    needed = copies * weight_bytes(config.encoder)
    if 0 < free < needed:
        raise ResourceError(
            f"training from {config.encoder} takes {needed / 1e6:,.0f} MB for weights, "
            f"gradients and optimizer, and {free / 1e6:,.0f} MB of memory are free; take a "
            "smaller encoder, or --lora 16"
        )


def starting_backbone(
    config: TrainConfig, images: Images, network: nn.Module | None, start: RunFolder | None
) -> tuple[Backbone, Images]:
    """Build the backbone of a resolved configuration as training starts with it.

    `start` is the run folder that holds the encoder to start from, where there is one. Also
    return the images in the range that the backbone takes.
    """
    size = int(config.image_size)
    if config.encoder:
        source = start.start if start and start.start.exists() else config.encoder
        encoder = load_for(config, source, network, size)
        backbone, view = encoder.backbone, encoder.preprocessing.for_images(images)
        # Those of augmented views spoil the features of whole images within a few steps.
        backbone.keeps_statistics = True
    else:
        view = Preprocessing.of(size, images.channels)
        if network is None:
            own = build_backbone(config.backbone, size)
        else:
            own = as_backbone(copy.deepcopy(network), size)
        backbone = rescaled(own, view)
    if backbone.num_channels != images.num_channels:
        raise UsageError(
            f"backbone {backbone.name} takes {backbone.num_channels} channels, and images have "
            f"{images.num_channels}; leave --backbone out, or give another"
        )
    rate = None if config.drop_path == "auto" else config.drop_path
    set_drop_path(backbone.body, rate, backbone.name)
    if config.lora:
        add_lora(backbone, config.lora, size)
    if config.grad_checkpointing:
        checkpoint_blocks(backbone.body, backbone.name)
    return backbone, view.applied(images)
