"""From encoded bytes to RGB pixels, whatever they are encoded as.

Any thread or process may decode. What cannot be decoded is a `BadImage` with a reason, whatever
the decoder raised. Damage that a format cannot detect (an uncompressed or a JPEG image with
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
    with opened(encoded) as image:
        return load(image, min_side)


def load(image: Image.Image, min_side: int | None) -> Image.Image:
    """Decode an opened image; only to be called inside `opened`."""
    turn = orientation(image)
    if min_side is not None and image.format in ("JPEG", "MPO"):
        image.draft(None, (min_side, min_side))
    image.load()
    color = _rgb(image)
    return color if turn == 1 else color.transpose(UPRIGHT[turn])


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 bits, 32 bits or floats as gray of 8 bits."""
    pixels = np.nan_to_num(np.asarray(image, np.float64), posinf=0, neginf=0)
    low, high = pixels.min(), pixels.max()
    if image.mode.startswith("I;16"):
        tags = getattr(image, "tag_v2", {})
        low, high = 0.0, 2.0 ** int(tags.get(BITS_PER_SAMPLE, (16,))[0]) - 1
    scaled = (pixels - low) / max(high - low, np.finfo(np.float64).tiny)
    return Image.fromarray(np.rint(255 * scaled.clip(0, 1)).astype(np.uint8))
