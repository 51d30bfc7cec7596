"""Two sets of images as one, and which images of a set are there twice."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from posixpath import join, normpath, split

import numpy as np

from nearkin.data.arrays import Arrays, is_name
from nearkin.data.decode import BadImage
from nearkin.data.images import Images, open_files, open_images
from nearkin.data.labels import (
    TABLES,
    Annotations,
    Row,
    annotations_from_folders,
    list_table,
    read_table,
)
from nearkin.data.sources import BadFile, Folder, Source, in_bytes
from nearkin.errors import DataError
from nearkin.types import UNKNOWN


@dataclass(frozen=True)
class Either:
    """Reads each image from the one of two sources that has it."""

    first: Source
    second: Source
    prefix: str
    """Stands before the names that the second source knows."""
    added: frozenset[str]
    """The names, with the prefix, of the second source's images."""

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """The image's bytes, or the first `limit` of them; or its pixels."""
        if name in self.added:
            return self.second.read(name.removeprefix(self.prefix), limit)
        return self.first.read(name, limit)


def union(first: Images, second: Images, prefix: str) -> Images:
    """The images of both: the first's under their names, the second's under prefix + name.

    Classes of one name become one; groups stay apart.

    Raises:
        DataError: An image of the second would have the name of one of the first.
    """
    added = [prefix + name for name in second.names]
    twice = sorted(set(added).intersection(first.names))
    if twice:
        raise DataError(
            f"{len(twice)} images have the names of others, such as {twice[0]!r}; rename them"
        )
    names = [*first.names, *added]
    rows = np.array(sorted(range(len(names)), key=lambda row: in_bytes(names[row])), np.int64)
    classes, number = Annotations([*first.classes, *second.classes], [], []).numbered()
    shifted = np.where(second.labels < 0, UNKNOWN, second.labels + len(first.classes))
    labels = np.append(number, UNKNOWN)[np.concatenate([first.labels, shifted])]
    groups = np.concatenate([first.groups, second.groups + first.groups.max(initial=-1) + 1])
    _, start, group = np.unique(groups[rows], return_index=True, return_inverse=True)
    strays = (BadFile(prefix + bad.name, bad.reason, bad.bytes) for bad in second.bad)
    return Images(
        names=tuple(names[row] for row in rows),
        labels=labels[rows],
        groups=start[group],
        splits=np.concatenate([first.splits, second.splits])[rows],
        classes=classes,
        sizes=np.concatenate([first.sizes, second.sizes])[rows],
        num_bytes=np.concatenate([first.num_bytes, second.num_bytes])[rows],
        kinds=np.concatenate([first.kinds, second.kinds])[rows],
        modified=np.concatenate([first.modified, second.modified])[rows],
        source=Either(first.source, second.source, prefix, frozenset(added)),
        key="\0".join((first.key, prefix, second.key)) if first.key and second.key else "",
        bad=tuple(sorted((*first.bad, *strays), key=lambda bad: in_bytes(bad.name))),
        notes=first.notes + second.notes,
    )


def copies(images: Images, rows: Iterable[int]) -> list[list[int]]:
    """The rows of images that are exact copies of one another, for copies of these rows.

    Copies are files with the same SHA-256, or arrays with the same pixels. Only images of the
    same size as one of `rows`, in bytes and in pixels, are read. Unreadable ones have no copies.

    Returns:
        Ascending rows, two or more in each group, of which at least one is among `rows`.
    """
    asked = set(rows)
    looks = list(zip(images.num_bytes.tolist(), *images.sizes.T.tolist(), strict=True))
    count, sought = Counter(looks), {looks[row] for row in asked}
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, look in enumerate(looks):
        if look in sought and count[look] > 1:
            try:
                held = images.read(row)
            except BadImage:
                continue
            pixels = held if isinstance(held, bytes) else held.tobytes()
            alike.setdefault((look, hashlib.sha256(pixels).digest()), []).append(row)
    return [group for group in alike.values() if len(group) > 1 and not asked.isdisjoint(group)]


@dataclass(frozen=True, eq=False)
class Recognized:
    """Labeled images: some in the data, by their paths, and some outside."""

    classes: dict[str, str]
    """The class of each by its name, which is the data's or that of the union with `outside`."""
    outside: Images
    """Those that are elsewhere."""
    prefix: str
    """Stands before the names of `outside` in a union with the data."""


def recognize(images: Images, labeled: str) -> Recognized:
    """Read what is labeled, and look it up in the data by its paths.

    Args:
        images: The data.
        labeled: Class folders, an archive of them, or arrays with labels; or a table with the
            columns path and label, whose paths are names in the data, absolute, or relative to
            the table. Rows with an empty label say nothing.

    Raises:
        DataError: It cannot be read, names files that do not exist, contradicts itself, or says
            no class at all.
    """
    data = _Data(images)
    return _table(data, Path(labeled)) if is_table(labeled) else _images(data, labeled)


