"""Known classes: images of the data are labeled by path or as exact copies, others are added.

And which labeled images are held out: none of a class that has too few to spare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.data.arrays import is_name
from nearkin.data.boxes import region
from nearkin.data.folders import list_files
from nearkin.data.images import Arrays, Either, Folder, Images
from nearkin.data.labels import (
    Annotations,
    Row,
    annotations_from_folders,
    annotations_from_rows,
    class_names,
    class_of,
    composed,
    grouped,
    numbered,
    spellings,
)
from nearkin.data.notes import Note, named, noted
from nearkin.data.opening import open_images
from nearkin.data.remote import is_url
from nearkin.data.scan import scan
from nearkin.data.split import Split, has_test_split
from nearkin.data.tables import Resolver, by_name, file_at, is_table, read_table
from nearkin.data.union import copies, union
from nearkin.errors import DataError, UsageError, redacted
from nearkin.pace import count
from nearkin.places import user_path
from nearkin.schema import as_typed, suggestion
from nearkin.types import UNLABELED

FEW: Final = 5  # Labeled images of a class of which none is held out: all are needed to learn it


def label_images(images: Images, labeled: str, known: Sequence[str] = ()) -> Images:
    """Return the data with known classes as their only labels, so nothing sees what is hidden.

    `labeled` is what `recognize` takes. A labeled image is one of the data if its path says so, or
    if the data have exact copies of it, which are then all labeled. All others are added under
    their absolute paths. `known` names classes instead, whose labels in the data count. The labels
    of a benchmark may contradict each other, so copies are not looked for.
    """
    if labeled:
        return _labeled(images, recognize(images, labeled), labeled)
    names = listed(known)
    if len(names) < 2:
        raise UsageError(f"--known {as_typed(known)}: name at least two classes")
    return replace(images, labels=labels_of(names, images), classes=tuple(names))


def listed(known: Sequence[str]) -> list[str]:
    """Return names of classes as those of the data are spelled, each once, or raise UsageError."""
    names = [composed(name) for name in known]
    if len(set(names)) < len(names):
        raise UsageError(f"--known {as_typed(known)} names a class twice; name each once")
    return names


def labels_of(names: Sequence[str], images: Images) -> Int64[np.ndarray, " images"]:
    """Return labels of these classes, numbered in their order; `UNLABELED` for other images."""
    number = np.full(len(images.classes) + 1, UNLABELED)  # the last one is at UNLABELED, -1
    for position, name in enumerate(names):
        if name not in images.classes:
            bad = [file for file in images.bad if f"/{name}/" in f"/{file.name}"]
            if bad:
                raise DataError(
                    f"--known {name}: none of its {count(len(bad), 'image')} can be used, such as "
                    f"{bad[0].name!r} ({bad[0].reason}); replace them, or name other classes"
                )
            if not images.classes:
                raise UsageError(
                    f"--known {name}: the data have no labels; folders are classes if nine of ten "
                    "images or more lie in one: move the others, or give a table with columns "
                    "path and label"
                )
            near = suggestion(name, images.classes)
            raise UsageError(f"--known {name} is no class of the data.{near}")
        number[images.classes.index(name)] = position
    return np.asarray(number[images.labels])


def own_images(images: Images) -> Bool[np.ndarray, " images"]:
    """Whether each image is one of the data, and not a labeled one from outside."""
    source = images.source
    if not isinstance(source, Either):
        return np.ones(len(images), np.bool_)
    return np.asarray(source.rows < source.start)


def _labeled(images: Images, recognized: "Recognized", labeled: str) -> Images:
    """Return the data and the images that are labeled outside of them, with these labels."""
    everything = union(images, recognized.outside, recognized.prefix)
    own = own_images(everything)
    labels = [composed(recognized.classes.get(name, "")) for name in everything.names]
    merged, groups = with_copies(everything, labels)
    # Of copies, those of the data stay, or else the first; others need not be added.
    ordered = (sorted(group, key=lambda row: not own[row]) for group in groups)
    spare = {row for group in ordered for row in group[1:] if not own[row]}
    keep = np.setdiff1d(np.arange(len(everything)), sorted(spare))
    annotated = _annotations(everything, recognized, groups)
    classes, numbers = numbered([merged[row] for row in keep])
    lost = sorted(recognized.classes.keys() - set(everything.names))
    _check_lost(labeled, {name: recognized.classes[name] for name in lost}, classes, everything)
    if len(classes) < 2:
        raise DataError(
            f"{labeled}: usable images are labeled as {named(classes)}; "
            "give at least two known classes"
        )
    notes = [*recognized.notes, *spellings(recognized.classes.values())]
    notes += noted("left out", lost, "labeled files that cannot be used")
    copies = [everything.names[row] for row in sorted(spare)]
    notes += noted("left out", copies, "labeled files that are exact copies of other images")
    spread = sum(merged[row] != labels[row] for row in np.flatnonzero(own))
    if spread:
        text = f"{spread} images of the data are labeled as exact copies of labeled ones"
        notes.append(Note("guessed", text, spread))
    outside = len(recognized.outside) + len(recognized.outside.bad)
    used = everything.subset(keep) if outside else images
    group_of = [annotated.groups[row] for row in keep]
    return replace(
        used.noted(*notes),
        labels=numbers,
        groups=grouped(group_of),
        group_names=[name if name[:1] != "\0" else "" for name in group_of],
        splits=np.array(annotated.splits, np.str_)[keep],
        classes=classes,
    )


def _check_lost(
    labeled: str, lost: Mapping[str, str], classes: Sequence[str], everything: Images
) -> None:
    """Refuse a class of which all images are lost: it would be discovered as a novel one."""
    examples = {composed(label): name for name, label in reversed([*lost.items()])}
    if gone := sorted(examples.keys() - {*classes}):
        first = examples[gone[0]]
        reason = everything.reasons.get(first, "unusable")
        raise DataError(
            f"{labeled}: {count(len(gone), 'known class')} without a usable image, such as "
            f"{gone[0]!r} ({first!r}: {reason}); replace its files, or leave it out"
        )


def _annotations(
    everything: Images, recognized: "Recognized", duplicates: Sequence[Sequence[int]]
) -> Annotations:
    """Return groups and splits: those of the table, or else those that the images have.

    Exact copies share them like their label, where only one of them has some.
    """
    several = np.bincount(everything.groups)[everything.groups] > 1
    given = zip(everything.group_names, everything.groups.tolist(), several.tolist(), strict=True)
    groups = [name or (f"\0{number}" if shared else "") for name, number, shared in given]
    own = Annotations([""] * len(everything), groups, everything.splits.tolist())
    table, _ = annotations_from_rows(recognized.rows, everything.names)
    columns = [list(column) for column in table.or_else(own)]
    for rows, column in product(duplicates, columns):
        shared = next((column[row] for row in rows if column[row]), "")
        for row in rows:
            column[row] = column[row] or shared
    return Annotations(*columns)


def with_copies(images: Images, labels: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Return the labels with those of exact copies, which share one, and the groups of copies.

    A copy without its label would be held out or discovered although its class is known.
    """
    groups = copies(images, [row for row, label in enumerate(labels) if label])
    merged, conflicts = list(labels), list[str]()
    for group in groups:
        classes = {labels[row]: row for row in group if labels[row]}
        if len(classes) > 1:
            pair = [f"{images.names[row]!r} ({label!r})" for label, row in classes.items()]
            conflicts.append(" and ".join(pair[:2]))
        for row in group:
            merged[row] = min(classes)
    if conflicts:
        raise DataError(
            f"{len(conflicts)} images are labeled as two classes, such as {conflicts[0]}, "
            "which are exact copies; keep one of them"
        )
    return merged, groups


