"""The images of folders, tables and archives, on this machine or in a store with a URL.

Archives, and the bytes of images in the columns of tables, are read in place.
"""

import gzip
import hashlib
import io
import json
import os
import re
import stat
import struct
import tarfile
import weakref
import zipfile
import zlib
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from posixpath import splitext
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from nearkin.data.cache import cache_folder
from nearkin.data.columns import COLUMN_TABLES, Cell, list_column
from nearkin.data.images import BadFile, Folder, Images, Source, in_bytes
from nearkin.data.labels import File, Row, read_table
from nearkin.data.notes import named
from nearkin.data.remote import (
    THREADS,
    RemoteError,
    RemoteFile,
    blocks,
    cache_limit,
    files_below,
    is_url,
    remote_files,
    warm,
)
from nearkin.errors import DataError, OutputError, redacted
from nearkin.tables import replace_text

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
    """Find the images below a folder or, where it holds none, in the shards below it.

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
    shards = {name: root / name for name in others if is_shard(name)}
    if shards and not names:
        in_shards = list_shards(root, shards)
        return replace(in_shards, bad=in_shards.bad + bad)
    return _require_files(Listing(Folder(root), names, states, bad, str(root)), root, others)


def list_store(url: str) -> Listing:
    """The same for what lies below an address of a store, which knows neither links nor runs."""
    files = files_below(url, lambda name: is_image(name) or is_shard(name))
    visible = {name: file for name, file in files.items() if not is_hidden(name)}
    images = {name: file for name, file in visible.items() if is_image(name)}
    where = redacted(url).rstrip("/")
    if visible and not images:
        return list_shards(where, visible)
    return _require_files(_objects(url.rstrip("/"), images), where, files)


def _objects(root: str, files: Mapping[str, RemoteFile]) -> Listing:
    """Images that are files of a store, by their paths below an address."""

    def entries() -> Iterator[Entry]:
        for name, file in files.items():
            refusal = _refusal(name)
            yield name, BadFile(name, refusal, file.size) if refusal else (file.size, file.tag)

    names, states, bad = in_order(entries(), 2)
    return Listing(Objects(root, names, states), names, states, bad, redacted(root))


@dataclass(frozen=True, eq=False)
class Objects:
    """Reads files below an address of a store."""

    root: str
    names: Sequence[str]  # In the order of their bytes
    states: Int64[np.ndarray, "files 2"]
    tagged: Final = True

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The file's first `limit` bytes, or all of it."""
        file = self._file(name)
        return file.read(0, file.size if limit is None else limit)

    def warm(self, names: Sequence[str]) -> None:
        """Fetch these files at once."""
        files = map(self._file, names)
        warm((file, number) for file in files for number in blocks(0, file.size))

    def _file(self, name: str) -> RemoteFile:
        row = bisect_left(self.names, in_bytes(name), key=in_bytes)
        return RemoteFile(f"{self.root}/{name}", *self.states[row].tolist())


def list_table(path: File) -> Listing:
    """The images that a table lists, by paths relative to its folder."""
    if isinstance(path, RemoteFile):
        return _list_remote_table(path)
    root = path.resolve().parent
    rows = {_name(path, written, row): row for written, row in read_table(path).items()}
    _require_all(path, root, rows, [name for name in rows if not os.path.lexists(root / name)])
    return replace(list_files(root, rows), key=str(path.resolve()), rows=rows, folders=False)


def _list_remote_table(table: RemoteFile) -> Listing:
    root = table.url.partition("?")[0].rpartition("/")[0]
    rows = {name.removeprefix(f"{root}/"): row for name, row in read_table(table).items()}
    if root.startswith("http"):  # which may have no list of its files
        files = remote_files({name: f"{root}/{name}" for name in rows})
    else:
        files = files_below(root, rows.__contains__)
    _require_all(table, redacted(root), rows, [name for name in rows if name not in files])
    return replace(_objects(root, files), key=str(table), rows=rows, folders=False)


def _require_all(path: File, root: object, rows: Collection[str], missing: list[str]) -> None:
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(rows)} files do not exist below {root}, such as "
            f"{named(missing)}; give paths relative to the table"
        )


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
SHARDS: Final = (".tar", *COLUMN_TABLES)
"""What a folder without images is searched for; each counts as a folder of that name."""
MAX_UNPACKED: Final = 2**30
"""A .tar.gz has no index, so it is unpacked into memory, up to this many bytes."""
MAX_OPEN: Final = 128  # Archives that a process keeps open; the data may be thousands of shards
LABEL_SUFFIXES: Final = (".cls", ".json")
"""A member of such a suffix holds the label of the image of the same stem: as text, or as `label`
or `cls` of a JSON object, as in WebDataset."""
MAX_LABEL: Final = {".cls": 200, ".json": 2**16}  # Bytes of it that are read
LISTINGS: Final = 1  # Version of the stored lists of members
DAMAGED: Final = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, NotImplementedError),
    *(EOFError, OSError, OverflowError, ValueError, MemoryError),
)
MOST: Final = 2**48
"""No place or size that an archive states is larger, so that sums of them stay numbers."""
BARE, STORED, DEFLATED = range(3)
"""What lies at a member's place: its bytes or, in a zip, its header and then those, or packed."""


