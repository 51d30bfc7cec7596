"""Files of stores and members of archives, read in place: no stated size is believed."""

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from nearkin.data.images import Images, Source
from nearkin.data.labels import Row
from nearkin.data.remote import File, RemoteFile, blocks, cache_limit, warm
from nearkin.errors import UsageError

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
    label: Any = None  # What a member says that is no image, of the one of its sample
    row: Row | None = None  # What a table says of its own image


def read_at(file: File, offset: int, count: int) -> bytes:
    """These bytes of a file, as far as there are any."""
    if isinstance(file, RemoteFile):
        return file.read(offset, count)
    with file.open("rb", buffering=0) as opened:
        # The memory for `count` bytes is taken before any is read, however few there are.
        left = max(0, opened.seek(0, os.SEEK_END) - offset)
        opened.seek(offset)
        return opened.read(min(count, left))


@dataclass(frozen=True, eq=False)
class Archives(Source):
    """Reads members of archives; or whole files of a store, each its only member."""

    files: Sequence[File]
    file_of: Int64[np.ndarray, " members"]  # The position of each one's archive
    places: Int64[np.ndarray, "members 4"]  # The `Place` of each

    def read(self, row: int, limit: int | None = None) -> bytes:
        """The member's first `limit` bytes, or all of it; an OSError if it is damaged."""
        return read_member(*self._place(row), limit)

    def only(self, rows: Int64[np.ndarray, " rows"]) -> "Archives":
        """The source of these members alone."""
        used, file_of = np.unique(self.file_of[rows], return_inverse=True)
        return Archives([self.files[file] for file in used], file_of, self.places[rows])

    def warm(self, rows: Iterable[int]) -> None:
        """Fetch what these members need of files of a store, at once."""
        needed = dict[tuple[RemoteFile, int], None]()
        for file, (offset, packed, *_) in map(self._place, rows):
            if isinstance(file, RemoteFile):
                needed |= {(file, number): None for number in blocks(offset, offset + packed)}
        warm(needed)

    def _place(self, row: int) -> tuple[File, Place]:
        return self.files[self.file_of[row]], Place(*self.places[row].tolist())


def window_for(images: Images) -> int:
    """What `shuffle_window` is by itself: half of the cache, where shards in a store exceed it."""
    files = images.source.files if isinstance(images.source, Archives) else ()
    shards = files if len(files) < len(images) else ()
    total, limit = sum(s.size for s in shards if isinstance(s, RemoteFile)), cache_limit()
    return max(1, len(images) * limit // (2 * total)) if 0 < limit < total else 0


def read_member(file: File, place: Place, limit: int | None) -> bytes:
    """The first bytes of what lies at a place; an OSError if the archive lies of it."""
    try:
        return _unpacked(file, place, limit)
    except UsageError:  # which is a ValueError
        raise
    except (struct.error, zlib.error, ValueError, OverflowError, MemoryError) as error:
        raise OSError("damaged in the archive") from error


def _unpacked(file: File, place: Place, limit: int | None) -> bytes:
    offset = place.offset
    size = place.bytes if limit is None else min(limit, place.bytes)
    if size <= 0:  # which zlib would take for no limit
        return b""
    if place.form != BARE:
        # The lengths of name and extra field may differ from the central directory's.
        mark, *lengths = struct.unpack("<4s22xHH", read_at(file, offset, 30))
        if mark != b"PK\3\4":
            raise OSError("no file begins there in the archive")
        offset += 30 + sum(lengths)
    if place.form != DEFLATED:
        return read_at(file, offset, size)
    # No packing makes as much larger, but for what is made to be read in vain.
    packed = read_at(file, offset, min(place.packed, 2 * size + 2**10))
    # Bounded by `size`, or a small member could unpack to any number of bytes.
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size)
