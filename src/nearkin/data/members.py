"""Reading members of archives in place: nothing is extracted, and no stated size is believed.

Any number of threads and processes read at once.
"""

import io
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from nearkin.data.labels import Row
from nearkin.data.listing import START
from nearkin.data.remote import RemoteFile, blocks, warm

MAX_OPEN: Final = 128  # Archives that a process keeps open; the data may be thousands of shards
BARE, STORED, DEFLATED = range(3)
"""What lies at a member's place: its bytes or, in a zip, its header and then those, or packed."""


class Place(NamedTuple):
    """Where in its archive a member lies."""

    offset: int  # Of a zip member, its local header; of any other, its first byte
    packed: int  # Its bytes in the archive
    bytes: int
    form: int = BARE


class Member(NamedTuple):
    """A file in an archive, or the image of a row of a table, and what they say of it."""

    name: str
    place: Place
    refusal: str = ""  # Why it is not read
    label: str | None = None  # What a member says that is no image, of the one of its stem
    row: Row | None = None  # What a table says of its own image


@runtime_checkable
class Content(Protocol):
    """What an archive consists of; a `RemoteFile` is one, too."""

    def open(self) -> io.BytesIO | io.BufferedReader:
        """A file for reading."""

    def read(self, offset: int, count: int) -> bytes:
        """These bytes, as far as there are any."""


@dataclass(frozen=True)
class InMemory:
    """An archive in memory."""

    content: bytes = field(repr=False)

    def open(self) -> io.BytesIO | io.BufferedReader:
        """A file for reading."""
        return io.BytesIO(self.content)

    def read(self, offset: int, count: int) -> bytes:
        """These bytes, as far as there are any."""
        return self.content[offset : offset + count]


@dataclass(frozen=True)
class OnDisk:
    """An archive on this machine; a process opens it once, and for its forks, until it changes."""

    path: Path
    modified: int  # When it was last written, in nanoseconds

    def open(self) -> io.BytesIO | io.BufferedReader:
        """A file for reading."""
        return self.path.open("rb")

    def read(self, offset: int, count: int) -> bytes:
        """These bytes, as far as there are any."""
        if not hasattr(os, "pread"):  # on Windows, where an offset is shared by all threads
            with self.open() as file:
                file.seek(offset)
                return file.read(count)
        opened = _opened(self)  # a reference, or the cache might close it
        # The memory for `count` bytes is taken before any is read, however few there are.
        left = max(0, os.fstat(opened.descriptor).st_size - offset)
        return os.pread(opened.descriptor, min(count, left), offset)


class _Opened:
    """A file that stays open as long as this object lives."""

    def __init__(self, file: OnDisk) -> None:
        self.descriptor = os.open(file.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


def _kept_open() -> int:
    """How many archives stay open: a fourth of all files that a process may open, at most."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return MAX_OPEN
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_OPEN if limit < 0 else min(MAX_OPEN, limit // 4)


_opened = lru_cache(maxsize=_kept_open())(_Opened)


@dataclass(frozen=True, eq=False)
class Archives:
    """Reads members of archives by their positions among all of them."""

    contents: Sequence[Content]
    content_of: Int64[np.ndarray, " members"]  # The position of each one's archive
    places: Int64[np.ndarray, "members 4"]  # The `Place` of each

    def read(self, place: int, limit: int | None = None) -> bytes:
        """The member's first `limit` bytes, or all of it; an OSError if it is damaged."""
        return read_member(*self._where(place), limit)

    def start(self, place: int) -> bytes:
        """The first bytes of a member, as far as they can be read."""
        with suppress(OSError):
            return self.read(place, START)
        return b""

    def warm(self, places: Sequence[int]) -> None:
        """Fetch what these members need of files of a store, at once."""
        needed = dict[tuple[RemoteFile, int], None]()
        for content, (offset, packed, *_) in map(self._where, places):
            if isinstance(content, RemoteFile):
                numbers = blocks(offset, offset + packed)
                needed |= {(content, number): None for number in numbers}
        warm(needed)

    def _where(self, place: int) -> tuple[Content, Place]:
        return self.contents[self.content_of[place]], Place(*self.places[place].tolist())


def read_member(content: Content, place: Place, limit: int | None) -> bytes:
    """The first bytes of what lies at a place; an OSError if the archive lies of it."""
    try:
        return _unpacked(content, place, limit)
    except (struct.error, zlib.error, ValueError, OverflowError, MemoryError) as error:
        raise OSError("damaged in the archive") from error


def _unpacked(content: Content, place: Place, limit: int | None) -> bytes:
    offset = place.offset
    size = place.bytes if limit is None else min(limit, place.bytes)
    if size <= 0:  # which zlib would take for no limit
        return b""
    if place.form != BARE:
        # The lengths of name and extra field may differ from the central directory's.
        mark, *lengths = struct.unpack("<4s22xHH", content.read(offset, 30))
        if mark != b"PK\3\4":
            raise OSError("no file begins there in the archive")
        offset += 30 + sum(lengths)
    if place.form != DEFLATED:
        return content.read(offset, size)
    # No packing makes as much larger, but for what is made to be read in vain.
    packed = content.read(offset, min(place.packed, 2 * size + 2**10))
    # Bounded by `size`, or a small member could unpack to any number of bytes.
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size)