class Place(NamedTuple):
    """Where in an archive a file lies."""

    offset: int  # Of a zip member, its local header; of a tar member, its first byte
    packed: int  # Its bytes in the archive
    bytes: int
    form: int = BARE

    @classmethod
    def stated(cls, offset: int, packed: int, unpacked: int, form: int = BARE) -> "Place":
        """What an archive says, which may be any number: reading such a place gives nothing."""

        def bounded(number: int) -> int:
            return number if 0 <= number < MOST else MOST

        return cls(bounded(offset), bounded(packed), bounded(unpacked), form)


class Member(NamedTuple):
    """A file in an archive, or a row of a table."""

    name: str
    place: Place
    refusal: str = ""  # Why it is not read
    label: str | None = None  # What a member says that is no image, of the one of its stem
    row: Row | None = None  # What a table says of its own image


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

    archives: Sequence[File | bytes]
    modified: int  # When the last of them was written, in nanoseconds
    names: Sequence[str]  # In the order of their bytes
    places: Int64[np.ndarray, "members 5"]  # Of each name: which archive, and its `Place` there

    tagged: bool = False  # Whether `modified` of images changes with their content alone

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The member's first `limit` bytes, or all of it; an OSError if it is damaged."""
        return self.read_place(self._where(name), limit)

    def warm(self, names: Sequence[str]) -> None:
        """Fetch what these members need of files of a store, at once."""
        needed = dict[tuple[RemoteFile, int], None]()
        for archive, offset, packed, *_ in (self._where(name).tolist() for name in names):
            if isinstance(file := self.archives[archive], RemoteFile):
                needed |= {(file, number): None for number in blocks(offset, offset + packed)}
        warm(needed)

    def _where(self, name: str) -> Int64[np.ndarray, "5"]:
        where: np.ndarray = self.places[bisect_left(self.names, in_bytes(name), key=in_bytes)]
        return where

    def read_place(self, where: Int64[np.ndarray, "5"], limit: int | None) -> bytes:
        """The same for a row of `places`."""
        archive, *place = where.tolist()
        try:
            return self._read(self.archives[archive], Place(*place), limit)
        except (struct.error, zlib.error, ValueError, OverflowError, MemoryError) as error:
            raise OSError("damaged in the archive") from error

    def _read(self, archive: File | bytes, place: Place, limit: int | None) -> bytes:
        offset = place.offset
        size = place.bytes if limit is None else min(limit, place.bytes)
        if size <= 0:  # which zlib would take for no limit
            return b""
        if place.form != BARE:
            # The lengths of name and extra field may differ from the central directory's.
            mark, *lengths = struct.unpack("<4s22xHH", self._bytes(archive, offset, 30))
            if mark != b"PK\3\4":
                raise OSError("no file begins there in the archive")
            offset += 30 + sum(lengths)
        if place.form != DEFLATED:
            return self._bytes(archive, offset, size)
        # No packing makes as much larger, but for what is made to be read in vain.
        packed = self._bytes(archive, offset, min(place.packed, 2 * size + 2**10))
        # Bounded by `size`, or a small member could unpack to any number of bytes.
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size)

    def _bytes(self, archive: File | bytes, offset: int, count: int) -> bytes:
        if isinstance(archive, bytes):
            return archive[offset : offset + count]
        if isinstance(archive, RemoteFile):
            return archive.read(offset, count)
        if not hasattr(os, "pread"):  # on Windows, where an offset is shared by all threads
            with archive.open("rb") as file:
                file.seek(offset)
                return file.read(count)
        opened = _opened(archive, self.modified)  # a reference, or the cache might close it
        # The memory for `count` bytes is taken before any is read, however few there are.
        left = max(0, os.fstat(opened.descriptor).st_size - offset)
        return os.pread(opened.descriptor, min(count, left), offset)


