"""Encoders and images as the settings of `nearkin embed` say, and features computed by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from nearkin.config import TRUST, EmbedConfig, defaults
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import Encoder, load
from nearkin.encoders.inference import Inference, choose_precision, inference
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.pace import under
from nearkin.run.reporter import Reporter
from nearkin.schema import option

USED_ALONE: Final = (
    "encoder", "allow_partial", TRUST, "labels", "ignore", "image_size", "device", "precision",
    "batch_size", "workers", "report",
)  # fmt: skip
"""Settings that have an effect without a run folder, or that the environment may set."""
OF_COLUMN: Final = ("val", "seed")
"""Those that have one where a column is removed, on images that are held out."""


def check_alone(config: EmbedConfig) -> None:
    """Refuse settings that have no effect without a run folder."""
    used = USED_ALONE + OF_COLUMN if config.ignore else USED_ALONE
    check_unused(
        **{
            name: getattr(config, name) != value
            for name, value in defaults(EmbedConfig).items()
            if name not in used
        }
    )


def check_unused(**given: bool) -> None:
    """Refuse what is given of options that have no effect without a run folder."""
    for name, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{option(name)} is of run folders, and here are features alone; omit it"
            )


def check_no_column(config: EmbedConfig) -> None:
    """Refuse to remove a column, which takes the features of all images at once, without a file.

    A run folder would have features that its encoder does not make.
    """
    if config.ignore:
        raise UsageError(
            f"--ignore {config.ignore} removes a column from the features of one file; give -o "
            "FILE.parquet, without shards. `nearkin evaluate --ignore` measures a run"
        )


def features_of(
    config: EmbedConfig,
    encoder: Encoder,
    images: Images,
    device: torch.device,
    workers: int,
    log: Reporter,
    name: str = "",
) -> Embeddings:
    """Compute the features of images in one go, and log how; progress is shown under a name."""
    config = with_precision(config, encoder, images, device, workers, log)
    by = prepared(config, encoder, len(images), device, log)
    on_progress = under(name, log.progress) if name else log.progress
    return encode_images(by, images, workers=workers, on_progress=on_progress)


def with_precision(
    config: EmbedConfig,
    encoder: Encoder,
    images: Images,
    device: torch.device,
    workers: int,
    log: Reporter,
) -> EmbedConfig:
    """Replace the precision `auto`, and log what a lower one changes."""
    precision, lines = choose_precision(config.precision, encoder, images, device, workers)
    for line in lines:
        log.info(line)
    return replace(config, precision=precision)


def prepared(
    config: EmbedConfig, encoder: Encoder, count: int, device: torch.device, log: Reporter
) -> Inference:
    """Prepare an encoder to compute the features of so many images as the settings say."""
    by = inference(encoder, device, config.precision, config.batch_size, count=count)
    for line in by.lines:
        log.info(line)
    return by


def opened(
    config: EmbedConfig, data: Any, network: nn.Module | None, log: Reporter
) -> tuple[Encoder, Images]:
    """Open the encoder and the images, and log what they are."""
    encoder = loaded(config.encoder, config, network)
    for line in encoder.lines():
        log.info(line)
    images = open_images(data, labels=config.labels, on_progress=log.progress)
    for line in images.decisions(*encoder.preprocessing.notes(images)):
        log.info(line)
    return encoder, images


def loaded(source: str | Path, config: EmbedConfig, network: nn.Module | None) -> Encoder:
    """Load an encoder as the settings say; `network` is its own, if it has no name."""
    return load(
        source,
        backbone=network,
        image_size=config.image_size,
        allow_partial=config.allow_partial,
        trust_remote_code=config.trust_remote_code,
    )
