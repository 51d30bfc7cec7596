"""The images in archives, in shards and in tables that hold them."""

import gzip
import hashlib
import io
import json
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from posixpath import splitext
from typing import Final
from unicodedata import normalize

import numpy as np

from nearkin.data.columns import COLUMN_TABLES, list_column
from nearkin.data.images import BadFile, in_bytes
from nearkin.data.labels import SHARDS, Row
from nearkin.data.listing import (
    MASKS,
    Listing,
    chosen,
    in_order,
    is_image,
    require_files,
    stem,
)
from nearkin.data.members import (
    DEFLATED,
    STORED,
    Archives,
    Content,
    InMemory,
    Member,
    OnDisk,
    Place,
    read_member,
)
from nearkin.data.notes import Note, named
from nearkin.data.remote import THREADS, RemoteError, RemoteFile, is_url, remote_files
from nearkin.data.tables import File
from nearkin.errors import DataError, OutputError, redacted
from nearkin.files import replace_text
from nearkin.places import cache_folder, exists, system_error, user_path

ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_UNPACKED: Final = 2**30
"""A .tar.gz has no index, so it is unpacked into memory, up to this many bytes."""
LABEL_SUFFIXES: Final = (".cls", ".json")
"""A member of such a suffix holds the label of the image of the same stem: as text, or as `label`
or `cls` of a JSON object, as in WebDataset."""
MAX_LABEL: Final = {".cls": 200, ".json": 2**24}  # Bytes of it that are read
LISTINGS: Final = 3  # Version of the stored lists of members
DAMAGED: Final = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, NotImplementedError),
    *(EOFError, OSError, OverflowError, ValueError, MemoryError),
)
MOST: Final = 2**48
"""No place or size that an archive states is larger, so that sums of them stay numbers."""


def is_shard(name: str) -> bool:
    """Whether a file is a part of a data set, not a cache that `datasets` leaves beside them."""
    suffix = splitext(name)[1].lower()
    return suffix in SHARDS and not name.rpartition("/")[2].startswith("cache-")


def is_pattern(text: str) -> bool:
    """Whether this stands for several shards, as `shards/{000000..000009}.tar`."""
    return bool(re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", text)) and not exists(user_path(text))


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
    files = {name: user_path(path) for name, path in zip(names, paths, strict=True)}
    missing = [str(path) for path in files.values() if not exists(path)]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(files)} shards do not exist, such as "
            f"{named(missing)}; give a pattern of those that do"
        )
    return list_shards(str(user_path(where).absolute()), files)


def list_shards(where: Path | str, shards: Mapping[str, File]) -> Listing:
    """The images in all shards of a data set, each a folder of its name."""
    named = {f"{shard}/": shards[shard] for shard in sorted(shards, key=in_bytes)}
    return list_archives(where, named)


def list_archives(where: File | str, archives: Mapping[str, File]) -> Listing:
    """Find the images in archives, given by the prefix of their members' names.

    Listed as bad are members with an absolute name, a '..' or the name of an earlier one, links,
    devices, encrypted members and those of an unusual compression. Of the images of one sample,
    as shards of WebDataset have them, one counts.
    """
    found = _Found()
    opened = _opened_all(archives.values())
    for prefix, file in archives.items():
        with _readable(file):
            found.add(prefix, _modified(file), *next(opened))
    files = in_order(found.names)
    numbers = np.array(found.numbers, np.int64).reshape(-1, found.WIDTH)[files.found]
    said = files.said(found.rows)
    every = Archives(found.contents, numbers[:, 1], numbers[:, 2:])
    kept, tried, others = chosen(files.names, every.start, said)
    companions = [] if said else _companions([files.names[row] for row in kept])
    beside = {*companions}
    rows = [row for row in kept if files.names[row] not in beside]
    images, numbers = files.only(rows), numbers[np.array(rows, np.int64)]
    source = Archives(found.contents, numbers[:, 1], numbers[:, 2:])
    listing = Listing(
        source,
        images.names,
        np.stack([source.places[:, Place._fields.index("bytes")], numbers[:, 0]], axis=1),
        found.bad,
        key=str(where.resolve()) if isinstance(where, Path) else str(where),
        rows=said | _labels_beside(found.labels, images.names),
        tried=tried,
        others=[*others, *found.refused],
        notes=[*images.notes(), *_beside(companions)],
    )
    return require_files(listing, where)


