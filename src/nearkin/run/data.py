"""What a run was computed from, as its folder records it: the images and the machine."""

import hashlib
import json
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Shaped

from nearkin.config import ClassifyConfig, Config, DiscoverConfig, EmbedConfig, TrainConfig
from nearkin.data.channels import Channels
from nearkin.data.images import BadFile, Images, in_bytes
from nearkin.data.labels import class_names
from nearkin.data.notes import Note, lines
from nearkin.data.opening import column_of, open_images
from nearkin.data.split import (
    NEW,
    Split,
    StoredSplit,
    duplicate_warnings,
    has_test_split,
    split_images,
    stored_parts,
    trained_or_scored,
)
from nearkin.distributed import device_name, world_size
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.files import replace_text, usable
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.reporter import Reporter
from nearkin.tables import read_csv, write_csv
from nearkin.text import as_text
from nearkin.version import __version__

NAMED: Final = 10  # Unreadable images that an error names
IGNORED: Final = "ignore"  # A column of images.csv: what that of `--ignore` says of the image
HELD_OUT: Final = {"train": False, "test": True}
Values = Shaped[np.ndarray, " images"]
"""What a column says of each image, as text; '' for nothing."""
_ORIGINS: Final = dict[str, Path | None]()  # Of encoders in memory; see `note_origin`
OBJECT: Final = "object:"  # How the name of an encoder in memory begins
ANEW: Final = "start anew with this run as the encoder"


def open_usable(
    data: Any,
    config: Config,
    on_progress: ProgressCallback = ignore_progress,
    folder: RunFolder | None = None,
) -> Images:
    """Open the images; a new run lists in its `folder` those that cannot be read.

    Their labels are those of the data; none, where a classification has others.

    Raises:
        DataError: If more images than the settings allow cannot be read, naming some of them.
    """
    labels = "auto" if isinstance(config, DiscoverConfig) else config.labels
    if isinstance(config, ClassifyConfig) and config.labeled:
        labels = "none"
    images = open_images(data, labels=labels, full=config.scan == "full", on_progress=on_progress)
    if folder and not folder.data.exists():  # else its list may not be replaced yet, or it is done
        write_bad_files(folder.bad_files, images, {})
    _check_bad(images, {}, config.max_bad)
    return images


def _check_bad(images: Images, undecodable: Mapping[str, str], max_bad: float) -> None:
    """Refuse more unreadable images, of the scan and of decoding, than the settings allow."""
    reasons = images.reasons | {**undecodable}
    bad, every = len(reasons), len(images) + len(images.bad)
    if bad > max_bad * every:
        first = ", ".join(f"{name!r} ({why})" for name, why in islice(reasons.items(), NAMED))
        more = f" and {bad - NAMED} more" if bad > NAMED else ""
        raise DataError(
            f"{bad} of {every} images are unreadable: {first}{more}; remove them, or allow more "
            "with --max-bad"
        )


def note_undecodable(
    folder: RunFolder,
    images: Images,
    undecodable: Mapping[str, str],
    log: Reporter,
    max_bad: float = 1.0,
) -> list[Note]:
    """List the images that could not be decoded, with the reason by name, and log a note on them.

    Raises:
        DataError: If more than `max_bad` of all images cannot be read, naming some of them.
    """
    write_bad_files(folder.bad_files, images, undecodable)
    _check_bad(images, undecodable, max_bad)
    if not undecodable:
        return []
    text = f"{count(len(undecodable), 'image')} that cannot be decoded (bad_files.csv)"
    note = Note("left out", text, len(undecodable), tuple(sorted(undecodable)[:3]))
    log.info(str(note))
    return [note]


def open_split(
    data: Any,
    config: TrainConfig | EmbedConfig,
    on_progress: ProgressCallback = ignore_progress,
    folder: RunFolder | None = None,
    resumed: RunFolder | None = None,
) -> Split:
    """Open the data and hold images out; see `open_usable` and `hold_out`."""
    images = trained_or_scored(open_usable(data, config, on_progress, folder))
    return hold_out(images, config, on_progress, resumed)


def open_logged(
    folder: RunFolder, data: Any, config: TrainConfig | EmbedConfig, log: Reporter, *, resume: bool
) -> Split:
    """Open the data of a run and hold images out, as it has noted if it goes on; log them."""
    split = open_split(data, config, log.progress, folder, folder if resume else None)
    if resume:
        split = replace(split, images=noted_channels(folder, split.images))
    warnings = duplicate_warnings(split.num_exact, "exact", split.images)
    notes = lines(split.images.notes)
    for line in (split.describe(), *notes, *(f"warning: {each}" for each in warnings)):
        log.info(line)
    return split


