"""Images of other channels than red, green and blue, or of more than 8 bits: TIFF, PNG, arrays.

Pages are not channels, unless the file says so (axes CYX of OME and ImageJ, or samples); of a
stack in 8 bits the first page counts, as of an animation, and any other is bad.
"""

import io
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tifffile
from jaxtyping import Float32, Shaped, UInt8
from PIL import ExifTags, Image

from nearkin.data.decode import (
    NOT_AN_IMAGE,
    TIFF,
    BadImage,
    Header,
    PixelType,
    array_pixels,
    as_array,
    check_size,
    decode,
    is_deep,
    opened,
    orientation,
    rgb,
    rgb_pixels,
    swapped,
    upright,
)
from nearkin.data.decode import header as eight_bit_header

NEEDS_CODECS: Final = "needs pip install 'nearkin[tiff]'"
MAX_DECODED: Final = 2**30  # Bytes of one image
MAX_PAGES: Final = 2**16  # A file that leads from page to page in a circle has no last one
UNSPECIFIED: Final = 0  # Extra samples that are not said to be transparency

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # What is wrong is raised


@dataclass(frozen=True)
class Channels:
    """The range and the statistics of each channel of some images."""

    low: tuple[float, ...]  # The value that becomes 0; what is lower, too
    high: tuple[float, ...]  # The value that becomes 1; what is higher, too
    mean: tuple[float, ...]  # Of values from 0 to 1
    std: tuple[float, ...]

    def scaled(self, content: bytes | np.ndarray) -> Float32[np.ndarray, "height width _"]:
        """Pixels from 0 to 1 of an image, which may be encoded; else a `BadImage`."""
        pixels = read_channels(content)
        low, high = np.array([self.low, self.high], np.float32)
        if pixels.shape[2] != len(low) and (pixels.shape[2], len(low)) != (1, 3):
            raise BadImage(f"{pixels.shape[2]} channels, not {len(low)}")
        return np.asarray(((pixels.astype(np.float32) - low) / (high - low)).clip(0, 1))


def named(pixel_type: PixelType | None) -> str:
    """What images hold, in words.

    >>> named(PixelType(13, "uint16")), named(None)
    ('13 channels of uint16', 'RGB of 8 bits')
    """
    if pixel_type is None:
        return "RGB of 8 bits"
    plural = "s" * (pixel_type.num_channels != 1)
    return f"{pixel_type.num_channels} channel{plural} of {pixel_type.dtype}"


def array_header(pixels: np.ndarray) -> Header:
    """The header of an image in memory, of shape (height, width, channels)."""
    height, width, count = pixels.shape
    plain = pixels.dtype == np.uint8 and count in (1, 3)
    return Header("array", width, height, None if plain else PixelType(count, str(pixels.dtype)))


def as_color(pixels: np.ndarray) -> np.ndarray:
    """Gray of 8 bits as three equal channels, other pixels as they are."""
    gray = pixels.dtype == np.uint8 and pixels.shape[-1] == 1
    return pixels.repeat(3, axis=-1) if gray else pixels


def in_8_bits(content: bytes | np.ndarray) -> bytes | np.ndarray:
    """Gray pixels of more than 8 bits as `decode` reads a file of them; all else as it is."""
    if isinstance(content, bytes) or content.dtype == np.uint8:
        return content
    return np.asarray(rgb(Image.fromarray(content[..., 0])))


def header(encoded: bytes, *, whole: bool = True) -> Header:
    """As `decode.header`, of images of any channels; `whole` unless it is but the beginning."""
    if encoded.startswith(TIFF):
        with suppress(_NotReadError):
            return _tiff_header(encoded, whole)
    known = eight_bit_header(encoded)
    # Behind the length, name and size of a PNG's first chunk: its bits, and 0 for gray.
    deep = known.format == "PNG" and encoded[24:26] == b"\x10\0"
    return known._replace(pixel_type=PixelType(1, "uint16")) if deep else known


class _NotReadError(Exception):
    """A TIFF that tifffile does not read; its tags may make sense to Pillow."""


def _tiff_header(encoded: bytes, whole: bool) -> Header:
    with _tiff(encoded, whole) as file:
        page = _first_page(file)
        bits, extra = np.max(page.bitspersample), page.extrasamples
        plain = bits <= 8 and UNSPECIFIED not in extra
        if plain and not _has_channels_in_pages(file):
            try:
                return eight_bit_header(encoded)
            except BadImage as error:
                if error.reason != NOT_AN_IMAGE:
                    raise
        check_size(page.imagewidth, page.imagelength)
        series, (height, width, count) = _first_series(file)
        size = swapped((width, height), _turn(page))
        return Header("TIFF", *size, PixelType(count, series.dtype.name))


@contextmanager
def _tiff(encoded: bytes, whole: bool = True) -> Iterator[tifffile.TiffFile]:
    """A TIFF, by tifffile; of errors of many kinds, by what is damaged, a `BadImage`."""
    try:
        file = tifffile.TiffFile(io.BytesIO(encoded))
        page = _first_page(file)
        num_tags, next_page = _tags_and_next_page(encoded, file, page.offset)
    except Exception as error:
        raise (_NotReadError if whole else BadImage("truncated")) from error
    if not whole and (next_page or len(page.tags) < num_tags):  # they may lie anywhere
        raise BadImage("truncated")
    try:
        _check_pages(encoded, file, next_page)
        yield file
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(NEEDS_CODECS if "imagecodecs" in str(error) else "unreadable") from error


