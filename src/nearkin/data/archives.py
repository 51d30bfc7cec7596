"""The images in archives, in shards and in tables that hold them."""

import gzip
import hashlib
import json
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from posixpath import splitext
from typing import Any, Final
from unicodedata import normalize

import numpy as np

from nearkin.data.columns import COLUMN_TABLES, list_column, undecided
from nearkin.data.images import BadFile, in_bytes
from nearkin.data.labels import SHARDS, Row
from nearkin.data.listing import Listing, images_among, is_image, listed, require_files
from nearkin.data.members import DEFLATED, STORED, Archives, Member, Place, read_member
from nearkin.data.notes import named
from nearkin.data.remote import (
    THREADS,
    File,
    RemoteFile,
    is_url,
    readable,
    remote_files,
    state_of,
)
from nearkin.data.samples import beside, companions, labels_beside, sample_key
from nearkin.data.unpacked import hold_copies, unpacked
from nearkin.errors import DataError, OutputError, redacted
from nearkin.files import replace_text
from nearkin.places import cache_folder, exists, user_path

ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_UNPACKED: Final = 2**30
"""Bytes that a .tar.gz may unpack to, or ten times its own: images hardly become smaller."""
MAX_LABEL: Final = {".cls": 200, ".json": 2**24}
"""Bytes that are read of members of a suffix that hold the label of the image of their sample, as
in WebDataset: as text, or as `label` or `cls` of a JSON object."""
LISTINGS: Final = 5  # Version of the stored lists of members
DAMAGED: Final = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, NotImplementedError),
    *(EOFError, OSError, OverflowError, ValueError, MemoryError),
)
PADDING: Final = 2**20
"""Bytes of zeros that a .tar ends with at most: more are a download that was never finished."""
MOST: Final = 2**48
"""Numbers of an archive that are larger count as it: nothing is there, and sums stay numbers."""


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
    start = len(redacted(root))
    paths = {redacted(path)[start:].lstrip("/"): path for path in expanded(pattern)}
    if is_url(pattern):
        return list_shards(where, remote_files(paths))
    files = {name: user_path(path) for name, path in paths.items()}
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

    Of the images of one sample, as shards of WebDataset have them, one counts.
    """
    found, modified = _Found(), list[int]()
    hold_copies(archives.values())
    remote = any(isinstance(file, RemoteFile) for file in archives.values())
    with ThreadPoolExecutor(THREADS) if remote else nullcontext() as pool:
        files = archives.values()
        opened = pool.map(_opened, files) if pool else map(_opened, files)
        for prefix, file in archives.items():
            with readable(file, "archive", "pack it again", *DAMAGED):
                found.add(prefix, *next(opened))
                modified.append(state_of(file)[1])
    numbers = np.array(found.numbers, np.int64).reshape(-1, 1 + len(Place._fields))
    source = Archives(found.files, numbers[:, 0], numbers[:, 1:])
    sizes = source.places[:, Place._fields.index("bytes")]
    states = np.stack([sizes, np.array(modified, np.int64)[source.file_of]], axis=1)
    images = images_among(listed(source, found.names, states, found.rows))
    left = [] if images.rows else companions(images.names)
    less = {*left}
    images = images.only(np.flatnonzero([name not in less for name in images.names]))
    samples = {*map(sample_key, images.names)}
    alone = [name for name in found.labels if sample_key(name) not in samples]
    listing = replace(
        images,
        bad=found.bad,
        key=str(where.resolve()) if isinstance(where, Path) else str(where),
        rows={**images.rows, **labels_beside(found.labels, images.names)},
        others=[*images.others, *found.refused, *alone],
        notes=[*beside(left), *undecided(found.files)],
    )
    return require_files(listing, where)


class _Found:
    """What lies in archives, in the order in which it lies there; it may be millions of files."""

    def __init__(self) -> None:
        self.files = list[File]()
        self.names = list[str]()
        self.numbers = array("q")  # For each name, the position of its archive, and its `Place`
        self.rows = dict[str, Row]()  # What tables say of their images
        self.labels = dict[str, Row]()  # What members say of the images of their sample
        self.bad = list[BadFile]()
        self.refused = list[str]()  # Files that are not read, and would not be images

    def add(self, prefix: str, file: File, members: Iterable[Member]) -> None:
        """Add an archive. Of members of one name, all that follow the first good one are bad."""
        earlier = set[str]()
        for member in members:
            name = prefix + member.name
            if member.label is not None:
                self.labels[normalize("NFC", name)] = Row.of(member.label)
                continue
            refusal = member.refusal or ("duplicate name" if name in earlier else "")
            if member.row is not None:
                self.rows[name] = member.row
            if not refusal:
                earlier.add(name)
                self.names.append(name)
                self.numbers.extend((len(self.files), *member.place))
            elif member.row is not None or is_image(name):
                self.bad.append(BadFile(name, refusal, member.place.bytes))
            else:
                self.refused.append(name)
        self.files.append(file)


def _opened(file: File) -> tuple[File, Iterable[Member]]:
    """What to read from, and what lies in it."""
    suffix = file.suffix.lower()
    if suffix in COLUMN_TABLES:
        return list_column(file)
    if suffix in (".gz", ".tgz"):
        file = unpacked(file, ".tar", partial(_gunzip, file))
    if isinstance(file, Path):
        file = file.resolve()
    listed = _zip_members(file) if suffix == ".zip" else _tar_members(file)
    members = _with_labels(file, listed)
    return file, _listed_once(file, members) if isinstance(file, RemoteFile) else members


def _listed_once(file: RemoteFile, members: Iterable[Member]) -> list[Member]:
    """The members of an archive in a store, from the index if they are in there."""
    known = hashlib.sha256(f"{file} {file.size} {file.version}".encode()).hexdigest()
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


def _gunzip(path: File, packed: Any, new: Path) -> None:
    limit = max(MAX_UNPACKED, 10 * state_of(path)[0])
    with gzip.open(packed) as file, new.open("wb") as target:
        while content := file.read(2**20):
            target.write(content)
            if target.tell() > limit:
                raise DataError(
                    f"{path}: over {limit >> 20} MiB unpacked, too much for images in a "
                    "compressed tar; give it as .tar or .zip"
                )


def _with_labels(file: File, members: Iterable[Member]) -> Iterator[Member]:
    """The same members, those that hold a label with it."""
    for member in members:
        suffix = splitext(member.name)[1].lower()
        if suffix not in MAX_LABEL or member.refusal:
            yield member
            continue
        written = read_member(file, member.place, MAX_LABEL[suffix])
        text = written.decode("utf-8", "replace").strip()
        yield member._replace(label=text if suffix == ".cls" else _json_label(text))


def _json_label(text: str) -> Any:
    """What a sample's JSON gives as its label or class: one value, if one of them is; else ''."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    values = [said.get(name) for name in ("label", "cls")] if isinstance(said, dict) else []
    given = [value for value in values if value is not None]
    return min(given, key=lambda value: not isinstance(value, str | int | float), default="")