@dataclass(frozen=True, eq=False)
class Recognized:
    """Labeled images: some in the data, by their paths, and some outside."""

    classes: dict[str, str]  # The class of each by its name in the union of the data and `outside`
    outside: Images
    prefix: str  # Of the names of `outside` in that union
    rows: Mapping[str, Row] = field(default_factory=dict)  # Of a table, with groups and splits
    notes: tuple[Note, ...] = ()


def recognize(images: Images, labeled: str) -> Recognized:
    """Read labels, and look their images up in the data by path.

    `labeled` are class folders, an archive of them, or arrays with labels; or a table with the
    columns path and label, whose paths are names in the data, absolute, or relative to the table.
    Rows with an empty label count for groups and splits alone.
    """
    names = [*images.names, *(bad.name for bad in images.bad)]
    table = file_at(labeled) if is_table(labeled) else Path(labeled)
    data = Resolver(table, names, images)
    return _by_table(data) if is_table(labeled) else _by_folders(data, labeled)


def _by_table(data: Resolver) -> Recognized:
    path = data.table
    table = read_table(path, "label")
    labeled = {region(written, row.box) for written, row in table if row.label or row.unusable}
    telling = [
        (written, row)
        for written, row in table
        if row.label or row.unusable or row.group or row.split
    ]
    rows, stray = by_name(path, telling, data.find)
    missing = [written for written in stray if written in labeled]
    labels, notes = class_of(rows)
    without = [written for written in stray if written not in labeled]
    notes += noted("left out", without, f"rows without a label of {path}, which no image is of")
    classes = {name: label for name, label in labels.items() if label}
    if not (classes or missing):
        raise DataError(f"{path}: none of {len(table)} rows has a label; fill some of them in")
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(labeled)} labeled files exist neither in the data "
            f"nor beside the table, such as {named(missing)}; write their paths as they are "
            f"below the data, such as {named(sorted(data.names)[:1])}"
        )
    outside = {name.removeprefix("/") for name in classes if name.startswith("/")}
    listing = replace(list_files(Path("/"), outside), key=f"{path}\0labeled")
    form = {f"/{old}": f"/{new}" for old, new in zip(listing.written, listing.names, strict=True)}
    classes = {form.get(name, name): label for name, label in classes.items()}
    rows = {form.get(name, name): row for name, row in rows.items()}
    return Recognized(classes, scan(listing), "/", rows, tuple(notes))


