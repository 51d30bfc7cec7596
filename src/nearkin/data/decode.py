"""Encoded images to RGB pixels: what is refused, headers, crops and centers."""

import io
import math
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The only decoders that are tried, whatever the name of a file."""
NETPBM: Final = (b"P2", b"P3", b"P5", b"P6")
"""PGM and PPM, as text and binary. Pillow's format PPM is also bitmaps, floats and extensions."""
MAGIC: Final = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF8", b"BM", b"II", b"MM"),
    *NETPBM,
)
"""How files of these formats begin."""
MAX_BYTES: Final = 256 * 2**20
MIN_SIDE: Final = 2  # Shortest side of an image that can be trained on
SWAPPED: Final = (5, 6, 7, 8)  # Exif orientations that exchange width and height


class BadImage(Exception):  # noqa: N818  (a finding about a file, not a failure of the program)
    """An image that is not-an-image, truncated, too-large, too-small or unreadable (`reason`)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    """An image's format, and its size in pixels after exif orientation."""

    format: str
    width: int
    height: int


class _Quiet:
    """Ignores warnings while any thread is inside; `catch_warnings` alone is not thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.filters = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.filters.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.filters.close()


quiet = _Quiet()


@contextmanager
def opened(encoded: bytes) -> Iterator[Image.Image]:
    """The image, identified, within the limits, not decoded; Pillow's errors become `BadImage`."""
    if len(encoded) > MAX_BYTES:
        raise BadImage("too-large")
    with quiet:
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                if image.format == "PPM" and not encoded.startswith(NETPBM):
                    raise BadImage("not-an-image")
                if min(image.size) < MIN_SIDE:
                    raise BadImage("too-small")
                yield image
        except BadImage:
            raise
        except Exception as error:
            raise BadImage(_reason(error, encoded)) from error


ENDED: Final = ("truncated", "reached eof", "smaller than requested size")
"""What Pillow and numpy say of data that end too early."""


def _reason(error: Exception, encoded: bytes) -> str:
    # A RIFF file says how long it is; libwebp only says that it failed.
    riff = 8 + int.from_bytes(encoded[4:8], "little") if encoded[:4] == b"RIFF" else 0
    if isinstance(error, Image.DecompressionBombError | MemoryError):
        return "too-large"
    if isinstance(error, UnidentifiedImageError):
        return "not-an-image"
    ended = any(words in str(error).lower() for words in ENDED)
    if isinstance(error, EOFError) or ended or riff > len(encoded):
        return "truncated"
    return "unreadable"


def orientation(image: Image.Image) -> int:
    """The exif orientation, 1 to 8, still to be applied; 1 where it is absent or broken."""
    # Pillow applies a TIFF's own. A PNG's exif counts only before the pixels: further back, its
    # header could not be read without decoding all of it.
    pending = image.format != "PNG" or {"exif", "Raw profile type exif"} & image.info.keys()
    if image.format == "TIFF" or not pending:
        return 1
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken exif block must not cost the image
        return 1
    return value if value in range(1, 9) else 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height after exif orientation."""
    width, height = image.size
    return (height, width) if orientation(image) in SWAPPED else (width, height)


def header(encoded: bytes) -> Header:
    """Format and size of an encoded image, or of its beginning; a `BadImage` without any."""
    with opened(encoded) as image:
        # The multi-image variant of JPEG is, for its first image, a JPEG.
        name = "JPEG" if image.format == "MPO" else str(image.format)
        return Header(name, *upright_size(image))


UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each exif orientation."""
BITS_PER_SAMPLE: Final = 258  # A TIFF tag


def decode(encoded: bytes, *, min_side: int | None = None) -> Image.Image:
    """Decode an image of one of `FORMATS`, recognized by content, into upright RGB, or `BadImage`.

    Of an animation, the first frame counts. A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size,
    several times faster, as long as its shorter side keeps `min_side` pixels.
    """
    with opened(encoded) as image:
        return load(image, min_side)


