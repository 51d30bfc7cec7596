"""Pictures that are there twice: exact copies, and resized, recompressed or burst ones.

To a contrastive method every copy is a false negative, and a copy on the other side of a split
makes the score a lie.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int64
from PIL import Image

from nearkin.data.header import BadImage
from nearkin.data.images import Images
from nearkin.data.rgb import decode

SIDE: Final = 16
"""Of the thumbnails that are compared. Finer ones tell resized copies apart."""
ALIKE: Final = 0.98
"""Least correlation of two thumbnails of copies."""
ALIKE_SMALL: Final = 0.995
"""The same for pictures up to 64 pixels: handwritten digits reach .98 without being copies."""
PLAIN: Final = 3.0
"""Standard deviation, in gray levels, below which a thumbnail shows too little to compare."""
TABLES: Final = 32
BITS: Final = 24
"""Per table: two thumbnails that correlate by .98 share at least one key at 99.9 %."""
REACH: Final = 16
"""Pictures compared with one another in a bucket; keeps thousands of like ones affordable."""
THREADS: Final = 8


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Which pictures show the same."""

    groups: Int64[np.ndarray, " images"]
    """Each picture's group: the first row of all its copies, and of the groups it had before."""
    num_exact: int
    """Pictures that are byte for byte a copy of an earlier one."""
    num_near: int
    """Further pictures that look the same as an earlier one."""


def duplicates(images: Images) -> Duplicates:
    """Group exact copies (by SHA-256) and near copies, and merge the groups the pictures had.

    Two pictures are near copies if their thumbnails, each color channel without its mean,
    correlate by .98 or more. So size, compression, brightness and contrast may differ, not the
    section that is shown. Which pairs are compared at all is decided by the signs of random
    projections (Charikar 2002, "Similarity estimation techniques from rounding algorithms"),
    in a time nearly proportional to the number of pictures.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        looked = list(pool.map(lambda row: _look(images, row), range(len(images))))
    first: dict[bytes, int] = {}
    original = np.array([first.setdefault(digest, row) for row, (digest, _) in enumerate(looked)])
    rows = np.flatnonzero(original == np.arange(len(images)))
    thumbnails = np.stack([looked[row][1] for row in rows])
    near = rows[_near_pairs(thumbnails, ALIKE_SMALL if images.is_small else ALIKE)]
    copies = np.stack([np.arange(len(images)), original], axis=1)
    _, leader = np.unique(images.groups, return_index=True)
    numbered = np.searchsorted(np.unique(images.groups), images.groups)
    given = np.stack([np.arange(len(images)), leader[numbered]], axis=1)
    seen = _components(len(images), np.concatenate([copies, near]))
    num_exact = len(images) - len(rows)
    return Duplicates(
        groups=_components(len(images), np.concatenate([copies, near, given])),
        num_exact=num_exact,
        num_near=len(images) - len(np.unique(seen)) - num_exact,
    )


def _look(images: Images, row: int) -> tuple[bytes, Float[np.ndarray, " features"]]:
    """A picture's digest, and its thumbnail as a unit vector (zero if bad or plain)."""
    nothing = np.zeros(3 * SIDE**2, np.float32)
    try:
        held = images.read(row)
        if isinstance(held, bytes):
            digest = hashlib.sha256(held).digest()
            picture = decode(held, min_side=4 * SIDE)
        else:
            digest = hashlib.sha256(held.tobytes()).digest()
            picture = Image.fromarray(held)
    except BadImage:
        return hashlib.sha256(b"%d" % row).digest(), nothing
    small = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(small, np.float32).reshape(-1, 3)
    shape = (pixels - pixels.mean(0)).ravel()
    return digest, shape / np.linalg.norm(shape) if shape.std() >= PLAIN else nothing
