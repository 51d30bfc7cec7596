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
from nearkin.config import TRUST, EmbedConfig, option
from nearkin.data.augmentations import stored_views, views_of
from nearkin.data.images import Images
from nearkin.data.notes import plain
from nearkin.data.split import Split
from nearkin.distributed import cpus_per_process
from nearkin.encoders.encoder import Encoder, is_own, load, untrained_like, write_encoder
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_split
from nearkin.evaluation.table import PartFolder, note_on, write_embeddings
from nearkin.methods import METHODS
from nearkin.pace import under
from nearkin.report.image_map import EarlyMap
from nearkin.report.pages import write_page
from nearkin.run.auto import augment_for
from nearkin.run.data import note_data, open_logged, write_bad_files
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, clear, data_name, run_folder
from nearkin.run.opening import OpenRun, kept_copy, open_run, split_source
from nearkin.run.reporter import Reporter
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

    `network` is the encoder's, if it was given one from Python; untrained.
    """
    if not config.encoder:
        raise UsageError("no encoder given; say nearkin embed ENCODER DATA")
    config = replace(config, encoder=absolute_source(config.encoder))
    folder = run_folder(out, data, source_name(config.encoder), again=resume or overwrite)
    # First of all: an encoder that cannot be loaded leaves no folder behind.
    encoder = load_source(
        kept_copy(folder.encoder, config.encoder, resume=resume),
        backbone=network,
        image_size=config.image_size,
        allow_partial=config.allow_partial,
        trust_remote_code=config.trust_remote_code,
    )
    with open_run(
        folder,
        config,
        resume=resume,
        overwrite=overwrite,
        encoders=[config.encoder],
        reporter=reporter,
    ) as run:
        for line in encoder.lines():
            run.log.info(line)
        split = open_logged(folder, data, run.config, run.log, resume=resume)
        run = replace(run, config=resolved(run.config, encoder, split.images))
        if overwrite:
            clear(folder)
        encoder.preprocessing = encoder.preprocessing.for_images(split.images)
        note_data(folder, split)
        if folder.summary.exists() and (folder.report.exists() or not run.config.report):
            run.log.info("already complete")
        else:
            folder.write_settings(run.config, data_name(data))
            with resource_errors():
                _write(run, encoder, split, network)
        _tidy(folder)
    return Run(folder)


def only_of_folders(config: EmbedConfig, *, resume: bool, overwrite: bool = False) -> None:
    """Refuse settings that have no effect where only a table is written."""
    used = (
        "encoder", "allow_partial", TRUST, "labels", "image_size", "device", "workers", "report"
    )  # fmt: skip
    unused = [
        option(entry.name)
        for entry in fields(config)
        if entry.name not in used and getattr(config, entry.name) != entry.default
    ]
    unused += ["--resume"] * resume + ["--overwrite"] * overwrite
    if unused:
        raise UsageError(f"{unused[0]} is of run folders, but -o writes only a table; omit one")


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
    run: OpenRun[EmbedConfig], encoder: Encoder, split: Split, network: nn.Module | None
) -> None:
    """Write what a run folder lacks: encoder, embeddings, measures and page."""
    folder = run.folder
    if not folder.encoder.exists():
        # Whatever its size: a run works when the cache that it came from is gone.
        write_encoder(folder.encoder, encoder.backbone, encoder.details, encoder.preprocessing)
        # What is measured is the file: a resumed run has nothing else.
        encoder = load(folder.encoder, backbone=network, trust_remote_code=True)
    with EarlyMap(folder, split.images) as early:
        if not folder.summary.exists():
            _measure(run, encoder, split, network, early)
        if run.config.report:
            write_page(folder, split.images, run.log.progress, early)
            run.log.info(f"report {folder.report.resolve()}")


def _tidy(folder: RunFolder) -> None:
    """Remove the parts, which are in one file by now, and folders that only trainings fill."""
    shutil.rmtree(folder.parts, ignore_errors=True)
    for empty in (folder.parts.parent, folder.checkpoints):
        with suppress(OSError):
            empty.rmdir()


def _measure(
    run: OpenRun[EmbedConfig],
    encoder: Encoder,
    split: Split,
    network: nn.Module | None,
    early: EarlyMap,
) -> None:
    """Write the embeddings and the measures of an encoder, from parts that survive a kill."""
    folder, config, device, log = run.folder, run.config, run.device, run.log
    floors = frozen_floors(encoder, split.images, config.seed, device, network)
    if not floors:
        log.info(
            f"note   the untrained network is no floor of more than "
            f"{_by_device(MOST_UNTRAINED, device):,} images on {device.type}; raw pixels are"
        )
    features = {
        name: _in_parts(run, name, each, split.images)
        for name, each in {"encoder": encoder, **floors}.items()
    }

    def encoded(embeddings: Embeddings) -> None:
        write_embeddings(folder.embeddings, embeddings, encoder.digest)
        if config.report:
            early.start()

    evaluation, embeddings = evaluate_split(
        encoder,
        split,
        floors=floors,
        seed=config.seed,
        workers=int(config.workers),
        augment=config.augment,
        device=device,
        features=features,
        on_encoded=encoded,
        on_progress=log.progress,
    )
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
        "notes": plain(split.images.notes),
    }
    # Last: a run without a summary is evaluated again.
    folder.write_summary({**summary, **evaluation.to_dict()})
    log.debug("\n".join(evaluation.lines()))


def _in_parts(
    run: OpenRun[EmbedConfig], name: str, encoder: Encoder, images: Images
) -> Embeddings:
    """Compute the features of all images, continuing with the parts that are there."""
    run.folder.parts.mkdir(parents=True, exist_ok=True)
    note = note_on(encoder.digest, images, _by_device(SHARD, run.device))
    parts = PartFolder.claim(run.folder.parts / name, note)
    missing = parts.missing()
    if len(missing) < note.num_parts:
        done = note.num_parts - len(missing)
        run.log.info(f"resuming after {done} of {note.num_parts} parts of the {name}'s")
    for part, count in parts.compute(
        missing, encoder, images, device=run.device, workers=int(run.config.workers),
        normalized=False, on_progress=under(name, run.log.progress),
    ):  # fmt: skip
        run.log.debug(f"{name}: {part}, {count} images")
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


def absolute_source(source: str) -> str:
    """Return the source of an encoder as it holds from any working directory."""
    head, file = split_source(source)
    return head + str(Path(file).resolve()) if file and Path(file).exists() else source


def source_name(source: str) -> str:
    """Return the name of an encoder in the name of a folder.

    >>> source_name("timm:vit_small_patch16_224"), source_name("timm:resnet18@weights/a.pth")
    ('vit_small_patch16_224', 'a')
    """
    _, file = split_source(source)
    path = Path(file.partition("?")[0])
    if is_own(source) and path.is_file():
        path = path.parent / path.stem if path.parent.name == "" else path.parent
    elif path.suffix in (".safetensors", ".pth", ".pt", ".bin"):
        path = path.with_suffix("")
    return re.sub(r"[^\w.-]+", "-", path.name.rpartition(":")[2]).strip("-") or "encoder"
