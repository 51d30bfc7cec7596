"""`nearkin evaluate`: measure an encoder beside its baselines."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nearkin.choices import Protocol
from nearkin.commands.arguments import command
from nearkin.commands.embed_run import resolved
from nearkin.commands.evaluate_vectors import evaluate_vectors
from nearkin.commands.features import features_of
from nearkin.commands.settings import EncoderLike, name_of
from nearkin.commands.sources import VectorsLike, check_stored, is_table, source_of
from nearkin.config import AutoCountOrZero, AutoImageSize, EmbedConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.data.opening import column_of
from nearkin.data.split import Split
from nearkin.distributed import available_cpus, choose_device
from nearkin.encoders.encoder import Encoder, is_own, load
from nearkin.encoders.projector import embedding_encoder
from nearkin.encoders.sources import unknown
from nearkin.errors import OutputError, UsageError
from nearkin.evaluation.column import ColumnTest, Values, check_values, column_test, divided
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_split
from nearkin.pace import count
from nearkin.run.data import changed_data, note_column, open_split
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.training.session import encoders_beside


@command
def evaluate(
    encoder: EncoderLike | Embeddings,
    data: Any = None,
    *,
    bank: VectorsLike | None = None,
    protocol: Sequence[Protocol] = ("quick",),
    features: Literal["backbone", "embedding"] = "backbone",
    ignore: str = "",
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> Evaluation:
    """Measure an encoder beside its baselines: its start, the untrained network, raw pixels.

    Of features that `nearkin embed -o FILE` has written, it measures as many as a disk holds.

    Args:
        encoder: A run, or what else `nearkin.load` takes, such as dinov2-small; or features that
            `embed` has made: a folder of shards, or a .parquet.
        data: Other images than those of the run, split like those; the images for an encoder
            that is of no run.
        bank: Of features, those to learn from. By default their split decides, as of images: test
            images are scored, or validation images without them, and all but these two are learned
            from; where none is to be scored, `train` is learned from and all others are scored.
        protocol: What is measured, some of these: quick (kNN at k 20 and 200, linear probe,
            clusters, view retrieval and geometry); knn (at k 10, 20, 100 and 200, temperatures
            .07 and .1, and by majority); linear (probe); attentive (probe on the tokens before the
            pooling); fewshot (classifiers from 1, 2, 5 and 10 images per class, 10 draws each);
            retrieval (mAP, mAP@R and recall@1 of test images among training images); labelfree
            (what needs no labels: view retrieval and geometry); or full, which is all of them.
            Other than quick, the metrics of a run's own images are also stored in its
            evaluation.json and shown in its report, as is what `ignore` finds.
        features: What is measured: those of the `backbone`, as everywhere; with `embedding` also
            the run's embedding, which its projector makes of them, in a table of its own.
        ignore: A column of the table of the images or of their labels, or of the features, that
            features are to ignore, such as camera: whether they follow it, and what is left of the
            class accuracy without it.
        image_size: Side of the images in pixels, if not that of the encoder; a run keeps its own.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Returns:
        The metrics, by default kNN, linear probe, clusters and geometry, of the encoder and of raw
        pixels; of one that was trained here also of the untrained network and of the start of its
        training, if it had one, with the verdict on it. Each with its protocol and interval.
        Without labels, only view retrieval and geometry.

    Raises:
        UsageError: If there is no such encoder, no embedding of it, or no images to measure it on.
    """
    if is_table(encoder):
        if data is not None:
            raise UsageError("of features, no images are read; leave the images out")
        check_stored(
            backbone=backbone is not None,
            features=features != "backbone",
            image_size=image_size != "auto",
            allow_partial=allow_partial,
        )
        return evaluate_vectors(encoder, bank, protocol, ignore, device, verbose)
    name = name_of(encoder)
    if bank is not None:
        raise UsageError(f"--bank is for features, and {name} is an encoder; leave it out")
    log, where = reporter_of(verbose), choose_device(device)
    folder, config, source = _run_of(name, data, trust_remote_code=trust_remote_code)
    if image_size != "auto" and folder.config.exists():
        raise UsageError("a run is measured at its own --image-size; leave the option out")
    loaded = load(
        name,
        backbone=backbone,
        image_size=image_size,
        allow_partial=allow_partial,
        trust_remote_code=trust_remote_code,
    )
    tables = _tables(loaded, folder, features, log)
    split, same = _opened(folder, config, source, log)
    values = _values(ignore, split, config.labels, source) if ignore else None
    processes = available_cpus() if workers == "auto" else workers
    with resource_errors():
        computed = None
        if isinstance(config, TrainConfig):
            tables |= encoders_beside(loaded, folder, config, split, where, processes, backbone)
        else:
            config = resolved(config, loaded, split.images)
            computed = {  # in one go, as a run does, so that numbers are the same
                name: features_of(config, encoder, split.images, where, processes, log, name)
                for name, encoder in tables.items()
            }
        (table, measured), *compared = tables.items()
        evaluation, embeddings = evaluate_split(
            measured,
            split,
            beside=dict(compared),
            seed=config.seed,
            workers=processes,
            augment=config.augment,
            device=where,
            features=computed,
            table=table,
            protocol=protocol,
            on_encoded=partial(_log_bad, log),
            on_progress=log.progress,
        )
        column = _of_column(ignore, embeddings, values, config.seed, where)
    evaluation = replace(_named(evaluation, table, measured.num_features), column=column)
    if data is None and same and (ignore or table == "embedding" or [*protocol] != ["quick"]):
        _store(folder, evaluation, split.images, values, log)
    return replace(evaluation, start=folder.start, bad=split.images.reasons | {**embeddings.bad})


def _values(ignore: str, split: Split, labels: str, source: Any) -> Values:
    """What a column says of each image, which has to be enough to be measured."""
    values = column_of(ignore, split.images, labels, source)
    check_values(ignore, values[split.train_rows], values[split.test_rows])
    return values


def _log_bad(log: Reporter, embeddings: Embeddings) -> None:
    if embeddings.bad:
        log.info(f"left out: {count(len(embeddings.bad), 'image')} that cannot be read")


def _of_column(
    name: str, embeddings: Embeddings, values: Values | None, seed: int, device: torch.device
) -> ColumnTest | None:
    if values is None:
        return None
    parts = divided(embeddings, values[embeddings.rows])
    return column_test(name, *parts, seed=seed, device=device)


def _opened(
    folder: RunFolder, config: TrainConfig | EmbedConfig, data: Any, log: Reporter
) -> tuple[Split, bool]:
    """Open images, divided as the run has noted, and say whether they are those of the run."""
    resumed = folder if folder.config.exists() else None
    split = open_split(data, config, log.progress, resumed=resumed)
    for line in split.images.decisions():
        log.info(line)
    changes = changed_data(split)
    if changes:
        log.info(
            f"warning: these are not the images of {folder.path}: {changes}; nothing is stored "
            "there"
        )
    return split, not changes


def _tables(
    encoder: Encoder, folder: RunFolder, features: str, log: Reporter
) -> dict[str, Encoder]:
    """Return what is measured, the table that it is about first."""
    for line in encoder.lines():
        log.info(line)
    if features != "embedding":
        return {"encoder": encoder}
    embedding = embedding_encoder(encoder, folder.projector)
    log.info(f"embedding {embedding.num_features} dimensions, by {folder.projector}")
    return {"embedding": embedding, "encoder": encoder}


def _run_of(
    encoder: str, data: Any, *, trust_remote_code: bool
) -> tuple[RunFolder, TrainConfig | EmbedConfig, Any]:
    """Return the run folder of an encoder, with its settings and what its images are opened from.

    An encoder that is of no run has the default settings, and no images. Settings that name code
    to make images or views with are refused, unless it is trusted. However many images cannot be
    read, the others are measured.
    """
    folder = RunFolder(Path(encoder))
    if is_own(encoder) and not folder.path.is_file():
        if not folder.path.exists():
            raise unknown(encoder)
        config, _ = folder.encoder_settings()
        trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        source = source_of(folder, data, augment=config.augment, **trust)
        return folder, replace(config, **trust, max_bad=1.0), source
    if data is None:
        raise UsageError(f"{encoder} keeps no images; give its images, too")
    return folder, EmbedConfig(encoder=encoder, max_bad=1.0), data


def _named(evaluation: Evaluation, table: str, dim: int) -> Evaluation:
    """Let the protocols of an embedding's metrics say that they are of it; else change none."""
    if table != "embedding":
        return evaluation
    column = [metric.of(f"embedding of {dim} dimensions") for metric in evaluation.metrics[table]]
    return replace(evaluation, metrics={**evaluation.metrics, table: column})


def _store(
    folder: RunFolder,
    evaluation: Evaluation,
    images: Images,
    values: Values | None,
    log: Reporter,
) -> None:
    """Add the metrics to the run; where that is impossible, they are still shown."""
    if "embedding" in evaluation.metrics:  # the report's map is of the features
        evaluation = replace(evaluation, column=None)
    try:
        with folder.locked():
            if evaluation.column and values is not None:
                note_column(folder, evaluation.column.column, images, values)
            folder.add_metrics(evaluation.to_dict())
    except (OSError, OutputError) as error:
        log.info(f"warning: the metrics are not stored in {folder.evaluation}: {error}")
