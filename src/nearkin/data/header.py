"""What can be known of an encoded image before its pixels are decoded, and what is refused."""

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""The only decoders ever tried, whatever a file is called."""
MAGIC: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF8", b"BM", b"II", b"MM")
"""How files of these formats begin; without that, no decoder takes a file for its own."""
MAX_BYTES: Final = 256 * 2**20
MIN_SIDE: Final = 2
"""Images with a shorter side than this hold no shape to learn from."""
SWAPPED: Final = (5, 6, 7, 8)
"""Exif orientations that exchange width and height."""


class BadImage(Exception):  # noqa: N818  (a finding about a file, not a failure of the program)
    """An image that cannot be used; `reason` says why.

    Reasons: not-an-image, truncated, too-large, too-small, unreadable.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    """An image's format, and its size in pixels as one looks at it (after exif orientation)."""

    format: str
    width: int
    height: int


class _Quiet:
    """Ignores warnings while any thread is inside.

    With `warnings.catch_warnings` alone, two threads that overlap restore each other's filters.
    """

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
    """The image, identified and within the limits, but not yet decoded.

    Inside the block, whatever Pillow raises becomes a `BadImage`, and its warnings are dropped.
    """
    if len(encoded) > MAX_BYTES:
        raise BadImage("too-large")
    with quiet:
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                if min(image.size) < MIN_SIDE:
                    raise BadImage("too-small")
                yield image
        except BadImage:
            raise
        except Exception as error:
            raise BadImage(_reason(error, encoded)) from error


def _reason(error: Exception, encoded: bytes) -> str:
    # A RIFF file says how long it is; libwebp only says that it failed.
    riff = 8 + int.from_bytes(encoded[4:8], "little") if encoded[:4] == b"RIFF" else 0
    if isinstance(error, Image.DecompressionBombError | MemoryError):
        return "too-large"
    if isinstance(error, UnidentifiedImageError):
        return "not-an-image"
    if isinstance(error, EOFError) or "truncated" in str(error).lower() or riff > len(encoded):
        return "truncated"
    return "unreadable"


def orientation(image: Image.Image) -> int:
    """The exif orientation, 1 to 8, still to be applied; 1 where it is absent or broken.

    Pillow applies a TIFF's own. A PNG's exif counts only where it precedes the pixels, for
    otherwise its header could not be read without decoding it all.
    """
    pending = image.format != "PNG" or {"exif", "Raw profile type exif"} & image.info.keys()
    if image.format == "TIFF" or not pending:
        return 1
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # exif is an ornament: a broken one must not cost the image
        return 1
    return value if value in range(1, 9) else 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height after exif orientation."""
    width, height = image.size
    return (height, width) if orientation(image) in SWAPPED else (width, height)


def header(encoded: bytes) -> Header:
    """Format and size of an encoded image, or of its beginning.

    Raises:
        BadImage: it is not an image of an allowed format and size.
    """
    with opened(encoded) as image:
        # The multi-image variant of JPEG is, for its first image, a JPEG.
        name = "JPEG" if image.format == "MPO" else str(image.format)
        return Header(name, *upright_size(image))
