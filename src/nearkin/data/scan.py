"""Headers of all images, read once and stored in an index until a file changes.

The index lies in $XDG_CACHE_HOME/nearkin/index (by default ~/.cache). Where that cannot be
written, headers are read again at every start.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64, UInt8
from torch.utils.data import Dataset

from nearkin.data.cache import cache_folder
from nearkin.data.channels import array_header, check, header
from nearkin.data.decode import (
    MAX_BYTES,
    NO_IMAGE,
    BadImage,
    Header,
    PixelType,
    looks_like_image,
    max_pixels,
    needs_all,
    quiet,
)
from nearkin.data.images import (
    PREFIX,
    Arrays,
    BadFile,
    CustomSource,
    Images,
    Source,
    content_bytes,
    content_id,
    in_bytes,
    read,
)
from nearkin.data.kinds import of_one_kind
from nearkin.data.listing import Listing, left_out, masks
from nearkin.data.loader import prefetch
from nearkin.distributed import available_cpus
from nearkin.files import whole
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.types import UNKNOWN

VERSION: Final = 4  # Of the index; another version has other file names


THREADS: Final = 8  # Enough to hide the latency of a disk or of a network
BLOCK: Final = 2**10  # Files between two calls of `on_progress`
MANY: Final = 2**14  # Files from which on starting processes pays
Columns = Mapping[str, np.ndarray]  # A value of each file
Values = Callable[[int], Sequence[Any]]  # Computes the values of a row, one of each column


def fill(
    columns: Columns,
    files: Listing | Images,
    kind: str,
    values: Values,
    what: str,
    on_progress: ProgressCallback,
    *,
    retried: str,
) -> None:
    """Fill in columns from the index of this kind, and compute what is not in it.

    Threads do so and, if many files are new, processes with threads. Where the column `retried`
    is zero, the index does not count.
    """
    path, known = None, np.zeros(len(files.names), np.bool_)
    if files.key:
        name = hashlib.sha256(in_bytes(files.key)).hexdigest()[:32]
        path = cache_folder("index") / f"{name}-{kind}-{VERSION}.npz"
        known = _load(path, files, columns)
    known &= columns[retried].any(axis=1)
    fresh = np.flatnonzero(~known)
    blocks = _Blocks(values, fresh)
    workers = available_cpus() if len(fresh) >= MANY else 0
    computed = prefetch(blocks, 0, len(blocks), workers, images=BLOCK)
    progress = tracked(computed, len(fresh), what, on_progress)
    for rows, block in zip(blocks.rows, progress, strict=True):
        for column, each in zip(columns.values(), zip(*block, strict=True), strict=True):
            column[rows] = each
    if path and columns[retried][fresh].any():
        _save(path, files, columns)


def _load(path: Path, files: Listing | Images, columns: Columns) -> Bool[np.ndarray, " files"]:
    """Fill in the columns of each file that has not changed; return which rows are filled in."""
    filled = np.zeros(len(files.names), np.bool_)
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            then = _stored_rows(file["names"].tobytes(), files.names)
            same = (then >= 0) & (file["stats"][then] == files.states).all(axis=1)
            for name, column in columns.items():
                column[same] = file[name][then[same]]
            filled[same] = True
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        filled[:] = False  # absent or damaged: everything in it can be read again
    return filled


def _stored_rows(stored: bytes, names: Sequence[str]) -> Int64[np.ndarray, " files"]:
    """Return the row in the index of each file, -1 if it has none."""
    if stored == _joined(names):  # as a rule; a table of millions of names is large
        return np.arange(len(names))
    row = {
        name: row for row, name in enumerate(stored.decode("utf-8", "surrogateescape").split("\0"))
    }
    return np.array([row.get(name, -1) for name in names], np.int64)


def _joined(names: Sequence[str]) -> bytes:
    return in_bytes("\0".join(names))


def _save(path: Path, files: Listing | Images, columns: Columns) -> None:
    """Store the columns in place of the index before."""
    names: UInt8[np.ndarray, " bytes"] = np.frombuffer(_joined(files.names), np.uint8)
    with suppress(OSError):  # a full or read-only disk costs the next start some time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as own, own.open("wb") as file:
            np.savez_compressed(
                file, allow_pickle=False, names=names, stats=files.states, **columns
            )


class _Blocks(Dataset[list[Sequence[Any]]]):
    """The values of some rows, block by block."""

    def __init__(self, values: Values, rows: np.ndarray) -> None:
        self.values = values
        self.rows = np.split(rows, range(BLOCK, len(rows), BLOCK)) if len(rows) else []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[Sequence[Any]]:
        with quiet, ThreadPoolExecutor(THREADS) as pool:
            parts = np.array_split(self.rows[number], THREADS)
            return list(chain.from_iterable(pool.map(self._part, parts)))

    def _part(self, rows: np.ndarray) -> list[Sequence[Any]]:
        return list(map(self.values, rows.tolist()))


FURTHER: Final = 2**24
"""Bytes that hold a header, unless it `needs_all`; a JPEG with more before it is a trap."""
LARGE: Final = 2**25
"""Bytes of a file, or pixels, from which on at most two threads work at once, to bound memory."""
_large: Final = BoundedSemaphore(2)


def scan(
    listing: Listing,
    *,
    full: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> Images:
    """The images with a good header, without labels; all others are bad. There may be none.

    Reads the header of every file, or loads it from the index if the file has not changed. If
    `full`, every image is decoded now, which finds damage behind the header.
    """
    names, states = listing.names, listing.states
    formats = np.full(len(names), b"", np.dtype("S64"))  # ASCII; of a bad file, the reason
    sizes = np.zeros((len(names), 2), np.int32)  # of a bad file, zeros
    contents = np.zeros(len(names), np.uint64)
    channels = np.zeros(len(names), np.int64)  # of RGB of 8 bits, zeros
    dtypes = np.full(len(names), b"", np.dtype("S16"))
    columns = {
        **{"formats": formats, "sizes": sizes, "channels": channels, "dtypes": dtypes},
        "contents": contents,
    }
    reasons = dict[int, str]()
    if isinstance(listing.source, Arrays):
        known = _values(array_header(listing.source.stacked(names[:1])[0]), 0)
        for column, value in zip(columns.values(), known, strict=True):
            column[:] = value
        for row, name in enumerate(names):
            contents[row] = content_id(listing.source.read(name), int(states[row, 0]))
    elif isinstance(listing.source, CustomSource):
        reasons = _scan_source(listing, columns, full, on_progress)
    else:
        kind = f"{'full' if full else 'headers'}-{max_pixels()}"
        what = "decoding all images" if full else "looking at all files"
        values = partial(_scan_file, listing, full)
        # What has failed may be no fault of the file: a permission, a package, a disk, a store.
        fill(columns, listing, kind, values, what, on_progress, retried="sizes")
    bad, others = [*listing.bad], [*listing.others]
    good = sizes.any(axis=1)
    for row in np.flatnonzero(~good).tolist():
        reason = reasons.get(row, formats[row].decode())
        if names[row] in listing.tried and reason in NO_IMAGE:
            others.append(names[row])
        else:
            bad.append(BadFile(names[row], reason, int(states[row, 0])))
    rows = np.flatnonzero(good)
    images = Images(
        tuple(map(names.__getitem__, rows.tolist())),
        labels=np.full(len(rows), UNKNOWN, np.int64),
        groups=np.arange(len(rows)),
        splits=np.full(len(rows), ""),
        classes=(),
        sizes=sizes[rows],
        num_bytes=states[rows, 0],
        kinds=formats[rows].astype(np.str_),
        modified=states[rows, 1],
        contents=contents[rows],
        source=listing.source,
        key=listing.key,
        bad=tuple(sorted(bad, key=lambda file: in_bytes(file.name))),
        notes=(*listing.notes, *left_out(others), *masks(names)),
    )
    return of_one_kind(images, channels[rows], dtypes[rows].astype(np.str_))


def _scan_source(
    listing: Listing, columns: Columns, full: bool, on_progress: ProgressCallback
) -> dict[int, str]:
    """Read every image of a user's own source, once; return why some are bad."""
    reasons = dict[int, str]()
    rows = [[row] for row in range(len(listing.names))]
    for (row,) in tracked(rows, len(rows), "reading all images", on_progress):
        try:
            image = listing.source.read(listing.names[row])
            content = content_bytes(image)
            # A checksum stands where files have the time of their last write.
            listing.states[row] = len(content), zlib.crc32(content)
            values = _values(_header(image, full), content_id(image, len(content)))
            for column, value in zip(columns.values(), values, strict=True):
                column[row] = value
        except BadImage as error:
            reasons[row] = error.reason
    return reasons