class _Found:
    """What lies in archives, in the order in which it lies there; it may be millions of files."""

    WIDTH: Final = 2 + len(Place._fields)

    def __init__(self) -> None:
        self.contents = list[Content]()
        self.names = list[str]()
        self.numbers = array("q")
        """For each name, when its archive was written, the position of that, and its `Place`."""
        self.rows = dict[str, Row]()  # What tables say of their images
        self.labels = dict[str, str]()  # What members say of the images of their stem
        self.bad = list[BadFile]()
        self.refused = list[str]()  # Files that are not read, and would not be images

    def add(self, prefix: str, modified: int, content: Content, members: Iterable[Member]) -> None:
        """Add an archive. Of members of one name, all that follow the first good one are bad."""
        earlier = set[str]()
        for member in members:
            name = prefix + member.name
            if member.label is not None:
                self.labels[normalize("NFC", name)] = member.label
                continue
            refusal = member.refusal or ("duplicate name" if name in earlier else "")
            if member.row is not None:
                self.rows[name] = member.row
            if not refusal:
                earlier.add(name)
                self.names.append(name)
                self.numbers.extend((modified, len(self.contents), *member.place))
            elif member.row is not None or is_image(name):
                self.bad.append(BadFile(name, refusal, member.place.bytes))
            else:
                self.refused.append(name)
        self.contents.append(content)


PHOTOGRAPHS: Final = ("jpg", "jpeg", "jpe", "jfif", "webp", "avif", "heic", "heif")


def _companions(names: Sequence[str]) -> list[str]:
    """The images that belong to another one of their sample: masks, depth maps.

    That are `0.mask.png` beside `0.jpg` or `0.rgb.jpg` and, where most samples have two, `0.png`.
    """
    samples = dict[str, list[str]]()
    for name in names:
        samples.setdefault(stem(name), []).append(name)
    found, plain = list[str](), list[list[str]]()
    for group in samples.values():
        simple = [name for name in group if "." not in _field(name)]
        others = [name for name in group if name not in simple]
        if not simple:
            others = [name for name in group if not MASKS.isdisjoint(_field(name).split("."))]
        found += others if len(others) < len(group) else []
        if len({_field(name) for name in simple}) > 1:
            plain.append(simple)
    if 2 * len(plain) >= len(samples):
        for group in plain:
            first = min(map(_field, group), key=lambda kind: (kind not in PHOTOGRAPHS, kind))
            found += [name for name in group if _field(name) != first]
    return found


def _field(name: str) -> str:
    """What WebDataset calls the field of a sample: all behind the stem.

    >>> _field("shard.tar/0001.Mask.png")
    'mask.png'
    """
    return name[len(stem(name)) + 1 :].lower()


def _beside(names: Sequence[str]) -> list[Note]:
    """Note images that are left out for another one of their sample."""
    counts = Counter(map(_field, names)).most_common(5)
    kinds = ", ".join(f"{count} .{kind}" for kind, count in counts)
    text = f"{len(names)} images ({kinds}) beside the one of their sample"
    return [Note("left out", text, len(names), tuple(names[:3]))] if names else []


def _labels_beside(labels: Mapping[str, str], names: Iterable[str]) -> dict[str, Row]:
    """The label of each image, from members that hold labels; nothing if there are none."""
    in_turn = sorted((name for name, label in labels.items() if label), key=in_bytes)
    classes = {stem(name): labels[name] for name in in_turn}
    return {name: Row(classes.get(stem(name), "")) for name in names} if classes else {}


def _modified(file: File) -> int:
    return file.tag if isinstance(file, RemoteFile) else file.stat().st_mtime_ns


Opened = tuple[Content, Iterable[Member]]  # What to read from, and what lies in it


def _opened_all(files: Iterable[File]) -> Iterator[Opened]:
    """Each archive; those of a store at once, in order."""
    archives = list(files)
    if not any(isinstance(file, RemoteFile) for file in archives):
        yield from map(_opened, archives)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(_opened, archives)


