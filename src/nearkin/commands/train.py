"""`nearkin train`: from a folder of images to a measured encoder."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nearkin.commands.evaluate import evaluate_parts, table_lines
from nearkin.config import TrainConfig, continued
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.order import Order
from nearkin.data.sheets import augmentation_sheet
from nearkin.data.split import Parts, copies, open_parts
from nearkin.distributed import broadcast_bytes, choose_device, device_name, is_first, together
from nearkin.errors import CheckpointError, UsageError
from nearkin.evaluation.encoder import CUSTOM, initialize, load, write_encoder
from nearkin.method import Method
from nearkin.networks.branch import in_chunks
from nearkin.networks.compilation import compile_branches
from nearkin.report.contact import neighbor_sheet
from nearkin.report.write import write_page
from nearkin.run.data import same_data, write_bad_files
from nearkin.run.failures import foreseen
from nearkin.run.folder import RunFolder, clear, data_name
from nearkin.run.opened import default_folder, opened
from nearkin.run.reporter import Logger, Reporter, Silent
from nearkin.run.settings.build import build_method, named_backbone, resolve, views_for
from nearkin.run.settings.describe import describe, shrunk
from nearkin.run.settings.options import checked_options, known_classes, known_labels
from nearkin.training.checkpoint import latest
from nearkin.training.fit import accompany, fit, timed
from nearkin.training.health import verdict
from nearkin.training.loop import seeded
from nearkin.training.monitor import Monitor
from nearkin.version import __version__


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: RunFolder

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def summary(self) -> Mapping[str, Any]:
        """What was measured, as in summary.json."""
        return self.folder.read_summary()


def train(
    data: Any,
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    network: nn.Module | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Train an encoder on images and measure it.

    Args:
        data: What `open_images` takes: a folder, a table, an archive, arrays, or a name.
        config: Settings; the defaults if None.
        out: The run folder; `runs/DATA-METHOD` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        network: A network of your own instead of `config.backbone`, untrained.
        reporter: Who is told how it goes.

    Returns:
        The finished run.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    if not is_first():
        return Run(follow(data, network))
    config = _asked(config or TrainConfig(), network)
    path = Path(out) if out else default_folder(data, config.method, resume=resume)
    source = Path(config.init_from).resolve()
    if overwrite and config.init_from and source.is_relative_to(path.resolve()):
        raise UsageError("--overwrite would remove the run that --init-from names; choose --out")
    with (
        opened(path, resume=resume, overwrite=overwrite) as folder,
        Logger(reporter or Silent(), folder.log) as log,
    ):
        if resume and not folder.config.exists() and latest(folder.checkpoints):
            raise CheckpointError(
                f"{path} has checkpoints but no {folder.config.name}; bring it back, or start "
                "anew in another --out"
            )
        if resume and folder.config.exists():
            config = continued(config, folder.settings()[0])
        device = choose_device(config.device)
        log.line(
            f"nearkin {__version__} | {device_name(device)} | seed {config.seed} | "
            f"writing {path.resolve()}"
        )
        parts = open_parts(data, config, log.progress, partial(write_bad_files, folder.bad_files))
        warnings = copies(parts.num_exact, "exact", parts.images)
        for line in [parts.describe(), *parts.images.notes, *(f"warning: {w}" for w in warnings)]:
            log.line(line)
        config = resolve(config, parts.train, device)
        if overwrite:
            clear(folder)
        same_data(folder, parts)
        with foreseen(int(config.batch_size)):
            _run(folder, config, parts, data, network, device, log)
        log.line(f"done   {path.resolve()}")
    return Run(folder)


def _asked(config: TrainConfig, network: nn.Module | None) -> TrainConfig:
    """What was asked for, checked as far as it can be without the data."""
    if config.max_time and config.epochs != "auto":
        raise UsageError("--epochs and --max-time both set the length; give one")
    views_of("simclr" if config.augment == "auto" else config.augment, ("strong",))
    options = checked_options(config.method, config.options)
    known_classes(config)
    backbone = CUSTOM if network is not None else config.backbone
    if config.init_from and backbone == "auto":
        backbone = str(load(config.init_from).details["backbone"])
    return replace(config, options=options, backbone=backbone)


def _run(
    folder: RunFolder,
    config: TrainConfig,
    parts: Parts,
    data: Any,
    network: nn.Module | None,
    device: torch.device,
    log: Logger,
) -> None:
    """Build everything, train to the last step, and measure."""
    with together(config.devices, follow, data, network):
        broadcast_bytes(json.dumps([asdict(config), str(folder.path)]).encode())
        method, batches = built(config, parts, device, network)
        config = timed(config, method, batches)
        if config.compile != "off":
            compile_branches(method, graphs=config.compile == "graphs")
        folder.write_settings(config, data_name(data))
        for line in [describe(config), *shrunk(config, len(parts.train))]:
            log.line(line)
        sheet = augmentation_sheet(batches, folder.plots / "augmentations.png")
        log.line(f"look at the augmentations before waiting: {sheet.resolve()}")
        monitor = Monitor(parts, config, device, log.progress)
        worked = fit(folder, config, method, batches, monitor, log)
    if worked or not folder.summary.exists():
        _finish(folder, config, method, batches, monitor, parts, network, log)
    if worked or not folder.report.exists():
        write_page(folder, parts.images)
        log.line(f"look   {folder.report.resolve()}")
    else:
        log.line("already complete")


def follow(data: Any, network: nn.Module | None = None) -> RunFolder:
    """What all processes but the first do: the same steps, each with its part of every batch."""
    with together(1, follow):
        settings, path = json.loads(broadcast_bytes(b""))
        config = TrainConfig(**settings)
        parts = open_parts(data, config)
        method, batches = built(config, parts, choose_device(config.device), network)
        accompany(timed(config, method, batches), method, batches)
    return RunFolder(Path(path))


def built(
    config: TrainConfig, parts: Parts, device: torch.device, network: nn.Module | None = None
) -> tuple[Method[Any], Batches]:
    """What a resolved configuration trains, as it is at the start, and what with."""
    with seeded(config.seed, torch.device("cpu")):
        backbone = named_backbone(config, network)
        if config.init_from:
            initialize(backbone, config.init_from)
        method = build_method(config, backbone, parts.train)
    method = method.to(device).to(memory_format=torch.channels_last)
    if config.chunk_size:
        in_chunks(method, config.chunk_size, int(config.batch_size))
    return method, Batches(
        parts.train,
        views_for(type(method), config.augment),
        image_size=int(config.image_size),
        order=Order(len(parts.train), int(config.batch_size), config.seed),
        device=device,
        workers=int(config.workers),
        cache=config.cache,
        labels=known_labels(config, parts.train),
    )


def _finish(
    folder: RunFolder,
    config: TrainConfig,
    method: Method[Any],
    batches: Batches,
    monitor: Monitor,
    parts: Parts,
    network: nn.Module | None,
    log: Logger,
) -> None:
    """Everything that follows the last step: the encoder as a file, and what it is worth."""
    details = _details(config)
    write_encoder(folder.encoder, method.backbone, details)
    seen = monitor.look(method)
    log.line(f"health {verdict(seen, type(method))}")
    encoder = load(folder.path, backbone=network)
    evaluation, embeddings = evaluate_parts(
        encoder, parts, config, network=network, device=batches.device, on_progress=log.progress
    )
    embeddings.write(folder.embeddings)
    found = {parts.train.names[row]: reason for row, reason in batches.bad.items()}
    found |= embeddings.bad
    write_bad_files(folder.bad_files, parts.images, found)
    if found:
        log.line(f"warning: {len(found)} images cannot be decoded, see bad_files.csv")
    if len(parts.test):
        plot = folder.plots / "neighbors.png"
        neighbor_sheet(embeddings.part("train"), embeddings.part("test"), plot)
    folder.write_summary({**details, "health": seen, **evaluation.to_dict()})
    log.note("\n".join(table_lines(evaluation)))


def _details(config: TrainConfig) -> dict[str, Any]:
    """Where the weights come from."""
    return {
        "method": config.method,
        "backbone": config.backbone,
        "image_size": int(config.image_size),
        "epochs": int(config.epochs),
        "seed": config.seed,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
