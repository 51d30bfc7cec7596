"""Headers of all images: which files can be used, and what they are."""

import zlib
from contextlib import nullcontext
from functools import partial
from threading import BoundedSemaphore
from typing import Final

import numpy as np
from jaxtyping import Int64

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
    picked,
    read,
)
from nearkin.data.index import Record, indexed
from nearkin.data.listing import Listing, left_out, renamed
from nearkin.data.pixel_types import of_one_pixel_type
from nearkin.data.samples import masks
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.types import UNLABELED

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
    listing: Listing, *, full: bool = False, on_progress: ProgressCallback = ignore_progress
) -> Images:
    """The images with a good header, without labels; all others are bad. There may be none.

    If `full`, every image is decoded now, which finds damage behind the header.
    """
    names, states, source = listing.names, listing.states, listing.source
    reasons = dict[int, str]()
    if isinstance(source, Arrays):
        known, sizes = array_header(source.read(0)), enumerate(states[:, 0].tolist())
        headers = np.array([_record(known, source.read(row), n) for row, n in sizes], HEADER)
    elif isinstance(source, CustomSource):
        headers, states, reasons = _of_own_source(source, full, on_progress)
    else:
        name = f"{'full' if full else 'headers'}-{max_pixels()}"
        what = "decoding all images" if full else "looking at all files"
        compute = partial(_of_file, source, states[:, 0], full)
        headers, reasons = indexed(listing, name, HEADER, compute, what, on_progress)
    bad, others = [*listing.bad], [*listing.others]
    for row, reason in reasons.items():
        if names[row] in listing.tried and reason in NO_IMAGE:
            others.append(names[row])
        else:
            bad.append(BadFile(names[row], reason, int(states[row, 0])))
    rows = np.delete(np.arange(len(names)), [*reasons])
    if reasons:
        names, source = picked(names, rows), source.only(rows)
    formats = headers["format"][rows]
    images = Images(
        names,
        labels=np.full(len(rows), UNLABELED, np.int64),
        groups=np.arange(len(rows)),
        group_names=("",) * len(rows),
        splits=np.full(len(rows), ""),
        classes=(),
        sizes=headers["size"][rows],
        num_bytes=states[rows, 0],
        formats=formats.astype(f"U{np.char.str_len(formats).max(initial=1)}"),
        modified=states[rows, 1],
        contents=headers["content"][rows],
        source=source,
        key=listing.key,
        bad=tuple(sorted(bad, key=lambda file: in_bytes(file.name))),
        notes=(*renamed(listing), *listing.notes, *left_out(others), *masks(listing.names)),
    )
    dtypes = headers["dtype"][rows].astype(np.str_)
    return of_one_pixel_type(images, headers["channels"][rows], dtypes)


def _of_own_source(
    source: CustomSource, full: bool, on_progress: ProgressCallback
) -> tuple[np.ndarray, Int64[np.ndarray, "images 2"], dict[int, str]]:
    """Headers and states (bytes and checksum) of a user's own images, and why some are bad."""
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


def _of_file(source: Source, sizes: Int64[np.ndarray, " files"], full: bool, row: int) -> Record:
    """The `HEADER` of an image; a `BadImage` if it is none."""
    size = int(sizes[row])
    if size > MAX_BYTES:
        raise BadImage("too-large")
    start = _read(source, row, PREFIX)
    known = _read_header(source, row, size, start)
    if full:
        large = max(size, known.width * known.height) >= LARGE
        with _large if large else nullcontext():
            check(_read(source, row), known)
    return _record(known, start, size)


def _record(known: Header, start: bytes | np.ndarray, size: int) -> Record:
    of = known.pixel_type or PixelType(0, "")
    size_in_pixels = (known.width, known.height)
    return known.format, size_in_pixels, content_id(start, size), of.num_channels, of.dtype


def _read_header(source: Source, row: int, size: int, start: bytes) -> Header:
    try:
        return header(start, whole=len(start) == size)
    except BadImage:
        if size <= PREFIX or not looks_like_image(start):
            raise
        limit = None if needs_all(start) else FURTHER
        with _large if size >= LARGE else nullcontext():
            return header(_read(source, row, limit))


def _read(source: Source, row: int, limit: int | None = None) -> bytes:
    encoded = read(source, row, limit)
    assert isinstance(encoded, bytes), row
    return encoded