def window_for(images: Images) -> int:
    """What `shuffle_window` is by itself: half of the cache, where shards in a store exceed it."""
    shards = images.source.archives if isinstance(images.source, Archive) else ()
    total, limit = sum(s.size for s in shards if isinstance(s, RemoteFile)), cache_limit()
    return max(1, len(images) * limit // (2 * total)) if 0 < limit < total else 0


def is_shard(name: str) -> bool:
    """Whether a file is a part of a data set, not a cache that `datasets` leaves beside them."""
    suffix = splitext(name)[1].lower()
    return suffix in SHARDS and not name.rpartition("/")[2].startswith("cache-")


def is_pattern(text: str) -> bool:
    """Whether this stands for several shards, as `shards/{000000..000009}.tar`."""
    return bool(re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", text)) and not Path(text).exists()


def expanded(pattern: str) -> list[str]:
    """What a pattern with braces stands for.

    >>> expanded("{train,val}/{08..10}.tar")[:4]
    ['train/08.tar', 'train/09.tar', 'train/10.tar', 'val/08.tar']
    """
    start, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, end = rest.partition("}")
    first, dots, last = inside.partition("..")
    values = inside.split(",")
    if dots:
        if not (first.isdecimal() and last.isdecimal()):
            raise DataError(f"{redacted(pattern)}: {inside!r} is no range; say 000000..000009")
        values = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return [start + value + tail for value in values for tail in expanded(end)]


def list_pattern(pattern: str) -> Listing:
    """The shards that a pattern stands for, named by what follows the folder of them all."""
    where, root = redacted(pattern), pattern.partition("{")[0].rpartition("/")[0]
    paths = expanded(pattern)
    names = [redacted(path)[len(redacted(root)) :].lstrip("/") for path in paths]
    if is_url(pattern):
        return list_shards(where, remote_files(dict(zip(names, paths, strict=True))))
    files = {name: Path(path).expanduser() for name, path in zip(names, paths, strict=True)}
    missing = [str(path) for path in files.values() if not path.exists()]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(files)} shards do not exist, such as "
            f"{named(missing)}; give a pattern of those that do"
        )
    return list_shards(str(Path(where).expanduser().absolute()), files)


def list_shards(where: Path | str, shards: Mapping[str, File]) -> Listing:
    """The images in all shards of a data set, each a folder of its name."""
    named = {f"{shard}/": shards[shard] for shard in sorted(shards, key=in_bytes)}
    return list_archives(where, named)


def list_archives(where: File | str, archives: Mapping[str, File]) -> Listing:
    """Find the images in archives, given by the prefix of their members' names.

    Listed as bad are members with an absolute name, a '..' or the name of an earlier one, links,
    devices, encrypted members and those of an unusual compression.
    """
    contents: list[File | bytes] = []
    labels, others, rows = dict[str, str](), list[str](), dict[str, Row]()
    modified = [_modified(file) for file in archives.values()]

    def images() -> Iterator[Entry]:
        opened = zip(archives, modified, _opened_all(archives.values()), strict=True)
        for prefix, written, (content, members) in opened:
            for member in _once(members):
                name, place = prefix + member.name, member.place
                if member.label is not None:
                    labels[name] = member.label
                elif member.row is None and not is_image(name):
                    others.append(name)
                elif member.refusal:
                    yield name, BadFile(name, member.refusal, place.bytes)
                else:
                    if member.row is not None:
                        rows[name] = member.row
                    yield name, (place.bytes, written, len(contents), *place)
            contents.append(content)

    names, numbers, bad = in_order(images(), 2 + 5)
    tagged = any(isinstance(file, RemoteFile) for file in archives.values())
    source = Archive(contents, max(modified), names, numbers[:, 2:], tagged)
    rows |= _labels_beside(labels, names)
    key = str(where.resolve()) if isinstance(where, Path) else str(where)
    return _require_files(Listing(source, names, numbers[:, :2], bad, key, rows), where, others)


def _once(members: Iterable[Member]) -> Iterator[Member]:
    """The same members; of those of one name, all that follow the first good one are refused."""
    earlier = set[str]()
    for member in members:
        repeated = member.name in earlier and not member.refusal and member.label is None
        yield member._replace(refusal="duplicate name") if repeated else member
        if not member.refusal and (member.row is not None or is_image(member.name)):
            earlier.add(member.name)


def _labels_beside(labels: Mapping[str, str], names: Iterable[str]) -> dict[str, Row]:
    """The label of each image, from members that hold labels; nothing if there are none."""
    in_turn = sorted((name for name, label in labels.items() if label), key=in_bytes)
    classes = {stem(name): labels[name] for name in in_turn}
    return {name: Row(classes.get(stem(name), "")) for name in names} if classes else {}


