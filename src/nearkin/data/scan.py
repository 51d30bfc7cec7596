"""Headers of all images, read once and stored in an index until a file changes.

The index lies in $XDG_CACHE_HOME/nearkin/index (by default ~/.cache). Where that cannot be
written, headers are read again at every start.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
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
from nearkin.places import cache_folder
from nearkin.types import UNKNOWN

VERSION: Final = 5  # Of the index; another version has other file names
THREADS: Final = 8  # Enough to hide the latency of a disk or of a network
BLOCK: Final = 2**10  # Files between two calls of `on_progress`
MANY: Final = 2**14  # Files from which on starting processes pays
Record = tuple[Any, ...]  # The values of one file
Compute = Callable[[int], Record]  # Those of a row; a `BadImage` if there are none


def indexed(
    files: Listing | Images,
    kind: str,
    dtype: np.dtype[Any],
    compute: Compute,
    what: str,
    on_progress: ProgressCallback,
) -> tuple[np.ndarray, dict[int, str]]:
    """A record of each file: from the index of this kind or, if it is not in there, computed.

    Threads compute and, if many files are new, processes with threads. Returns the records, which
    are zero where there is none, and for each such row the reason. It may be no fault of the file
    but of a permission, a package, a disk or a store, so these are tried again at every start.
    """
    records, known = np.zeros(len(files.names), dtype), np.zeros(len(files.names), np.bool_)
    path = None
    if files.key:
        name = hashlib.sha256(in_bytes(files.key)).hexdigest()[:32]
        path = cache_folder("index") / f"{name}-{kind}-{VERSION}.npz"
        known = _load(path, files, records)
    fresh = np.flatnonzero(~known)
    blocks = _Blocks(compute, fresh)
    workers = available_cpus() if len(fresh) >= MANY else 0
    computed = prefetch(blocks, 0, len(blocks), workers, images=BLOCK)
    answers = chain.from_iterable(tracked(computed, len(fresh), what, on_progress))
    reasons = dict[int, str]()
    for row, answer in zip(fresh.tolist(), answers, strict=True):
        if isinstance(answer, str):
            reasons[row] = answer
        else:
            records[row] = answer
            known[row] = True
    if path and len(reasons) < len(fresh):
        _save(path, files, records, known)
    return records, reasons


def _load(path: Path, files: Listing | Images, records: np.ndarray) -> Bool[np.ndarray, " files"]:
    """Fill in the records of files that have not changed; return which rows these are."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            then = _stored_rows(file["names"].tobytes(), files.names)
            unchanged = (file["states"][then] == files.states).all(axis=1)
            same: np.ndarray = (then >= 0) & file["known"][then] & unchanged
            records[same] = file["records"][then[same]]
            return same
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        return np.zeros(len(records), np.bool_)  # absent or damaged: all can be computed again


def _stored_rows(stored: bytes, names: Sequence[str]) -> Int64[np.ndarray, " files"]:
    """Return the row in the index of each file, -1 if it has none."""
    if stored == _joined(names):  # as a rule; a table of millions of names is large
        return np.arange(len(names))
    then = stored.decode("utf-8", "surrogateescape").split("\0")
    row_of = {name: row for row, name in enumerate(then)}
    return np.array([row_of.get(name, -1) for name in names], np.int64)


def _joined(names: Sequence[str]) -> bytes:
    return in_bytes("\0".join(names))


def _save(
    path: Path,
    files: Listing | Images,
    records: np.ndarray,
    known: Bool[np.ndarray, " files"],
) -> None:
    """Store an index in place of the one before."""
    names: UInt8[np.ndarray, " bytes"] = np.frombuffer(_joined(files.names), np.uint8)
    columns = {"names": names, "states": files.states, "records": records, "known": known}
    with suppress(OSError):  # a full or read-only disk costs the next start some time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as own, own.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **columns)


class _Blocks(Dataset[list[Record | str]]):
    """The records of some rows, or why there are none, block by block.

    As a data set, for the loader's processes: they replace a lost one, and get `compute`, which
    may hold a million names, once.
    """

    def __init__(self, compute: Compute, rows: np.ndarray) -> None:
        self.compute = compute
        self.rows = np.split(rows, range(BLOCK, len(rows), BLOCK)) if len(rows) else []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[Record | str]:
        with quiet, ThreadPoolExecutor(THREADS) as pool:
            parts = np.array_split(self.rows[number], THREADS)
            return list(chain.from_iterable(pool.map(self._part, parts)))

    def _part(self, rows: np.ndarray) -> list[Record | str]:
        return list(map(self._answer, rows.tolist()))

    def _answer(self, row: int) -> Record | str:
        try:
            return self.compute(row)
        except BadImage as error:
            return error.reason


