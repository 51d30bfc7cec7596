"""Images in a .zip, a .tar, a .tar.gz or in many .tar shards, read in place: never extracted."""

import gzip
import io
import os
import stat
import struct
import tarfile
import weakref
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from nearkin.data.sources import BadFile, Files, Found, Listing, in_bytes, is_hidden, is_image, no_images, stem
from nearkin.errors import DataError

ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_UNPACKED: Final = 2**30
"""A .tar.gz has no index, so it is unpacked into memory, up to this many bytes."""
MAX_OPEN: Final = 128
"""Archives that a process keeps open; the data may be thousands of shards."""
CLASS: Final = ".cls"
"""Ending of a member that says, in text, what class the image beside it is of."""
LONGEST: Final = 200
"""Bytes of it that are read."""
DAMAGED: Final = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error),
    *(EOFError, OSError, OverflowError),
)
BARE, STORED, DEFLATED = range(3)
"""What lies at a member's place: its bytes or, in a zip, its header and then those, or packed."""


class Place(NamedTuple):
    """Where in an archive a file lies."""

    offset: int
    """Of a zip member, its local header; of a tar member, its first byte."""
    packed: int
    """Its bytes in the archive."""
    bytes: int
    form: int = BARE


class _Opened:
    """A file that stays open for as long as anybody holds this."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


@lru_cache(maxsize=MAX_OPEN)
def _opened(path: Path, modified: int) -> _Opened:
    """An archive, opened once by a process, and for its forks, as long as it is as it was."""
    del modified
    return _Opened(path)


@dataclass(frozen=True, eq=False)
class Archive:
    """Reads members of archives, from any number of threads and processes at once."""

    archives: Sequence[Path | bytes]
    modified: int
    """When the last of them was written, in nanoseconds."""
    names: Sequence[str]
    """In the order of their bytes."""
    places: Int64[np.ndarray, "members 5"]
    """Of each name: which archive, and its `Place` there."""

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The member's first `limit` bytes, or all of it.

        Raises:
            OSError: the archive is gone or damaged there.
        """
        row = bisect_left(self.names, in_bytes(name), key=in_bytes)
        return self._at(self.places[row], limit)

    def texts(
        self, names: Sequence[str], places: Int64[np.ndarray, "members 5"]
    ) -> Iterator[tuple[str, str]]:
        """Names of further members, and what is written in them."""
        for name, place in zip(names, places, strict=True):
            yield name, self._at(place, LONGEST).decode("utf-8", "replace").strip()

    def _at(self, where: Int64[np.ndarray, "5"], limit: int | None) -> bytes:
        archive, *place = where.tolist()
        try:
            return self._read(self.archives[archive], Place(*place), limit)
        except (struct.error, zlib.error, ValueError, OverflowError, MemoryError) as error:
            raise OSError("damaged in the archive") from error

    def _read(self, archive: Path | bytes, place: Place, limit: int | None) -> bytes:
        offset = place.offset
        size = place.bytes if limit is None else min(limit, place.bytes)
        if place.form != BARE:
            # The lengths of name and extra field may differ from the central directory's.
            mark, *lengths = struct.unpack("<4s22xHH", self._bytes(archive, offset, 30))
            if mark != b"PK\3\4":
                raise OSError("no file begins there in the archive")
            offset += 30 + sum(lengths)
        if place.form != DEFLATED:
            return self._bytes(archive, offset, size)
        packed = self._bytes(archive, offset, place.packed)
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size)

    def _bytes(self, archive: Path | bytes, offset: int, count: int) -> bytes:
        if isinstance(archive, bytes):
            return archive[offset : offset + count]
        opened = _opened(archive, self.modified)  # held, or another thread might have it closed
        return os.pread(opened.descriptor, count, offset)


