"""What a run was computed from, as its folder records it: the images and the machine."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from nearkin.config import EmbedConfig, TrainConfig
from nearkin.data.channels import Channels
from nearkin.data.images import Images, in_bytes
from nearkin.data.notes import lines
from nearkin.data.recognize import class_names
from nearkin.data.split import Decided, Split, duplicate_warnings, open_split
from nearkin.distributed import device_name, world_size
from nearkin.errors import CheckpointError
from nearkin.files import replace_text, usable
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter
from nearkin.tables import read_csv, write_csv
from nearkin.version import __version__


def open_logged(
    folder: RunFolder, data: Any, config: TrainConfig | EmbedConfig, log: Reporter, *, resume: bool
) -> Split:
    """Open the data of a run and hold images out; log what they are.

    If `resume`, images stay on the side on which the run has noted them.
    """
    list_bad = partial(write_bad_files, folder.bad_files)
    split = open_split(data, config, log.progress, list_bad, decided(folder) if resume else None)
    if resume:
        split = replace(split, images=noted_channels(folder, split.images))
    warnings = duplicate_warnings(split.num_exact, "exact", split.images)
    for line in [
        split.describe(),
        *lines(split.images.notes),
        *(f"warning: {w}" for w in warnings),
    ]:
        log.info(line)
    return split


COLUMNS: Final = ("path", "bytes", "content", "split")
"""Of images.csv. `content` is the `content_id` of an image; `split`, train or test."""
ANEW: Final = "start anew with --init-from this run"


def decided(folder: RunFolder) -> Decided | None:
    """Return which images a run has trained on and held out; None before it has noted them."""
    if not (folder.data.exists() and folder.images.exists()):
        return None
    with usable(folder.images, ANEW):
        rows = list(read_csv(folder.images))
        contents = np.array([int(row["content"], 16) for row in rows], np.uint64)
        held_out = np.array([PARTS[row["split"]] for row in rows], np.bool_)
        return Decided(tuple(row["path"] for row in rows), contents, held_out)


PARTS: Final = {"train": False, "test": True}


def note_data(
    folder: RunFolder, split: Split, sources: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """Note in a run folder which images it has, or refuse others than those noted there.

    `sources` are the files of the method and the backbone and their SHA-256, where they are the
    user's own. Returns a warning for each that has changed since the run was started.

    Raises:
        CheckpointError: If a run is resumed on data that have changed: its order, its views and
            its memories belong to the images it was started with. The difference is named.
    """
    images = split.images
    if not folder.data.exists():
        ids = (f"{content:016x}" for content in images.contents.tolist())
        sizes, parts = images.num_bytes.tolist(), split.splits.tolist()
        write_csv(folder.images, COLUMNS, zip(images.names, sizes, ids, parts, strict=True))
        counts = {"train": len(split.train), "test": len(split.test)}
        noted: dict[str, Any] = {**counts, "fingerprint": split.fingerprint}
        noted |= {"channels": asdict(images.channels)} if images.channels else {}
        replace_text(folder.data, json.dumps({**noted, "sources": sources or {}}) + "\n")
        return []
    before = decided(folder)
    if before is None:
        raise CheckpointError(
            f"{folder.images} is missing, beside {folder.data.name}; put it back, or {ANEW}"
        )
    changes = changed_data(before, split)
    if changes:
        raise CheckpointError(
            f"the data have changed since the run was started: {changes}; bring them back, or "
            f"{ANEW}"
        )
    with usable(folder.data, ANEW):
        used = json.loads(folder.data.read_text(encoding="utf-8")).get("sources", {})
        return [
            f"warning: the source of the {kind}, {file['file']}, has changed since the run was "
            f"started (SHA-256 {used[kind]['sha256'][:12]} then, {file['sha256'][:12]} now)"
            for kind, file in (sources or {}).items()
            if kind in used and used[kind]["sha256"] != file["sha256"]
        ]


def changed_data(before: Decided, split: Split) -> str:
    """Describe how these images differ from those that a run has noted; '' if they do not."""
    now = Decided(split.images.names, split.images.contents, split.held_out)
    changes = _differences(before, now)
    if not changes:
        return ""
    then = int(before.held_out.sum())
    return (
        f"{changes}; {len(before.names) - then} images to train on and {then} held out then, "
        f"{len(split.train_rows)} and {len(split.test_rows)} now"
    )


def noted_channels(folder: RunFolder, images: Images) -> Images:
    """Return the same images in the range that the run was started with, if it has been."""
    if images.channels is None or not folder.data.exists():
        return images
    with usable(folder.data, ANEW):
        noted = json.loads(folder.data.read_text(encoding="utf-8")).get("channels")
        channels = noted and Channels(**{name: tuple(each) for name, each in noted.items()})
        return replace(images, channels=channels)


def note_labels(folder: RunFolder, split: Split) -> None:
    """Note the images and labels of a run, or refuse others than those noted; see `note_data`."""
    digest = hashlib.sha256()
    for label in class_names(split.images):
        digest.update(in_bytes(label) + b"\0")
    labels = {"labels": {"file": "the labels", "sha256": digest.hexdigest()}}
    if note_data(folder, split, labels):
        raise CheckpointError(
            "the labels have changed since the run was started; bring them back, or start anew "
            "with --overwrite"
        )


def _differences(then: Decided, now: Decided) -> str:
    """Describe which images came, went, changed or moved, with an example of each."""
    if not set(then.contents.tolist()) & set(now.contents.tolist()):
        return "none of them is the same"
    before, after = (
        dict(zip(each.names, zip(each.contents, each.held_out, strict=True), strict=True))
        for each in (then, now)
    )
    both = before.keys() & after.keys()
    kinds = {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "of other contents": {name for name in both if before[name][0] != after[name][0]},
        "held out otherwise": {name for name in both if before[name][1] != after[name][1]},
    }
    changes = (f"{len(names)} {kind} ({min(names)!r})" for kind, names in kinds.items() if names)
    return ", ".join(changes)


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