HEADER: Final = np.dtype(
    [
        *(("format", "S16"), ("size", np.int32, (2,)), ("content", np.uint64)),
        *(("channels", np.int64), ("dtype", "S16")),
    ]
)
"""What is known of an image: format, in ASCII; width and height, upright; `content_id`; and, of
what is not RGB or gray of 8 bits, its channels and their type, else 0 and ''."""
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
    names, states, source = listing.names, listing.states, listing.source
    reasons = dict[int, str]()
    if isinstance(source, Arrays):
        headers = _of_arrays(source, states)
    elif isinstance(source, CustomSource):
        headers, states, reasons = _of_own_source(source, full, on_progress)
    else:
        kind = f"{'full' if full else 'headers'}-{max_pixels()}"
        what = "decoding all images" if full else "looking at all files"
        compute = partial(_of_file, source, states[:, 0], full)
        headers, reasons = indexed(listing, kind, HEADER, compute, what, on_progress)
    bad, others = [*listing.bad], [*listing.others]
    for row, reason in reasons.items():
        if names[row] in listing.tried and reason in NO_IMAGE:
            others.append(names[row])
        else:
            bad.append(BadFile(names[row], reason, int(states[row, 0])))
    rows = np.delete(np.arange(len(names)), [*reasons])
    formats = headers["format"][rows]
    images = Images(
        tuple(map(names.__getitem__, rows.tolist())) if reasons else names,
        place=rows,
        labels=np.full(len(rows), UNKNOWN, np.int64),
        groups=np.arange(len(rows)),
        splits=np.full(len(rows), ""),
        classes=(),
        sizes=headers["size"][rows],
        num_bytes=states[rows, 0],
        kinds=formats.astype(f"U{np.char.str_len(formats).max(initial=1)}"),
        modified=states[rows, 1],
        contents=headers["content"][rows],
        source=source,
        key=listing.key,
        bad=tuple(sorted(bad, key=lambda file: in_bytes(file.name))),
        notes=(*listing.notes, *left_out(others), *masks(names)),
    )
    dtypes = headers["dtype"][rows].astype(np.str_)
    return of_one_kind(images, headers["channels"][rows], dtypes)


def _of_arrays(source: Arrays, states: Int64[np.ndarray, "images 2"]) -> np.ndarray:
    known = array_header(source.read(0))
    sizes = enumerate(states[:, 0].tolist())
    return np.array([_record(known, source.read(row), size) for row, size in sizes], HEADER)


def _of_own_source(
    source: CustomSource, full: bool, on_progress: ProgressCallback
) -> tuple[np.ndarray, Int64[np.ndarray, "images 2"], dict[int, str]]:
    """Read every image of a user's own source, once: headers, states, and why some are bad.

    A checksum stands where files have the time of their last write.
    """
    count, reasons = len(source.names), dict[int, str]()
    headers, states = np.zeros(count, HEADER), np.zeros((count, 2), np.int64)
    rows = [[row] for row in range(count)]
    for (row,) in tracked(rows, count, "reading all images", on_progress):
        try:
            image = source.read(row)
            content = content_bytes(image)
            states[row] = len(content), zlib.crc32(content)
            known = header(image) if isinstance(image, bytes) else array_header(image)
            if full and isinstance(image, bytes):
                check(image, known)
            headers[row] = _record(known, image, len(content))
        except BadImage as error:
            reasons[row] = error.reason
    return headers, states, reasons


def _of_file(source: Source, sizes: Int64[np.ndarray, " files"], full: bool, place: int) -> Record:
    """The `HEADER` of an image; a `BadImage` if it is none."""
    size = int(sizes[place])
    if size > MAX_BYTES:
        raise BadImage("too-large")
    start = _read(source, place, PREFIX)
    known = _read_header(source, place, size, start)
    if full:
        with _memory_limit(max(size, known.width * known.height)):
            check(_read(source, place), known)
    return _record(known, start, size)


def _record(known: Header, start: bytes | np.ndarray, size: int) -> Record:
    of = known.pixel_type or PixelType(0, "")
    size_in_pixels = (known.width, known.height)
    return known.format, size_in_pixels, content_id(start, size), of.num_channels, of.dtype


def _read_header(source: Source, place: int, size: int, start: bytes) -> Header:
    try:
        return header(start, whole=len(start) == size)
    except BadImage:
        if size <= PREFIX or not looks_like_image(start):
            raise
        limit = None if needs_all(start) else FURTHER
        with _memory_limit(size):
            return header(_read(source, place, limit))


def _memory_limit(amount: int) -> AbstractContextManager[object]:
    return nullcontext() if amount < LARGE else _large


def _read(source: Source, place: int, limit: int | None = None) -> bytes:
    encoded = read(source, place, limit)
    assert isinstance(encoded, bytes), place
    return encoded
