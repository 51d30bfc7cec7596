"""`nearkin embed ENCODER DATA`: the run folder of an encoder that is used as it is."""

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from nearkin.commands.embed import load_source
from nearkin.commands.train import Run
from nearkin.config import EmbedConfig, continued, option
from nearkin.data.augmentations import views_of
from nearkin.data.images import Images
from nearkin.data.split import Split
from nearkin.distributed import choose_device, cpus_per_process
from nearkin.encoders.encoder import Encoder, is_own, load, untrained_like, write_encoder
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.evaluation.evaluate import Evaluation, evaluate_split
from nearkin.evaluation.protocols import QUICK
from nearkin.evaluation.table import PartFolder, note_on, write_embeddings
from nearkin.methods import METHODS
from nearkin.pace import ProgressCallback, ignore_progress, under
from nearkin.report.pages import write_page
from nearkin.run.data import log_start, open_logged, same_data, write_bad_files
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, clear, data_name, default_folder, opened
from nearkin.run.reporter import Logger, Reporter, Silent
from nearkin.run.settings import augment_for, stored_views
from nearkin.training.health import health

SHARD: Final = {"cpu": 1_024, "cuda": 16_384}
"""Images whose features a kill costs at most, by device: about a minute's on a CPU."""
MOST_UNTRAINED: Final = {"cpu": 5_000, "cuda": 100_000}
"""Images up to which the untrained network is measured, by device: it takes as long as the encoder
itself, which hours of a CPU are too much for."""


