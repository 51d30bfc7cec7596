"""Where images come from: folders, archives and a user's own sources, read by name.

Archives are read in place, never extracted. A source holds no open files, so it can be pickled,
forked, and read from any thread or process.
"""

import gzip
import io
import os
import stat
import struct
import tarfile
import weakref
import zipfile
import zlib
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from posixpath import splitext
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from nearkin.data.decode import rgb_pixels
from nearkin.errors import DataError

EXTENSIONS: Final = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm"}
)
"""A first filter only: the content of a file decides in the end."""


@runtime_checkable
class Source(Protocol):
    """Reads images by name."""

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """An image's encoded bytes (the first `limit` of them) or its pixels; else an OSError."""


@runtime_checkable
class ImageSource(Protocol):
    """What a source of your own has: names, and a method that reads one image.

    It must be picklable, and `read` must give the same image for a name every time. Optional
    attributes, each a sequence with one text per name, '' where nothing is known:

        labels    the class of each image
        groups    images of one group never fall on two sides of a split
        splits    train, val or test
    """

    names: Sequence[str]
    """Unique names, in any order."""

    def read(self, name: str, /) -> bytes | np.ndarray:
        """A file's bytes, or pixels (height, width[, 3]): uint8, or floats from 0 to 1."""


@dataclass(frozen=True)
class CustomSource:
    """Reads an `ImageSource`: whatever it raises, or returns that is no image, is an OSError."""

    source: ImageSource

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """The encoded bytes, or RGB pixels."""
        try:
            image: Any = self.source.read(name)
            return image[:limit] if isinstance(image, bytes) else rgb_pixels(image)
        except Exception as error:
            raise OSError(f"{name}: {error}") from error


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that cannot be used."""

    name: str
    reason: str
    bytes: int


class Files(NamedTuple):
    """Any number of files, and what tells whether they have changed."""

    names: tuple[str, ...]  # Unique, in the order of their bytes
    states: Int64[np.ndarray, "files 2"]
    """Bytes, and time of the last write in nanoseconds (of a member, that of its archive)."""


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The files that have the name of an image, before any of them is opened."""

    key: str  # The absolute path, which the index of headers is filed under
    source: Source
    files: Files
    bad: list[BadFile] = field(default_factory=list[BadFile])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels from files beside the images, by the `stem` of both."""


class FileCollector:
    """Collects names and a fixed number of integers each, in little memory."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.names: list[str] = []
        self.numbers = array("q")

    def add(self, name: str, *numbers: int) -> None:
        """Add a file."""
        self.names.append(name)
        self.numbers.extend(numbers)

    def in_order(self) -> tuple[tuple[str, ...], Int64[np.ndarray, "files numbers"]]:
        """The names in the order of their bytes, and their numbers."""
        names = self.names
        # ASCII text sorts like its bytes, and needs no copies to be compared.
        plain = all(map(str.isascii, names))
        key = names.__getitem__ if plain else lambda row: in_bytes(names[row])
        rows = sorted(range(len(names)), key=key)
        numbers = np.array(self.numbers, np.int64).reshape(-1, self.width)
        return tuple(map(names.__getitem__, rows)), numbers[np.array(rows, np.int64)]


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


def is_hidden(name: str) -> bool:
    """Whether a file or one of its folders is hidden, or is macOS's shadow of another file."""
    if "." not in name[:1] and "/." not in name and "__MACOSX" not in name:
        return False  # nearly always
    parts = set(name.split("/")) - {".", ".."}
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def is_image(name: str) -> bool:
    """Whether a file has the name of an image."""
    return splitext(name)[1].lower() in EXTENSIONS


def no_images(where: str, others: Iterable[str]) -> DataError:
    """The error for data without images, which says what there is instead."""
    counts = Counter(splitext(name)[1].lower() or "no extension" for name in others)
    present = ", ".join(f"{count} x {suffix}" for suffix, count in counts.most_common(5))
    return DataError(
        f"{where}: no images ({f'found {present}' if present else 'it is empty'}); "
        f"give files ending in {' '.join(sorted(EXTENSIONS))}"
    )


# Folders


