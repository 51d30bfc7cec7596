"""`nearkin train`: from a folder of pictures to a measured encoder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nearkin import __version__
from nearkin.config import TrainConfig, continued
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.order import Order
from nearkin.distributed import choose_device, device_name, native_precision
from nearkin.method import Method
from nearkin.runs.build import build_method, checked_options, named_backbone, resolve, shrunk
from nearkin.runs.data import Parts, open_parts, same_data, write_bad_files
from nearkin.runs.encoder import load, write_encoder
from nearkin.runs.evaluate import evaluate_parts, table_lines
from nearkin.runs.fit import PRECISIONS, epochs_within, fit, seconds_per_epoch
from nearkin.runs.folder import RunFolder, data_name, default_folder, opened
from nearkin.runs.monitor import Monitor
from nearkin.runs.pictures import augmentation_sheet, curves, neighbor_sheet
from nearkin.runs.reporter import Logged, Reporter, Silent
from nearkin.training.health import verdict


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
    init_from: str | Path | None = None,
    network: nn.Module | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Train an encoder on pictures and measure it.

    Args:
        data: What `open_images` takes: a folder, a table, an archive, arrays, or a name.
        config: Settings; the defaults if None.
        out: The run folder; `runs/DATA-METHOD` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        init_from: A run whose encoder's weights to start from.
        network: A network of your own instead of `config.backbone`, untrained.
        reporter: Who is told how it goes.

    Returns:
        The finished run.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config = config or TrainConfig()
    path = Path(out) if out is not None else default_folder(data, config.method)
    with (
        opened(path, resume=resume, overwrite=overwrite) as folder,
        Logged(reporter or Silent(), folder.log) as told,
    ):
        device = choose_device(config.device)
        told.line(
            f"nearkin {__version__} | {device_name(device)} | seed {config.seed} | "
            f"writing {path.resolve()}"
        )
        parts = open_parts(data, config)
        for line in [parts.describe(), *parts.images.notes]:
            told.line(line)
        config = _settled(config, folder, parts, device, resume)
        method = _method(config, network, init_from, parts, device)
        batches = _batches(config, parts, method, device)
        if config.max_time:
            pace = seconds_per_epoch(config, method, batches)
            epochs = epochs_within(config.max_time, pace)
            config = replace(config, epochs=epochs, max_time="")
        same_data(folder.data, parts.images)
        folder.write_settings(config, data_name(data))
        for line in [describe(config), *shrunk(config)]:
            told.line(line)
        sheet = augmentation_sheet(batches, folder.plots / "augmentations.png")
        told.line(f"look at the augmentations before waiting: {sheet.resolve()}")
        monitor = Monitor(parts, config, device)
        worked = fit(folder, config, method, batches, monitor, told)
        if worked or not folder.summary.exists():
            _finish(folder, config, method, batches, monitor, parts, network, told)
        else:
            told.line("already complete")
        told.line(f"done   {path.resolve()}")
    return Run(folder)


def _finish(
    folder: RunFolder,
    config: TrainConfig,
    method: Method[Any],
    batches: Batches,
    monitor: Monitor,
    parts: Parts,
    network: nn.Module | None,
    told: Logged,
) -> None:
    """Everything that follows the last step: the encoder as a file, and what it is worth."""
    details = _details(config, network)
    write_encoder(folder.encoder, method.backbone, details)
    found = {parts.train.names[row]: reason for row, reason in batches.bad.items()}
    write_bad_files(folder.bad_files, parts.images, found)
    curves(folder.metrics, folder.plots / "curves.png")
    seen = monitor.look(method)
    told.line(f"health {verdict(seen)}")
    encoder = load(folder.path, backbone=network)
    evaluation, features = evaluate_parts(
        encoder, parts, config, network=network, device=batches.device
    )
    parts.table(features).write(folder.embeddings)
    if len(parts.test):
        plot = folder.plots / "neighbors.png"
        neighbor_sheet(parts.train, parts.test, features, int(config.image_size), plot)
    folder.write_summary({**details, "health": seen, **evaluation.to_dict()})
    told.note("\n".join(table_lines(evaluation)))


def _settled(
    config: TrainConfig, folder: RunFolder, parts: Parts, device: torch.device, resume: bool
) -> TrainConfig:
    """The settings of a new run, or those of the run that is continued."""
    config = replace(config, options=checked_options(config.method, config.options))
    if resume and folder.config.exists():
        return continued(config, folder.settings()[0])
    return with_precision(resolve(config, parts.train, device), device)


def with_precision(config: TrainConfig, device: torch.device) -> TrainConfig:
    """The settings with `precision` replaced by what the device computes natively."""
    if config.precision != "auto":
        return config
    native = native_precision(device)
    return replace(config, precision="bf16" if native == PRECISIONS["bf16"] else "fp32")


def _method(
    config: TrainConfig,
    network: nn.Module | None,
    init_from: str | Path | None,
    parts: Parts,
    device: torch.device,
) -> Method[Any]:
    torch.manual_seed(config.seed)
    backbone = named_backbone(config, network)
    if init_from is not None:
        backbone.load_state_dict(load(init_from, backbone=network).backbone.state_dict())
    method = build_method(config, backbone, len(parts.train))
    return method.to(device).to(memory_format=torch.channels_last)


def _batches(
    config: TrainConfig, parts: Parts, method: Method[Any], device: torch.device
) -> Batches:
    return Batches(
        parts.train,
        views_of(config.augment, method.num_views),
        image_size=int(config.image_size),
        order=Order(len(parts.train), int(config.batch_size), config.seed),
        device=device,
        workers=int(config.workers),
    )


def describe(config: TrainConfig) -> str:
    """The recipe in one line."""
    options = ", ".join(f"{name} {value}" for name, value in config.options.items())
    return (
        f"recipe {config.method} ({options}), {config.backbone}, {config.image_size} px, "
        f"augmentation {config.augment}, batch {config.batch_size} (global), {config.optimizer} "
        f"lr {config.lr:.4g}, weight decay {config.weight_decay:g}, {config.epochs} epochs, "
        f"{config.precision}; all of it in config.toml"
    )


def _details(config: TrainConfig, network: nn.Module | None) -> dict[str, Any]:
    """Where the weights come from."""
    return {
        "method": config.method,
        "backbone": "" if network is not None else config.backbone,
        "image_size": int(config.image_size),
        "epochs": int(config.epochs),
        "seed": config.seed,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
