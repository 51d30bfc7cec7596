"""`nearkin embed ENCODER DATA`: features by an encoder as it is, in a file or a run folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import nn

from nearkin.choices import Engine
from nearkin.commands.arguments import command
from nearkin.commands.embed_run import embed_run
from nearkin.commands.embed_shards import embed_shards, makes_shards
from nearkin.commands.features import check_alone, check_unused, features_of, opened
from nearkin.commands.run import Run
from nearkin.commands.settings import EncoderLike, PathLike, given, name_of
from nearkin.config import EmbedConfig
from nearkin.data.images import Images
from nearkin.data.opening import column_of
from nearkin.distributed import available_cpus, choose_device
from nearkin.encoders.encoder import Encoder
from nearkin.errors import UsageError
from nearkin.evaluation.column import check_values, remove_column
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.shards import ShardsWritten
from nearkin.evaluation.vectors import FORMATS, check_format, write_embeddings
from nearkin.run.data import hold_out
from nearkin.run.failures import resource_errors
from nearkin.run.folder import check_target
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.schema import Count

OTHER_FORMATS: Final = (".csv", ".tsv", ".json", ".txt", ".h5", ".pt", ".pkl", ".feather")
"""Endings of files that features are not written to, and no run folder has."""


@command
def embed(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike | None = None,
    overwrite: bool = False,
    backbone: nn.Module | None = None,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> Embeddings:
    """Compute the features of images by an encoder as it is, without training.

    Nothing is measured: `embed_run` also makes a run folder. All features are in memory:
    `embed_shards` needs room for a part of them only.

    Args:
        encoder: A run, a name such as `dinov2-small`, or a file; what `load` takes or returns.
        data: What `nearkin.train` takes.
        config: The settings, of which `settings` replaces some.
        output: A file to write the features to: .parquet, .npz, or .npy with a .csv beside it.
        overwrite: Replace the file.
        backbone: The encoder's network, if it was given one from Python; untrained.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.EmbedConfig`, other than those of a run folder.

    Returns:
        Unit vectors, a row per readable image, in the order of `paths`, which is that of the
        names: a list of paths may have another. With `ignore`, LEACE removes that column from
        them, fitted to those that are not held out, within classes where they have labels; what
        kNN predicts of it for the others before and after is logged.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(EmbedConfig, config, {**settings, "encoder": name_of(encoder)})
    check_alone(config)
    log, path = reporter_of(verbose), None if output is None else Path(output)
    if path is not None:
        check_format(path)
        for file in (path, path.with_suffix(".csv")) if path.suffix == ".npy" else (path,):
            check_target(file, overwrite=overwrite, reads=[data, config.labels])
    embeddings = _features(config, data, backbone, log)
    if path is not None:
        write_embeddings(path, embeddings, embeddings.encoder)
        log.info(f"features {path.resolve()}")
    return embeddings


@command
def embed_files(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike | None = None,
    shard_size: Count | None = None,
    shard: str = "",
    engine: Engine = "local",
    resume: bool = False,
    overwrite: bool = False,
    backbone: nn.Module | None = None,
    verbose: bool | Reporter = True,
) -> Run | Embeddings | ShardsWritten:
    """Embed images by an encoder as it is, without training, and measure it.

    Makes a run folder, which other commands take like that of a training. Into a file, only the
    features are written. With --shard-size, they are written into a folder of shards, with one of
    them in memory: what is there is not made again, and processes that torchrun or srun has
    started divide the shards.

    Args:
        encoder: A run folder, an encoder.safetensors, or a name: dinov2-small, timm:NAME,
            torchvision:NAME, a folder of Hugging Face, or ARCHITECTURE@FILE.
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`), or
            a name such as digits.
        config: The settings.
        output: The run folder, runs/DATA-ENCODER if not given; or a file of features alone,
            .parquet, .npz or .npy; or a folder of shards.
        shard_size: Images of a shard; 65,536 if not given, or those of the folder.
        shard: I/N, such as 1/8: make the I-th of N shares of the shards, as a job of an array.
        engine: ray: let the actors of a Ray cluster make the shards.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder, or the file.
        backbone: The encoder's network, if it was given one from Python; untrained.
        verbose: Whether to show progress, or what receives it.
    """
    config = config or EmbedConfig()
    how: dict[str, Any] = {"backbone": backbone, "verbose": verbose}
    if makes_shards(output, shard_size, shard, engine):
        if output is None:
            raise UsageError(
                "--shard-size, --shard and --engine need a folder of shards; give -o FOLDER/"
            )
        if Path(output).suffix in FORMATS:
            raise UsageError(f"{output} is the name of one file, without shards; give a folder")
        check_unused(resume=resume, overwrite=overwrite)
        how |= {"shard_size": shard_size, "shard": shard, "engine": engine}
        return embed_shards(encoder, data, config, output=output, **how)
    if output is None or Path(output).suffix not in (*FORMATS, *OTHER_FORMATS):
        again: dict[str, Any] = {"resume": resume, "overwrite": overwrite}
        return embed_run(encoder, data, config, output=output, **again, **how)
    check_unused(resume=resume)
    return embed(encoder, data, config, output=output, overwrite=overwrite, **how)


def _features(
    config: EmbedConfig, data: Any, network: nn.Module | None, log: Reporter
) -> Embeddings:
    """Compute the unit features of all images in memory, without the column to ignore."""
    encoder, images = opened(config, data, network, log)
    if not config.ignore:
        return _unit_features(config, encoder, images, log)
    # By the parts that the file names, as `evaluate` of it: it learns from no validation part.
    held_out = np.isin(images.splits, ("val", "test"))
    if held_out.all() or not held_out.any():
        split = hold_out(images, config, log.progress)
        images, held_out = split.images, split.held_out
    values = column_of(config.ignore, images, config.labels, data)
    check_values(config.ignore, values[~held_out], values[held_out])
    embeddings = _unit_features(config, encoder, images, log)
    of_each = values[embeddings.rows], held_out[embeddings.rows]
    without, changes = remove_column(config.ignore, embeddings, *of_each, seed=config.seed)
    for line in changes:
        log.info(line)
    return without


def _unit_features(
    config: EmbedConfig, encoder: Encoder, images: Images, log: Reporter
) -> Embeddings:
    processes = available_cpus() if config.workers == "auto" else config.workers
    where = choose_device(config.device)
    with resource_errors():
        embeddings = features_of(config, encoder, images, where, processes, log)
    bad = images.reasons | {**embeddings.bad}
    return replace(embeddings.normalized(), bad=dict(sorted(bad.items())), encoder=encoder.digest)
