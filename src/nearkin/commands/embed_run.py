"""`nearkin embed ENCODER DATA -o RUN`: the run folder of an encoder that is not trained here."""

import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.commands.arguments import command
from nearkin.commands.features import check_no_column, loaded, with_precision
from nearkin.commands.run import Run
from nearkin.commands.settings import EncoderLike, PathLike, given, name_of
from nearkin.config import EmbedConfig
from nearkin.data.augmentations import stored_views, views_of
from nearkin.data.images import Images
from nearkin.data.notes import plain
from nearkin.data.split import Split
from nearkin.distributed import cpus_per_process
from nearkin.encoders.encoder import Encoder, is_own, load, write_encoder
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_split
from nearkin.evaluation.layout import EarlyMap
from nearkin.evaluation.vectors import write_embeddings
from nearkin.methods import METHODS
from nearkin.report.pages import write_page
from nearkin.run.auto import augment_for
from nearkin.run.data import note_data, note_undecodable, open_logged, versions
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, clear, data_name, run_folder
from nearkin.run.opening import OpenRun, kept_copy, open_run, self_contained, split_source
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.training.health import health


@command
def embed_run(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    backbone: nn.Module | None = None,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> Run:
    """Embed images by an encoder as it is and measure it on them, in a run folder.

    Args:
        encoder: A run, a name such as `dinov2-small`, or a file; what `load` takes or returns.
        data: What `nearkin.train` takes.
        config: The settings, of which `settings` replaces some.
        output: The run folder; runs/DATA-ENCODER if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        backbone: The encoder's network, if it was given one from Python; untrained.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.EmbedConfig`.

    Returns:
        The finished run: its metrics beside their baselines, embeddings and report.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(EmbedConfig, config, {**settings, "encoder": name_of(encoder)})
    check_no_column(config)
    config = self_contained(config)
    folder = run_folder(output, data, source_name(config.encoder), again=resume or overwrite)
    # First of all: an encoder that cannot be loaded leaves no folder behind.
    source = kept_copy(folder.encoder, config.encoder, resume=resume)
    frozen = loaded(source, config, backbone)
    with open_run(
        folder, config, data, resume=resume, overwrite=overwrite, reporter=reporter_of(verbose)
    ) as run:
        for line in frozen.lines():
            run.log.info(line)
        split = open_logged(folder, data, run.config, run.log, resume=resume)
        run = replace(run, config=resolved(run.config, frozen, split.images))
        if overwrite:
            clear(folder)
        frozen.preprocessing = frozen.preprocessing.for_images(split.images)
        note_data(folder, split)
        if folder.summary.exists() and (folder.report.exists() or not run.config.report):
            run.log.info("already complete")
        else:
            with resource_errors():
                workers = int(run.config.workers)
                config = with_precision(
                    run.config, frozen, split.images, run.device, workers, run.log
                )
                run = replace(run, config=config)
                folder.write_settings(config, data_name(data))
                _write(run, frozen, split, backbone)
        _tidy(folder)
    return Run(folder)


def resolved(config: EmbedConfig, encoder: Encoder, images: Images) -> EmbedConfig:
    """Replace `auto` by what suits the images, and check the augmentation."""
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
    """Write what a run folder lacks: encoder, embeddings, metrics and page."""
    folder = run.folder
    if not folder.encoder.exists():
        # Whatever its size: a run works when the cache that it came from is gone.
        write_encoder(folder.encoder, encoder.backbone, encoder.details, encoder.preprocessing)
        # What is measured is the file: a resumed run has nothing else.
        encoder = load(folder.encoder, backbone=network, trust_remote_code=True)
    with EarlyMap(folder, split.images) as early:
        if not folder.summary.exists():
            _measure(run, encoder, split, early)
        if run.config.report:
            write_page(folder, split.images, run.log.progress, early)
            run.log.info(f"report {folder.report.resolve()}")


def _tidy(folder: RunFolder) -> None:
    """Remove kept features, which are in one file by now, and folders that trainings fill."""
    shutil.rmtree(folder.kept_features, ignore_errors=True)
    for empty in (folder.kept_features.parent, folder.checkpoints):
        with suppress(OSError):
            empty.rmdir()


def _measure(
    run: OpenRun[EmbedConfig],
    encoder: Encoder,
    split: Split,
    early: EarlyMap,
) -> None:
    """Write the embeddings and the metrics of an encoder; a kill costs a shard of features."""
    folder, config, device, log = run.folder, run.config, run.device, run.log
    how: Any = {"precision": config.precision, "batch_size": config.batch_size, "compiled": True}
    where = device, int(config.workers), log, folder.kept_features
    extracted = Extraction(encoder, split.images, UNTOUCHED, *where, **how).compute()
    features = {"encoder": extracted.embeddings(split.images)}
    bad = features["encoder"].bad
    notes = note_undecodable(folder, split.images, bad, log, config.max_bad)

    def encoded(embeddings: Embeddings) -> None:
        write_embeddings(folder.embeddings, embeddings, encoder.digest)
        if config.report:
            early.start()

    evaluation, embeddings = evaluate_split(
        encoder,
        split,
        beside={},
        seed=config.seed,
        workers=int(config.workers),
        augment=config.augment,
        device=device,
        features=features,
        on_encoded=encoded,
        on_progress=log.progress,
    )
    summary = {
        **encoder.details,
        "encoder": config.encoder,
        "digest": encoder.digest,
        "seed": config.seed,
        "precision": config.precision,
        **versions(),
        "threads": torch.get_num_threads(),
        "health": health(embeddings.tensor),
        "notes": plain((*split.images.notes, *notes)),
    }
    # Last: a run without a summary is evaluated again.
    folder.write_summary({**summary, **evaluation.to_dict()})
    log.debug("\n".join(evaluation.lines()))


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
