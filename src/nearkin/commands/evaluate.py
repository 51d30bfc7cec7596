"""`nearkin evaluate`: measure an encoder beside its start, the untrained network and pixels."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nearkin.commands.embed import load_source
from nearkin.commands.frozen import frozen_floors, measure, resolved
from nearkin.config import Auto, EmbedConfig, protocol_names
from nearkin.data.split import open_split
from nearkin.distributed import available_cpus, choose_device
from nearkin.encoders.encoder import is_own, load
from nearkin.errors import OutputError, UsageError
from nearkin.evaluation.evaluate import Evaluation, evaluate_split
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, data_name, locked
from nearkin.run.reporter import Reporter, Silent
from nearkin.training.session import floors


def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    protocol: str = "quick",
    image_size: int | Auto = "auto",
    allow_partial: bool = False,
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure the encoder of a run, or any other.

    Args:
        run: A run folder, or what else `nearkin.load` takes, such as dinov2-small.
        data: Other images than those of the run, split like those; the images for an encoder
            that is of no run.
        protocol: What is measured, names of `nearkin.config.PROTOCOLS` separated by commas, or
            `full`. Other than `quick`, the measures of a run's own images are also stored in its
            evaluation.json and shown by its page.
        image_size: Side of the images in pixels, if not that of the encoder; a run keeps its own.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        reporter: Receives log lines and progress.

    Returns:
        The measures, by default kNN, linear probe, clusters and geometry, of the encoder, of the
        frozen start of its training if it had one, of the untrained network and of raw pixels,
        each with its protocol and interval; with a start, also the verdict on the training.
        Without labels, only view retrieval and geometry.

    Raises:
        UsageError: If there is no such encoder, or no images to measure it on.
    """
    names = protocol_names(protocol)  # refused before anything is opened
    log = reporter or Silent()
    folder = RunFolder(Path(run))
    of_run = folder.path.is_dir() and is_own(run)
    if of_run and image_size != "auto":
        raise UsageError("a run is measured at its own --image-size; leave the option out")
    if folder.is_frozen or not of_run:
        source = EmbedConfig(
            encoder=str(run), image_size=image_size, allow_partial=allow_partial, workers=workers
        )
        evaluation = _evaluate_frozen(source, data, backbone, choose_device(device), protocol, log)
    else:
        evaluation = _evaluate_trained(
            folder, data, backbone, choose_device(device), workers, protocol, log
        )
    if data is None and names != ["quick"]:
        _store(folder, evaluation, log)
    return evaluation


def _evaluate_trained(
    folder: RunFolder,
    data: Any,
    backbone: nn.Module | None,
    device: torch.device,
    workers: int | Literal["auto"],
    protocol: str,
    log: Reporter,
) -> Evaluation:
    """Measure the encoder of a training, on its images or on others."""
    config, stored = folder.settings()
    if data is None and stored == data_name(None) and not Path(stored).exists():
        raise UsageError(
            f"{folder.path} was trained on arrays, which it does not keep; pass them as data"
        )
    encoder = load(folder.path, backbone=backbone)
    on_progress = log.progress
    split = open_split(stored if data is None else data, config, on_progress=on_progress)
    with resource_errors():
        evaluation, _ = evaluate_split(
            encoder,
            split,
            floors=floors(encoder, folder, config, backbone),
            seed=config.seed,
            workers=available_cpus() if workers == "auto" else workers,
            augment=config.augment,
            device=device,
            protocol=protocol,
            on_progress=on_progress,
        )
    return evaluation


def _store(folder: RunFolder, evaluation: Evaluation, log: Reporter) -> None:
    """Add the measures to the run; where that is impossible, they are still shown."""
    try:
        with locked(folder):
            folder.add_measures(evaluation.to_dict())
    except (OSError, OutputError) as error:
        log.info(f"warning: the measures are not stored in {folder.evaluation}: {error}")


def _evaluate_frozen(
    config: Any,
    data: Any,
    network: nn.Module | None,
    device: torch.device,
    protocol: str,
    log: Reporter,
) -> Evaluation:
    """Measure an encoder as it is, on the images of its run or on others."""
    source, folder, stored = config.encoder, RunFolder(Path(config.encoder)), ""
    if folder.is_frozen:
        of_run, stored = folder.encoder_settings()
        config = replace(of_run, workers=config.workers)
    if data is None and (not stored or (stored == data_name(None) and not Path(stored).exists())):
        raise UsageError(f"{source} keeps no images; say nearkin evaluate {source} DATA")
    encoder = load_source(
        source, backbone=network, image_size=config.image_size, allow_partial=config.allow_partial
    )
    for line in encoder.lines():
        log.info(line)
    split = open_split(stored if data is None else data, config, log.progress)
    config = resolved(config, encoder, split.images)
    floors = frozen_floors(encoder, split.images, config.seed, device, network)
    with resource_errors():
        evaluation, _ = measure(
            encoder, split, config, floors, device, protocol=protocol, on_progress=log.progress
        )
    return evaluation
