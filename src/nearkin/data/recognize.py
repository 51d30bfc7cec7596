"""Labeled images recognized in the data by path or as exact copies; unions of two sets."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.data import channels
from nearkin.data.arrays import is_name
from nearkin.data.decode import BadImage
from nearkin.data.folders import list_files
from nearkin.data.images import COLUMNS, Arrays, BadFile, Folder, Images, Source, digest, in_bytes
from nearkin.data.labels import Annotations, annotations_from_folders, class_of
from nearkin.data.notes import Note, named
from nearkin.data.opening import open_images
from nearkin.data.remote import is_url
from nearkin.data.scan import scan
from nearkin.data.tables import Resolver, by_name, file_at, is_table, read_table
from nearkin.errors import DataError, redacted
from nearkin.places import user_path
from nearkin.types import UNKNOWN


@dataclass(frozen=True)
class Either:
    """A source of two sources."""

    first: Source
    second: Source
    prefix: str  # Of the names of the second source's images
    added: frozenset[str]  # These names, with the prefix

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """Return the image's bytes, or the first `limit` of them; or its pixels."""
        if name in self.added:
            return self.second.read(name.removeprefix(self.prefix), limit)
        return self.first.read(name, limit)


def union(first: Images, second: Images, prefix: str) -> Images:
    """Return the images of both: the first's under their names, the second's under prefix + name.

    Classes of one name become one; groups stay separate.
    """
    added = [prefix + name for name in second.names]
    if first.pixel_type != second.pixel_type and len(first) and len(second):
        one, other = channels.named(first.pixel_type), channels.named(second.pixel_type)
        raise DataError(f"images are {one}, and others {other}; convert some of them")
    duplicates = sorted(set(added).intersection(first.names))
    if duplicates:
        raise DataError(
            f"{len(duplicates)} images have the names of others, such as {duplicates[0]!r}; "
            "rename them"
        )
    names = [*first.names, *added]
    rows = np.array(sorted(range(len(names)), key=lambda row: in_bytes(names[row])), np.int64)
    classes, number = Annotations([*first.classes, *second.classes], [], []).numbered()
    shifted = np.where(second.labels < 0, UNKNOWN, second.labels + len(first.classes))
    labels = np.append(number, UNKNOWN)[np.concatenate([first.labels, shifted])]
    groups = np.concatenate([first.groups, second.groups + first.groups.max(initial=-1) + 1])
    _, start, group = np.unique(groups[rows], return_index=True, return_inverse=True)
    second_bad = (BadFile(prefix + bad.name, bad.reason, bad.bytes) for bad in second.bad)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])[rows]
        for name in COLUMNS
    }
    return Images(
        **columns | {"labels": labels[rows], "groups": start[group]},
        names=tuple(names[row] for row in rows),
        classes=classes,
        source=Either(first.source, second.source, prefix, frozenset(added)),
        pixel_type=first.pixel_type,
        channels=first.channels,
        key="\0".join((first.key, prefix, second.key)) if first.key and second.key else "",
        bad=tuple(sorted((*first.bad, *second_bad), key=lambda bad: in_bytes(bad.name))),
        notes=first.notes + second.notes,
    )


def copies(images: Images, rows: Iterable[int]) -> list[list[int]]:
    """Return groups of exact copies of these rows (equal bytes, or pixels), rows ascending."""
    requested = set(rows)
    # Copies have the same size, in bytes and in pixels, so few images need to be read.
    sizes = list(zip(images.num_bytes.tolist(), *images.sizes.T.tolist(), strict=True))
    count, candidates = Counter(sizes), {sizes[row] for row in requested}
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, size in enumerate(sizes):
        if size in candidates and count[size] > 1:
            with suppress(BadImage):
                groups.setdefault((size, digest(images.stored(row))), []).append(row)
    return [
        group for group in groups.values() if len(group) > 1 and not requested.isdisjoint(group)
    ]


@dataclass(frozen=True, eq=False)
class Recognized:
    """Labeled images: some in the data, by their paths, and some outside."""

    classes: dict[str, str]  # The class of each by its name in the union of the data and `outside`
    outside: Images
    prefix: str  # Of the names of `outside` in that union
    notes: tuple[Note, ...] = ()


def recognize(images: Images, labeled: str) -> Recognized:
    """Read labels, and look their images up in the data by path.

    `labeled` are class folders, an archive of them, or arrays with labels; or a table with the
    columns path and label, whose paths are names in the data, absolute, or relative to the table.
    Rows with an empty label are ignored.
    """
    names = [*images.names, *(bad.name for bad in images.bad)]
    table = file_at(labeled) if is_table(labeled) else Path(labeled)
    data = Resolver(table, names, images.source)
    return _table(data) if is_table(labeled) else _images(data, labeled)


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


def class_names(images: Images) -> list[str]:
    """Return each image's class, '' where it has none."""
    names = (*images.classes, "")
    return [names[label] for label in images.labels.tolist()]


def _table(data: Resolver) -> Recognized:
    path = data.table
    table = read_table(path, ("path", "label"))
    labeled = [(written, row) for written, row in table if row.label or row.unusable]
    rows, missing = by_name(path, labeled, data.find)
    labels, notes = class_of(rows)
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
    return Recognized(classes, scan(listing), "/", tuple(notes))


def _images(data: Resolver, labeled: str) -> Recognized:
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
    outside = classes.keys() - data.names
    added = [row for row, place in enumerate(places) if place in outside]
    bad = tuple(file for file in images.bad if place(file.name) not in data.names)
    rest = replace(images.subset(np.array(added, np.int64)), bad=bad)
    return Recognized(classes, rest, prefix)
