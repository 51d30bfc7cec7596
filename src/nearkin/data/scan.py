"""Headers: what every file says of itself before it is decoded."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import BoundedSemaphore
from typing import Final

import numpy as np

from nearkin.data.header import MAGIC, MAX_BYTES, BadImage, Header, header
from nearkin.data.index import index_path, recall, remember
from nearkin.data.rgb import decode
from nearkin.data.sources import Listing, Source

THREADS: Final = 8
"""Enough to hide the latency of a disk or of a network."""
WHOLE: Final = (b"II", b"MM", b"RIFF")
"""How the formats begin of which all is needed for the header: TIFF and WebP."""
FURTHER: Final = 2**24
"""Bytes that hold the header of any other, or it is a trap: a JPEG that is all padding."""
PREFIX: Final = 2**16
"""Bytes that nearly always hold the whole header."""
LARGE: Final = 2**25
"""Bytes of a file, or pixels, from which on memory for one per thread may be too much."""
_large: Final = BoundedSemaphore(2)


def scan(listing: Listing, *, decoded_pixels: int = 0, cache: bool = True) -> dict[str, Header]:
    """Read the header of every listed file, or recall it if the file has not changed since.

    Args:
        listing: the files.
        decoded_pixels: decode every picture of at most so many pixels, which finds damage
            behind the header.
        cache: use and keep the index.

    Returns:
        Each file's header. A bad file has a `BadImage` reason as its format, and no size.
    """
    path = index_path(listing.key, f"up-to-{decoded_pixels}" if decoded_pixels else "headers")
    files = listing.files
    known = recall(path, files, ("formats", "sizes")) if cache else {}
    found = {name: Header(str(kind), *size.tolist()) for name, (kind, size) in known.items()}
    fresh = [name for name in files if name not in found]

    def look(name: str) -> Header:
        return _look(listing.source, name, files[name].bytes, decoded_pixels)

    with ThreadPoolExecutor(THREADS) as pool:
        found.update(zip(fresh, pool.map(look, fresh), strict=True))
    headers = {name: found[name] for name in files}
    if cache and fresh:
        formats = np.array([seen.format for seen in headers.values()])
        sizes = np.array([seen[1:] for seen in headers.values()], np.int32)
        remember(path, files, {"formats": formats, "sizes": sizes})
    return headers


def _look(source: Source, name: str, size: int, decoded_pixels: int) -> Header:
    try:
        if size > MAX_BYTES:
            raise BadImage("too-large")
        found = _header(source, name, size)
        pixels = found.width * found.height
        if pixels <= decoded_pixels:
            with _room(max(size, pixels)):
                decode(_read(source, name))
    except BadImage as error:
        return Header(error.reason, 0, 0)
    return found


def _header(source: Source, name: str, size: int) -> Header:
    start = _read(source, name, PREFIX)
    try:
        return header(start)
    except BadImage:
        if size <= PREFIX or not start.startswith(MAGIC):
            raise
        limit = None if start.startswith(WHOLE) else FURTHER
        with _room(size):
            return header(_read(source, name, limit))


def _room(amount: int) -> AbstractContextManager[object]:
    """Waits, before much memory is taken, until at most one other thread holds as much."""
    return nullcontext() if amount < LARGE else _large


def _read(source: Source, name: str, limit: int | None = None) -> bytes:
    try:
        encoded = source.read(name, limit)
    except OSError as error:
        raise BadImage("unreadable") from error
    assert isinstance(encoded, bytes), name
    return encoded