def stored_split(folder: RunFolder) -> StoredSplit | None:
    """Return which images a run has trained on and held out; None before it has noted them."""
    if not (folder.data.exists() and (folder.images.exists() or folder.config.exists())):
        return None  # other folders may have such files, too
    with usable(folder.images, f"put it back, or {ANEW}"):
        rows = list(read_csv(folder.images))
        contents = np.array([int(row["content"], 16) for row in rows], np.uint64)
        held_out = np.array([HELD_OUT[row["split"]] for row in rows], np.bool_)
        return StoredSplit(tuple(row["path"] for row in rows), contents, held_out)


class _Noted(NamedTuple):
    """What data.json says of the images of a run."""

    fingerprint: str
    sources: dict[str, str]  # The SHA-256 of each
    channels: Channels | None
    gone: str  # See `Split.gone`


def _noted(folder: RunFolder) -> _Noted:
    with usable(folder.data, ANEW):
        noted = json.loads(folder.data.read_text(encoding="utf-8"))
        sources = {kind: str(file["sha256"]) for kind, file in noted["sources"].items()}
        ranges = {name: tuple(each) for name, each in noted.get("channels", {}).items()}
        channels = Channels(**ranges) if ranges else None
        return _Noted(str(noted["fingerprint"]), sources, channels, str(noted.get("gone", "")))


def ignored_values(data: Any, config: TrainConfig, split: Split) -> Values | None:
    """Return what the column that a training is to ignore says of each image; None without one."""
    if not config.ignore:
        return None
    values = column_of(config.ignore, split.images, config.labels, data)
    sizes = np.unique(values[split.train_rows], return_counts=True)[1]
    if len(sizes) == 1:
        raise UsageError(
            f"--ignore {config.ignore}: all images to train on have one value; give a column with "
            "two or more"
        )
    if sizes.max() < int(config.batch_size):
        raise UsageError(
            f"--ignore {config.ignore}: none of {len(sizes)} values has the {config.batch_size} "
            f"images of a batch; give --batch-size {sizes.max()} or less"
        )
    return values


def noted_values(folder: RunFolder) -> tuple[Values, Bool[np.ndarray, " images"]]:
    """Return what the column to ignore said of each image of a run, and which are held out."""
    with usable(folder.images, f"put it back, or {ANEW}"):
        rows = list(read_csv(folder.images))
        values = np.array([row[IGNORED] for row in rows], np.str_)
        return values, np.array([HELD_OUT[row["split"]] for row in rows], np.bool_)


def note_column(folder: RunFolder, column: str, images: Images, values: Values) -> None:
    """Note in a run folder what a tested column says of each image: the report colors by it."""
    write_csv(folder.column, ("path", column), zip(images.names, values.tolist(), strict=True))


def noted_column(folder: RunFolder, column: str) -> dict[str, str]:
    """Return what `note_column` has noted, by path; empty if that was another column."""
    if not folder.column.exists():
        return {}
    with usable(folder.column, "remove it; `nearkin evaluate --ignore COLUMN` writes it anew"):
        rows, name = read_csv(folder.column), column.strip().lower()  # as they are read
        return {as_text(row["path"]): row[name] for row in rows if name in row}


