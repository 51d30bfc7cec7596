"""`nearkin embed`: features by an encoder as it is, in memory, a file, a run folder, or shards."""

import re
import shutil
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from nearkin.choices import Engine
from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.commands.arguments import (
    EncoderLike,
    PathLike,
    command,
    given,
    name_of,
    processes,
    refuse,
)
from nearkin.commands.run import Run
from nearkin.config import EmbedConfig
from nearkin.data.augmentations import Augment, stored_views
from nearkin.data.images import Images
from nearkin.data.notes import plain
from nearkin.data.opening import column_of, open_images
from nearkin.data.split import Split
from nearkin.distributed import choose_device, native_precision
from nearkin.distributed.ranks import rank_info
from nearkin.encoders.encoder import CUSTOM, Encoder, is_own, load, write_encoder
from nearkin.encoders.inference import Bfloat16, Inference, inference, neighbors_kept
from nearkin.errors import UsageError
from nearkin.evaluation.column import check_values, remove_column
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.evaluation.evaluate import evaluate_split
from nearkin.evaluation.layout import EarlyMap
from nearkin.evaluation.ray_shards import Opener, compute_on_ray
from nearkin.evaluation.shards import MOST, SHARD, ShardFolder, ShardsWritten, note_on
from nearkin.evaluation.table import are_vectors
from nearkin.evaluation.vectors import FORMATS, check_format, write_embeddings
from nearkin.methods import METHODS
from nearkin.pace import Pace, under
from nearkin.report.pages import write_page
from nearkin.run.auto import augment_for
from nearkin.run.data import computed_with, hold_out, note_data, note_undecodable, open_logged
from nearkin.run.folder import RunFolder, check_target, clear, data_name, run_folder
from nearkin.run.opening import (
    OpenRun,
    kept_copy,
    open_run,
    resumed_settings,
    self_contained,
    split_source,
)
from nearkin.run.reporter import Reporter, Silent, reporter_of
from nearkin.schema import Count
from nearkin.training.health import health

OF_RUNS: Final = ("augment", "scan", "max_bad")  # Settings without an effect on features alone
OF_COLUMN: Final = ("seed", "val")  # Those that have one only where a column is removed
ALONE: Final = "of run folders, and here are features alone; omit it"
OTHER_FORMATS: Final = (".csv", ".tsv", ".json", ".txt", ".h5", ".pt", ".pkl", ".feather")
"""Endings of files that features are not written to, and no run folder has."""
SAMPLE: Final = 512  # Images whose neighbors are compared in two precisions
KEPT: Final = 0.999
"""Share of them whose nearest neighbor must stay, for bfloat16 to be taken unasked."""
MANY: Final = 10 * SAMPLE  # Images from which on the comparison takes less than is gained


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
    check_alone(settings, config.ignore)
    log, path = reporter_of(verbose), None if output is None else Path(output)
    if path is not None:
        check_format(path)
        for file in (path, path.with_suffix(".csv")) if path.suffix == ".npy" else (path,):
            check_target(file, overwrite=overwrite, reads=[data, config.labels])
    embeddings = _features(config, data, backbone, log)
    if path is not None:
        write_embeddings(path, embeddings)
        log.info(f"features {path.resolve()}")
    return embeddings


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
    if resume:
        config = resumed_settings(folder, config)
    # First of all: an encoder that cannot be loaded leaves no folder behind.
    if isinstance(encoder, Encoder) and encoder.details["backbone"] == CUSTOM:
        backbone = backbone or encoder.backbone.body
    source = kept_copy(folder.encoder, config.encoder, resume=resume)
    frozen = loaded(source, config, backbone)
    with open_run(folder, config, data, verbose, resume=resume, overwrite=overwrite) as run:
        for line in frozen.lines():
            run.log.info(line)
        split = open_logged(folder, data, run.config, run.log, resume=resume)
        config = resolved(run.config, frozen, split.images)
        frozen.preprocessing = frozen.preprocessing.for_images(split.images)
        if overwrite:
            clear(folder)
        note_data(folder, split)
        if folder.summary.exists() and (folder.report.exists() or not config.report):
            run.log.info("already complete")
        else:
            config = with_precision(config, frozen, split.images, run.device, run.log)
            folder.write_settings(config, data_name(data))
            _write(replace(run, config=config), frozen, split, backbone)
        _tidy(folder)
    return Run(folder)


