"""Headers of all images, read once and stored in an index until a file changes.

The index lies in $XDG_CACHE_HOME/nearkin/index (by default ~/.cache). Where that cannot be
written, headers are read again at every start.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from threading import BoundedSemaphore
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped, UInt8
from torch.utils.data import Dataset

from nearkin.data.decode import MAGIC, MAX_BYTES, BadImage, Header, decode, header, quiet
from nearkin.data.loading import prefetch
from nearkin.data.sources import CustomSource, ImageFiles, Source, in_bytes
from nearkin.distributed import available_cpus
from nearkin.errors import DataError
from nearkin.pace import ProgressCallback, ignore_progress, tracked

VERSION: Final = 1  # Of the index; another version has other file names


def cache_folder(kind: str) -> Path:
    """The user's own folder for one kind of data that can be computed again."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "nearkin" / kind


def index_path(key: str, kind: str) -> Path:
    """The index of one kind for the data at a place."""
    name = hashlib.sha256(in_bytes(key)).hexdigest()[:32]
    return cache_folder("index") / f"{name}-{kind}-{VERSION}.npz"


def load_index(
    path: Path,
    names: Sequence[str],
    states: Int64[np.ndarray, "files 2"],
    columns: Mapping[str, np.ndarray],
) -> Bool[np.ndarray, " files"]:
    """Fill in the columns of each file that has not changed; return which rows are filled in."""
    filled = np.zeros(len(names), np.bool_)
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            then, now = _common(file["names"], names)
            same = (file["stats"][then] == states[now]).all(axis=1)
            for name, column in columns.items():
                column[now[same]] = file[name][then[same]]
            filled[now[same]] = True
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        filled[:] = False  # absent or damaged: everything in it can be read again
    return filled


def _common(
    stored: UInt8[np.ndarray, " bytes"], names: Sequence[str]
) -> tuple[Int64[np.ndarray, " common"], Int64[np.ndarray, " common"]]:
    """The rows then, and now, of the names that are in both."""
    if np.array_equal(stored, _joined(names)):
        return np.arange(len(names)), np.arange(len(names))
    then_names = stored.tobytes().decode("utf-8", "surrogateescape").split("\0")
    then = {name: row for row, name in enumerate(then_names)}
    rows = np.array([then.get(name, -1) for name in names], np.int64)
    return rows[rows >= 0], np.flatnonzero(rows >= 0)


def _joined(names: Sequence[str]) -> UInt8[np.ndarray, " bytes"]:
    return np.frombuffer(in_bytes("\0".join(names)), np.uint8)


def save_index(
    path: Path,
    names: Sequence[str],
    states: Int64[np.ndarray, "files 2"],
    columns: Mapping[str, np.ndarray],
) -> None:
    """Store one value per file and column, in place of the index before."""
    own = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(own, allow_pickle=False, names=_joined(names), stats=states, **columns)
        own.replace(path)
    except OSError:  # a full or read-only disk costs the next start some time, nothing else
        with suppress(OSError):
            own.unlink()


THREADS: Final = 8  # Enough to hide the latency of a disk or of a network
BLOCK: Final = 2**10  # Files between two calls of `on_progress`
MANY: Final = 2**14  # Files from which on starting processes pays
WHOLE: Final = (b"II", b"MM", b"RIFF")
"""TIFF and WebP: formats whose header may lie anywhere in the file."""
FURTHER: Final = 2**24
"""Bytes that hold the header of any other format; a JPEG with more before it is a trap."""
PREFIX: Final = 2**16  # Bytes that nearly always hold the whole header
LARGE: Final = 2**25
"""Bytes of a file, or pixels, from which on at most two threads work at once, to bound memory."""
_large: Final = BoundedSemaphore(2)


class Headers(NamedTuple):
    """The headers of some files."""

    kinds: Shaped[np.ndarray, " files"]
    """The format or, of a bad file, the reason of a `BadImage`; ASCII, a byte a letter."""
    sizes: Int32[np.ndarray, "files 2"]  # Width and height; of a bad file, zeros

    @staticmethod
    def empty(count: int) -> "Headers":
        """Headers to be filled in."""
        return Headers(np.full(count, b"not-an-image"), np.zeros((count, 2), np.int32))