def note_data(
    folder: RunFolder,
    split: Split,
    sources: Mapping[str, Mapping[str, str]] | None = None,
    ignored: Values | None = None,
) -> list[str]:
    """Note in a run folder which images it has and lacks, or refuse others than those noted there.

    `sources` are the files of the method and the backbone and their SHA-256, where they are the
    user's own; `ignored` is what the column to ignore says of each image, if there is one. Returns
    a warning for each that has changed since the run was started.

    Raises:
        CheckpointError: If a run is resumed on data that have changed: its order, its views and
            its memories belong to the images it was started with. The difference is named.
    """
    images = split.images
    if not folder.data.exists():
        if folder.config.exists():  # which is written later
            raise CheckpointError(
                f"{folder.path} has a run but no {folder.data.name}, which says what it "
                "has trained on; bring it back, or start anew in another -o"
            )
        ids = (f"{content:016x}" for content in images.contents.tolist())
        columns: dict[str, Iterable[object]] = {
            "path": images.names,
            "bytes": images.num_bytes.tolist(),
            "content": ids,
            "split": split.splits.tolist(),
        }
        if ignored is not None:
            columns[IGNORED] = ignored.tolist()
        write_csv(folder.images, list(columns), zip(*columns.values(), strict=True))
        counts = {"train": len(split.train), "test": len(split.test)}
        new: dict[str, Any] = {**counts, "fingerprint": split.fingerprint}
        new |= {"channels": asdict(images.channels)} if images.channels else {}
        new |= {"gone": split.gone} if split.gone else {}
        write_bad_files(folder.bad_files, images, {})
        replace_text(folder.data, json.dumps({**new, "sources": sources or {}}) + "\n")
        return []
    fingerprint, used, *_ = _noted(folder)
    if fingerprint != split.fingerprint:
        noted = replace(split, stored=stored_split(folder))  # that of a stage is another
        changes = changed_data(noted) or f"{folder.images} was edited"
        raise CheckpointError(
            f"the data have changed since the run was started: {changes}; bring them back, or "
            f"{ANEW}"
        )
    warnings = [
        f"warning: the source of the {kind}, {file['file']}, has changed since the run was "
        f"started (SHA-256 {used[kind][:12]} then, {file['sha256'][:12]} now)"
        for kind, file in (sources or {}).items()
        if used.get(kind, file["sha256"]) != file["sha256"]
    ]
    others = 0 if ignored is None else int((noted_values(folder)[0] != ignored).sum())
    if others:
        warnings.append(
            f"warning: the column to ignore has other values of {count(others, 'image')} than "
            "when the run was started, which keeps those"
        )
    return warnings


def changed_data(split: Split) -> str:
    """Describe how the images differ from those of the split that is stored; '' if they do not."""
    stored, images = split.stored, split.images
    if stored is None:
        return ""
    before = dict(zip(stored.names, stored.held_out, strict=True))
    after = dict(zip(images.names, split.held_out, strict=True))
    otherwise = {name for name in before if after.get(name, before[name]) != before[name]}
    kinds = {"added": after.keys() - before.keys(), **_lost(stored, images)}
    changes = _counted(kinds | {"held out otherwise": otherwise})
    if not changes:
        return ""
    if not np.isin(images.contents, stored.contents).any():
        changes = ["none of them is the same"]
    then = int(stored.held_out.sum())
    return (
        f"{', '.join(changes)}; {len(stored.names) - then} images to train on and {then} held out "
        f"then, {len(split.train_rows)} and {len(split.test_rows)} now"
    )


def lost_images(folder: RunFolder, images: Images) -> str:
    """Describe which images of a run are not there any more, or others; '' for none."""
    stored = stored_split(folder)
    return "" if stored is None else ", ".join(_counted(_lost(stored, images)))


def _lost(stored: StoredSplit, images: Images) -> dict[str, Collection[str]]:
    now = dict(zip(images.names, images.contents, strict=True))
    then = zip(stored.names, stored.contents, strict=True)
    return {
        "removed": [name for name in stored.names if name not in now],
        "of other contents": [name for name, content in then if now.get(name, content) != content],
    }


def _counted(kinds: Mapping[str, Collection[str]]) -> list[str]:
    return [f"{len(names)} {kind} ({min(names)!r})" for kind, names in kinds.items() if names]


def noted_channels(folder: RunFolder, images: Images) -> Images:
    """Return the same images in the range that the run was started with, if it has been."""
    if images.channels is None or not folder.data.exists():
        return images
    return replace(images, channels=_noted(folder).channels)


def noted_images(folder: RunFolder, images: Images) -> Images:
    """Return those of the images that a run has noted, in the range that it was started with.

    Where its folder is not to be seen here, or some of its images are not, the data decide.
    """
    stored = stored_split(folder)
    row = {name: number for number, name in enumerate(images.names)}
    if stored is None or not row.keys() >= set(stored.names):
        return noted_channels(folder, trained_or_scored(images))
    rows = np.array(sorted(row[name] for name in stored.names), np.int64)
    return noted_channels(folder, images.subset(rows))


