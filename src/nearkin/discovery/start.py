"""Which encoder a discovery starts from where none is named: a pretrained one for photographs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.discovery.features import check_layers
from nearkin.distributed import num_processes
from nearkin.encoders.encoder import load, weight_bytes
from nearkin.encoders.sources import license_of
from nearkin.errors import UsageError
from nearkin.run.data import OBJECT
from nearkin.run.folder import RunFolder

PRETRAINED: Final = "dinov2-small"
"""The smallest of the recommended encoders."""
MIN_SIDE: Final = 64
"""Median side of images, in pixels, from which they are taken for photographs. Smaller ones it
would get enlarged four times and more, and an encoder of their own is trained in minutes."""


def with_encoder(
    config: DiscoverConfig, images: Images, say: Callable[[str], None]
) -> DiscoverConfig:
    """Return the settings with the encoder, or the method to train one, decided and said.

    The pretrained encoder is taken for images of `MIN_SIDE` px and more if nothing asks for a
    training, and if its weights are on this computer or can be fetched. What is decided is
    stored: `encoder` names an encoder, or `method` is not left to `auto`.

    Raises:
        UsageError: If it has not the layers that are to learn.
        CheckpointError: If its weights are there, but damaged.
    """
    if config.encoder != "auto" or config.method != "auto":
        return config
    why = _why_train(config, images)
    if not why:
        say(
            f"encoder  {PRETRAINED} ({license_of(PRETRAINED)}, "
            f"{weight_bytes(PRETRAINED) / 1e6:.0f} MB), since the images have {MIN_SIDE} px and "
            "more; --encoder takes another, --method simclr trains one"
        )
        try:
            encoder = load(PRETRAINED)
        except UsageError as error:  # offline or refused
            why = str(error)
        else:
            check_layers(config.train_layers, encoder.backbone)
            return replace(config, encoder=PRETRAINED)
    say(f"encoder  trained on these images: {why}; --encoder takes one that exists")
    return replace(config, method=TrainConfig.method)


def _why_train(config: DiscoverConfig, images: Images) -> str:
    """Say why an encoder is trained; nothing if a pretrained one serves."""
    side = int(np.median(images.sizes.min(axis=1)))
    if config.max_time:
        return f"--max-time {config.max_time} is the length of a training"
    if num_processes(config.devices) > 1:
        return "several processes share a training"
    if images.channels:
        return f"{PRETRAINED} takes RGB of 8 bits alone"
    if side < MIN_SIDE:
        return f"they have {side} px in the median, and {PRETRAINED} is for {MIN_SIDE} and more"
    return ""


def kept_encoder(config: DiscoverConfig, folder: RunFolder) -> str:
    """Return what `--encoder` takes so that the features are kept: the one before any label."""
    if config.encoder == "auto":
        return str(folder.stage("features").path)
    return str(folder.start) if config.encoder.startswith(OBJECT) else config.encoder