def check_alone(named: Container[str], column: str) -> None:
    """Refuse to name settings without an effect on features alone; files of a run have them."""
    names = OF_RUNS if column else OF_RUNS + OF_COLUMN
    refuse(ALONE, **{name: name in named for name in names})


def check_no_column(config: EmbedConfig) -> None:
    """Refuse to remove a column, which takes the features of all images at once, without a file.

    A run folder would have features that its encoder does not make.
    """
    if config.ignore:
        raise UsageError(
            f"--ignore {config.ignore} removes a column from the features of one file; give -o "
            "FILE.parquet, without shards. `nearkin evaluate --ignore COLUMN` measures a run"
        )


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


def features_of(
    config: EmbedConfig,
    encoder: Encoder,
    images: Images,
    device: torch.device,
    log: Reporter,
    name: str = "",
) -> Embeddings:
    """Compute the features of images in one go, and log how; progress is shown under a name."""
    config = with_precision(config, encoder, images, device, log)
    by = prepared(config, encoder, len(images), device, log)
    on_progress = under(name, log.progress) if name else log.progress
    return encode_images(by, images, workers=processes(config.workers), on_progress=on_progress)


def with_precision(
    config: EmbedConfig, encoder: Encoder, images: Images, device: torch.device, log: Reporter
) -> EmbedConfig:
    """Replace the precision `auto`, and log what a lower one changes; the encoder moves.

    `auto` is bf16 on a CPU that computes it natively, for `MANY` images or more, if at least
    `KEPT` of a sample of them keep their nearest neighbor; else fp32.
    """
    native, is_auto = native_precision(device) == torch.bfloat16, config.precision == "auto"
    worth = device.type == "cpu" and native and len(images) >= MANY
    if config.precision == "fp32" or (is_auto and not worth):
        return replace(config, precision="fp32")
    by, sample = inference(encoder, device), images.spread(SAMPLE)
    exact, lower = (
        encode_images(each, sample, workers=processes(config.workers), allow_none=True).tensor
        for each in (by, replace(by, network=Bfloat16(by.network)))
    )
    share = neighbors_kept(exact, lower)
    line = (
        f"bf16    {100 * share:.1f} % of {len(exact)} images keep their nearest neighbor of fp32"
    )
    if is_auto and share < KEPT:
        log.info(f"{line}; fp32 is used")
        return replace(config, precision="fp32")
    slow = "" if native else f"; it is slower, as this {device.type} has no such arithmetic"
    log.info(line + slow)
    return replace(config, precision="bf16")


def prepared(
    config: EmbedConfig, encoder: Encoder, count: int, device: torch.device, log: Reporter
) -> Inference:
    """Prepare an encoder to compute the features of so many images as the settings say."""
    by = inference(encoder, device, config.precision, config.batch_size, count=count)
    for line in by.lines:
        log.info(line)
    return by


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
    embeddings = features_of(config, encoder, images, choose_device(config.device), log)
    bad = images.reasons | {**embeddings.bad}
    return replace(embeddings.normalized(), bad=dict(sorted(bad.items())), encoder=encoder.digest)


def resolved(config: EmbedConfig, encoder: Encoder, images: Images) -> EmbedConfig:
    """Replace `auto` by what suits the images, and check the augmentation."""
    augment: Augment = config.augment
    if augment == "auto":
        augment = usual_augment(images, encoder.image_size)
    return replace(
        config,
        augment=stored_views(augment),
        image_size=encoder.image_size,
        workers=0 if images.is_small and config.workers == "auto" else processes(config.workers),
    )


def usual_augment(images: Images, image_size: int) -> Augment:
    """Return the augmentation of a training on these images, whatever they are enlarged to."""
    side = min(image_size, int(np.median(images.sizes.min(axis=1))))
    return augment_for(METHODS["simclr"].defaults, images, side)


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


