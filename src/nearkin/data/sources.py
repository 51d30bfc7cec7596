"""What every kind of data offers: images that are read by name, from any thread or process."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from posixpath import splitext
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from nearkin.errors import DataError

EXTENSIONS: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
"""A first filter only: what a file holds decides in the end."""


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that was met and cannot be used."""

    name: str
    reason: str
    bytes: int


@runtime_checkable
class Source(Protocol):
    """Where images come from. Holds no open files, so it can be pickled, forked and shared."""

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """An image's encoded bytes (the first `limit` of them) or its pixels.

        Raises:
            OSError: it cannot be read.
        """


class Stat(NamedTuple):
    """What tells that a file has changed since it was last looked at."""

    bytes: int
    modified: int
    """Nanoseconds; for a member of an archive, that of the archive."""


class Files(NamedTuple):
    """Any number of files and their states."""

    names: tuple[str, ...]
    """Unique, in the order of their bytes."""
    states: Int64[np.ndarray, "files 2"]
    """Of each its `Stat`."""


@dataclass(frozen=True, eq=False)
class Listing:
    """The files that look like images, before any of them is opened."""

    key: str
    """The absolute path, by which the index of headers is remembered."""
    source: Source
    files: Files | Mapping[str, Stat]
    """A few may be given by name."""
    bad: list[BadFile] = field(default_factory=list[BadFile])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """What files beside the images say of them, by the `stem` of both."""

    @cached_property
    def columns(self) -> Files:
        """The files."""
        if isinstance(self.files, Files):
            return self.files
        found = Found(len(Stat._fields))
        for name, state in self.files.items():
            found.add(name, *state)
        return Files(*found.in_order())


class Found:
    """Collects files, and so many numbers of each, as they are met, in little memory."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.names: list[str] = []
        self.numbers = array("q")

    def add(self, name: str, *numbers: int) -> None:
        """Take a file and its numbers."""
        self.names.append(name)
        self.numbers.extend(numbers)

    def in_order(self) -> tuple[tuple[str, ...], Int64[np.ndarray, "files numbers"]]:
        """The names in the order of their bytes, and their numbers."""
        names = self.names
        # Where all is ASCII, text has that order too, and needs no copies to be compared.
        plain = all(map(str.isascii, names))
        key = names.__getitem__ if plain else lambda row: in_bytes(names[row])
        rows = sorted(range(len(names)), key=key)
        numbers = np.array(self.numbers, np.int64).reshape(-1, self.width)
        return tuple(map(names.__getitem__, rows)), numbers[np.array(rows, np.int64)]


def is_hidden(name: str) -> bool:
    """Whether a file or one of its folders is hidden, or is macOS's shadow of another file."""
    if "." not in name[:1] and "/." not in name and "__MACOSX" not in name:
        return False  # as nearly always, and soon told
    parts = set(name.split("/")) - {".", ".."}
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def is_image(name: str) -> bool:
    """Whether a file is called like an image."""
    return splitext(name)[1].lower() in EXTENSIONS


def no_images(where: str, others: Iterable[str]) -> DataError:
    """The error for data without images, which says what there was instead."""
    seen = Counter(splitext(name)[1].lower() or "no extension" for name in others)
    found = ", ".join(f"{count} x {suffix}" for suffix, count in seen.most_common(5))
    return DataError(
        f"{where}: no images ({f'found {found}' if found else 'it is empty'}); "
        f"give files ending in {' '.join(sorted(EXTENSIONS))}"
    )


def in_bytes(name: str) -> bytes:
    """A sort key that does not depend on locale, and keeps names that are not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def stem(name: str) -> str:
    """What files that belong together have in common: all up to the first dot after the folder.

    >>> stem("shard.tar/0001.left.jpg")
    'shard.tar/0001'
    """
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]