def _header(image: bytes | np.ndarray, full: bool) -> Header:
    if not isinstance(image, bytes):
        return array_header(image)
    known = header(image)
    if full:
        check(image, known)
    return known


def _values(known: Header, content: int) -> Sequence[Any]:
    """A header and a `content_id` as the values of the columns of an index."""
    of = known.pixel_type or PixelType(0, "")
    return known.format, (known.width, known.height), of.num_channels, of.dtype, content


def _scan_file(listing: Listing, full: bool, row: int) -> Sequence[Any]:
    """The header and `content_id` of an image, or the reason why it is none."""
    source, name, size = listing.source, listing.names[row], int(listing.states[row, 0])
    try:
        if size > MAX_BYTES:
            raise BadImage("too-large")
        start = _read(source, name, PREFIX)
        known = _read_header(source, name, size, start)
        if full:
            with _memory_limit(max(size, known.width * known.height)):
                check(_read(source, name), known)
    except BadImage as error:
        return _values(Header(error.reason, 0, 0), 0)
    return _values(known, content_id(start, size))


def _read_header(source: Source, name: str, size: int, start: bytes) -> Header:
    try:
        return header(start, whole=len(start) == size)
    except BadImage:
        if size <= PREFIX or not looks_like_image(start):
            raise
        limit = None if needs_all(start) else FURTHER
        with _memory_limit(size):
            return header(_read(source, name, limit))


def _memory_limit(amount: int) -> AbstractContextManager[object]:
    return nullcontext() if amount < LARGE else _large


def _read(source: Source, name: str, limit: int | None = None) -> bytes:
    encoded = read(source, name, limit)
    assert isinstance(encoded, bytes), name
    return encoded