def note_labels(
    folder: RunFolder,
    split: Split,
    sources: Mapping[str, Mapping[str, str]] | None = None,
    ignored: Values | None = None,
) -> list[str]:
    """Note the images and labels of a run, or refuse others than those noted; see `note_data`."""
    images, first = split.images, dict[str, str]()
    # By its first image, as a group may be called by where the data are.
    named = zip(images.group_names, images.names, strict=True)
    groups = [group and first.setdefault(group, name) for group, name in named]
    own = {"labels": class_names(images), "groups": groups}
    files = {kind: {"file": f"the {kind}", "sha256": _digest(own[kind])} for kind in own}
    warnings = note_data(folder, split, {**(sources or {}), **files}, ignored)
    noted = _noted(folder).sources
    for kind, file in files.items():
        if noted.get(kind, file["sha256"]) != file["sha256"]:
            raise CheckpointError(
                f"the {kind} have changed since the run was started; bring them back, or start "
                "anew with --overwrite"
            )
    return warnings


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(in_bytes(name) + b"\0" for name in names)).hexdigest()


def hold_out(
    images: Images,
    config: Config,
    on_progress: ProgressCallback = ignore_progress,
    resumed: RunFolder | None = None,
) -> Split:
    """Hold images out; those that an earlier run had stay on the side on which they were.

    What `resumed` has noted stays as it is; of all other images, none is scored that a run was
    trained on which this one starts from. Where the data name a test part, the split of a run
    whose encoder was not trained there says nothing. A training on all images scores none.
    """
    own = stored_split(resumed) if resumed else None
    if resumed and own:
        images = _without_listed(images, resumed, own)
    named = has_test_split(images)
    runs = _origins(config) if named or config.val or not isinstance(config, TrainConfig) else []
    earlier = [*map(stored_split, (run for run in runs if not (named and run.is_frozen)))]
    gone = next((str(run.path) for run in runs if not run.data.exists()), "")
    noted = stored_parts([own], images)
    if resumed and own and (noted != NEW).all():
        gone = _noted(resumed).gone
    if gone:
        text = f"a new split: {gone}, which the encoder was loaded from, is gone with its own"
        images = images.noted(Note("substituted", text, len(images)))
    part = stored_parts(earlier, images)
    if resumed and own and not (named and resumed.is_frozen):
        part = np.where(noted == NEW, part, noted)
    chooses = isinstance(config, DiscoverConfig | ClassifyConfig)
    split = split_images(images, _share(config), config.seed, on_progress, part, chooses=chooses)
    if named and not own and not len(split.test_rows):
        raise DataError(
            "an earlier run has trained on all test images that the data name, so none is left to "
            "score; give other test images, or an encoder that was not trained on them"
        )
    return replace(split, stored=own or next(filter(None, earlier), None), gone=gone)


def _without_listed(images: Images, run: RunFolder, own: StoredSplit) -> Images:
    """Return the images of a run that goes on without files that it could not read at its start.

    They may be readable by now; what it has begun is without them.
    """
    names = {*own.names}
    if not run.bad_files.exists() or not names <= {*images.names}:
        return images
    with usable(run.bad_files, f"put it back, or {ANEW}"):
        listed = {row["path"]: row for row in read_csv(run.bad_files)}
    is_late = np.array([name in listed and name not in names for name in images.names], np.bool_)
    late = [listed[images.names[row]] for row in np.flatnonzero(is_late).tolist()]
    if not late:
        return images
    bad = (BadFile(row["path"], row["reason"], int(row["bytes"] or 0)) for row in late)
    text = f"{count(len(late), 'image')} that could not be read when the run was started"
    note = Note("left out", text, len(late), tuple(row["path"] for row in late[:3]))
    left = images.subset(np.flatnonzero(~is_late)).noted(note)
    return replace(left, bad=(*images.bad, *bad))


def learnable(split: Split) -> Split:
    """Return the same split, which has images to learn from; or DataError."""
    if len(split.train_rows):
        return split
    raise DataError(
        f"the run of the encoder held all {count(len(split.images), 'image')} out, and they stay "
        "held out, so none is left to learn from; give other images, or another encoder"
    )


def held_share(data: Any, config: DiscoverConfig | ClassifyConfig) -> float:
    """Return the share of the images to hold out: that of the encoder's run on the same data."""
    run = next(_named(config), None)
    if not (run and run.config.exists()):
        return _share(config)
    earlier, its_data = run.any_settings()
    if earlier.val in ("auto", _share(config)) or not _is_of(run, its_data, data):
        return _share(config)
    if config.val != "auto":
        raise UsageError(
            f"--val {config.val}, but {run.path} was made with --val {earlier.val} of the same "
            "images, and what it held out stays held out; leave --val out"
        )
    return float(earlier.val)