def _zip_members(path: File) -> Iterator[Member]:
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
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
            name = info.filename.replace("\\", "/")  # as some programs of Windows write it
            if name and not name.endswith("/"):
                offset, packed, size = map(_bounded, numbers)
                place = Place(offset, packed, size, DEFLATED if deflated else STORED)
                yield Member(_plain(name), place, refused)


def _tar_members(path: File) -> Iterator[Member]:
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for info in archive:
            archive.members = []  # type: ignore[attr-defined]  # or it would remember all
            regular = info.isreg() and not info.issparse()
            refused = forbidden(info.name) if regular else "link, device or sparse file"
            if not info.isdir():
                offset, size = map(_bounded, (info.offset_data, info.size))
                place = Place(offset, size, size)
                yield Member(_plain(info.name), place, refused)
        file.seek(archive.offset)  # tarfile takes a damaged header, or half of one, for the end
        rest = file.read(PADDING + tarfile.BLOCKSIZE)
        if not rest or len(rest) % tarfile.BLOCKSIZE:
            raise tarfile.ReadError("unexpected end of data")
        if len(rest) > PADDING or rest.strip(b"\0"):
            raise tarfile.ReadError(f"neither a file nor the end at byte {archive.offset}")


def _bounded(number: int) -> int:
    return number if 0 <= number < MOST else MOST


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def forbidden(name: str) -> str:
    """Why no file of this name is read; '' if it is."""
    parts = name.replace("\\", "/").split("/")
    unsafe = name.startswith(("/", "\\")) or ".." in parts or "\0" in name
    return "name leaves the archive" if unsafe else ""
