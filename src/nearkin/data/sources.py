"""The files of folders, tables and archives that have the name of an image.

Archives are read in place, never extracted.
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
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from nearkin.data.images import BadFile, Folder, Source, in_bytes
from nearkin.data.labels import Row, examples, read_table
from nearkin.errors import DataError

EXTENSIONS: Final = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm"}
)
"""A first filter only: the content of a file decides in the end."""


@dataclass(frozen=True, eq=False)
class Listing:
    """Images by name, before any of them is opened."""

    source: Source
    names: tuple[str, ...]  # Unique, in the order of their bytes
    states: Int64[np.ndarray, "files 2"]
    """Bytes, and time of the last write in nanoseconds (of a member, that of its archive)."""
    bad: list[BadFile] = field(default_factory=list[BadFile])
    key: str = ""  # The absolute path, which the index of headers is filed under; '' for no index
    rows: Mapping[str, Row] = field(default_factory=dict[str, Row])
    """What the data say of each image. Without it, folders may be classes."""
    folders: bool = True  # Whether folders may be the sides of a split


Entry = tuple[str, Sequence[int] | BadFile]  # The name of a file, and numbers that belong to it


def in_order(
    entries: Iterable[Entry], width: int
) -> tuple[tuple[str, ...], Int64[np.ndarray, "files width"], list[BadFile]]:
    """The names in the order of their bytes, `width` numbers of each, and the bad files."""
    names, numbers, bad = list[str](), array("q"), list[BadFile]()
    for name, entry in entries:  # there may be millions
        if isinstance(entry, BadFile):
            bad.append(entry)
        else:
            names.append(name)
            numbers.extend(entry)
    # ASCII text sorts like its bytes, and needs no copies to be compared.
    plain = all(map(str.isascii, names))
    key = names.__getitem__ if plain else lambda row: in_bytes(names[row])
    rows = sorted(range(len(names)), key=key)
    columns = np.array(numbers, np.int64).reshape(-1, width)[np.array(rows, np.int64)]
    return tuple(map(names.__getitem__, rows)), columns, bad


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


def _require_files(listing: Listing, where: object, others: Iterable[str]) -> Listing:
    """Refuse data without images, and say what there is instead."""
    if listing.names or listing.bad:
        return listing
    counts = Counter(splitext(name)[1].lower() or "no extension" for name in others)
    present = ", ".join(f"{count} x {suffix}" for suffix, count in counts.most_common(5))
    raise DataError(
        f"{where}: no images ({f'found {present}' if present else 'it is empty'}); "
        f"give files ending in {' '.join(sorted(EXTENSIONS))}"
    )


# Folders and tables

MARKER: Final = ".nearkin-run"
"""A file in every run folder, so that the plots of a run never count as images."""


def list_folder(root: Path) -> Listing:
    """Find the images below a folder or, where it holds none, in the .tar files below it.

    Hidden files and folders and the folders of runs are skipped. A link is followed only to a
    target inside the folder. Every folder is entered once, real ones before links to them, which
    cuts loops.
    """
    root = root.resolve()
    others = list[str]()

    def images() -> Iterator[Entry]:
        for name, state in _walk(root):
            if is_image(name) or isinstance(state, BadFile):
                yield name, _entry(name, state)
            else:
                others.append(name)

    names, states, bad = in_order(images(), 2)
    shards = sorted(name for name in others if name.lower().endswith(".tar"))
    if shards and not names:
        # Shards of WebDataset: each counts as a folder of that name.
        in_shards = list_archives(root, {f"{shard}/": root / shard for shard in shards})
        return replace(in_shards, bad=in_shards.bad + bad)
    return _require_files(Listing(Folder(root), names, states, bad, str(root)), root, others)


def list_table(path: Path) -> Listing:
    """The images that a table lists, by paths relative to its folder."""
    root = path.resolve().parent
    rows = {_name(path, written, row): row for written, row in read_table(path).items()}
    missing = [name for name in rows if not os.path.lexists(root / name)]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(rows)} files do not exist below {root}, such as "
            f"{examples(missing)}; give paths relative to the table"
        )
    return replace(list_files(root, rows), key=str(path.resolve()), rows=rows, folders=False)


def _name(path: Path, written: str, row: Row) -> str:
    root = path.resolve().parent
    name = written.removeprefix(f"{root}{os.sep}")
    if "\\" in name and not os.path.lexists(root / name):
        name = name.replace("\\", "/")
    if Path(name).anchor or ".." in name.split("/"):  # on Windows, also of a drive alone
        raise DataError(
            f"{path}, line {row.line}: {written!r} leads out of the table's folder; "
            "move the table above the images"
        )
    return name


def list_files(root: Path, names: Iterable[str]) -> Listing:
    """These files below a (resolved) folder, also those that no walk comes to."""
    entries = ((name, _entry(name, _state(root, name, is_inside=False))) for name in names)
    return Listing(Folder(root), *in_order(entries, 2))


def _entry(name: str, state: os.stat_result | BadFile) -> Sequence[int] | BadFile:
    if isinstance(state, BadFile):
        return state
    if not stat.S_ISREG(state.st_mode):
        return BadFile(name, "not a regular file")
    return state.st_size, state.st_mtime_ns


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
        for name, state in _in_folder(root, folder):
            if isinstance(state, BadFile) or not stat.S_ISDIR(state.st_mode):
                yield name, state
            else:
                below.append(name)
        for name in sorted(below):
            (linked if (root / name).is_symlink() else real).append(name)


def _in_folder(root: Path, folder: str) -> Iterator[tuple[str, os.stat_result | BadFile]]:
    start = f"{folder}/" if folder else ""
    try:
        if (root / folder / MARKER).exists():
            return
        with os.scandir(f"{root}/{folder}") as entries:  # one at a time: there may be a million
            for entry in entries:
                if not is_hidden(entry.name):
                    yield start + entry.name, _state(root, start + entry.name, is_inside=True)
    except OSError:
        yield folder, BadFile(folder, "unreadable folder")


def _state(root: Path, name: str, *, is_inside: bool) -> os.stat_result | BadFile:
    """The state of a file; `is_inside` if its folder is known to be below the root."""
    try:
        state = os.lstat(f"{root}/{name}")
        if is_inside and not stat.S_ISLNK(state.st_mode):
            return state
        path = root / name
        if not path.resolve().is_relative_to(root):
            return BadFile(name, "link leaves the folder")
        return path.stat()
    except (OSError, RuntimeError):  # a dangling link, or one that leads to itself
        return BadFile(name, "broken link")


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
        if not hasattr(os, "pread"):  # on Windows, where an offset is shared by all threads
            with archive.open("rb") as file:
                file.seek(offset)
                return file.read(count)
        opened = _opened(archive, self.modified)  # a reference, or the cache might close it
        return os.pread(opened.descriptor, count, offset)


def list_archives(where: Path, archives: Mapping[str, Path]) -> Listing:
    """Find the images in archives, given by the prefix of their members' names.

    Listed as bad are members with an absolute name, a '..' or the name of an earlier one, links,
    devices, encrypted members and those of an unusual compression.
    """
    contents: list[Path | bytes] = []
    labels, others = dict[str, np.ndarray](), list[str]()
    modified = [path.stat().st_mtime_ns for path in archives.values()]

    def images() -> Iterator[Entry]:
        for (prefix, path), written in zip(archives.items(), modified, strict=True):
            earlier = set[str]()
            with _readable(path):
                content, members = _open(path.resolve())
                for name, place, refusal in members:
                    numbers = len(contents), *place
                    if name.endswith(LABEL_SUFFIX) and not refusal:
                        labels[prefix + name] = np.array(numbers)
                    elif not is_image(name):
                        others.append(name)
                    elif refusal or name in earlier:
                        reason = refusal or "duplicate name"
                        yield name, BadFile(prefix + name, reason, place.bytes)
                    else:
                        earlier.add(name)
                        yield prefix + name, (place.bytes, written, *numbers)
            contents.append(content)

    names, numbers, bad = in_order(images(), 2 + 5)
    source = Archive(contents, max(modified), names, numbers[:, 2:])
    with _readable(where):
        classes = {
            stem(name): source.read_place(place, MAX_LABEL).decode("utf-8", "replace").strip()
            for name, place in sorted(labels.items(), key=lambda label: in_bytes(label[0]))
        }
    rows = {name: Row(classes.get(stem(name), "")) for name in names} if classes else {}
    key = str(where.resolve())
    return _require_files(Listing(source, names, numbers[:, :2], bad, key, rows), where, others)


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