def embed_folder(
    data: Any,
    config: EmbedConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    network: nn.Module | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Embed images by an encoder that is not trained, and measure it; see `nearkin.embed`.

    Args:
        data: What `open_images` takes.
        config: Settings.
        out: The run folder; `runs/DATA-ENCODER` if None.
        resume: Continue the run that is in `out`. The encoder is then the one that it keeps.
        overwrite: Replace the run that is in `out`.
        network: The encoder's network, if it was given one from Python; untrained.
        reporter: Receives log lines and progress.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    if not config.encoder:
        raise UsageError("no encoder given; say nearkin embed ENCODER DATA")
    config = replace(config, encoder=absolute_source(config.encoder))
    path = Path(out) if out else default_folder(data, source_name(config.encoder), resume=resume)
    _check_spared(path, config, overwrite=overwrite)
    kept = RunFolder(path).encoder if resume and RunFolder(path).is_frozen else None
    # First of all: an encoder that cannot be loaded leaves no folder behind.
    encoder = _loaded(config, network, kept)
    with (
        opened(path, resume=resume, overwrite=overwrite) as folder,
        Logger(reporter or Silent(), folder.log) as log,
    ):
        if resume and folder.config.exists():
            config = continued(config, _stored(folder))
        device = choose_device(config.device)
        log_start(folder, device, config.seed, log)
        for line in encoder.lines():
            log.info(line)
        split = open_logged(folder, data, config, log)
        config = resolved(config, encoder, split.images)
        if overwrite:
            clear(folder)
        same_data(folder, split)
        if folder.summary.exists() and folder.report.exists():
            log.info("already complete")
        else:
            folder.write_settings(config, data_name(data))
            _write(folder, config, encoder, split, device, network, log)
        _tidy(folder)
        log.info(f"done   {path.resolve()}")
    return Run(folder)


def only_of_folders(config: EmbedConfig, *, resume: bool, overwrite: bool) -> None:
    """Refuse settings that have no effect where only a table is written."""
    used = ("encoder", "allow_partial", "labels", "image_size", "device", "workers")
    unused = [
        option(entry.name)
        for entry in fields(config)
        if entry.name not in used and getattr(config, entry.name) != entry.default
    ]
    unused += ["--resume"] * resume + ["--overwrite"] * overwrite
    if unused:
        raise UsageError(f"{unused[0]} is of run folders, but -o writes only a table; omit one")


def _check_spared(path: Path, config: EmbedConfig, *, overwrite: bool) -> None:
    """Refuse to replace the very run that the encoder is from."""
    source = Path(config.encoder)
    if overwrite and source.exists() and source.resolve().is_relative_to(path.resolve()):
        raise UsageError(f"--overwrite would remove {config.encoder}; choose another --out")


def _loaded(config: EmbedConfig, network: nn.Module | None, kept: Path | None) -> Encoder:
    """Load the encoder from where a run keeps it, or else from its source."""
    if kept is not None and kept.exists():
        return load(kept, backbone=network)
    return load_source(
        config.encoder,
        backbone=network,
        image_size=config.image_size,
        allow_partial=config.allow_partial,
    )


def _stored(folder: RunFolder) -> EmbedConfig:
    config, _ = folder.encoder_settings()
    if not isinstance(config, EmbedConfig):
        raise UsageError(f"{folder.path} is a run of nearkin train; choose another --out")
    return config


def resolved(config: EmbedConfig, encoder: Encoder, images: Images) -> EmbedConfig:
    """Replace every `auto`, and check the augmentation."""
    augment: Any = config.augment
    if augment == "auto":
        # As a training on these images would choose it, whatever the encoder enlarges them to.
        side = min(encoder.image_size, int(np.median(images.sizes.min(axis=1))))
        augment = augment_for(METHODS["simclr"].defaults, images, side)
    views_of(augment, ("strong",))
    workers = config.workers
    if workers == "auto":
        workers = 0 if images.is_small else cpus_per_process()
    return replace(
        config,
        augment=stored_views(augment),
        image_size=encoder.image_size,
        workers=workers,
    )


def _write(
    folder: RunFolder,
    config: EmbedConfig,
    encoder: Encoder,
    split: Split,
    device: torch.device,
    network: nn.Module | None,
    log: Logger,
) -> None:
    """Write what a run folder lacks: encoder, embeddings, measures and page."""
    with resource_errors():
        if not folder.encoder.exists():
            # Whatever its size: a run works when the cache that it came from is gone.
            write_encoder(folder.encoder, encoder.backbone, encoder.details, encoder.preprocessing)
        # What is measured is the file: a resumed run has nothing else.
        encoder = load(folder.encoder, backbone=network)
        if not folder.summary.exists():
            _measure(folder, config, encoder, split, device, network, log)
        write_page(folder, split.images)
    log.info(f"report {folder.report.resolve()}")


def _tidy(folder: RunFolder) -> None:
    """Remove the parts, which are in one file by now, and folders that only trainings fill."""
    shutil.rmtree(folder.parts, ignore_errors=True)
    for empty in (folder.parts.parent, folder.checkpoints):
        with suppress(OSError):
            empty.rmdir()


def _measure(
    folder: RunFolder,
    config: EmbedConfig,
    encoder: Encoder,
    split: Split,
    device: torch.device,
    network: nn.Module | None,
    log: Logger,
) -> None:
    """Write the embeddings and the measures of an encoder, from parts that survive a kill."""
    floors = frozen_floors(encoder, split.images, config.seed, device, network)
    if not floors:
        log.info(
            f"note   the untrained network is no floor of more than "
            f"{_by_device(MOST_UNTRAINED, device):,} images on {device.type}; raw pixels are"
        )
    features = {
        name: _in_parts(folder.parts / name, each, split.images, int(config.workers), device, log)
        for name, each in {"encoder": encoder, **floors}.items()
    }
    evaluation, embeddings = measure(
        encoder, split, config, floors, device, features=features, on_progress=log.progress
    )
    write_embeddings(folder.embeddings, embeddings)
    write_bad_files(folder.bad_files, split.images, embeddings.bad)
    if embeddings.bad:
        log.info(f"warning: {len(embeddings.bad)} images cannot be decoded, see bad_files.csv")
    summary = {
        **encoder.details,
        "encoder": config.encoder,
        "digest": encoder.digest,
        "seed": config.seed,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "health": health(embeddings.tensor),
    }
    # Last: a run without a summary is evaluated again.
    folder.write_summary({**summary, **evaluation.to_dict()})
    log.debug("\n".join(evaluation.lines()))


def _in_parts(
    path: Path, encoder: Encoder, images: Images, workers: int, device: torch.device, log: Logger
) -> Embeddings:
    """Compute the features of all images, continuing with the parts that are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = PartFolder.claim(path, note_on(encoder.digest, images, _by_device(SHARD, device)))
    missing = parts.missing()
    if len(missing) < parts.note.num_parts:
        done = parts.note.num_parts - len(missing)
        log.info(f"resuming after {done} of {parts.note.num_parts} parts of the {path.name}'s")
    progress = under(path.name, log.progress)
    for name, count in parts.compute(
        missing, encoder, images, device=device, workers=workers, normalized=False,
        on_progress=progress,
    ):  # fmt: skip
        log.debug(f"{path.name}: {name}, {count} images")
    return parts.read(images)


def _by_device(numbers: Mapping[str, int], device: torch.device) -> int:
    return numbers.get(device.type, numbers["cuda"])


def frozen_floors(
    encoder: Encoder,
    images: Images,
    seed: int,
    device: torch.device,
    network: nn.Module | None = None,
) -> dict[str, Encoder]:
    """Return the encoders that a frozen one has to beat: the same with random weights.

    None for so many images that it would cost hours; see `MOST_UNTRAINED`.
    """
    if len(images) > _by_device(MOST_UNTRAINED, device):
        return {}
    return {"untrained": untrained_like(encoder, seed, network)}


def measure(
    encoder: Encoder,
    split: Split,
    config: EmbedConfig,
    floors: Mapping[str, Encoder],
    device: torch.device,
    *,
    features: Mapping[str, Embeddings] | None = None,
    protocol: str = QUICK,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[Evaluation, Embeddings]:
    """Measure a frozen encoder by resolved settings; see `evaluate_split`.

    Its features are those of all images in one go, as a run computes them, so that the same
    numbers come out of a run and of `nearkin evaluate`.
    """
    if features is None:
        features = {
            name: encode_images(
                each,
                split.images,
                device=device,
                workers=int(config.workers),
                on_progress=under(name, on_progress),
            )
            for name, each in {"encoder": encoder, **floors}.items()
        }
    return evaluate_split(
        encoder,
        split,
        floors=floors,
        seed=config.seed,
        workers=int(config.workers),
        augment=config.augment,
        device=device,
        features=features,
        protocol=protocol,
        on_progress=on_progress,
    )


def absolute_source(source: str) -> str:
    """Return the source of an encoder as it holds from any working directory."""
    head, file = _split_source(source)
    return head + str(Path(file).resolve()) if Path(file).exists() else source


def source_name(source: str) -> str:
    """Return the name of an encoder in the name of a folder.

    >>> source_name("timm:vit_small_patch16_224"), source_name("timm:resnet18@weights/a.pth")
    ('vit_small_patch16_224', 'a')
    """
    _, file = _split_source(source)
    path = Path(file.partition("?")[0])
    if is_own(source) and path.is_file():
        path = path.parent / path.stem if path.parent.name == "" else path.parent
    elif path.suffix in (".safetensors", ".pth", ".pt", ".bin"):
        path = path.with_suffix("")
    return re.sub(r"[^\w.-]+", "-", path.name.rpartition(":")[2]).strip("-") or "encoder"


def _split_source(source: str) -> tuple[str, str]:
    """Split `ARCHITECTURE@FILE` and `timm:local-dir:PATH` before the path; others are all path."""
    for mark in ("@", "local-dir:"):
        head, found, file = source.rpartition(mark)
        if found:
            return head + found, file
    return "", source