@dataclass(frozen=True)
class Folder:
    """Reads files below a folder."""

    root: Path

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The file's first `limit` bytes, or all of it."""
        with open(f"{self.root}/{name}", "rb") as file:  # noqa: PTH123  (a million times)
            return file.read(-1 if limit is None else limit)


MARKER: Final = ".nearkin-run"
"""A file in every run folder, so that the plots of a run never count as images."""


def list_folder(root: Path) -> ImageFiles:
    """Find the images below a folder or, where it holds none, in the .tar files below it.

    Hidden files and folders and the folders of runs are skipped. A link is followed only to a
    target inside the folder. Every folder is entered once, real ones before links to them, which
    cuts loops.
    """
    root = root.resolve()
    files, bad, others = FileCollector(2), list[BadFile](), list[str]()
    for name, entry in _walk(root):
        if isinstance(entry, BadFile):
            bad.append(entry)
        elif not is_image(name):
            others.append(name)
        elif stat.S_ISREG(entry.st_mode):
            files.add(name, entry.st_size, entry.st_mtime_ns)
        else:
            bad.append(BadFile(name, "not a regular file", 0))
    shards = sorted(name for name in others if name.lower().endswith(".tar"))
    if shards and not files.names:
        # Shards of WebDataset: each counts as a folder of that name.
        in_shards = list_archives(root, {f"{shard}/": root / shard for shard in shards})
        return replace(in_shards, bad=in_shards.bad + bad)
    if not files.names and not bad:
        raise no_images(str(root), others)
    return ImageFiles(str(root), Folder(root), Files(*files.in_order()), bad)


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result | BadFile]]:
    """Every visible file's name and state, breadth first, links to folders last."""
    real, linked = deque([""]), deque[str]()
    entered = set[tuple[int, int]]()
    while real or linked:
        folder = real.popleft() if real else linked.popleft()
        here = (root / folder).stat()
        if (here.st_dev, here.st_ino) in entered:
            continue
        entered.add((here.st_dev, here.st_ino))
        below = list[str]()
        for name, entry in _entries(root, folder):
            if isinstance(entry, BadFile) or not stat.S_ISDIR(entry.st_mode):
                yield name, entry
            else:
                below.append(name)
        for name in sorted(below):
            (linked if (root / name).is_symlink() else real).append(name)


def _entries(root: Path, folder: str) -> Iterator[tuple[str, os.stat_result | BadFile]]:
    start = f"{folder}/" if folder else ""
    try:
        if (root / folder / MARKER).exists():
            return
        with os.scandir(f"{root}/{folder}") as entries:  # one at a time: there may be a million
            for entry in entries:
                if not is_hidden(entry.name):
                    yield start + entry.name, _state(root, start + entry.name)
    except OSError:
        yield folder, BadFile(folder, "unreadable folder", 0)


def state(root: Path, name: str) -> os.stat_result | BadFile:
    """The state of a file below a (resolved) folder, or what is wrong with it.

    Checks all links on the way: a name from a table may be one that no walk comes to.
    """
    folder = name
    while folder := folder.rpartition("/")[0]:
        if os.path.islink(f"{root}/{folder}"):  # noqa: PTH114  (tables have a million rows)
            link = _state(root, folder)
            if isinstance(link, BadFile):
                return replace(link, name=name)
    return _state(root, name)


def _state(root: Path, name: str) -> os.stat_result | BadFile:
    """The same for a file in a folder that is known to be below the root."""
    try:
        entry = os.lstat(f"{root}/{name}")
        if not stat.S_ISLNK(entry.st_mode):
            return entry
        path = root / name
        if not path.resolve().is_relative_to(root):
            return BadFile(name, "link leaves the folder", 0)
        return path.stat()
    except (OSError, RuntimeError):  # a dangling link, or one that leads to itself
        return BadFile(name, "broken link", 0)


