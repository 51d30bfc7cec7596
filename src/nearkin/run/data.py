"""What a run was computed from, as its folder records it: the images and the machine."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nearkin.config import EmbedConfig, TrainConfig
from nearkin.data.channels import Channels
from nearkin.data.images import Images, in_bytes
from nearkin.data.notes import lines
from nearkin.data.recognize import class_names
from nearkin.data.split import Split, duplicate_warnings, open_split
from nearkin.distributed import device_name, world_size
from nearkin.errors import CheckpointError
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter
from nearkin.tables import read_csv, replace_text, usable, write_csv
from nearkin.version import __version__


def open_logged(
    folder: RunFolder, data: Any, config: TrainConfig | EmbedConfig, log: Reporter
) -> Split:
    """Open the data of a run and hold images out; log what they are."""
    split = open_split(data, config, log.progress, partial(write_bad_files, folder.bad_files))
    split = noted_channels(folder, split)
    warnings = duplicate_warnings(split.num_exact, "exact", split.images)
    for line in [
        split.describe(),
        *lines(split.images.notes),
        *(f"warning: {w}" for w in warnings),
    ]:
        log.info(line)
    return split


def same_data(
    folder: RunFolder, split: Split, sources: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """Note in a run folder which images it has, or refuse others than those noted there.

    `sources` are the files of the method and the backbone and their SHA-256, where they are the
    user's own. Returns a warning for each that has changed since the run was started.

    Raises:
        CheckpointError: If a run is resumed on data that have changed: its order, its views and
            its memories belong to the images it was started with. The difference is named.
    """
    now = {"train": len(split.train), "test": len(split.test), "fingerprint": split.fingerprint}
    names, sizes = split.images.names, split.images.num_bytes
    if not folder.data.exists():
        rows = zip(names, sizes.tolist(), strict=True)
        write_csv(folder.images, ("path", "bytes"), rows)
        channels = split.images.channels
        noted: dict[str, Any] = {} if split.seed is None else {"seed": split.seed}
        noted |= {"channels": asdict(channels)} if channels else {}
        replace_text(folder.data, json.dumps({**now, "sources": sources or {}, **noted}) + "\n")
        return []
    with usable(folder.data, "start anew with --init-from this run"):
        noted = json.loads(folder.data.read_text(encoding="utf-8"))
        then, used = {name: noted[name] for name in now}, noted.get("sources", {})
        warnings = [
            f"warning: the source of the {kind}, {file['file']}, has changed since the run was "
            f"started (SHA-256 {used[kind]['sha256'][:12]} then, {file['sha256'][:12]} now)"
            for kind, file in (sources or {}).items()
            if kind in used and used[kind]["sha256"] != file["sha256"]
        ]
    if then == now:
        return warnings
    with usable(folder.images, "start anew with --init-from this run"):
        before = {row["path"]: int(row["bytes"]) for row in read_csv(folder.images)}
    differences = _differences(before, dict(zip(names, sizes.tolist(), strict=True)))
    raise CheckpointError(
        f"the data have changed since the run was started: {differences}; {then['train']} "
        f"images to train on and {then['test']} held out then, {now['train']} and "
        f"{now['test']} now; bring them back, or start anew with --init-from this run"
    )


def noted_channels(folder: RunFolder, split: Split) -> Split:
    """Return the same images in the range that the run was started with, if it has been."""
    if split.images.channels is None or not folder.data.exists():
        return split
    with usable(folder.data, "start anew with --init-from this run"):
        noted = json.loads(folder.data.read_text(encoding="utf-8")).get("channels")
        channels = noted and Channels(**{name: tuple(each) for name, each in noted.items()})
        return replace(split, images=replace(split.images, channels=channels))


def same_labels(folder: RunFolder, split: Split) -> None:
    """Note the images and labels of a run, or refuse others than those noted; see `same_data`."""
    digest = hashlib.sha256()
    for label in class_names(split.images):
        digest.update(in_bytes(label) + b"\0")
    labels = {"labels": {"file": "the labels", "sha256": digest.hexdigest()}}
    if same_data(folder, split, labels):
        raise CheckpointError(
            "the labels have changed since the run was started; bring them back, or start anew "
            "with --overwrite"
        )


def noted_seed(folder: RunFolder, default: int) -> int:
    """Return the seed by which a run has held images out; the default where it notes none."""
    if not folder.data.exists():
        return default
    with usable(folder.data, "start anew with --init-from this run"):
        return int(json.loads(folder.data.read_text(encoding="utf-8")).get("seed", default))


def _differences(then: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Describe which images came, went or changed, with an example of each."""
    kinds = {
        "added": now.keys() - then.keys(),
        "removed": then.keys() - now.keys(),
        "of another size": {name for name in now.keys() & then.keys() if now[name] != then[name]},
    }
    changes = [f"{len(names)} {kind} ({min(names)!r})" for kind, names in kinds.items() if names]
    return (
        ", ".join(changes) or "the same names and sizes, with other contents or held out otherwise"
    )


def write_bad_files(
    path: Path, images: Images, undecodable: Mapping[str, str] | None = None
) -> None:
    """List the unreadable images: those of the scan, and those that could not be decoded later."""
    rows: list[tuple[str, str, object]] = [(bad.name, bad.reason, bad.bytes) for bad in images.bad]
    rows += [(name, reason, "") for name, reason in sorted((undecodable or {}).items())]
    if rows:
        write_csv(path, ("path", "reason", "bytes"), rows)


def versions() -> dict[str, str]:
    """Return the versions of the programs that compute a run."""
    return {
        "nearkin": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def computed_with(seed: int) -> dict[str, str | int]:
    """Return what the numbers of a summary depend on, beside settings and data."""
    return {**versions(), "threads": torch.get_num_threads(), "seed": seed}


def machine(device: torch.device) -> dict[str, str | int]:
    """Return all that the bits of a result depend on, beside settings and data."""
    return {
        "nearkin": __version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processes": world_size(),
    }


def note_machine(path: Path, device: torch.device, step: int) -> str:
    """Record the machine that a run is computed on from a step on, in a list of changes.

    Returns what has changed since the last time, in one line; nothing if nothing has.
    """
    now = machine(device)
    before, changes = [], ""
    if path.exists():
        with usable(path, "remove it; it only notes what the run is computed with"):
            before = json.loads(path.read_text(encoding="utf-8"))
            then = before[-1]
            names = [name for name in now if then.get(name) != now[name]]
            changes = "; ".join(f"{name} {then.get(name)} became {now[name]}" for name in names)
    if changes or not before:
        entries = [*before, {"after_step": step, **now}]
        replace_text(path, json.dumps(entries, indent=2) + "\n")
    return changes
