"""Encoded images to RGB pixels: what is refused, headers, crops and centers."""

import io
import math
import os
import re
import threading
import warnings
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from nearkin.errors import UsageError

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""The only decoders that are tried, whatever the name of a file, beside that of HEIC."""
NETPBM: Final = (b"P5", b"P6")
"""PGM and PPM. Pillow's format PPM is also bitmaps, floats and extensions."""
TIFF: Final = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"II\0*", b"MM*\0")
MAGIC: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", *TIFF)
"""How files of these formats begin. Others are told by more: a text may begin with BM or P2."""
BMP: Final = re.compile(rb"BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL)
PNM: Final = re.compile(rb"P[2356]\s(?:\s|#[^\n\r]*(?:[\n\r]|$))*(?:\d|$)")
AVIF: Final = (b"avif", b"avis", b"mif1", b"msf1")
HEIC: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
"""Brands of files; `mif1` and `msf1` are of both kinds."""
NEEDS_HEIF: Final = "HEIC; needs pip install 'nearkin[heif]'"
MAX_BYTES: Final = 256 * 2**20
MAX_PIXELS: Final = "50M"  # Of an image as it is decoded, unless the environment says otherwise
HALVED: Final = 4  # How many times as many a JPEG may have, which is then decoded at half its size
MIN_SIDE: Final = 2  # Shortest side of an image that can be trained on


def max_pixels() -> int:
    """Pixels of the largest image that is decoded, from $NEARKIN_MAX_PIXELS, as 200M."""
    text = os.environ.get("NEARKIN_MAX_PIXELS") or MAX_PIXELS
    try:
        return int(float(text.upper().removesuffix("M")) * (1e6 if text[-1] in "mM" else 1))
    except (ValueError, OverflowError) as error:
        raise UsageError(f"NEARKIN_MAX_PIXELS {text!r} is no number; say 200M") from error


class BadImage(Exception):  # noqa: N818  (a finding about a file, not a failure of the program)
    """An image that cannot be used; `reason` is a few words, such as truncated or unreadable."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class PixelType:
    """How many channels an image has, and the type of their values."""

    num_channels: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.num_channels} {self.dtype}"


class Header(NamedTuple):
    """An image's format, and its size in pixels after exif orientation."""

    format: str
    width: int
    height: int
    pixel_type: PixelType | None = None
    """Of what is not RGB or gray of 8 bits."""


class _Quiet:
    """Pillow without its warnings and its limit of pixels, in all threads while one is inside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.undo = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.undo.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                self.undo.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
                Image.MAX_IMAGE_PIXELS = None
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.undo.close()


quiet = _Quiet()


@contextmanager
def opened(encoded: bytes) -> Iterator[Image.Image]:
    """The image, identified, within the limits, not decoded; Pillow's errors become `BadImage`."""
    if len(encoded) > MAX_BYTES:
        raise BadImage("too-large")
    formats = _with_heif() if is_heic(encoded) else FORMATS
    with quiet:
        try:
            with Image.open(io.BytesIO(_without_texts(encoded)), formats=formats) as image:
                if image.format == "PPM" and not encoded.startswith(NETPBM):
                    is_text = encoded.startswith((b"P2", b"P3"))
                    raise BadImage(NETPBM_TEXT if is_text else NOT_AN_IMAGE)
                check_size(*image.size, most=HALVED if image.format in JPEG else 1)
                yield image
        except (BadImage, UsageError):
            raise
        except Exception as error:
            raise BadImage(_reason(error, encoded)) from error


def check_size(width: int, height: int, *, most: int = 1) -> None:
    """Refuse an image that is too small, or has more than `most` times the pixels allowed."""
    if min(width, height) < MIN_SIDE:
        raise BadImage("too-small")
    if width * height > most * max_pixels():
        raise BadImage(f"too-large: {width}x{height} pixels; see NEARKIN_MAX_PIXELS")


JPEG: Final = ("JPEG", "MPO")  # The multi-image variant is, for its first image, a JPEG
ENDED: Final = ("truncated", "reached eof", "not enough image data", "end of file")
"""What Pillow and libheif say of data that end too early."""
OTHERS: Final = {
    b"version https://git-lfs": "git-lfs pointer; run git lfs pull",
    b"\0\0\0\x0cJXL ": "JPEG XL; convert it to PNG",
    b"\xff\x0a": "JPEG XL; convert it to PNG",
    b"\0\0\0\x0cjP  ": "JPEG 2000; convert it to PNG",
    b"\xff\x4f\xff\x51": "JPEG 2000; convert it to PNG",
}
"""How files begin that are no images which are read here, and what to do."""
NETPBM_TEXT: Final = "PGM or PPM as text; convert it to PNG"
"""For its comments Pillow needs a time that is quadratic: hours for a small file made so."""
NOT_AN_IMAGE: Final = "not-an-image"
EMPTY: Final = "empty file"
HTML: Final = "HTML page, not an image"
TEXT: Final = "text, not an image"
NO_IMAGE: Final = (NOT_AN_IMAGE, EMPTY, HTML, TEXT, NETPBM_TEXT, *OTHERS.values())
"""Reasons by which a file is no image at all, rather than a bad one."""


def _reason(error: Exception, encoded: bytes) -> str:
    # WebP, AVIF and HEIC say how long they are; their libraries only say that they failed.
    cut = _stated_bytes(encoded) > len(encoded)
    if isinstance(error, Image.DecompressionBombError | MemoryError):
        return "too-large"
    unknown = isinstance(error, UnidentifiedImageError) and not cut
    if unknown or not looks_like_image(encoded):
        return "unreadable" if is_heic(encoded) else what_it_is(encoded)
    ended = any(words in str(error).lower() for words in ENDED)
    return "truncated" if isinstance(error, EOFError) or ended or cut else "unreadable"


def _stated_bytes(encoded: bytes) -> int:
    """How long a file says that it is, if it is RIFF or of ISO's base media format; else 0."""
    if encoded.startswith(b"RIFF"):
        return 8 + int.from_bytes(encoded[4:8], "little")
    at = 0
    while _brands(encoded) and at + 8 <= len(encoded):  # one box after another
        size = int.from_bytes(encoded[at : at + 4], "big")
        if size < 8:  # to the end of the file, or of 64 bits
            return 0
        at += size
    return at


def what_it_is(encoded: bytes) -> str:
    """Why a file that no decoder knows is no image, from how it begins."""
    if not encoded:
        return EMPTY
    start = encoded[:512]
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return HTML
    if known := [reason for head, reason in OTHERS.items() if start.startswith(head)]:
        return known[0]
    try:
        text = getincrementaldecoder("utf-8")().decode(start)  # the last letter may be cut
    except UnicodeDecodeError:
        return NOT_AN_IMAGE
    return TEXT if "".join(text.split()).isprintable() else NOT_AN_IMAGE


def looks_like_image(start: bytes) -> bool:
    """Whether a file may be an image that is read here, from its first 128 bytes."""
    if start.startswith(b"RIFF"):
        return start[8:12] == b"WEBP"
    named = start.startswith(MAGIC) or (_brands(start) or [b""])[0] in (*AVIF, *HEIC)
    return named or bool(BMP.match(start) or PNM.match(start))


def is_heic(start: bytes) -> bool:
    """Whether a file is HEIC, from its first 128 bytes."""
    chief, *others = _brands(start) or [b""]
    if chief in AVIF:  # which `mif1` is, too, if nothing else is said
        return not {*AVIF[:2]} & {chief, *others} and bool({*HEIC} & {*others})
    return chief in HEIC


def needs_all(start: bytes) -> bool:
    """Whether a header may lie anywhere in a file that begins so: TIFF, WebP, AVIF, HEIC."""
    return start.startswith((*TIFF, b"RIFF")) or bool(_brands(start))


def _brands(start: bytes) -> list[bytes]:
    """What a file of ISO's base media format says that it is, the chief brand first."""
    if start[4:8] != b"ftyp":
        return []
    end = min(int.from_bytes(start[:4], "big"), 128)
    return [start[8:12], *(start[at : at + 4] for at in range(16, end, 4))]


def _with_heif() -> tuple[str, ...]:
    """Let Pillow open HEIC, by a library that is imported only where there is one to open."""
    try:
        import pillow_heif
    except ImportError:
        raise BadImage(NEEDS_HEIF) from None
    pillow_heif.register_heif_opener()
    return ("HEIF",)


TEXTS: Final = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
"""Chunks of a PNG that Pillow refuses if they are large, and whose content counts for nothing."""
EXIF: Final = b"Raw profile type"  # What begins the text that holds the exif of older PNGs


def _without_texts(encoded: bytes) -> bytes:
    """A PNG without its texts and color profile; any other file as it is."""
    if not encoded.startswith(b"\x89PNG") or not any(kind in encoded for kind in TEXTS):
        return encoded
    parts, at = [encoded[:8]], 8
    while at < len(encoded):
        end = at + 12 + int.from_bytes(encoded[at : at + 4], "big")
        if encoded[at + 4 : at + 8] not in TEXTS or encoded.startswith(EXIF, at + 8):
            parts.append(encoded[at:end])
        at = end
    return b"".join(parts)


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


def header(encoded: bytes) -> Header:
    """Format and size of an encoded image, or of its beginning; a `BadImage` without any."""
    with opened(encoded) as image:
        name = "JPEG" if image.format in JPEG else str(image.format)
        return Header(name, *swapped(image.size, orientation(image)))


def swapped(size: tuple[int, int], turn: int) -> tuple[int, int]:
    """Width and height after this exif orientation."""
    return size[::-1] if turn >= 5 else size


def upright(pixels: np.ndarray, turn: int) -> np.ndarray:
    """Pixels (height, width, channels) after this exif orientation."""
    if turn >= 5:
        pixels = pixels.swapaxes(0, 1)
    if turn in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if turn in (2, 3, 6, 7) else pixels


def decode(encoded: bytes, *, min_side: int | None = None) -> Image.Image:
    """Decode an image of one of `FORMATS`, recognized by content, into upright RGB, or `BadImage`.

    A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, several times faster, as long as its
    shorter side keeps `min_side` pixels.
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
    """Encoded bytes (see `decode`), or pixels of 8 bits or from 0 to 1, as an image."""
    if isinstance(content, bytes):
        return decode(content, min_side=min_side)
    if content.dtype == np.uint8:
        return Image.fromarray(content)
    return Planes([Image.fromarray(np.ascontiguousarray(x)) for x in np.moveaxis(content, -1, 0)])


def load(image: Image.Image, min_side: int | None) -> Image.Image:
    """Decode an opened image; only to be called inside `opened`."""
    turn = orientation(image)
    if image.format in JPEG:
        most = min(image.size) // (2 if image.width * image.height > max_pixels() else 1)
        side = most if min_side is None else min(min_side, most)
        image.draft(None, (side, side))
    image.load()
    color = rgb(image)
    return color if turn == 1 else Image.fromarray(upright(np.asarray(color), turn))


def is_deep(image: Image.Image) -> bool:
    """Whether an image is gray of 16 bits, of 32 bits or of floats."""
    return image.mode.startswith("I") or image.mode == "F"


def rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB of 8 bits; transparent pixels are laid over white.

    16-bit samples are scaled by their bit depth, 32-bit and float samples by their extremes.
    """
    if is_deep(image):
        pixels = np.nan_to_num(np.asarray(image, np.float64), posinf=0, neginf=0)
        low, high = pixels.min(), pixels.max()
        if image.mode.startswith("I;16") or image.format == "PPM":
            tags = getattr(image, "tag_v2", {})
            low, high = 0.0, 2.0 ** int(tags.get(ExifTags.Base.BitsPerSample, (16,))[0]) - 1
        scaled = ((pixels - low) / max(high - low, np.finfo(np.float64).tiny)).clip(0, 1)
        return Image.fromarray(np.rint(255 * scaled).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


MIDDLE_GRAY: Final = 128
DEEP: Final = ("uint16", "int16")  # Integers beside 8 bits that arrays may hold
CENTER: Final = 0.875  # Share of the shorter side in the evaluation view (224 of 256 pixels)


Pixels = UInt8[np.ndarray, "_ _ 3"] | Float32[np.ndarray, "_ _ _"]
"""Of 8 bits or, of any channels, from 0 to 1."""


def crops(
    source: bytes | Pixels, boxes: Float[np.ndarray, "views 4"], sizes: Sequence[int]
) -> list[Pixels]:
    """Cut square views, as shares (left, top, width, height) of an image that is decoded once.

    It is decoded at the smallest scale that gives every crop its pixels; crops are bicubic.
    """
    if isinstance(source, bytes):
        with opened(source) as file:
            size = swapped(file.size, orientation(file))
            needed = np.asarray(sizes)[:, None] / (boxes[:, 2:] * size)
            image: Image.Image | Planes = load(file, math.ceil(min(size) * needed.max()))
    else:
        image = as_image(source)
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
    corners = np.concatenate([box[:2], box[:2] + box[2:]]).clip(0, 1) * np.tile(image.size, 2)
    left, top, right, bottom = corners
    region = (left, top, right, bottom)
    return np.array(image.resize((size, size), Image.Resampling.BICUBIC, box=region))


def rgb_pixels(image: Any, min_side: int | None = None) -> UInt8[np.ndarray, "_ _ 3"]:
    """A PIL image (`min_side` as in `decode`), an array or a tensor as upright RGB."""
    if isinstance(image, Image.Image):
        if isinstance(image, JpegImageFile) and image.tile and image.fp:  # not decoded yet
            frame, image = image.tell(), Image.open(image.fp)  # what was given keeps its scale
            image.seek(frame)
        return np.asarray(load(image, min_side))
    pixels = array_pixels(image, 3, plain=True)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def array_pixels(images: Any, ndim: int, *, plain: bool = False) -> np.ndarray:
    """An array or tensor of an image (`ndim` 3) or several (4), checked, with its channels last.

    As uint8 of one channel or three. Those of `DEEP`, or of other channels, stay as they are; or
    are refused, if it is to be `plain`.
    """
    if not (hasattr(images, "dtype") and hasattr(images, "shape")):
        kind = type(images).__name__
        raise TypeError(f"{kind} is no image; give a PIL image, an array or a tensor")
    given = as_array(images, ndim)
    pixels = given[..., None] if given.ndim == ndim - 1 else given
    if not plain and _is_deep_array(pixels, ndim):
        check_several(images, ndim)
        return pixels
    check_pixels(images, ndim)
    return pixels if pixels.dtype == np.uint8 else np.rint(pixels * 255).astype(np.uint8)


def _is_deep_array(pixels: np.ndarray, ndim: int) -> bool:
    if pixels.ndim != ndim or not pixels.size:
        return False
    height, width, count = pixels.shape[-3:]
    others = count not in (1, 3) and (pixels.dtype.kind == "f" or pixels.dtype == np.uint8)
    # More than the sides have pixels are no channels, but a side.
    return (others or pixels.dtype in DEEP) and count <= min(height, width)


def as_array(images: Any, ndim: int) -> np.ndarray:
    """An image (`ndim` 3) or batch (4), array or tensor, as an array with its channels last."""
    if not is_tensor(images):
        return np.asarray(images)
    last = images if is_channels_last(images, ndim) else images.movedim(-3, -1)
    known = last.float() if "bfloat16" in str(last.dtype) else last  # which NumPy lacks
    return np.asarray(known.detach().cpu().numpy())


def is_tensor(images: Any) -> bool:
    """Whether these are a tensor, recognized without an import of torch."""
    return hasattr(images, "movedim")


def is_channels_last(images: Any, ndim: int) -> bool:
    """Whether channels stand behind height and width: in tensors only if nothing else can be."""
    shape = tuple(images.shape)
    color = len(shape) == ndim and shape[-1] in (1, 3) and shape[-3] not in (1, 3)
    return color or len(shape) < ndim or not is_tensor(images)


def check_several(images: Any, ndim: int) -> None:
    """Refuse a single color image where a batch (`ndim` 4) is expected."""
    shape = tuple(images.shape)
    if len(shape) == ndim - 1 == 3 and shape[-1] in (1, 3):
        kind = "a tensor" if is_tensor(images) else "an array"
        raise ValueError(f"{kind} of shape {shape} is one image; give a list of images")


def check_pixels(images: Any, ndim: int) -> None:
    """Refuse what is no image (of `ndim` 3) or batch (4) of uint8, or of floats from 0 to 1.

    Arrays have their channels last, tensors first or last; gray ones may have none.
    """
    tensor = "a tensor", "(3, height, width)"
    kind, layout = tensor if is_tensor(images) else ("an array", "(height, width, 3)")
    shape, dtype = tuple(images.shape), str(images.dtype)
    check_several(images, ndim)
    color = len(shape) == ndim and shape[-1 if is_channels_last(images, ndim) else -3] in (1, 3)
    if not (color or len(shape) == ndim - 1) or 0 in shape:
        each = " of each image" if ndim == 4 else ""
        raise ValueError(f"{kind} of shape {shape}; give {layout} or (height, width){each}")
    if "float" in dtype:
        values = images.detach() if is_tensor(images) else images
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):  # false for NaN, too
            raise ValueError(
                f"floats from {low:g} to {high:g}; give values from 0 to 1, not yet normalized"
            )
    elif "uint8" not in dtype:
        raise TypeError(f"{kind} of {dtype}; give uint8, or floats from 0 to 1")
