"""What the data say about their images: class, group and side of the split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64

from nearkin.data.sources import in_bytes, stem
from nearkin.errors import DataError
from nearkin.types import UNKNOWN

SIDES: Final = {
    "train": "train",
    "training": "train",
    "test": "test",
    "val": "test",
    "valid": "test",
    "validation": "test",
}
"""Folder and table words for the two sides of a split."""


@dataclass(frozen=True)
class Said:
    """One entry per image, each '' where nothing is said."""

    labels: Sequence[str]
    groups: Sequence[str]
    splits: Sequence[str]

    def or_else(self, other: "Said") -> "Said":
        """This, with groups and splits of the other where this says nothing."""

        def either(mine: Sequence[str], theirs: Sequence[str]) -> list[str]:
            return [a or b for a, b in zip(mine, theirs, strict=True)]

        groups, splits = either(self.groups, other.groups), either(self.splits, other.splits)
        return Said(self.labels, groups, splits)

    def numbered(self) -> tuple[tuple[str, ...], Int64[np.ndarray, " images"]]:
        """The class names, in order, and each image's position among them.

        Classes that are all whole numbers are ordered as numbers, others by their bytes.
        """
        names = set(self.labels) - {""}
        if all(name.isascii() and name.isdecimal() for name in names):
            classes = sorted(names, key=lambda name: (int(name), name))
        else:
            classes = sorted(names, key=in_bytes)
        number = {name: i for i, name in enumerate(classes)} | {"": UNKNOWN}
        return tuple(classes), np.array([number[name] for name in self.labels], np.int64)

    def grouped(self) -> Int64[np.ndarray, " images"]:
        """Each image's group: the row of the group's first image, its own by default."""
        first: dict[str, int] = {}
        rows = enumerate(self.groups)
        return np.array([first.setdefault(g, i) if g else i for i, g in rows], np.int64)


def said_by_folders(names: Sequence[str], labels: str) -> Said:
    """Read classes and splits off the folders.

    A wrapper folder that holds everything is passed over. If all top-level folders are then
    called train, val, test or the like, they set the split. Of what remains, an image's folder
    is its class, if the folders look like classes: every image lies in one, all equally deep,
    at least two of them, with two images or more on average. A .tar shard is no folder.

    Args:
        names: the images' names.
        labels: "auto", "folders" to insist on classes, or "none" for splits alone.

    Raises:
        DataError: "folders" is asked for, and an image lies in no folder.
    """
    folders: dict[str, int] = {}
    numbers = (folders.setdefault(name.rpartition("/")[0], len(folders)) for name in names)
    folder = np.fromiter(numbers, np.int64, len(names))
    paths = _unwrapped([[part for part in path.split("/") if is_folder(part)] for path in folders])
    sided = all(path and path[0].lower() in SIDES for path in paths)
    splits = [SIDES[path[0].lower()] if sided else "" for path in paths]
    classes = [path[1:] if side else path for path, side in zip(paths, splits, strict=True)]
    if labels == "folders" and not all(classes):
        stray = names[folder.tolist().index(classes.index([]))]
        raise DataError(f"{stray}: lies in no class folder; move it, or do not ask for folders")
    if labels == "none" or (labels == "auto" and not _are_classes(classes, len(names))):
        classes = [[]] * len(classes)

    def of_each(said: list[str]) -> list[str]:
        return list(np.array(said, object)[folder])

    return Said(of_each(["/".join(path) for path in classes]), [""] * len(names), of_each(splits))


def said_beside(names: Sequence[str], labels: Mapping[str, str]) -> Said:
    """Read classes off what lies beside the images, as in WebDataset, and splits off folders.

    Args:
        names: the images' names.
        labels: each image's class, by its `stem`.
    """
    nothing = [""] * len(names)
    own = Said([labels.get(stem(name), "") for name in names], nothing, nothing)
    return own.or_else(said_by_folders(names, "none"))


def is_folder(part: str) -> bool:
    """Whether this part of a name says something, and is no shard that holds what comes next."""
    return part != "" and not part.lower().endswith(".tar")


def _unwrapped(paths: list[list[str]]) -> list[list[str]]:
    while all(len(path) > 1 and path[0] == paths[0][0] for path in paths):
        if paths[0][0].lower() in SIDES:
            break
        paths = [path[1:] for path in paths]
    return paths


def _are_classes(classes: list[list[str]], images: int) -> bool:
    distinct = set(map(tuple, classes))
    depths = set(map(len, distinct))
    return len(depths) == 1 and depths != {0} and 2 <= len(distinct) <= images / 2
