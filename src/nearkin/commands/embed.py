"""`nearkin embed ENCODER DATA`: features by an encoder as it is, alone or in a run folder."""

import re
import shutil
from collections.abc import Iterator, Mapping
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
from nearkin.commands.run import Run
from nearkin.commands.settings import EncoderLike, PathLike, given, name_of
from nearkin.config import TRUST, EmbedConfig, defaults
from nearkin.data.augmentations import stored_views, views_of
from nearkin.data.images import Images
from nearkin.data.notes import lines, plain
from nearkin.data.opening import column_of, open_images
from nearkin.data.split import Split
from nearkin.distributed import available_cpus, choose_device, cpus_per_process
from nearkin.distributed.ranks import rank_info
from nearkin.encoders.encoder import Encoder, is_own, load, write_encoder
from nearkin.encoders.inference import Inference, choose_precision, inference
from nearkin.errors import UsageError
from nearkin.evaluation.column import check_values, remove_column
from nearkin.evaluation.embeddings import Embeddings, embed_images
from nearkin.evaluation.evaluate import evaluate_split
from nearkin.evaluation.layout import EarlyMap
from nearkin.evaluation.parts import MOST, PartFolder, ShardsWritten, note_on
from nearkin.evaluation.ray_parts import Opener, compute_on_ray
from nearkin.evaluation.table import are_vectors
from nearkin.evaluation.vectors import FORMATS, check_format, write_embeddings
from nearkin.files import check_new
from nearkin.methods import METHODS
from nearkin.pace import Pace, under
from nearkin.report.pages import write_page
from nearkin.run.auto import augment_for
from nearkin.run.data import hold_out, note_data, note_undecodable, open_logged
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, clear, data_name, run_folder
from nearkin.run.opening import OpenRun, kept_copy, open_run, self_contained, split_source
from nearkin.run.reporter import Reporter, Silent, reporter_of
from nearkin.schema import option
from nearkin.training.health import health

RUN_SHARD: Final = {"cpu": 1_024, "cuda": 16_384}
"""Images whose features a killed run loses at most, by device: about a minute's on a CPU."""
OTHER_FORMATS: Final = (".csv", ".tsv", ".json", ".txt", ".h5", ".pt", ".pkl", ".feather")
"""Endings of files that features are not written to, and no run folder has."""
USED_ALONE: Final = (
    "encoder", "allow_partial", TRUST, "labels", "ignore", "image_size", "device", "precision",
    "batch_size", "workers", "report",
)  # fmt: skip
"""Settings that have an effect without a run folder."""


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
        Unit vectors, a row per readable image, in the order of the data. With `ignore`, LEACE
        removes that column from them, fitted to those that are not held out, within classes where
        they have labels; what kNN predicts of it for the others before and after is logged.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(EmbedConfig, config, {**settings, "encoder": name_of(encoder)})
    _check_alone(config, resume=False)
    log, path = reporter_of(verbose), None if output is None else Path(output)
    if path is not None:
        check_format(path)
        for file in (path, path.with_suffix(".csv")) if path.suffix == ".npy" else (path,):
            check_new(file, overwrite=overwrite, reads=[data, config.labels])
    embeddings = _features(config, data, backbone, log)
    if path is not None:
        write_embeddings(path, embeddings, embeddings.encoder)
        log.info(f"features {path.resolve()}")
    return embeddings