def _is_of(run: RunFolder, its_data: str, data: Any) -> bool:
    """Whether data are those of a run: by their name or, of Python objects, by the images."""
    if its_data != data_name(data) or isinstance(data, str | Path):
        return its_data == data_name(data)
    images = trained_or_scored(open_images(data, labels="none"))
    return bool((stored_parts([stored_split(run)], images) != NEW).all())


def shares_images(run: RunFolder, data: Any) -> bool:
    """Whether data that are called like those of a run are the same; objects have one name."""
    if isinstance(data, str | Path):
        return True
    images = open_images(data, labels="none")
    return bool((stored_parts([stored_split(run)], images) != NEW).any())


def _share(config: Config) -> float:
    return TrainConfig.val if config.val == "auto" else config.val


def origin_of(encoder: str, passed: Collection[Path] = ()) -> Path | None:
    """Return the folder of the run that an encoder is of, by its path, if it held images out.

    A copy that a run keeps, of what it has started from or learns from, is of the run that the
    original is of. Where that is gone, or names a copy already `passed`, it is of the run itself.
    """
    path = Path(encoder)
    run = RunFolder(path.parent if path.is_file() else path)
    if not (encoder and run.data.exists()):  # other folders may have such files, too
        return None
    setting, original = {run.start: "encoder", run.teacher: "teacher"}.get(path), ""
    if setting and run.config.exists():
        original = getattr(run.any_settings()[0], setting, "")
    if original in _ORIGINS:
        return _ORIGINS[original]
    absolute = Path(original).is_absolute()
    gone = original.startswith(OBJECT) or (absolute and not Path(original).exists())
    if original and not gone and path not in passed:
        return origin_of(original, {*passed, path})
    return run.path.resolve() if original or path in (run.path, run.encoder) else None


def note_origin(encoder: str, run: Path | None) -> None:
    """Note which run an encoder in memory is of, under the name that stands for it in settings."""
    _ORIGINS[encoder] = run


def _origins(config: Config) -> list[RunFolder]:
    """Return the runs that a run starts from, and those that they started from, nearest first."""
    runs = [*_named(config)]
    for run in runs:  # which grows
        if run.config.exists():
            known = {each.path for each in runs}
            runs += (each for each in _named(run.any_settings()[0]) if each.path not in known)
    return runs


def runs_of(encoder: str) -> list[RunFolder]:
    """Return the run of an encoder, and those that it started from, nearest first."""
    return _origins(EmbedConfig(encoder=encoder))


def trained_on(encoder: str, images: Images) -> Bool[np.ndarray, " images"] | None:
    """Return which images a run of an encoder was trained on; None where no run is known."""
    if not (known := runs_of(encoder)):
        return None
    runs = (run for run in known if not run.is_frozen)
    return np.asarray(stored_parts(map(stored_split, runs), images) == 0)


def held_out_by(encoder: str, images: Images) -> Bool[np.ndarray, " images"]:
    """Return which images the run of an encoder holds out, and no run before it was trained on."""
    return np.asarray(stored_parts(map(stored_split, runs_of(encoder)), images) == 1)


def _named(config: Config) -> Iterator[RunFolder]:
    """Yield the runs that settings name: the accepted one, and those of encoder and teacher.

    A path at which nothing is any more may have been one.
    """
    for encoder in (getattr(config, name, "") for name in ("accept", "encoder", "teacher")):
        found, path = _ORIGINS.get(encoder) or origin_of(encoder), Path(encoder)
        if not found and path.is_absolute() and not path.exists():
            found = path  # which is gone
        if found and encoder != "auto":
            yield RunFolder(found)


def write_bad_files(path: Path, images: Images, undecodable: Mapping[str, str]) -> None:
    """List the images that the scan could not read, and those that could not be decoded later."""
    rows: list[tuple[str, str, object]] = [(bad.name, bad.reason, bad.bytes) for bad in images.bad]
    rows += [(name, reason, "") for name, reason in sorted(undecodable.items())]
    if rows:
        write_csv(path, ("path", "reason", "bytes"), rows)
    else:  # an earlier attempt may have left a list
        path.unlink(missing_ok=True)


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
    """Record the machine that a run is computed on from a step on; return what has changed."""
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
