"""The views of one image: crops for training, the middle for everything else.

Nothing here is random: who calls decides where to cut.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from nearkin.data.header import BadImage, opened, upright_size
from nearkin.data.rgb import decode, load

MIDDLE_GRAY: Final = 128
CENTER: Final = 0.875
"""Share of the shorter side that the evaluation view keeps (256 pixels cropped to 224)."""


def crops(
    source: bytes | UInt8[np.ndarray, "_ _ 3"],
    boxes: Float[np.ndarray, "views 4"],
    sizes: Sequence[int],
) -> list[UInt8[np.ndarray, "_ _ 3"]]:
    """Cut several square views out of an image that is decoded once.

    Decodes at the smallest scale that still gives every crop the pixels it needs. Resampling
    is bicubic with antialiasing, as in the papers.

    Args:
        source: the file's bytes, or pixels.
        boxes: left, top, width and height of each crop, as fractions of the upright image.
        sizes: the side of each view in pixels.

    Raises:
        BadImage: as `decode` does.
    """
    if isinstance(source, bytes):
        image = _decode_for(source, boxes, sizes)
    else:
        image = Image.fromarray(source)
    return [_crop(image, box, side) for box, side in zip(boxes, sizes, strict=True)]


def _decode_for(
    encoded: bytes, boxes: Float[np.ndarray, "views 4"], sizes: Sequence[int]
) -> Image.Image:
    with opened(encoded) as image:
        size = upright_size(image)
        needed = np.asarray(sizes)[:, None] / (boxes[:, 2:] * size)
        return load(image, math.ceil(min(size) * needed.max()))


def center(
    source: bytes | UInt8[np.ndarray, "_ _ 3"], size: int
) -> UInt8[np.ndarray, "{size} {size} 3"]:
    """The evaluation view: the middle of an image, without randomness.

    Keeps the central square of .875 of the shorter side, as the papers do at 224 pixels; the
    whole shorter side for views below 64 pixels or an image that already has the right size.

    Raises:
        BadImage: as `decode` does.
    """
    if isinstance(source, bytes):
        image = decode(source, min_side=math.ceil(size / CENTER))
    else:
        image = Image.fromarray(source)
    whole = size < 64 or image.size == (size, size)
    extent = np.minimum(1, min(image.size) * (1 if whole else CENTER) / np.array(image.size))
    return _crop(image, np.concatenate([(1 - extent) / 2, extent]), size)


def _crop(
    image: Image.Image, box: Float[np.ndarray, " 4"], size: int
) -> UInt8[np.ndarray, "{size} {size} 3"]:
    limits = np.tile(image.size, 2)
    corners = np.concatenate([box[:2], box[:2] + box[2:]]).clip(0, 1) * limits
    region = (corners[0], corners[1], corners[2], corners[3])
    return np.array(image.resize((size, size), Image.Resampling.BICUBIC, box=region))
