"""What every kind of data offers: pictures that are read by name, from any thread or process."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from posixpath import splitext
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from nearkin.errors import DataError

EXTENSIONS: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})
"""A first filter only: what a file holds decides in the end."""


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that was met and cannot be used."""

    name: str
    reason: str
    bytes: int


class Stat(NamedTuple):
    """What tells that a file has changed since it was last looked at."""

    bytes: int
    modified: int
    """Nanoseconds; for a member of an archive, that of the archive."""


@runtime_checkable
class Source(Protocol):
    """Where pictures come from. Holds no open files, so it can be pickled, forked and shared."""

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """A picture's encoded bytes (the first `limit` of them) or its pixels.

        Raises:
            OSError: it cannot be read.
        """


@dataclass(frozen=True)
class Listing:
    """The files that look like pictures, before any of them is opened."""

    key: str
    """The absolute path, by which the index of headers is remembered."""
    source: Source
    files: Mapping[str, Stat]
    bad: list[BadFile] = field(default_factory=list[BadFile])


def is_hidden(name: str) -> bool:
    """Whether a file or one of its folders is hidden, or is macOS's shadow of another file."""
    parts = set(name.split("/")) - {".", ".."}
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def is_picture(name: str) -> bool:
    """Whether a file is called like a picture."""
    return splitext(name)[1].lower() in EXTENSIONS


def no_pictures(where: str, others: Iterable[str]) -> DataError:
    """The error for data without pictures, which says what there was instead."""
    seen = Counter(splitext(name)[1].lower() or "no extension" for name in others)
    found = ", ".join(f"{count} x {suffix}" for suffix, count in seen.most_common(5))
    return DataError(
        f"{where}: no pictures ({f'found {found}' if found else 'it is empty'}); "
        f"give files ending in {' '.join(sorted(EXTENSIONS))}"
    )