# Archives

ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_UNPACKED: Final = 2**30
"""A .tar.gz has no index, so it is unpacked into memory, up to this many bytes."""
MAX_OPEN: Final = 128  # Archives that a process keeps open; the data may be thousands of shards
LABEL_SUFFIX: Final = ".cls"
"""A member of this suffix holds, as text, the label of the image of the same stem."""
MAX_LABEL: Final = 200  # Bytes of it that are read
DAMAGED: Final = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error),
    *(EOFError, OSError, OverflowError),
)
BARE, STORED, DEFLATED = range(3)
"""What lies at a member's place: its bytes or, in a zip, its header and then those, or packed."""


class Place(NamedTuple):
    """Where in an archive a file lies."""

    offset: int  # Of a zip member, its local header; of a tar member, its first byte
    packed: int  # Its bytes in the archive
    bytes: int
    form: int = BARE


class _Opened:
    """A file that stays open as long as this object lives."""

    def __init__(self, path: Path, modified: int) -> None:
        del modified  # a part of the key of the cache
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


# An archive is opened once by a process, and for its forks, until it is written again.
_opened = lru_cache(maxsize=MAX_OPEN)(_Opened)


@dataclass(frozen=True, eq=False)
class Archive:
    """Reads members of archives, from any number of threads and processes at once."""

    archives: Sequence[Path | bytes]
    modified: int  # When the last of them was written, in nanoseconds
    names: Sequence[str]  # In the order of their bytes
    places: Int64[np.ndarray, "members 5"]  # Of each name: which archive, and its `Place` there

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The member's first `limit` bytes, or all of it; an OSError if it is damaged."""
        row = bisect_left(self.names, in_bytes(name), key=in_bytes)
        return self.read_place(self.places[row], limit)

    def read_place(self, where: Int64[np.ndarray, "5"], limit: int | None) -> bytes:
        """The same for a row of `places`."""
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
        # Bounded by `size`, or a small member could unpack to any number of bytes.
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size)

    def _bytes(self, archive: Path | bytes, offset: int, count: int) -> bytes:
        if isinstance(archive, bytes):
            return archive[offset : offset + count]
        opened = _opened(archive, self.modified)  # a reference, or the cache might close it
        return os.pread(opened.descriptor, count, offset)


def list_archives(where: Path, archives: dict[str, Path]) -> ImageFiles:
    """Find the images in archives, given by the prefix of their members' names.

    Listed as bad are members with an absolute name, a '..' or the name of an earlier one, links,
    devices, encrypted members and those of an unusual compression.
    """
    contents: list[Path | bytes] = []
    files, label_files = FileCollector(2 + 5), FileCollector(5)
    bad, others = list[BadFile](), list[str]()
    modified = [path.stat().st_mtime_ns for path in archives.values()]
    for (prefix, path), written in zip(archives.items(), modified, strict=True):
        earlier = set[str]()
        with _readable(path):
            content, members = _open(path.resolve())
            for name, place, refusal in members:
                if name.endswith(LABEL_SUFFIX) and not refusal:
                    label_files.add(prefix + name, len(contents), *place)
                elif not is_image(name):
                    others.append(name)
                elif refusal or name in earlier:
                    bad.append(BadFile(prefix + name, refusal or "duplicate name", place.bytes))
                else:
                    earlier.add(name)
                    files.add(prefix + name, place.bytes, written, len(contents), *place)
        contents.append(content)
    if not files.names and not bad:
        raise no_images(str(where), others)
    names, numbers = files.in_order()
    source = Archive(contents, max(modified), names, numbers[:, 2:])
    with _readable(where):
        labels = {
            stem(name): source.read_place(place, MAX_LABEL).decode("utf-8", "replace").strip()
            for name, place in zip(*label_files.in_order(), strict=True)
        }
    return ImageFiles(str(where.resolve()), source, Files(names, numbers[:, :2]), bad, labels)


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
    if path.suffix.lower() == ".tar":
        return path, _tar_members(path)
    with gzip.open(path) as file:
        content = file.read(MAX_UNPACKED + 1)
    if len(content) > MAX_UNPACKED:
        raise DataError(
            f"{path}: over {MAX_UNPACKED >> 20} MiB unpacked, too much for a compressed tar, "
            "which is read into memory; give it as .tar or .zip"
        )
    return content, _tar_members(content)


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


def _tar_members(content: Path | bytes) -> Iterator[tuple[str, Place, str]]:
    with (
        io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file,
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
