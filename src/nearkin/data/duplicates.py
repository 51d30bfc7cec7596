"""Pictures that are there twice: exact copies, and resized, recompressed or burst ones.

To a contrastive method every copy is a false negative, and a copy on the other side of a split
makes the score a lie.
"""

import hashlib
from collections.abc import Iterator
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
BLOCK: Final = 2**14
"""Pairs correlated at a time."""
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
    count = len(images)
    first: dict[bytes, int] = {}
    originals = np.zeros(count, np.int64)
    thumbnails = np.zeros((count, 3 * SIDE**2), np.float32)
    with ThreadPoolExecutor(THREADS) as pool:
        looks = pool.map(lambda row: _look(images, row), range(count))
        for row, (digest, thumbnail) in enumerate(looks):
            originals[row] = first.setdefault(digest, row)
            if originals[row] == row:
                thumbnails[row] = thumbnail
    near = _near_pairs(thumbnails, ALIKE_SMALL if images.is_small else ALIKE)
    copies = np.concatenate([_pairs(originals), near])
    num_near = len(first) - len(np.unique(_components(count, copies)))
    groups = _components(count, np.concatenate([copies, _pairs(images.groups)]))
    return Duplicates(groups, num_exact=count - len(first), num_near=num_near)


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


def _pairs(groups: Int64[np.ndarray, " images"]) -> Int64[np.ndarray, "images 2"]:
    """Each picture's row, and the first row of its group."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return np.stack([np.arange(len(groups)), first[group]], axis=1)


def _components(count: int, pairs: Int64[np.ndarray, "pairs 2"]) -> Int64[np.ndarray, " images"]:
    """For each of `count` rows, the first row to which pairs lead, step by step."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), (count, count))
    return _pairs(connected_components(edges, directed=False)[1].astype(np.int64))[:, 1]


def _near_pairs(
    thumbnails: Float[np.ndarray, "images features"], alike: float
) -> Int64[np.ndarray, "pairs 2"]:
    """The pairs of rows that correlate by `alike` or more."""
    shown = np.flatnonzero(thumbnails.any(axis=1))
    draws = np.random.default_rng(0)
    weights = 1 << np.arange(BITS)
    found = [np.zeros((0, 2), np.int64)]
    for _ in range(TABLES):
        planes = draws.standard_normal((thumbnails.shape[1], BITS), np.float32)
        keys = (thumbnails[shown] @ planes > 0) @ weights
        order = np.argsort(keys, kind="stable")
        for pairs in _neighbors(keys[order]):
            left, right = shown[order[pairs[:, 0]]], shown[order[pairs[:, 1]]]
            cosine = np.einsum("ij,ij->i", thumbnails[left], thumbnails[right])
            found.append(np.stack([left, right], axis=1)[cosine >= alike])
    return np.concatenate(found)


def _neighbors(keys: Int64[np.ndarray, " images"]) -> Iterator[Int64[np.ndarray, "pairs 2"]]:
    """Positions at most `REACH` apart in the sorted keys that have the same key."""
    for reach in range(1, REACH + 1):
        left = np.flatnonzero(keys[:-reach] == keys[reach:])
        for block in np.array_split(left, len(left) // BLOCK + 1):
            yield np.stack([block, block + reach], axis=1)