class Planes:
    """Pixels from 0 to 1, of any channels, with what is used here of a Pillow image."""

    def __init__(self, planes: Sequence[Image.Image]) -> None:
        self.planes = planes
        self.size = planes[0].size

    def resize(
        self,
        size: tuple[int, int],
        resample: Image.Resampling,
        box: tuple[float, float, float, float] | None = None,
    ) -> "Planes":
        """Each channel, resized in floats."""
        return Planes([plane.resize(size, resample, box=box) for plane in self.planes])

    def crop(self, box: tuple[int, int, int, int]) -> "Planes":
        """Each channel, cropped."""
        return Planes([plane.crop(box) for plane in self.planes])

    def __array__(
        self, dtype: Any = None, copy: bool | None = None
    ) -> Float32[np.ndarray, "height width _"]:
        del dtype, copy
        stacked: np.ndarray = np.stack([np.asarray(plane) for plane in self.planes], axis=2)
        return stacked.clip(0, 1)  # bicubic filters overshoot


def as_image(content: bytes | np.ndarray, *, min_side: int | None = None) -> Image.Image | Planes:
    """Encoded bytes (see `decode`) or pixels as an image."""
    if isinstance(content, bytes):
        return decode(content, min_side=min_side)
    return pixels_as_image(content)


def pixels_as_image(pixels: np.ndarray) -> Image.Image | Planes:
    """Pixels of 8 bits, or floats from 0 to 1, as an image."""
    if pixels.dtype == np.uint8:
        return Image.fromarray(pixels)
    return Planes([Image.fromarray(np.ascontiguousarray(x)) for x in np.moveaxis(pixels, -1, 0)])


def load(image: Image.Image, min_side: int | None) -> Image.Image:
    """Decode an opened image; only to be called inside `opened`."""
    turn = orientation(image)
    if min_side is not None and image.format in ("JPEG", "MPO"):
        image.draft(None, (min_side, min_side))
    if isinstance(image, ImageFile.ImageFile) and image.format == "PPM" and image.tile:
        return _netpbm(image)
    image.load()
    color = rgb(image)
    return color if turn == 1 else color.transpose(UPRIGHT[turn])


def _netpbm(image: ImageFile.ImageFile) -> Image.Image:
    """Decode an opened PGM or PPM; samples are scaled by the largest value the header names.

    Pillow decodes text and all but the commonest depths in Python, sample by sample, and needs
    a time that is quadratic in the number of comments: hours for a small file that is made so.
    """
    codec, _, offset, args = image.tile[0]
    raw = {"RGB": 255, "L": 255, "I": 65535}
    largest: int = raw[image.mode] if codec == "raw" else args[1]  # type: ignore[index, assignment]
    bands = len(image.getbands())
    count = bands * image.width * image.height
    assert image.fp is not None
    image.fp.seek(offset)
    samples: np.ndarray
    if codec == "ppm_plain":
        text = re.sub(rb"#[^\r\n]*", b"", image.fp.read())
        # Not with `count`: numpy then returns uninitialized memory for samples that are missing.
        samples = np.fromstring(text.decode("ascii"), np.int64, sep=" ")[:count]
    else:
        samples = np.frombuffer(image.fp.read(), ">u2" if largest > 255 else "u1", count)
    if len(samples) < count:
        raise BadImage("truncated")
    if samples.max() > largest or samples.min() < 0:
        raise BadImage("unreadable")
    scaled = np.rint(np.multiply(samples, 255 / largest, dtype=np.float32)).astype(np.uint8)
    gray = bands == 1
    shape = (image.height, image.width) if gray else (image.height, image.width, bands)
    return Image.fromarray(scaled.reshape(shape)).convert("RGB")


def rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB of 8 bits; transparent pixels are laid over white.

    16-bit samples are scaled by their bit depth, 32-bit and float samples by their extremes.
    """
    if image.mode.startswith("I") or image.mode == "F":  # gray of 16 bits, 32 bits or floats
        pixels = np.nan_to_num(np.asarray(image, np.float64), posinf=0, neginf=0)
        low, high = pixels.min(), pixels.max()
        if image.mode.startswith("I;16"):
            tags = getattr(image, "tag_v2", {})
            low, high = 0.0, 2.0 ** int(tags.get(BITS_PER_SAMPLE, (16,))[0]) - 1
        scaled = ((pixels - low) / max(high - low, np.finfo(np.float64).tiny)).clip(0, 1)
        return Image.fromarray(np.rint(255 * scaled).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


MIDDLE_GRAY: Final = 128
CENTER: Final = 0.875  # Share of the shorter side in the evaluation view (224 of 256 pixels)


Pixels = UInt8[np.ndarray, "_ _ 3"] | Float32[np.ndarray, "_ _ _"]
"""Of 8 bits or, of any channels, from 0 to 1."""


def crops(
    source: bytes | Pixels,
    boxes: Float[np.ndarray, "views 4"],
    sizes: Sequence[int],
) -> list[Pixels]:
    """Cut square views, as shares (left, top, width, height) of an image that is decoded once.

    Decodes at the smallest scale that gives every crop the pixels it needs. Resampling is
    bicubic with antialiasing, as in the papers.
    """
    if isinstance(source, bytes):
        with opened(source) as file:
            size = upright_size(file)
            needed = np.asarray(sizes)[:, None] / (boxes[:, 2:] * size)
            image: Image.Image | Planes = load(file, math.ceil(min(size) * needed.max()))
    else:
        image = pixels_as_image(source)
    return [_crop(image, box, side) for box, side in zip(boxes, sizes, strict=True)]


def center(source: bytes | Pixels, size: int) -> Pixels:
    """The evaluation view: a center crop of .875 of the shorter side, as in the papers at 224 px.

    Of all of it for views below 64 pixels, and for an image that already has the right size.
    """
    image = as_image(source, min_side=math.ceil(size / CENTER))
    whole = size < 64 or image.size == (size, size)
    extent = np.minimum(1, min(image.size) * (1 if whole else CENTER) / np.array(image.size))
    return _crop(image, np.concatenate([(1 - extent) / 2, extent]), size)


def _crop(image: Image.Image | Planes, box: Float[np.ndarray, " 4"], size: int) -> Pixels:
    limits = np.tile(image.size, 2)
    corners = np.concatenate([box[:2], box[:2] + box[2:]]).clip(0, 1) * limits
    region = (corners[0], corners[1], corners[2], corners[3])
    return np.array(image.resize((size, size), Image.Resampling.BICUBIC, box=region))


def rgb_pixels(image: Any, min_side: int | None = None) -> UInt8[np.ndarray, "_ _ 3"]:
    """A PIL image of any mode, an array or a tensor (see `check_pixels`) as upright RGB.

    `min_side` is that of `decode`, for a PIL image whose file is not yet decoded.
    """
    if isinstance(image, Image.Image):
        return np.asarray(load(image, min_side))
    pixels = eight_bits(image, 3)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def eight_bits(images: Any, ndim: int) -> UInt8[np.ndarray, "..."]:
    """An array or tensor, checked as `check_pixels` does, as uint8 with its channels last."""
    check_pixels(images, ndim)
    pixels: np.ndarray = images
    if not isinstance(images, np.ndarray):
        channels_last = images.movedim(-3, -1) if images.ndim == ndim else images
        pixels = channels_last.detach().cpu().numpy()
    if pixels.dtype != np.uint8:
        pixels = np.rint(pixels * 255).astype(np.uint8)
    return pixels if pixels.ndim == ndim else pixels[..., None]


def check_pixels(images: Any, ndim: int) -> None:
    """Refuse what is no image (of `ndim` 3) or batch (4) of uint8, or of floats from 0 to 1.

    Arrays have their channels last, tensors before height and width; gray ones may have none.
    """
    if not hasattr(images, "dtype") or not hasattr(images, "shape"):
        kind = type(images).__name__
        raise TypeError(f"{kind} is no image; give a PIL image, an array or a tensor")
    kind, axis, layout = "a tensor", -3, "(3, height, width)"
    if isinstance(images, np.ndarray):
        kind, axis, layout = "an array", -1, "(height, width, 3)"
    shape, dtype = tuple(images.shape), str(images.dtype)
    color = len(shape) == ndim and shape[axis] in (1, 3)
    if not (color or len(shape) == ndim - 1) or 0 in shape:
        each = " of each image" if ndim == 4 else ""
        raise ValueError(f"{kind} of shape {shape}; give {layout} or (height, width){each}")
    if "float" in dtype:
        low, high = float(images.min()), float(images.max())
        if not (low >= 0 and high <= 1):  # false for NaN, too
            raise ValueError(
                f"floats from {low:g} to {high:g}; give values from 0 to 1, not yet normalized"
            )
    elif "uint8" not in dtype:
        raise TypeError(f"{kind} of {dtype}; give uint8, or floats from 0 to 1")