def _opened(file: File) -> Opened:
    suffix = file.suffix.lower()
    if suffix in COLUMN_TABLES:
        table, rows = list_column(file)
        return OnDisk(table, _modified(table)), rows
    if suffix in (".gz", ".tgz"):
        content: Content = InMemory(_unzipped(file))
    else:
        content = OnDisk(file.resolve(), _modified(file)) if isinstance(file, Path) else file
    listed = _zip_members(content) if suffix == ".zip" else _tar_members(content)
    members = _with_labels(content, listed)
    return content, _listed_once(content, members) if isinstance(content, RemoteFile) else members


def _listed_once(file: RemoteFile, members: Iterable[Member]) -> list[Member]:
    """The members of an archive in a store, from the index if they are in there."""
    known = hashlib.sha256(f"{file} {file.size} {file.tag}".encode()).hexdigest()
    path = cache_folder("index") / f"{known[:32]}-members-{LISTINGS}.json"
    try:
        stored = json.loads(path.read_bytes())
        return [Member(name, Place(*place), *rest) for name, place, *rest in stored]
    except (OSError, ValueError, TypeError):  # absent or damaged
        found = list(members)
    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(found))
    return found


@contextmanager
def _readable(file: File) -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise DataError(f"{file}: cannot be read ({error.reason}); try again") from error
    except DAMAGED as error:
        damaged = DataError(f"{file}: not a readable archive ({error}); pack it again")
        raise system_error(error) or damaged from error


def _unzipped(path: File) -> bytes:
    with path.open("rb") as packed, gzip.open(packed) as file:
        content = file.read(MAX_UNPACKED + 1)
    if len(content) > MAX_UNPACKED:
        raise DataError(
            f"{path}: over {MAX_UNPACKED >> 20} MiB unpacked, too much for a compressed tar, "
            "which is read into memory; give it as .tar or .zip"
        )
    return content


def _with_labels(content: Content, members: Iterable[Member]) -> Iterator[Member]:
    """The same members, those that hold a label with it."""
    for member in members:
        suffix = splitext(member.name)[1].lower()
        if suffix not in LABEL_SUFFIXES or member.refusal:
            yield member
            continue
        written = read_member(content, member.place, MAX_LABEL[suffix])
        text = written.decode("utf-8", "replace").strip()
        yield member._replace(label=text if suffix == ".cls" else _json_label(text))


def _json_label(text: str) -> str:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    values = [said.get(name) for name in ("label", "cls")] if isinstance(said, dict) else []
    return next((str(value) for value in values if isinstance(value, str | int | float)), "")


def _zip_members(content: Content) -> Iterator[Member]:
    with content.open() as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            refused = forbidden(info.orig_filename)
            if stat.S_ISLNK(info.external_attr >> 16):
                refused = "link"
            elif info.flag_bits & 1:
                refused = "encrypted"
            elif not deflated and info.compress_type != zipfile.ZIP_STORED:
                refused = "unusual compression"
            numbers = info.header_offset, info.compress_size, info.file_size
            if not info.is_dir():
                form = DEFLATED if deflated else STORED
                offset, packed, size = map(_bounded, numbers)
                place = Place(offset, packed, size, form)
                yield Member(_plain(info.filename), place, refused)


def _tar_members(content: Content) -> Iterator[Member]:
    with content.open() as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for info in archive:
            archive.members = []  # type: ignore[attr-defined]  # or it would remember all
            regular = info.isreg() and not info.issparse()
            refused = forbidden(info.name) if regular else "link, device or sparse file"
            if not info.isdir():
                offset, size = map(_bounded, (info.offset_data, info.size))
                place = Place(offset, size, size)
                yield Member(_plain(info.name), place, refused)
        if file.seek(0, io.SEEK_END) % tarfile.BLOCKSIZE:  # tarfile takes half a header for none
            raise tarfile.ReadError("unexpected end of data")


def _bounded(number: int) -> int:
    """What an archive states, which may be any number: nothing can be read at the largest."""
    return number if 0 <= number < MOST else MOST


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def forbidden(name: str) -> str:
    """Why no file of this name is read; '' if it is."""
    parts = name.replace("\\", "/").split("/")
    unsafe = name.startswith(("/", "\\")) or ".." in parts or "\0" in name
    return "name leaves the archive" if unsafe else ""
