"""Images of one pixel type: RGB of 8 bits, or the same channels and type, with their range."""

from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from nearkin.data.channels import Channels, named, read_channels
from nearkin.data.decode import BadImage, PixelType, header
from nearkin.data.images import BadFile, Images, in_bytes
from nearkin.data.notes import note_on
from nearkin.errors import DataError
from nearkin.pace import count

SAMPLE: Final = 128  # Images that ranges and statistics are of, evenly spread
ACROSS: Final = 64  # Pixels along a side of each of them, evenly spread
PERCENTILES: Final = (0.1, 99.9)
"""Of values that are not of 8 bits. CT is cut at .5 and 99.5 % (nnU-Net, Isensee et al. 2021),
where few pixels matter as little; the bright cells of a microscope are often less than 1 %."""
MOST: Final = 0.9  # Share of gray images from which on their type decides, and the rest is bad
LEAST_STD: Final = 1e-3  # Of a channel that hardly differs from pixel to pixel


def of_one_pixel_type(
    images: Images, channels: Int64[np.ndarray, " images"], dtypes: Shaped[np.ndarray, " images"]
) -> Images:
    """The images of the most frequent channels and type, with their `Channels`; others are bad.

    `channels` are 0 of an image that is RGB or gray of 8 bits. Where most are that, or gray of
    several types of which none is that of `MOST`, all that Pillow reads stay, as RGB of 8 bits.
    """
    if not channels.any():
        return images
    stated = zip(channels.tolist(), dtypes.tolist(), strict=True)
    pixel_types = [PixelType(num, dtype) if num else None for num, dtype in stated]
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
        text = f"{count(deep, 'image')} of more than 8 bits, read in 8 bits, {why}"
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
        return isinstance(content, bytes) and bool(header(content))
    except BadImage:
        return False


def _channels(images: Images, common: PixelType) -> Channels:
    """Range, mean and deviation of each channel: a function of the images alone."""
    count = common.num_channels
    values = _sampled(images)
    low, high = np.zeros(count), np.full(count, 255.0)
    if common.dtype != "uint8":
        low, high = np.percentile(values, PERCENTILES, axis=0)
        high = np.where(high > low, high, low + 1)
    scaled = ((values - low) / (high - low)).clip(0, 1)
    std = scaled.std(axis=0).clip(min=LEAST_STD)
    columns = (low, high, scaled.mean(axis=0), std)
    # Gray is three equal channels, as in 8 bits.
    return Channels(*(tuple(x.tolist()) * (3 if count == 1 else 1) for x in columns))


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
        sides = pixels.shape[:2]
        rows, columns = (np.linspace(0, n - 1, min(n, ACROSS)).astype(int) for n in sides)
        part = pixels[rows][:, columns].reshape(-1, pixels.shape[2])
        sampled.append(part.astype(np.float64))
    if not sampled:
        raise DataError(f"no image can be decoded, such as {reason}; look at the files")
    return np.concatenate(sampled)