def _measure(run: OpenRun[EmbedConfig], encoder: Encoder, split: Split, early: EarlyMap) -> None:
    """Write the embeddings and the metrics of an encoder; a kill costs a shard of features."""
    folder, config, log = run.folder, run.config, run.log
    workers = processes(config.workers)
    extracted = Extraction(
        encoder,
        split.images,
        UNTOUCHED,
        run.device,
        workers,
        log,
        folder.kept_features,
        precision="bf16" if config.precision == "bf16" else "fp32",
        batch_size=config.batch_size,
        compiled=True,
    ).compute()
    features = extracted.embeddings(split.images)
    notes = note_undecodable(folder, split.images, features.bad, log, config.max_bad)

    def encoded(embeddings: Embeddings) -> None:
        write_embeddings(folder.embeddings, replace(embeddings, encoder=encoder.digest))
        if config.report:
            early.start()

    evaluation, embeddings = evaluate_split(
        encoder,
        split,
        beside={},
        seed=config.seed,
        workers=workers,
        augment=config.augment,
        device=run.device,
        features={"encoder": features},
        on_encoded=encoded,
        on_progress=log.progress,
    )
    summary = {
        **encoder.details,
        "encoder": config.encoder,
        "digest": encoder.digest,
        "precision": config.precision,
        **computed_with(config.seed),
        "health": health(embeddings.tensor),
        "notes": plain((*split.images.notes, *notes)),
    }
    # Last: a run without a summary is evaluated again.
    folder.write_summary({**summary, **evaluation.to_dict()})
    log.debug("\n".join(evaluation.lines()))


