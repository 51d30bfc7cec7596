"""Images of other channels than red, green and blue, or of more than 8 bits: TIFF, PNG, arrays.

What such an image is stands behind its format: `TIFF of 13 uint16` has 13 channels. Gray is one
channel, which becomes three equal ones, as it does in 8 bits. Pages are not channels, unless the
file says so (axes CYX of OME and ImageJ, or samples); of a stack in 8 bits the first page counts,
as of an animation, and any other is bad.
"""

import io
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from nearkin.data.decode import (
    SWAPPED,
    TIFF,
    UPRIGHT,
    BadImage,
    Header,
    check_size,
    decode,
    eight_bits,
    opened,
    orientation,
    quiet,
)
from nearkin.data.decode import header as eight_bit_header

BIG: Final = (b"\x2b\0", b"\0\x2b")  # BigTIFF, in either order of bytes
ERRORS: Final = (
    ArithmeticError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)
DEEP: Final = ("uint16", "int16")  # Integers beside 8 bits that arrays may hold
NEEDS_TIFFFILE: Final = "needs pip install 'nearkin[tiff]'"
MAX_DECODED: Final = 2**30  # Bytes of one image
UNSPECIFIED: Final = 0  # Extra samples that are not said to be transparency
WIDTH, HEIGHT, BITS, SAMPLES, EXTRA, FORMAT = 256, 257, 258, 277, 338, 339  # TIFF tags
ORIENTATION: Final = 274
GRAY: Final = "1 "  # How depths of one channel begin
KINDS: Final = {1: "uint", 2: "int", 3: "float"}  # Of samples, by their format


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
        scaled: np.ndarray = ((pixels.astype(np.float32) - low) / (high - low)).clip(0, 1)
        return scaled


def depth_of(kind: str) -> str:
    """What stands behind a format: channels and type; '' for RGB or gray of 8 bits.

    >>> depth_of("TIFF of 13 uint16"), depth_of("JPEG")
    ('13 uint16', '')
    """
    return kind.partition(" of ")[2]


def named(depth: str) -> str:
    """A depth in words.

    >>> named("13 uint16"), named("")
    ('13 channels of uint16', 'RGB of 8 bits')
    """
    count, _, kind = depth.partition(" ")
    return f"{count} channel{'s' * (count != '1')} of {kind}" if depth else "RGB of 8 bits"


def array_header(pixels: np.ndarray) -> Header:
    """The header of an image in memory, of shape (height, width, channels)."""
    height, width, count = pixels.shape
    plain = pixels.dtype == np.uint8 and count in (1, 3)
    return Header("array" if plain else f"array of {count} {pixels.dtype}", width, height)


def array_pixels(images: Any, ndim: int) -> np.ndarray:
    """An image (`ndim` 3) or several (4), channels last; as `eight_bits` unless it is deeper.

    Of 16 bits, or of other channels than one or three, arrays stay as they are.
    """
    if isinstance(images, np.ndarray) and ndim - 1 <= images.ndim <= ndim and images.size:
        deep = images if images.ndim == ndim else images[..., None]
        count, kind = deep.shape[-1], str(deep.dtype)
        floats_or_bytes = deep.dtype.kind == "f" or kind == "uint8"
        fits = count <= min(deep.shape[-3:-1])  # or these are no channels, but a side
        if fits and (kind in DEEP or (floats_or_bytes and count not in (1, 3))):
            return deep
    return eight_bits(images, ndim)


def as_color(pixels: np.ndarray) -> np.ndarray:
    """Gray of 8 bits as three equal channels, other pixels as they are."""
    gray = pixels.dtype == np.uint8 and pixels.shape[-1] == 1
    return pixels.repeat(3, axis=-1) if gray else pixels


def header(encoded: bytes, *, whole: bool = True) -> Header:
    """As `decode.header`, of images of any channels; `whole` unless it is but the beginning."""
    if encoded.startswith(TIFF):
        # Tags may be wrong in many ways, and make sense to Pillow.
        with suppress(*ERRORS):
            return _tiff_header(encoded, whole)
    known = eight_bit_header(encoded)
    # Behind the length, name and size of a PNG's first chunk: its bits, and 0 for gray.
    deep = known.format == "PNG" and encoded[24:26] == b"\x10\0"
    return known._replace(format="PNG of 1 uint16") if deep else known


def _tiff_header(encoded: bytes, whole: bool) -> Header:
    tags = _tags(encoded)
    if tags.next and not whole:  # the pages may lie anywhere
        raise BadImage("truncated")
    depth = _tiff_depth(encoded, tags)
    if not depth:
        return eight_bit_header(encoded)
    size = int(tags[WIDTH]), int(tags[HEIGHT])
    check_size(*size)
    if not (depth.startswith(GRAY) or find_spec("tifffile")):
        raise BadImage(NEEDS_TIFFFILE)
    turned = tags.get(ORIENTATION) in SWAPPED
    return Header(f"TIFF of {depth}", *(size[::-1] if turned else size))


