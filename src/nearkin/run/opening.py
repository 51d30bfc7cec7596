"""A run at work: its folder is locked, its settings are known, and its log is open."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic

import torch

from nearkin.config import DiscoverConfig, Settings, TrainConfig
from nearkin.data.augmentations import stored_views
from nearkin.distributed import check_gpus, choose_device, device_name
from nearkin.errors import CheckpointError, NearkinError, OutputError, UsageError
from nearkin.extensions import absolute, check_trusted, is_reference, load_reference, source_of
from nearkin.files import remove_partial, writing
from nearkin.methods import method_class
from nearkin.places import user_path
from nearkin.run.copies import check_destination
from nearkin.run.failures import resource_errors
from nearkin.run.folder import KINDS, STAGES, RunFolder, clear, cleared, data_name
from nearkin.run.reporter import Logger, Reporter, reporter_of
from nearkin.toml import continued
from nearkin.version import __version__

TAKEN: Final = ("encoder", "teacher", "accept")
"""Settings that name a run or a file to take something from."""
WORDS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(TAKEN, ("auto",)),
    **{"labeled": (), "labels": ("auto", "none", "folders"), "truth": ("data",), "copy_to": ()},
}
"""Settings that name something, and what is no path there, whatever file has that name."""


@dataclass(frozen=True)
class OpenRun(Generic[Settings]):
    """What every step of a run needs."""

    folder: RunFolder
    config: Settings
    device: torch.device
    log: Logger


@contextmanager
def requests_to_save_ignored() -> Iterator[None]:
    """Let SIGUSR1, unless it has a handler, do nothing in a `with` block, instead of ending it.

    A training handles it while it takes steps; there is nothing to save before and after.
    Processes that are started in the block ignore it as well.
    """
    number = getattr(signal, "SIGUSR1", None)  # Windows has none
    is_main = threading.current_thread() is threading.main_thread()
    if number is None or not is_main or signal.getsignal(number) != signal.SIG_DFL:
        yield
        return
    signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def open_run(
    folder: RunFolder,
    config: Settings,
    data: Any,
    verbose: bool | Reporter,
    *,
    resume: bool,
    overwrite: bool,
    stage: bool = False,
) -> Iterator[OpenRun[Settings]]:
    """Open a run for writing, and log what computes it. No other process can open it meanwhile.

    One that may have been begun (`resume`) goes on with the settings that it was started with.
    Another one may be there if the caller will clear it away (`overwrite`). A `stage` is a part of
    a run that has been logged already.

    Raises:
        OutputError: If the folder cannot be written, is in use, or is not empty and neither
            `resume` nor `overwrite` is set.
        ResourceError: If memory or disk runs out while it is open; see `resource_errors`.
        UsageError: If the run would replace what it takes, or goes on with other settings.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one")
    if overwrite:
        _check_spared(folder, config, data)
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        if not folder.marker.exists():  # which would be left there, and hide a folder of images
            _check_free(folder, resume=resume, overwrite=overwrite)
    with requests_to_save_ignored(), folder.locked(), resource_errors(resumes=True):
        _check_free(folder, resume=resume, overwrite=overwrite)
        _prepare(folder)
        with Logger(reporter_of(verbose), folder.log) as log, _emptied_if_refused(folder):
            if resume:
                config = resumed_settings(folder, config)
            device = choose_device(config.device)
            check_gpus(device, getattr(config, "devices", 1))
            if not stage:
                log.info(
                    f"nearkin {__version__} | {device_name(device)} | seed {config.seed} | "
                    f"writing {folder.path.resolve()}"
                )
            yield OpenRun(folder, config, device, log)
            if not stage:
                log.info(f"done   {folder.path.resolve()}")


def _check_spared(folder: RunFolder, config: Settings, data: Any) -> None:
    """Refuse to remove files in the folder that the run is to read."""
    taken = [getattr(config, name, "") for name in TAKEN]
    read = [data, *(getattr(config, name, "") for name in ("labeled", "labels", "truth"))]
    files = {source: split_source(source)[1] for source in taken}
    files |= {source: str(source) for source in read if isinstance(source, str | Path)}
    removed = [file.resolve() for file in cleared(folder)]
    for source, file in files.items():
        place = user_path(file).resolve()
        inside = place.is_relative_to(folder.path.resolve())
        if source and inside and any(each.is_relative_to(place) for each in removed):
            raise UsageError(f"--overwrite would remove {source}; choose another -o")


@contextmanager
def _emptied_if_refused(folder: RunFolder) -> Iterator[None]:
    """Let the corrected command have the folder of a new run that is refused before it begins.

    What took time stays: with the features of a teacher, --resume goes on.
    """
    was_empty = not folder.is_occupied
    try:
        yield
    except NearkinError:
        if was_empty and not (folder.config.exists() or folder.teacher_features.exists()):
            clear(folder)
        raise