def _first_page(file: tifffile.TiffFile) -> tifffile.TiffPage:
    page = file.pages.first
    assert isinstance(page, tifffile.TiffPage)
    return page


def _tags_and_next_page(encoded: bytes, file: tifffile.TiffFile, offset: int) -> tuple[int, int]:
    """The number of tags of the page at this offset, and the offset of the next; 0 for none."""
    form = file.tiff
    (num_tags,) = struct.unpack_from(form.tagnoformat, encoded, offset)
    end = offset + form.tagnosize + num_tags * form.tagsize
    return num_tags, struct.unpack_from(form.offsetformat, encoded, end)[0]


def _check_pages(encoded: bytes, file: tifffile.TiffFile, offset: int) -> None:
    """Refuse pages that lead to each other in a circle, which tifffile would follow for ever."""
    with suppress(struct.error):  # a page beyond the end is the last
        for _ in range(MAX_PAGES):
            if not offset:
                return
            _, offset = _tags_and_next_page(encoded, file, offset)
        raise BadImage(f"too-large: more than {MAX_PAGES} pages")


def _turn(page: tifffile.TiffPage) -> int:
    tag = page.tags.get(ExifTags.Base.Orientation)
    return tag.value if tag and tag.value in range(1, 9) else 1


def _has_channels_in_pages(file: tifffile.TiffFile) -> bool:
    """Whether a file of several pages says that they are channels of its first image."""
    if len(file.pages) > 1:
        with suppress(Exception):  # then its first page counts
            return _first_series(file)[1][2] > _first_page(file).samplesperpixel
    return False


def _first_series(file: tifffile.TiffFile) -> tuple[tifffile.TiffPageSeries, tuple[int, int, int]]:
    """The first image, and its height, width and channels; else a `BadImage`."""
    series = file.series[0]
    sizes = dict(zip(series.axes, series.shape, strict=True))
    count = sizes.pop("S", 1) * sizes.pop("C", 1)
    shape = (sizes.pop("Y"), sizes.pop("X"), count)
    if set(sizes.values()) - {1}:
        raise BadImage(f"stack of {len(series.pages)} pages ({series.axes}); channels are CYX")
    if series.nbytes > MAX_DECODED:
        raise BadImage("too-large")
    return series, shape


def read_channels(content: bytes | np.ndarray) -> Shaped[np.ndarray, "height width channels"]:
    """All channels of an image, in the type that they are stored in; else a `BadImage`."""
    pixels = _decoded(content) if isinstance(content, bytes) else content
    if not np.isfinite(pixels).all():
        raise BadImage("NaN or infinite pixels; give them a value")
    return pixels


def stored_channels(image: Any) -> Shaped[np.ndarray, "height width channels"]:
    """A Pillow image of one channel, upright; an array or tensor with its channels last."""
    turn = orientation(image) if isinstance(image, Image.Image) else 1
    pixels = upright(as_array(image, 3), turn)
    if pixels.ndim == 2:
        return pixels[..., None]
    if pixels.ndim != 3:
        raise ValueError(f"shape {pixels.shape}; give (height, width, channels)")
    return pixels


def image_pixels(image: Any) -> Shaped[np.ndarray, "height width channels"]:
    """An array as by `array_pixels`, or a Pillow image upright, in RGB unless `is_deep`."""
    if not isinstance(image, Image.Image):
        return array_pixels(image, 3)
    if not is_deep(image):
        return rgb_pixels(image)
    pixels = stored_channels(image)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def check(content: bytes, known: Header) -> None:
    """Decode all of an image with this header; a `BadImage` if that fails."""
    if known.pixel_type:
        read_channels(content)
    else:
        decode(content)


def _decoded(content: bytes) -> np.ndarray:
    pixel_type = header(content).pixel_type
    if pixel_type is None:
        raise BadImage("an image of 8 bits and of no further channels")
    if pixel_type.num_channels == 1:  # which Pillow reads without further codecs
        with suppress(BadImage), opened(content) as image:
            turn = orientation(image)
            image.load()
            if is_deep(image):
                return upright(np.asarray(image)[..., None], turn)
    with _tiff(content) as file:
        series, shape = _first_series(file)
        pages = [page for page in series.pages if page is not None]
        parts = [zip(page.dataoffsets, page.databytecounts, strict=True) for page in pages]
        if max(offset + size for page in parts for offset, size in page) > len(content):
            raise BadImage("truncated")
        pixels: np.ndarray = series.asarray()
        # Others, of length one, come first.
        order = sorted(range(pixels.ndim), key=lambda axis: "YXCS".find(series.axes[axis]))
        last = pixels.transpose(order).reshape(shape)
        return upright(last, _turn(_first_page(file)))


def preview(pixels: np.ndarray) -> UInt8[np.ndarray, "height width 3"]:
    """Pixels of 8 bits or from 0 to 1 as people see them: the first three channels in 8 bits."""
    if pixels.dtype != np.uint8:
        pixels = np.rint(255 * pixels).astype(np.uint8)
    if pixels.shape[2] == 2:
        pixels = np.pad(pixels, ((0, 0), (0, 0), (0, 1)))
    return np.ascontiguousarray(pixels[..., :3])