def _tiff_depth(encoded: bytes, tags: ImageFileDirectory_v2) -> str:
    """The channels of a TIFF and their type; '' of one whose 8 bits Pillow reads."""
    bits, count = tags.get(BITS, (1,)), int(tags.get(SAMPLES, 1))
    plain = max(bits) <= 8 and UNSPECIFIED not in tags.get(EXTRA, ())
    if tags.next and (find_spec("tifffile") or not plain):
        with suppress(*[BadImage] * plain), _first_series(encoded) as (series, shape):
            if shape[2] > count or not plain:
                return f"{shape[2]} {series.dtype.name}"
    try:
        if plain:
            eight_bit_header(encoded)
            return ""
    except BadImage as error:
        if error.reason != "not-an-image":
            raise
    kind = KINDS.get(tags.get(FORMAT, (1,))[0], "uint")
    return f"{count} {kind}{next((size for size in (8, 16, 32) if size >= max(bits)), 64)}"


def _tags(encoded: bytes) -> ImageFileDirectory_v2:
    """The tags of a TIFF's first page, also where Pillow does not know such images."""
    file = io.BytesIO(encoded)
    tags = ImageFileDirectory_v2(file.read(16 if encoded[2:4] in BIG else 8))
    file.seek(tags.next)
    with quiet:
        tags.load(file)
    return tags


@contextmanager
def _first_series(encoded: bytes) -> Iterator[tuple[Any, tuple[int, int, int]]]:
    """The first series of a TIFF, and its height, width and channels; else a `BadImage`."""
    if not find_spec("tifffile"):
        raise BadImage(NEEDS_TIFFFILE)
    import tifffile

    logging.getLogger("tifffile").addHandler(logging.NullHandler())  # what is wrong is raised
    try:
        with tifffile.TiffFile(io.BytesIO(encoded)) as file:
            series = file.series[0]
            sizes = dict(zip(series.axes, series.shape, strict=True))
            channel = sizes.pop("S", 1) * sizes.pop("C", 1)
            shape = (sizes.pop("Y"), sizes.pop("X"), channel)
            if set(sizes.values()) - {1}:
                pages = f"{len(series.pages)} pages ({series.axes})"
                raise BadImage(f"stack of {pages}; channels are CYX")
            if series.nbytes > MAX_DECODED:
                raise BadImage("too-large")
            yield series, shape
    except BadImage:
        raise
    except Exception as error:  # of many kinds, by what is damaged
        lacks_codec = "imagecodecs" in str(error)
        raise BadImage(NEEDS_TIFFFILE if lacks_codec else "unreadable") from error


def read_channels(content: bytes | np.ndarray) -> Shaped[np.ndarray, "height width channels"]:
    """All channels of an image, in the type that they are stored in; else a `BadImage`."""
    pixels = _decoded(content) if isinstance(content, bytes) else content
    if not np.isfinite(pixels).all():
        raise BadImage("NaN or infinite pixels; give them a value")
    return pixels


def stored_channels(image: Any) -> Shaped[np.ndarray, "height width channels"]:
    """A Pillow image of one channel, an array, or a tensor (channels first), as it is."""
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        return pixels[..., None]
    if pixels.ndim != 3:
        raise ValueError(f"shape {pixels.shape}; give (height, width, channels)")
    return pixels if isinstance(image, np.ndarray) else np.moveaxis(pixels, 0, -1)


def check(content: bytes, known: Header) -> None:
    """Decode all of an image with this header; a `BadImage` if that fails."""
    if depth_of(known.format):
        read_channels(content)
    else:
        decode(content)


def _decoded(content: bytes) -> np.ndarray:
    depth = depth_of(header(content).format)
    if not depth:
        raise BadImage("an image of 8 bits and of no further channels")
    if depth.startswith(GRAY):
        with suppress(BadImage), opened(content) as image:
            turn = orientation(image)
            image.load()
            if image.mode.startswith("I") or image.mode == "F":
                upright = image if turn == 1 else image.transpose(UPRIGHT[turn])
                return np.asarray(upright)[..., None]
    with _first_series(content) as (series, (height, width, count)):
        places = (zip(page.dataoffsets, page.databytecounts, strict=True) for page in series.pages)
        if max(offset + size for page in places for offset, size in page) > len(content):
            raise BadImage("truncated")
        pixels: np.ndarray = series.asarray()
        place = max(map(series.axes.find, "CS"))
    last = pixels if place < 0 else np.moveaxis(pixels, place, -1)
    return _upright(last.reshape(height, width, count), _tags(content).get(ORIENTATION))


def _upright(pixels: np.ndarray, turn: object) -> np.ndarray:
    """What `UPRIGHT` does to an image."""
    if turn in SWAPPED:
        pixels = pixels.swapaxes(0, 1)
    if turn in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if turn in (2, 3, 6, 7) else pixels


def preview(pixels: np.ndarray) -> UInt8[np.ndarray, "height width 3"]:
    """Pixels of 8 bits or from 0 to 1 as people see them, in 8 bits.

    Of more than three channels the first three are red, green and blue; of two there is no blue.
    """
    if pixels.dtype != np.uint8:
        pixels = np.rint(255 * pixels).astype(np.uint8)
    if pixels.shape[2] == 2:
        pixels = np.pad(pixels, ((0, 0), (0, 0), (0, 1)))
    return np.ascontiguousarray(pixels[..., :3])