def _by_folders(data: Resolver, labeled: str) -> Recognized:
    images, labels = read_classes(labeled)
    if not any(labels):
        raise DataError(f"{labeled}: carries no labels; give class folders, or a table")
    start = labeled if is_name(labeled) else str(user_path(labeled).resolve())
    if is_url(labeled):
        start = redacted(labeled).rstrip("/")
    prefix = f"{start}/"

    def place(name: str) -> str:
        inside = data.at(prefix + name) if isinstance(images.source, Folder) else None
        return inside or prefix + name

    places = list(map(place, images.names))
    classes = {place: label for place, label in zip(places, labels, strict=True) if label}
    if images.bad:
        classes |= {place(name): each for name, each in _classes_of_bad(images, labels).items()}
    outside = classes.keys() - data.names
    added = [row for row, place in enumerate(places) if place in outside]
    bad = tuple(file for file in images.bad if place(file.name) not in data.names)
    rest = replace(images.subset(np.array(added, np.int64)), bad=bad)
    return Recognized(classes, rest, prefix)


def _classes_of_bad(images: Images, labels: Sequence[str]) -> dict[str, str]:
    """Return the classes of files that cannot be used, of those that lie in class folders."""
    bad = [file.name for file in images.bad if "/" in file.name]
    try:
        of_all = annotations_from_folders([*images.names, *bad], "folders")[0].labels
    except DataError:  # one lies beside all class folders
        return {}
    # Where it lies beside the folder around them, all classes begin with that folder.
    same = dict(zip(of_all, labels, strict=False))
    of_bad = zip(bad, of_all[len(images) :], strict=True)
    return {name: same.get(label, label) for name, label in of_bad}


def read_classes(where: str) -> tuple[Images, list[str]]:
    """Return all images of class folders, an archive or arrays, and the class of each."""
    images = open_images(where)
    if isinstance(images.source, Arrays):
        return images, class_names(images)
    outside = [name for name in images.names if "/" not in name]
    if outside:
        raise DataError(
            f"{where}: {len(outside)} images lie in no class folder, such as {named(outside)}; "
            "move each into the folder of its class"
        )
    annotations, _ = annotations_from_folders(images.names, "folders")
    return images, list(annotations.labels)


def keep_few(split: Split) -> Split:
    """Return the labeled images of small classes to training, with their groups.

    Not where the data name a test part: what others have held out stays held out. Images that an
    earlier run has held out return as well, where their class needs them; they are not scored.
    """
    images = split.images
    if has_test_split(images):
        return split
    counts = np.bincount(images.labels[images.labels != UNLABELED], minlength=len(images.classes))
    few = (images.labels != UNLABELED) & (counts[images.labels] < FEW)
    back = split.test_rows[np.isin(images.groups[split.test_rows], images.groups[few])]
    return replace(
        split,
        train_rows=np.union1d(split.train_rows, back),
        test_rows=np.setdiff1d(split.test_rows, back),
    )