def _tidy(folder: RunFolder) -> None:
    """Remove kept features, which are in one file by now, and folders that trainings fill."""
    shutil.rmtree(folder.kept_features, ignore_errors=True)
    for empty in (folder.kept_features.parent, folder.checkpoints):
        with suppress(OSError):
            empty.rmdir()


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
    typed: Sequence[str] = (),
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
        typed: Names of the settings that are typed, and not from a file.
        verbose: Whether to show progress, or what receives it.
    """
    config = config or EmbedConfig()
    how: dict[str, Any] = {"verbose": verbose}
    if makes_shards(output, shard_size, shard, engine):
        if output is None:
            raise UsageError(
                "--shard-size, --shard and --engine need a folder of shards; give -o FOLDER/"
            )
        if Path(output).suffix.lower() in FORMATS:
            raise UsageError(f"{output} is the name of one file, without shards; give a folder")
        refuse(ALONE, resume=resume, overwrite=overwrite)
        check_alone(typed, config.ignore)
        how |= {"shard_size": shard_size, "shard": shard, "engine": engine}
        return embed_shards(encoder, data, config, output=output, **how)
    how |= {"output": output, "overwrite": overwrite}
    if output is None or Path(output).suffix.lower() not in (*FORMATS, *OTHER_FORMATS):
        return embed_run(encoder, data, config, resume=resume, **how)
    refuse(ALONE, resume=resume)
    check_alone(typed, config.ignore)
    return embed(encoder, data, config, **how)


def makes_shards(
    output: PathLike | None, shard_size: int | None, shard: str, engine: Engine
) -> bool:
    """Whether `embed` makes a folder of shards, or goes on with one."""
    asked = shard_size is not None or bool(shard) or engine != "local"
    return asked or (output is not None and Path(output).is_dir() and are_vectors(Path(output)))


@command
def embed_shards(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike,
    shard_size: Count | None = None,
    shard: str = "",
    engine: Engine = "local",
    backbone: nn.Module | None = None,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> ShardsWritten:
    """Compute the features of any number of images, with one shard in memory.

    Each shard is a Parquet file with rows as `embed` writes them, there whole or not at all. What
    is there is not made again: a command that was killed goes on. Processes that torchrun or srun
    has started divide the shards, and none waits for another; so do the actors of a Ray cluster.

    Args:
        encoder: A run, a name such as dinov2-small, or a file; what `load` takes or returns.
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        config: The settings, of which `settings` replaces some.
        output: A new folder, or one that was begun with the same encoder, data and size of shards.
        shard_size: Images of a shard; 65,536 if not given, or those of the folder.
        shard: `I/N` makes the I-th of N shares of the shards, with I from 1; all if empty.
        engine: `ray` computes on the cluster at the variable RAY_ADDRESS, or else on one that is
            started on this machine. Its nodes need the same files under the same names.
        backbone: The encoder's network, if it was given one from Python; untrained.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.EmbedConfig`, other than those of a run folder.

    Raises:
        UsageError: If `shard_size` or `shard` makes no sense, or Ray is not installed.
        WorkerError: If the Ray cluster does not answer, or fails. What is written stays.
        DataError: If none of the images can be read.
        OutputError: If the folder is of something else, or cannot be written.
    """
    config, _ = given(EmbedConfig, config, {**settings, "encoder": name_of(encoder)})
    check_alone(settings, config.ignore)
    check_no_column(config)
    path = Path(output)
    if shard_size is None:
        earlier = ShardFolder.noted(path)
        shard_size = earlier.shard if earlier else SHARD
    first, step = _turn(shard)
    log = reporter_of(verbose)
    if engine == "ray":
        _check_engine(encoder, data, shard, backbone)
    loaded, images = opened(config, data, backbone, log)
    device = choose_device(config.device)
    if config.precision == "auto" and (earlier := ShardFolder.noted(path)):
        config = replace(config, precision=earlier.precision)
    config = with_precision(config, loaded, images, device, log)
    folder = _claimed(path, config, loaded, images, shard_size)
    own = [number for number in folder.missing() if number % step == first]
    if engine == "ray":
        opener = partial(open_on_node, config, data, path.resolve())
        made = _made_on_ray(opener, own, shard_size, config, log)
    else:
        by, workers = prepared(config, loaded, len(images), device, log), processes(config.workers)
        made = folder.compute(own, by, images, workers=workers, on_progress=log.progress)
    for name, count in made:
        log.info(f"{name}: {count} images")
    return folder.finish(images, len(own))


def open_on_node(
    config: EmbedConfig, data: Any, output: Path
) -> tuple[ShardFolder, Inference, Images]:
    """Open the same on a node of a cluster, which must see the folder that was begun."""
    begun = ShardFolder.open(output).note
    config = replace(config, precision=begun.precision)
    encoder, images = opened(config, data, None, Silent())
    folder = _claimed(output, config, encoder, images, begun.shard)
    by = prepared(config, encoder, len(images), choose_device(config.device), Silent())
    return folder, by, images


def _claimed(
    path: Path, config: EmbedConfig, encoder: Encoder, images: Images, shard_size: int
) -> ShardFolder:
    """Return the folder of the shards of images, which must be of this encoder and of these."""
    note = note_on(encoder.digest, images, shard_size, config.precision)
    if note.num_shards > MOST:
        raise UsageError(f"--shard-size {shard_size} makes more than {MOST} shards; give more")
    return ShardFolder.claim(path, note)


def _check_engine(run: Any, data: Any, shard: str, backbone: nn.Module | None) -> None:
    """Refuse what Ray cannot divide, before anything is opened."""
    here = rank_info()
    if shard or here:
        what = f"--shard {shard}" if shard else f"{here and here.world_size} processes"
        raise UsageError(f"--engine ray and {what} both divide the shards; give one of them")
    if backbone is not None or isinstance(run, Encoder) or not isinstance(data, str | Path):
        raise UsageError("--engine ray takes an encoder and images by names that all nodes know")
    if find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Data; pip install 'nearkin[ray]'")


def _made_on_ray(
    opener: Opener, shards: list[int], shard_size: int, config: EmbedConfig, log: Reporter
) -> Iterator[tuple[str, int]]:
    """Let the actors of a Ray cluster make shards; yield the name and the images of each."""
    if not shards:
        return
    workers = None if config.workers == "auto" else config.workers
    pace = Pace(len(shards), shard_size)
    for done, made in enumerate(compute_on_ray(opener, shards, config.device, workers), 1):
        log.progress(done, len(shards), "  ".join(["shards", *pace.reach(done)]))
        yield made


def _turn(shard: str) -> tuple[int, int]:
    """Return the first shard that this process makes, and the step to the next one."""
    here = rank_info()
    if not shard:
        return (0, 1) if here is None else (here.rank, here.world_size)
    if here is not None:
        raise UsageError(
            f"--shard {shard}, but {here.world_size} processes were started; leave --shard out"
        )
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {shard} is not I/N with I from 1 to N; give one such as 1/8")
    return int(match[1]) - 1, int(match[2])
