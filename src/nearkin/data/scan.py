"""Headers of all images: which files can be used, and what they are.

Images are of one pixel type: RGB of 8 bits, or the same channels and type, with their range.
"""

import zlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import BoundedSemaphore
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from nearkin.data.channels import Channels, array_header, check, header, named, read_channels
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
from nearkin.data.decode import header as eight_bit_header
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
    spread_rows,
)
from nearkin.data.index import Record, indexed
from nearkin.data.listing import Listing, notes_on
from nearkin.data.notes import note_on
from nearkin.data.samples import masks
from nearkin.errors import DataError
from nearkin.pace import ProgressCallback, count, ignore_progress, tracked
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
SAMPLE: Final = 128  # Images that ranges and statistics are of, evenly spread
ACROSS: Final = 64  # Pixels along a side of each of them, evenly spread
PERCENTILES: Final = (0.1, 99.9)
"""Of values that are not of 8 bits. CT is cut at .5 and 99.5 % (nnU-Net, Isensee et al. 2021),
where few pixels matter as little; the bright cells of a microscope are often less than 1 %."""
MOST: Final = 0.9  # Share of gray images from which on their type decides, and the rest is bad
LEAST_STD: Final = 1e-3  # Of a channel that hardly differs from pixel to pixel


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
        notes=(*notes_on(listing, others), *masks(listing.names)),
    )
    return _of_one_pixel_type(images, headers[rows])


def _of_own_source(
    source: CustomSource, full: bool, on_progress: ProgressCallback
) -> tuple[np.ndarray, Int64[np.ndarray, "images 2"], dict[int, str]]:
    """Headers and states (bytes and checksum) of a user's own images, and why some are bad."""
    total, reasons = len(source.names), dict[int, str]()
    headers, states = np.zeros(total, HEADER), np.zeros((total, 2), np.int64)
    rows = [[row] for row in range(total)]
    for (row,) in tracked(rows, total, "reading all images", on_progress):
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


def _of_one_pixel_type(images: Images, headers: np.ndarray) -> Images:
    """The images of the most frequent channels and type, with their `Channels`; others are bad.

    Where most are RGB or gray of 8 bits, or gray of several types of which none is that of `MOST`,
    all that Pillow reads stay, as RGB of 8 bits.
    """
    if not headers["channels"].any():
        return images
    stated = headers[["channels", "dtype"]].tolist()
    pixel_types = [PixelType(num, dtype.decode()) if num else None for num, dtype in stated]
    pairs = zip(images.formats.tolist(), pixel_types, strict=True)
    formats = [f"{name} of {each}" if each else name for name, each in pairs]
    images = replace(images, formats=np.array(formats))
    counts = Counter(pixel_types)
    common = max(sorted(counts, key=lambda each: str(each or "")), key=lambda each: counts[each])
    gray = all(each is None or each.num_channels == 1 for each in counts)
    if gray and counts[common] < MOST * len(images):
        common = None
    same = np.array([each == common for each in pixel_types])
    if common is None:
        same |= [each is not None and _has_8_bits(images, n) for n, each in enumerate(pixel_types)]
        deep = int(same.sum()) - counts[None]
        why = "as the others are" if counts[None] else "as no type is that of most"
        text = f"{count(deep, 'image')} of more bits or channels, read as RGB of 8 bits, {why}"
        images = images.noted(*note_on("substituted", deep, text))
    others = [
        BadFile(images.names[row], f"{named(pixel_types[row])}, not {named(common)}", size)
        for row, size in enumerate(images.num_bytes.tolist())
        if not same[row]
    ]
    bad = tuple(sorted((*images.bad, *others), key=lambda file: in_bytes(file.name)))
    of_type = replace(images.subset(np.flatnonzero(same)), bad=bad, pixel_type=common)
    return replace(of_type, channels=_channels(of_type, common)) if common else of_type


def _has_8_bits(images: Images, row: int) -> bool:
    """Whether Pillow reads a file, if only as RGB of 8 bits."""
    try:
        content = images.stored(row)
        return isinstance(content, bytes) and bool(eight_bit_header(content))
    except BadImage:
        return False


def _channels(images: Images, common: PixelType) -> Channels:
    """Range, mean and deviation of each channel: a function of the images alone."""
    num, values = common.num_channels, _sampled(images)
    low, high = np.zeros(num), np.full(num, 255.0)
    if common.dtype != "uint8":
        low, high = np.percentile(values, PERCENTILES, axis=0)
        # `Channels.scaled` computes in float32, where a large number plus 1 may be the same one.
        above = np.nextafter(low.astype(np.float32), np.float32(np.inf))
        high = np.where(high >= above, high, np.maximum(low + 1, above))
    scaled = ((values - low) / (high - low)).clip(0, 1)
    std = scaled.std(axis=0).clip(min=LEAST_STD)
    columns = (low, high, scaled.mean(axis=0), std)
    # Gray is three equal channels, as in 8 bits.
    return Channels(*(tuple(x.tolist()) * (3 if num == 1 else 1) for x in columns))


def _sampled(images: Images) -> Float64[np.ndarray, "pixels channels"]:
    """Some pixels of some images; a `DataError` if none of these can be read."""
    sampled, reason = list[Shaped[np.ndarray, "pixels channels"]](), ""
    sample = images.spread(SAMPLE)
    for row, name in enumerate(sample.names):
        try:
            pixels = read_channels(sample.stored(row))
        except BadImage as error:
            reason = f"{name!r} ({error.reason})"
            continue
        rows, columns = (spread_rows(side, ACROSS) for side in pixels.shape[:2])
        part = pixels[rows][:, columns].reshape(-1, pixels.shape[2])
        sampled.append(part.astype(np.float64))
    if not sampled:
        raise DataError(f"no image can be decoded, such as {reason}; look at the files")
    return np.concatenate(sampled)