def _modified(file: File) -> int:
    return file.tag if isinstance(file, RemoteFile) else file.stat().st_mtime_ns


Opened = tuple[File | bytes, Iterable[Member]]  # What to read from, and what lies in it


def _opened_all(files: Iterable[File]) -> Iterator[Opened]:
    """Each archive; those of a store at once, in order."""
    archives = list(files)
    if not any(isinstance(file, RemoteFile) for file in archives):
        yield from map(_opened_one, archives)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(_opened_one, archives)


def _opened_one(file: File) -> Opened:
    """An archive, whose members are listed once if it lies in a store."""
    if not isinstance(file, RemoteFile) or file.suffix.lower() in (*COLUMN_TABLES, ".gz", ".tgz"):
        with _readable(file):
            content, members = _open(file.resolve() if isinstance(file, Path) else file)
        return content, _guarded(file, members)
    known = hashlib.sha256(f"{file} {file.size} {file.tag}".encode()).hexdigest()
    path = cache_folder("index") / f"{known[:32]}-members-{LISTINGS}.json"
    try:
        stored = json.loads(path.read_bytes())
        return file, [Member(name, Place(*place), *rest) for name, place, *rest in stored]
    except (OSError, ValueError, TypeError):  # absent or damaged
        members = list(_guarded(file, _open(file)[1]))
    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(members))
    return file, members


def _guarded(file: File, members: Iterable[Member]) -> Iterator[Member]:
    with _readable(file):
        yield from members


@contextmanager
def _readable(file: File) -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise DataError(f"{file}: cannot be read ({error.reason}); try again") from error
    except DAMAGED as error:
        raise DataError(f"{file}: not a readable archive ({error}); pack it again") from error


def _open(path: File) -> Opened:
    """What to read from, and each visible file's name, place and reason to refuse it."""
    suffix = path.suffix.lower()
    if suffix in COLUMN_TABLES:
        table, cells = list_column(path)
        return table, _rows_of(cells)
    if suffix == ".zip":
        return path, _with_labels(path, _zip_members(path))
    if suffix == ".tar":
        return path, _with_labels(path, _tar_members(path))
    with path.open("rb") as packed, gzip.open(packed) as file:
        content = file.read(MAX_UNPACKED + 1)
    if len(content) > MAX_UNPACKED:
        raise DataError(
            f"{path}: over {MAX_UNPACKED >> 20} MiB unpacked, too much for a compressed tar, "
            "which is read into memory; give it as .tar or .zip"
        )
    return content, _with_labels(content, _tar_members(content))


def _rows_of(cells: Iterable[Cell]) -> Iterator[Member]:
    for name, offset, size, refusal, row in cells:
        yield Member(name, Place(offset, size, size), refusal, row=row)


def _with_labels(content: File | bytes, members: Iterable[Member]) -> Iterator[Member]:
    """The same members, those that hold a label with it."""
    modified = 0 if isinstance(content, bytes) else _modified(content)
    source = Archive([content], modified, (), np.zeros((0, 5), np.int64))
    for member in members:
        suffix = splitext(member.name)[1].lower()
        if suffix not in LABEL_SUFFIXES or member.refusal:
            yield member
            continue
        written = source.read_place(np.array([0, *member.place]), MAX_LABEL[suffix])
        text = written.decode("utf-8", "replace").strip()
        yield member._replace(label=text if suffix == ".cls" else _json_label(text))


def _json_label(text: str) -> str:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    values = [said.get(name) for name in ("label", "cls")] if isinstance(said, dict) else []
    return next((str(value) for value in values if isinstance(value, str | int)), "")


def _zip_members(path: File) -> Iterator[Member]:
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
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
                form = DEFLATED if deflated else STORED
                place = Place.stated(info.header_offset, *sizes, form=form)
                yield Member(_plain(info.filename), place, refusal)


def _tar_members(content: File | bytes) -> Iterator[Member]:
    with (
        io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        for info in archive:
            archive.members = []  # type: ignore[attr-defined]  # or it would remember all
            regular = info.isreg() and not info.issparse()
            refusal = _refusal(info.name) if regular else "link, device or sparse file"
            if not info.isdir() and not is_hidden(_plain(info.name)):
                place = Place.stated(info.offset_data, info.size, info.size)
                yield Member(_plain(info.name), place, refusal)
        if file.seek(0, io.SEEK_END) % tarfile.BLOCKSIZE:  # tarfile takes half a header for none
            raise tarfile.ReadError("unexpected end of data")


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _refusal(name: str) -> str:
    parts = name.replace("\\", "/").split("/")
    unsafe = name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name
    return "name leaves the archive" if unsafe else ""