def is_table(where: str) -> bool:
    """Whether this is the path of a table."""
    return Path(where).suffix.lower() in TABLES


def read_classes(where: str) -> tuple[Images, list[str]]:
    """All images of a folder, an archive or arrays, and the class of each.

    An image's folder is its class; arrays bring labels, '' where they say nothing.

    Raises:
        DataError: There are no images, or some lie in no class folder.
    """
    images = open_images(where)
    if isinstance(images.source, Arrays):
        return images, class_names(images)
    stray = [name for name in images.names if "/" not in name]
    if stray:
        raise DataError(
            f"{where}: {len(stray)} images lie in no class folder, such as {examples(stray)}; "
            "move each into the folder of its class"
        )
    return images, list(annotations_from_folders(images.names, "folders").labels)


def class_names(images: Images) -> list[str]:
    """Each image's class, '' where it has none."""
    names = (*images.classes, "")
    return [names[label] for label in images.labels.tolist()]


def examples(names: Iterable[str]) -> str:
    """A few of them, as a message shows them: on one line, whatever they contain."""
    return ", ".join(map(repr, islice(names, 3)))


class _Data:
    """The images of the data by name and, where they lie in a folder, by path."""

    def __init__(self, images: Images) -> None:
        self.names = {*images.names, *(bad.name for bad in images.bad)}
        folder = str(images.source.root) if isinstance(images.source, Folder) else None
        self.root = "" if folder is None else join(folder, "")
        self.resolved = lru_cache(maxsize=2**10)(os.path.realpath)

    def at(self, path: str) -> str | None:
        """The name of the image at an absolute path; None if it is none of the data."""
        folder, file = split(path)
        for spelled in (path, join(self.resolved(folder), file)) if self.root else ():
            name = spelled.removeprefix(self.root)
            if name != spelled and name in self.names:
                return name
        return None

    def find(self, folder: str, written: str) -> str | None:
        """The name of the image that a table in this folder means.

        Returns:
            An absolute path for a file outside the data; None if there is no such file.
        """
        for spelled in map(normpath, (written, written.replace("\\", "/"))):
            if spelled in self.names:
                return spelled
            for start in filter(None, (folder, self.root)):
                path = "/" + normpath(join(start, spelled)).lstrip("/")
                if os.path.lexists(path):
                    return self.at(path) or path
        return None


def _table(data: _Data, path: Path) -> Recognized:
    table = path.expanduser()
    rows = {written: row.label for written, row in read_table(table, ("path", "label")).items()}
    labeled = {written: label for written, label in rows.items() if label}
    if not labeled:
        raise DataError(f"{path}: none of {len(rows)} rows has a label; fill some of them in")
    folder = str(table.resolve().parent)
    found = {written: data.find(folder, written) for written in labeled}
    missing = [written for written, name in found.items() if name is None]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(labeled)} labeled files exist neither in the data "
            f"nor beside the table, such as {examples(missing)}; write their paths as they are "
            f"below the data, such as {examples(sorted(data.names)[:1])}"
        )
    classes: dict[str, str] = {}
    for written, label in labeled.items():
        first = classes.setdefault(found[written] or "", label)
        if first != label:
            raise DataError(
                f"{path}: {written!r} is labeled {first!r} and, in another row, {label!r}; "
                "keep one of them"
            )
    outside = {name.removeprefix("/") for name in classes if name.startswith("/")}
    # Listed as by a table at the root of the file system, so that their names are their paths.
    listing, _ = list_table(Path("/table"), dict.fromkeys(outside, Row("", "", "", 0)))
    listing = replace(listing, key=f"{table.resolve()}\0labeled")
    return Recognized(classes, open_files(listing), "/")


def _images(data: _Data, labeled: str) -> Recognized:
    images, said = read_classes(labeled)
    if not any(said):
        raise DataError(f"{labeled}: carries no labels; give class folders, or a table")
    start = labeled if is_name(labeled) else str(Path(labeled).expanduser().resolve())
    prefix = f"{start}/"

    def place(name: str) -> str:
        inside = data.at(prefix + name) if isinstance(images.source, Folder) else None
        return inside or prefix + name

    places = list(map(place, images.names))
    classes = {place: label for place, label in zip(places, said, strict=True) if label}
    outside = classes.keys() - data.names
    added = [row for row, place in enumerate(places) if place in outside]
    bad = tuple(stray for stray in images.bad if place(stray.name) not in data.names)
    rest = replace(images.subset(np.array(added, np.int64)), bad=bad)
    return Recognized(classes, rest, prefix)
