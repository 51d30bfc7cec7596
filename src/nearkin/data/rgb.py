"""From encoded bytes to RGB pixels, whatever they are encoded as.

Any thread or process may decode. What cannot be decoded is a `BadImage` with a reason, whatever
the decoder raised. Damage that a format cannot detect (an uncompressed or a JPEG picture with
flipped bits) decodes to damaged pixels.
"""

from typing import Final

import numpy as np
from PIL import Image

from nearkin.data.header import opened, orientation

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
BITS_PER_SAMPLE: Final = 258
"""A TIFF tag."""


def decode(encoded: bytes, *, min_side: int | None = None) -> Image.Image:
    """Decode a JPEG, PNG, WebP, GIF, BMP or TIFF, recognized by content, into upright RGB.

    Exif orientation is applied. Transparent pixels are laid over white, CMYK and gray become
    RGB, 16-bit samples are scaled by their bit depth, 32-bit and float samples by their
    smallest and largest value. Of an animation, the first frame counts.

    Args:
        encoded: the file's bytes.
        min_side: where given, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long as its
            shorter side keeps at least this many pixels, which is several times faster.

    Raises:
        BadImage: not-an-image, truncated, too-large (over 256 MiB, or over the 179 million
            pixels at which Pillow suspects a bomb; `open_images` admits fewer), too-small (a
            side of one pixel) or unreadable.
    """
    with opened(encoded) as picture:
        return load(picture, min_side)


def load(picture: Image.Image, min_side: int | None) -> Image.Image:
    """Decode an opened picture; only to be called inside `opened`."""
    turn = orientation(picture)
    if min_side is not None and picture.format in ("JPEG", "MPO"):
        picture.draft(None, (min_side, min_side))
    picture.load()
    color = _rgb(picture)
    return color if turn == 1 else color.transpose(UPRIGHT[turn])


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I") or picture.mode == "F":
        return _eight_bits(picture).convert("RGB")
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Gray of 16 bits, 32 bits or floats as gray of 8 bits."""
    pixels = np.nan_to_num(np.asarray(picture, np.float64), posinf=0, neginf=0)
    low, high = pixels.min(), pixels.max()
    if picture.mode.startswith("I;16"):
        tags = getattr(picture, "tag_v2", {})
        low, high = 0.0, 2.0 ** int(tags.get(BITS_PER_SAMPLE, (16,))[0]) - 1
    scaled = (pixels - low) / max(high - low, np.finfo(np.float64).tiny)
    return Image.fromarray(np.rint(255 * scaled.clip(0, 1)).astype(np.uint8))