def embed_files(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike | None = None,
    shard_size: int | None = None,
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
        _check_alone(config, resume=resume, overwrite=overwrite)
        how |= {"shard_size": shard_size, "shard": shard, "engine": engine}
        return embed_shards(encoder, data, config, output=output, **how)
    if output is None or Path(output).suffix not in (*FORMATS, *OTHER_FORMATS):
        again: dict[str, Any] = {"resume": resume, "overwrite": overwrite}
        return embed_run(encoder, data, config, output=output, **again, **how)
    _check_alone(config, resume=resume)
    return embed(encoder, data, config, output=output, overwrite=overwrite, **how)


def makes_shards(
    output: PathLike | None, shard_size: int | None, shard: str, engine: Engine
) -> bool:
    """Whether `embed` makes a folder of shards, or goes on with one."""
    asked = shard_size is not None or bool(shard) or engine != "local"
    return asked or (output is not None and Path(output).is_dir() and are_vectors(Path(output)))


def _check_alone(config: EmbedConfig, *, resume: bool, overwrite: bool = False) -> None:
    """Refuse settings that have no effect without a run folder."""
    unused = [
        option(name)
        for name, value in defaults(EmbedConfig).items()
        if name not in USED_ALONE and getattr(config, name) != value
    ]
    unused += ["--resume"] * resume + ["--overwrite"] * overwrite
    if unused:
        raise UsageError(f"{unused[0]} is of run folders, and here are features alone; omit it")


def _check_in_memory(config: EmbedConfig) -> None:
    """Refuse to remove a column, which takes the features of all images at once, without a file.

    A run folder would have features that its encoder does not make.
    """
    if config.ignore:
        raise UsageError(
            f"--ignore {config.ignore} removes a column from the features of one file; give -o "
            "FILE.parquet, without shards. `nearkin evaluate --ignore` measures a run"
        )


# ---------------------------------------------------------------- features alone


def _features(
    config: EmbedConfig, data: Any, network: nn.Module | None, log: Reporter
) -> Embeddings:
    """Compute the unit features of all images in memory, without the column to ignore."""
    encoder, images = _opened(config, data, network, log)
    if not config.ignore:
        return _unit_features(config, encoder, images, log)
    split = hold_out(images, config, log.progress)
    values = column_of(config.ignore, split.images, config.labels, data)
    check_values(config.ignore, values[split.train_rows], values[split.test_rows])
    embeddings = _unit_features(config, encoder, split.images, log)
    of_each = values[embeddings.rows], split.held_out[embeddings.rows]
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
    return replace(embeddings.normalized(), encoder=encoder.digest)


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
    return embed_images(by, images, workers=workers, on_progress=on_progress)


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


def _opened(
    config: EmbedConfig, data: Any, network: nn.Module | None, log: Reporter
) -> tuple[Encoder, Images]:
    """Open the encoder and the images, and log what they are."""
    encoder = _loaded(config.encoder, config, network)
    for line in encoder.lines():
        log.info(line)
    images = open_images(data, labels=config.labels, on_progress=log.progress)
    for line in lines(images.notes):
        log.info(line)
    return encoder, images


def _loaded(source: str | Path, config: EmbedConfig, network: nn.Module | None) -> Encoder:
    return load(
        source,
        backbone=network,
        image_size=config.image_size,
        allow_partial=config.allow_partial,
        trust_remote_code=config.trust_remote_code,
    )


# ---------------------------------------------------------------- a folder of shards


def embed_shards(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike,
    shard_size: int | None = None,
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
    _check_alone(config, resume=False)
    _check_in_memory(config)
    path = Path(output)
    shard_size = PartFolder.shard_size(path) if shard_size is None else shard_size
    if shard_size < 1:
        raise UsageError(f"--shard-size {shard_size} is less than one image; give at least 1")
    first, step = _turn(shard)
    log = reporter_of(verbose)
    if engine == "ray":
        _check_engine(encoder, data, shard, backbone)
    folder, config, loaded, images = _opened_parts(config, data, path, shard_size, backbone, log)
    own = [number for number in folder.missing() if number % step == first]
    if engine == "ray":
        opener = partial(open_on_node, config, data, path.resolve(), shard_size)
        made = _made_on_ray(opener, own, shard_size, config, log)
    else:
        by = prepared(config, loaded, len(images), choose_device(config.device), log)
        made = folder.compute(own, by, images, workers=_workers(config), on_progress=log.progress)
    for name, count in made:
        log.info(f"{name}: {count} images")
    return folder.finish(images, len(own))


def _opened_parts(
    config: EmbedConfig,
    data: Any,
    output: Path,
    shard_size: int,
    network: nn.Module | None,
    log: Reporter,
) -> tuple[PartFolder, EmbedConfig, Encoder, Images]:
    """Open an encoder, images, and the folder of their parts, which must be of the same.

    The settings are returned with the precision of the folder.
    """
    loaded, images = _opened(config, data, network, log)
    if config.precision == "auto":
        config = replace(config, precision=PartFolder.precision(output))
    where, workers = choose_device(config.device), _workers(config)
    config = with_precision(config, loaded, images, where, workers, log)
    note = note_on(loaded.digest, images, shard_size, config.precision)
    if note.num_parts > MOST:
        raise UsageError(f"--shard-size {shard_size} makes more than {MOST} shards; give more")
    return PartFolder.claim(output, note), config, loaded, images


def _workers(config: EmbedConfig) -> int:
    return cpus_per_process() if config.workers == "auto" else config.workers


def open_on_node(
    config: EmbedConfig, data: Any, output: Path, shard_size: int
) -> tuple[PartFolder, Inference, Images]:
    """Open the same on a node of a cluster, which must see the folder that was begun."""
    config = replace(config, precision=PartFolder.open(output).note.precision)
    log = Silent()
    encoder, images = _opened(config, data, None, log)
    note = note_on(encoder.digest, images, shard_size, config.precision)
    by = prepared(config, encoder, len(images), choose_device(config.device), log)
    return PartFolder.claim(output, note), by, images


def _check_engine(run: Any, data: Any, shard: str, backbone: nn.Module | None) -> None:
    """Refuse what Ray cannot divide, before anything is opened."""
    here = rank_info()
    if shard or (here is not None and here.world_size > 1):
        what = f"--shard {shard}" if shard else f"{here and here.world_size} processes"
        raise UsageError(f"--engine ray and {what} both divide the shards; give one of them")
    if backbone is not None or isinstance(run, Encoder) or not isinstance(data, str | Path):
        raise UsageError("--engine ray takes an encoder and images by names that all nodes know")
    if find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Data; pip install 'nearkin[ray]'")


def _made_on_ray(
    opener: Opener, parts: list[int], shard: int, config: EmbedConfig, log: Reporter
) -> Iterator[tuple[str, int]]:
    """Let the actors of a Ray cluster make parts; yield the name and the images of each."""
    if not parts:
        return
    workers = None if config.workers == "auto" else config.workers
    pace = Pace(len(parts), shard)
    for done, made in enumerate(compute_on_ray(opener, parts, config.device, workers), 1):
        log.progress(done, len(parts), "  ".join(["parts", *pace.reach(done)]))
        yield made


def _turn(shard: str) -> tuple[int, int]:
    """Return the first shard that this process makes, and the step to the next one."""
    here = rank_info()
    if not shard:
        return (0, 1) if here is None else (here.rank, here.world_size)
    if here is not None and here.world_size > 1:
        raise UsageError(
            f"--shard {shard}, but {here.world_size} processes were started; leave --shard out"
        )
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {shard} is not I/N with I from 1 to N; give one such as 1/8")
    return int(match[1]) - 1, int(match[2])


# ---------------------------------------------------------------- a run folder


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
    _check_in_memory(config)
    config = self_contained(config)
    folder = run_folder(output, data, source_name(config.encoder), again=resume or overwrite)
    # First of all: an encoder that cannot be loaded leaves no folder behind.
    source = kept_copy(folder.encoder, config.encoder, resume=resume)
    frozen = _loaded(source, config, backbone)
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
    """Remove the parts, which are in one file by now, and folders that only trainings fill."""
    shutil.rmtree(folder.parts, ignore_errors=True)
    for empty in (folder.parts.parent, folder.checkpoints):
        with suppress(OSError):
            empty.rmdir()


def _measure(
    run: OpenRun[EmbedConfig],
    encoder: Encoder,
    split: Split,
    early: EarlyMap,
) -> None:
    """Write the embeddings and the metrics of an encoder, from parts that survive a kill."""
    folder, config, device, log = run.folder, run.config, run.device, run.log
    features = {"encoder": _in_parts(run, encoder, split.images)}
    bad = features["encoder"].bad
    notes = note_undecodable(folder, split.images, bad, log, config.max_bad)
    every = Extraction(encoder, split.images, UNTOUCHED, device, int(config.workers), log)
    if config.precision == "fp32":  # as a classification would compute them
        every.keep(features["encoder"])

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
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "health": health(embeddings.tensor),
        "notes": plain((*split.images.notes, *notes)),
    }
    # Last: a run without a summary is evaluated again.
    folder.write_summary({**summary, **evaluation.to_dict()})
    log.debug("\n".join(evaluation.lines()))


def _in_parts(run: OpenRun[EmbedConfig], encoder: Encoder, images: Images) -> Embeddings:
    """Compute the features of all images, continuing with the parts that are there."""
    run.folder.parts.mkdir(parents=True, exist_ok=True)
    config, shard = run.config, _by_device(RUN_SHARD, run.device)
    note = note_on(encoder.digest, images, shard, config.precision)
    parts = PartFolder.claim(run.folder.parts / "encoder", note)
    missing = parts.missing()
    if len(missing) < note.num_parts:
        done = note.num_parts - len(missing)
        run.log.info(f"resuming after {done} of {note.num_parts} parts of the encoder's")
    by = prepared(config, encoder, len(images), run.device, run.log)
    for part, count in parts.compute(
        missing, by, images, workers=int(config.workers),
        normalized=False, on_progress=under("encoder", run.log.progress),
    ):  # fmt: skip
        run.log.debug(f"encoder: {part}, {count} images")
    return parts.read(images)


def _by_device(numbers: Mapping[str, int], device: torch.device) -> int:
    return numbers.get(device.type, numbers["cuda"])


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
