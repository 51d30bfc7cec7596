"""A run at work: its folder is locked, its settings are known, and its log is open."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch

from nearkin.config import Settings
from nearkin.data.copies import check_destination
from nearkin.distributed import choose_device, device_name
from nearkin.errors import CheckpointError, UsageError
from nearkin.extensions import check_trusted
from nearkin.run.folder import KINDS, RunFolder, data_name, opened
from nearkin.run.reporter import Logger, Reporter, Silent
from nearkin.toml import continued
from nearkin.version import __version__


@dataclass(frozen=True)
class OpenRun(Generic[Settings]):
    """What every step of a run needs."""

    folder: RunFolder
    config: Settings
    device: torch.device
    log: Logger


@contextmanager
def open_run(
    folder: RunFolder,
    config: Settings,
    *,
    resume: bool,
    overwrite: bool,
    encoders: Iterable[str],
    reporter: Reporter | None,
) -> Iterator[OpenRun[Settings]]:
    """Open a run for writing, and log what computes it; see `opened`.

    Raises:
        UsageError: If it would replace one of the `encoders` that it takes from elsewhere, or
            goes on with other settings.
    """
    for source in encoders:
        file = Path(split_source(source)[1])
        inside = file.exists() and file.resolve().is_relative_to(folder.path.resolve())
        if overwrite and source and inside:
            raise UsageError(f"--overwrite would remove {source}; choose another --out")
    with (
        opened(folder.path, resume=resume, overwrite=overwrite),
        Logger(reporter or Silent(), folder.log) as log,
    ):
        if resume:
            config = resumed_settings(folder, config)
        device = choose_device(config.device)
        log.info(
            f"nearkin {__version__} | {device_name(device)} | seed {config.seed} | "
            f"writing {folder.path.resolve()}"
        )
        yield OpenRun(folder, config, device, log)
        log.info(f"done   {folder.path.resolve()}")


def kept_copy(copy: Path, source: str, *, resume: bool) -> str | Path:
    """Return the encoder that a run takes: a resumed one's own copy of it, if it is there."""
    return copy if resume and copy.exists() else source


def check_copies(folder: RunFolder, destination: str, data: Any, *, resume: bool) -> None:
    """Refuse a folder for copies of the images that is not new, unless all is done."""
    if destination and not (resume and folder.summary.exists()):
        check_destination(Path(destination), [data_name(data)])


def split_source(source: str) -> tuple[str, str]:
    """Split `ARCHITECTURE@FILE` and `timm:local-dir:PATH` before the path; others are all path."""
    for mark in ("@", "local-dir:"):
        head, separator, file = source.rpartition(mark)
        if separator:
            return head + separator, file
    return "", source


def resumed_settings(folder: RunFolder, config: Settings) -> Settings:
    """Return the settings a run goes on with: those it was started with, where `config` agrees.

    Raises:
        CheckpointError: If there are checkpoints, but no settings.
        UsageError: If `config` differs from the stored settings, is of another kind of run, or if
            only the stored ones name code, which is not trusted.
    """
    if folder.config.exists():
        if KINDS[folder.kind] is not type(config):
            raise UsageError(f"{folder.path} is a {folder.kind}; choose another --out")
        goes_on = continued(config, folder.settings_of(type(config))[0])
        own = vars(config)
        taken = {name: value for name, value in vars(goes_on).items() if value != own[name]}
        check_trusted(taken, folder.config, config.trust_remote_code)
        return goes_on
    if any(folder.checkpoints.glob("ckpt-*.pt")):
        raise CheckpointError(
            f"{folder.path} has checkpoints but no {folder.config.name}; bring it back, or start "
            "anew in another --out"
        )
    return config