def _check_free(folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    path = folder.path
    if folder.is_occupied and not (resume or overwrite):
        raise OutputError(
            f"{path} is not empty; continue it with --resume, or replace it with --overwrite"
        )
    begun = any(each.exists() for each in (folder.marker, folder.config, path / STAGES))
    is_run = folder.has_noted_data or (begun and not overwrite)
    if folder.is_occupied and not is_run:
        option = "--overwrite" if overwrite else "--resume"
        raise OutputError(
            f"{path} is no run, so {option} spares it; empty it or choose another -o"
        )


def _prepare(folder: RunFolder) -> None:
    """Remove what killed processes have left in a locked folder."""
    for each in {*vars(folder).values(), *folder.path.glob(f"{STAGES}/**/")}:
        remove_partial(each)  # finds nothing in what is a file
    folder.checkpoints.mkdir(exist_ok=True)


def kept_copy(copy: Path, source: str, *, resume: bool) -> str | Path:
    """Return the encoder that a run takes: a resumed one's own copy of it, if it is there."""
    return copy if resume and copy.exists() else source


def check_copies(folder: RunFolder, destination: str, data: Any, *, resume: bool) -> None:
    """Refuse a folder for copies of the images that is not new, unless they are of this run.

    A resumed run goes on with the folder that it was given before, if none is named.
    """
    known = resume and folder.config.exists()
    given = getattr(folder.any_settings()[0], "copy_to", "") if known else ""
    if not (destination or given):
        return
    place = Path(destination or given).absolute()
    if place in {each.absolute() for each in vars(folder).values()}:
        raise UsageError(f"--copy-to {place} is of the run itself; give a folder of its own")
    done = given and place == Path(given).absolute() and folder.summary.exists()
    if not (done or (known and place == folder.copied_to)):
        check_destination(place, [data_name(data)])


def split_source(source: str) -> tuple[str, str]:
    """Split `ARCHITECTURE@FILE` and `timm:local-dir:PATH` before the path; others are all path.

    So is what exists, whatever its name has.
    """
    if Path(source).exists():
        return "", source
    for mark in ("@", "local-dir:"):
        head, separator, file = source.partition(mark)
        if separator:
            return head + separator, file
    return "", source


def resumed_settings(folder: RunFolder, config: Settings) -> Settings:
    """Return the settings a run goes on with: those it was started with, where `config` agrees."""
    if folder.config.exists():
        if KINDS[folder.kind] is not type(config):
            raise UsageError(f"{folder.path} is a {folder.kind}; choose another -o")
        stored, _ = folder.settings_of(type(config))
        stored = replace(stored, **_absolute_paths(stored))
        config = replace(config, **_named_again(config, stored))
        goes_on = continued(config, stored, folder.planned_for)
        own = vars(config)
        taken = {name: value for name, value in vars(goes_on).items() if value != own[name]}
        check_trusted(taken, folder.config, config.trust_remote_code)
        return goes_on
    if any(folder.checkpoints.glob("ckpt-*.pt")):
        raise CheckpointError(
            f"{folder.path} has checkpoints but no {folder.config.name}; bring it back, or start "
            "anew in another -o"
        )
    return config


def self_contained(config: Settings) -> Settings:
    """Make paths absolute, those of Python files too; an augmentation from a file is its views."""
    changed = _absolute_paths(config)
    if isinstance(config, TrainConfig | DiscoverConfig) and config.method != "auto":
        method_class(config.method)
        changed["method"] = absolute(config.method)
    changed["augment"] = stored_views(config.augment)
    if isinstance(config, TrainConfig):
        changed["backbone"] = absolute(config.backbone)
    return replace(config, **changed)


def _absolute_paths(config: Settings) -> dict[str, Any]:
    """Return the settings that name runs, encoders, labels and copies, as they hold anywhere."""
    named = {name: getattr(config, name, "") for name in WORDS}
    return {
        name: _absolute_path(name, value)
        for name, value in named.items()
        if value and value not in WORDS[name]
    }


def _absolute_path(name: str, value: str) -> str:
    if name == "copy_to":  # which is refused if it is a link itself
        place = Path(value)
        return str(Path(os.path.realpath(place.parent)) / place.name)
    if name not in TAKEN:
        return data_name(value)
    head, file = split_source(value)
    return head + str(Path(file).resolve()) if file and Path(file).exists() else value


def _named_again(config: Settings, stored: Settings) -> dict[str, Any]:
    """Return the sources of a run that `config` names by relative paths; they may be gone."""
    again = dict[str, Any]()
    for name in TAKEN:
        source, theirs = getattr(config, name, ""), getattr(stored, name, "")
        head, file = split_source(source)
        if source and theirs in (os.path.realpath(source), head + os.path.realpath(file)):
            again[name] = theirs
    return again


def sources_of(config: TrainConfig) -> dict[str, dict[str, str]]:
    """Files that define the method and the backbone, where they are the user's own."""
    used = {"method": method_class(config.method)}
    if is_reference(config.backbone):
        used["backbone"] = load_reference(config.backbone, "backbone")
    return {kind: file for kind, thing in used.items() if (file := source_of(thing))}