def scan(
    files: ImageFiles,
    *,
    decoded_pixels: int = 0,
    cache: bool = True,
    on_progress: ProgressCallback = ignore_progress,
) -> Headers:
    """Read the header of every file, or load it from the index if the file has not changed.

    Every image of at most `decoded_pixels` is decoded, which finds damage behind the header.
    """
    names, states = files.files
    headers = Headers.empty(len(names))
    columns = {"formats": headers.kinds, "sizes": headers.sizes}
    path = index_path(files.key, f"up-to-{decoded_pixels}" if decoded_pixels else "headers")
    known = load_index(path, names, states, columns) if cache else np.zeros(len(names), np.bool_)
    fresh = np.flatnonzero(~known)
    blocks = _HeaderBlocks(files, fresh, decoded_pixels)
    workers = available_cpus() if len(fresh) >= MANY else 0
    read = prefetch(blocks, 0, len(blocks), workers, images=BLOCK)
    what = "decoding all images" if decoded_pixels else "looking at all files"
    tracked_blocks = tracked(read, len(fresh), what, on_progress)
    for rows, block in zip(blocks.rows, tracked_blocks, strict=True):
        headers.kinds[rows] = [each.format for each in block]
        headers.sizes[rows] = [each[1:] for each in block]
    if cache and len(fresh):
        save_index(path, names, states, columns)
    return headers


def scan_source(
    source: CustomSource,
    names: Sequence[str],
    *,
    decoded_pixels: int,
    on_progress: ProgressCallback,
) -> tuple[Headers, Int64[np.ndarray, "files 2"]]:
    """Read every image of a user's own source, once.

    Returns:
        The headers, and of each image its bytes and a checksum, which stands where files have
        the time of their last write.
    """
    headers, states = Headers.empty(len(names)), np.zeros((len(names), 2), np.int64)
    errors = list[OSError]()
    rows = [[row] for row in range(len(names))]
    for (row,) in tracked(rows, len(names), "reading all images", on_progress):
        try:
            image = source.read(names[row])
            content = image if isinstance(image, bytes) else image.tobytes()
            states[row] = len(content), zlib.crc32(content)
            headers.kinds[row], *headers.sizes[row] = _header_of(image, decoded_pixels)
        except BadImage as error:
            headers.kinds[row] = error.reason
        except OSError as error:
            headers.kinds[row] = "unreadable"
            errors.append(error)
    if len(errors) == len(names):
        raise DataError(f"no image can be read, such as {errors[0]}")
    return headers, states


def _header_of(image: bytes | np.ndarray, decoded_pixels: int) -> Header:
    if not isinstance(image, bytes):
        return Header("array", image.shape[1], image.shape[0])
    known = header(image)
    if known.width * known.height <= decoded_pixels:
        decode(image)
    return known


class _HeaderBlocks(Dataset[list[Header]]):
    """The headers of some files, block by block."""

    def __init__(self, files: ImageFiles, rows: np.ndarray, decoded_pixels: int) -> None:
        self.files = files
        self.rows = np.split(rows, range(BLOCK, len(rows), BLOCK)) if len(rows) else []
        self.decoded_pixels = decoded_pixels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[Header]:
        """One block, read by several threads."""
        with quiet, ThreadPoolExecutor(THREADS) as pool:
            parts = np.array_split(self.rows[number], THREADS)
            return list(chain.from_iterable(pool.map(self._headers, parts)))

    def _headers(self, rows: np.ndarray) -> list[Header]:
        names, states = self.files.files
        source, pixels = self.files.source, self.decoded_pixels
        return [_scan(source, names[row], int(states[row, 0]), pixels) for row in rows.tolist()]


def _scan(source: Source, name: str, size: int, decoded_pixels: int) -> Header:
    try:
        if size > MAX_BYTES:
            raise BadImage("too-large")
        known = _read_header(source, name, size)
        pixels = known.width * known.height
        if pixels <= decoded_pixels:
            with _memory_limit(max(size, pixels)):
                decode(_read(source, name))
    except BadImage as error:
        return Header(error.reason, 0, 0)
    return known


def _read_header(source: Source, name: str, size: int) -> Header:
    start = _read(source, name, PREFIX)
    try:
        return header(start)
    except BadImage:
        if size <= PREFIX or not start.startswith(MAGIC):
            raise
        limit = None if start.startswith(WHOLE) else FURTHER
        with _memory_limit(size):
            return header(_read(source, name, limit))


def _memory_limit(amount: int) -> AbstractContextManager[object]:
    return nullcontext() if amount < LARGE else _large


def _read(source: Source, name: str, limit: int | None = None) -> bytes:
    try:
        encoded = source.read(name, limit)
    except OSError as error:
        raise BadImage("unreadable") from error
    assert isinstance(encoded, bytes), name
    return encoded