def list_archive(path: Path) -> Listing:
    """Find the images in an archive.

    Refused, that is listed as bad, are members with an absolute name, a '..' or the name of an
    earlier one, links, devices, encrypted ones and those of an unusual compression.

    Raises:
        DataError: it is damaged, too large to unpack, or holds no images.
    """
    return _list(path, {"": path})


def list_shards(root: Path, shards: Iterable[str]) -> Listing:
    """Find the images in .tar files below a folder, as if each were a folder of that name.

    Raises:
        DataError: one is damaged, or they hold no images.
    """
    return _list(root, {f"{shard}/": root / shard for shard in shards})


def _list(where: Path, archives: dict[str, Path]) -> Listing:
    """Find the images in archives; their names begin with what the archive is called here."""
    opened: list[Path | bytes] = []
    files, classes, bad, others = Found(2 + 5), Found(5), list[BadFile](), list[str]()
    modified = [path.stat().st_mtime_ns for path in archives.values()]
    for (start, path), written in zip(archives.items(), modified, strict=True):
        met = set[str]()
        with _readable(path):
            data, members = _open(path.resolve())
            for name, place, refusal in members:
                if name.endswith(CLASS) and not refusal:
                    classes.add(start + name, len(opened), *place)
                elif not is_image(name):
                    others.append(name)
                elif refusal or name in met:
                    bad.append(BadFile(start + name, refusal or "duplicate name", place.bytes))
                else:
                    met.add(name)
                    files.add(start + name, place.bytes, written, len(opened), *place)
        opened.append(data)
    if not files.names and not bad:
        raise no_images(str(where), others)
    names, numbers = files.in_order()
    source = Archive(opened, max(modified), names, numbers[:, 2:])
    with _readable(where):
        labels = {stem(name): label for name, label in source.texts(*classes.in_order())}
    return Listing(str(where.resolve()), source, Files(names, numbers[:, :2]), bad, labels)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise DataError(f"{path}: not a readable archive ({error}); pack it again") from error


def _open(path: Path) -> tuple[Path | bytes, Iterator[tuple[str, Place, str]]]:
    """What to read from, and each visible file's name, place and reason to refuse it."""
    if path.suffix.lower() == ".zip":
        return path, _zip_members(path)
    data = path if path.suffix.lower() == ".tar" else _unpack(path)
    return data, _tar_members(data)


def _unpack(path: Path) -> bytes:
    with gzip.open(path) as file:
        data = file.read(MAX_UNPACKED + 1)
    if len(data) > MAX_UNPACKED:
        raise DataError(
            f"{path}: over {MAX_UNPACKED >> 20} MiB unpacked, too much for a compressed tar, "
            "which is read into memory; give it as .tar or .zip"
        )
    return data


def _zip_members(path: Path) -> Iterator[tuple[str, Place, str]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            refusal = _refusal(info.orig_filename)
            if stat.S_ISLNK(info.external_attr >> 16):
                refusal = "link"
            elif info.flag_bits & 1:
                refusal = "encrypted"
            elif not deflated and info.compress_type != zipfile.ZIP_STORED:
                refusal = "unusual compression"
            sizes = info.compress_size, info.file_size
            if not info.is_dir() and not is_hidden(_plain(info.filename)):
                place = Place(info.header_offset, *sizes, DEFLATED if deflated else STORED)
                yield _plain(info.filename), place, refusal


def _tar_members(data: Path | bytes) -> Iterator[tuple[str, Place, str]]:
    with (
        io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        for info in archive:
            archive.members = []  # type: ignore[attr-defined]  # or it would remember all
            regular = info.isreg() and not info.issparse()
            refusal = _refusal(info.name) if regular else "link, device or sparse file"
            if not info.isdir() and not is_hidden(_plain(info.name)):
                yield _plain(info.name), Place(info.offset_data, info.size, info.size), refusal


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _refusal(name: str) -> str:
    parts = name.replace("\\", "/").split("/")
    unsafe = name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name
    return "name leaves the archive" if unsafe else ""
