"""`nearkin embed ENCODER DATA`: the run folder of an encoder that is used as it is."""

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from nearkin.choices import Engine
from nearkin.commands.embed import embed_parts, embed_table, is_folder, load_source
from nearkin.commands.settings import given, stored
from nearkin.commands.train import Run
from nearkin.commands.vectors import images_of
from nearkin.config import TRUST, EmbedConfig, defaults
from nearkin.data.augmentations import stored_views, views_of
from nearkin.data.images import Images
from nearkin.data.notes import plain
from nearkin.data.split import Split
from nearkin.distributed import cpus_per_process
from nearkin.encoders.encoder import Encoder, is_own, load, write_encoder
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import evaluate_split
from nearkin.evaluation.table import (
    PartFolder,
    PartsWritten,
    note_on,
    read_embeddings,
    write_embeddings,
)
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
from nearkin.schema import option
from nearkin.training.health import health

SHARD: Final = {"cpu": 1_024, "cuda": 16_384}
"""Images whose features a kill costs at most, by device: about a minute's on a CPU."""


def embed(
    encoder: str | Path,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    out: str | Path | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    backbone: nn.Module | None = None,
    reporter: Reporter | None = None,
    **settings: Any,
) -> Embeddings:
    """Compute the features of images by an encoder as it is, without training.

    Without `out` they are only computed, and written to `output`; the settings of an evaluation
    have no effect then, and are refused. `embed_parts` needs memory for a part of them only.

    Args:
        encoder: A run folder, a file, or a name such as `dinov2-small`; what `load` takes.
        data: What `nearkin.train` takes.
        config: The settings, of which `settings` replaces some.
        out: A run folder to make: embeddings, metrics beside their baselines, and the report.
        output: A file to write the features to: .parquet, .npz, or .npy with a .csv beside it.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`, or the file `output`.
        backbone: The encoder's network, if it was given one from Python; untrained.
        reporter: Receives log lines and progress; None is silent.
        settings: Fields of `nearkin.EmbedConfig`.

    Returns:
        Unit vectors, a row per readable image, in the order of the data.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(EmbedConfig, config, {**settings, "encoder": stored("encoder", encoder)})
    if out is None:
        only_of_folders(config, resume=resume)
        return embed_table(
            encoder,
            data,
            output=output,
            overwrite=overwrite,
            backbone=backbone,
            reporter=reporter,
            **_of_tables(config),
        )
    if output is not None:
        raise UsageError("out makes a run folder and output only a table; give one")
    run = embed_run(
        data,
        config,
        out=out,
        resume=resume,
        overwrite=overwrite,
        network=backbone,
        reporter=reporter,
    )
    return read_embeddings(run.folder.embeddings, images_of(run.folder, data))


@dataclass(frozen=True)
class TableWritten:
    """A file of features."""

    path: Path
    images: int
    features: int
    bad: Mapping[str, str]  # Images without features, and why

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        """Lines of text."""
        left_out = [f"left out {name!r}: {reason}" for name, reason in self.bad.items()]
        return [f"{self.images} images, {self.features} features each: {self.path}", *left_out]


def embed_files(
    encoder: str | Path,
    data: Any,
    config: EmbedConfig,
    *,
    out: str | Path | None = None,
    output: str | None = None,
    shard: int | None = None,
    part: str = "",
    engine: Engine = "local",
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Run | TableWritten | PartsWritten:
    """Embed images by an encoder as it is, without training, and measure it.

    Makes a run folder, which other commands take like that of a training. With -o, only the
    features are written. Into a folder, they are written in parts, with only one part in memory:
    what is there is not made again, and processes that torchrun or srun has started divide the
    parts.

    Args:
        encoder: A run folder, an encoder.safetensors, or a name: dinov2-small, timm:NAME,
            torchvision:NAME, a folder of Hugging Face, or ARCHITECTURE@FILE.
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`), or
            a name such as digits.
        config: The settings.
        out: The run folder; runs/DATA-ENCODER if not given.
        output: Only a table of features instead: a .parquet, .npz or .npy, or a folder of parts,
            whose name ends in /.
        shard: Images of a part; 65,536 if not given.
        part: I/N, such as 1/8: make the I-th of N shares of the parts, as a job of an array.
        engine: ray: let the actors of a Ray cluster make the parts.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder, or the file.
        reporter: Receives log lines and progress.
    """
    config = replace(config, encoder=str(encoder))
    parts = {"part": part, "engine": engine, **({"shard": shard} if shard is not None else {})}
    has_parts = parts != {"part": "", "engine": "local"}
    if output is None:
        if has_parts:
            raise UsageError(
                "--shard, --part and --engine are of a folder of parts; give one with -o FOLDER/"
            )
        return embed_run(
            data, config, out=out, resume=resume, overwrite=overwrite, reporter=reporter
        )
    if out is not None:
        raise UsageError("--out makes a run folder and -o only a table; give one")
    only_of_folders(config, resume=resume, overwrite=overwrite and is_folder(output))
    if is_folder(output):
        more: Any = {**_of_tables(config), **parts}
        return embed_parts(encoder, data, output, reporter=reporter, **more)
    if has_parts:
        raise UsageError(f"{output} is one file, without parts; give a folder, {output}/")
    embeddings = embed_table(
        encoder,
        data,
        output=output,
        overwrite=overwrite,
        reporter=reporter,
        **_of_tables(config),
    )
    count, dim = embeddings.vectors.shape
    return TableWritten(Path(output).resolve(), count, dim, dict(embeddings.bad))


def _of_tables(config: EmbedConfig) -> dict[str, Any]:
    """The settings that matter where only features are written."""
    names = ("labels", "image_size", "allow_partial", TRUST, "device", "workers")
    return {name: getattr(config, name) for name in names}


def embed_run(
    data: Any,
    config: EmbedConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    network: nn.Module | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Embed images by an encoder that is not trained, and measure it, in a run folder.

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
    default = defaults(EmbedConfig)
    unused = [
        option(name)
        for name in default
        if name not in used and getattr(config, name) != default[name]
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


def _in_parts(run: OpenRun[EmbedConfig], encoder: Encoder, images: Images) -> Embeddings:
    """Compute the features of all images, continuing with the parts that are there."""
    run.folder.parts.mkdir(parents=True, exist_ok=True)
    note = note_on(encoder.digest, images, _by_device(SHARD, run.device))
    parts = PartFolder.claim(run.folder.parts / "encoder", note)
    missing = parts.missing()
    if len(missing) < note.num_parts:
        done = note.num_parts - len(missing)
        run.log.info(f"resuming after {done} of {note.num_parts} parts of the encoder's")
    for part, count in parts.compute(
        missing, encoder, images, device=run.device, workers=int(run.config.workers),
        normalized=False, on_progress=under("encoder", run.log.progress),
    ):  # fmt: skip
        run.log.debug(f"encoder: {part}, {count} images")
    return parts.read(images)


def _by_device(numbers: Mapping[str, int], device: torch.device) -> int:
    return numbers.get(device.type, numbers["cuda"])


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
