"""Exact and near duplicates, found by SHA-256 and by thumbnails of all images."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from jaxtyping import Float, Int64, UInt8
from PIL import Image

from nearkin.data.channels import preview
from nearkin.data.decode import BadImage, as_image
from nearkin.data.images import Images, digest
from nearkin.data.scan import fill
from nearkin.pace import ProgressCallback, ignore_progress

SIDE: Final = 16  # Side of a thumbnail; larger ones tell resized copies apart
DIGEST: Final = 32  # Bytes of a SHA-256


def thumbnails(
    images: Images, on_progress: ProgressCallback = ignore_progress
) -> tuple[UInt8[np.ndarray, "images digest"], UInt8[np.ndarray, "images features"]]:
    """The SHA-256 and thumbnail of each image, kept in an index; zeros if unreadable."""
    digests = np.zeros((len(images), DIGEST), np.uint8)
    tiny = np.zeros((len(images), 3 * SIDE**2), np.uint8)
    columns = {"digests": digests, "thumbnails": tiny}
    what, values = "looking for copies", partial(_thumbnail, images)
    # Thumbnails depend on the range of the values. An image that could not be read is tried again.
    kind = f"thumbnails{zlib.crc32(repr(images.channels).encode()) if images.channels else ''}"
    fill(columns, images, kind, values, what, on_progress, retried="digests")
    return digests, tiny


def _thumbnail(images: Images, row: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = images.stored(row)
        image = as_image(images.scaled(content), min_side=4 * SIDE)
    except BadImage:
        return np.zeros(DIGEST, np.uint8), np.zeros(3 * SIDE**2, np.uint8)
    small = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.frombuffer(digest(content), np.uint8), preview(np.asarray(small)).ravel()


ALIKE: Final = 0.98  # Smallest correlation of the thumbnails of near duplicates
ALIKE_SMALL: Final = 0.995
"""The same for images up to 64 pixels: handwritten digits reach .98 without being copies."""
PLAIN: Final = 3.0
"""Standard deviation, in gray levels, below which a thumbnail shows too little to compare."""
TABLES: Final = 32
BITS: Final = 24
"""Per table: two thumbnails that correlate by .98 share at least one key at 99.9 %."""
REACH: Final = 16
"""Images compared with one another in a bucket; keeps thousands of like ones affordable."""
BLOCK: Final = 2**11  # Thumbnails held as floats, or pairs correlated, at a time


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Groups of duplicates."""

    groups: Int64[np.ndarray, " images"]
    """Each image's group: the first row of its duplicates and of the group it had before."""
    num_exact: int  # Images with the bytes of an earlier one
    num_near: int  # Further images that look like an earlier one


def duplicates(images: Images, on_progress: ProgressCallback = ignore_progress) -> Duplicates:
    """Group exact copies (by SHA-256) and near copies, and merge the groups the images had.

    Two images are near copies if their thumbnails, each color channel without its mean,
    correlate by .98 or more. So size, compression, brightness and contrast may differ, not the
    section that is shown. Which pairs are compared at all is decided by the signs of random
    projections (Charikar 2002, "Similarity estimation techniques from rounding algorithms"),
    in a time and a memory nearly proportional to the number of images.
    """
    digests, tiny = thumbnails(images, on_progress)
    first: dict[bytes | int, int] = {}
    # An image that cannot be read has no digest and no duplicate.
    keys = (own.tobytes() if own.any() else row for row, own in enumerate(digests))
    exact = np.array([first.setdefault(key, row) for row, key in enumerate(keys)], np.int64)
    copies = _merge_near(exact, tiny, ALIKE_SMALL if images.is_small else ALIKE)
    return Duplicates(
        groups=_merge(copies, _pairs(images.groups)),
        num_exact=len(images) - len(first),
        num_near=len(first) - len(np.unique(copies)),
    )


def relation(images: Images, row: int, other: int) -> str:
    """Say what two images have in common: `same bytes`, `same pixels`, or less: `near copy`."""
    if (images.sizes[row] != images.sizes[other]).any():
        return "near copy"
    try:
        pair = [images.read(each) for each in (row, other)]
        if digest(pair[0]) == digest(pair[1]):
            return "same bytes"
        a, b = (np.asarray(as_image(content)) for content in pair)
    except BadImage:
        return "near copy"
    return "same pixels" if np.array_equal(a, b) else "near copy"


def _pairs(groups: Int64[np.ndarray, " images"]) -> Int64[np.ndarray, "images 2"]:
    """Each image's row, and the first row of its group."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return np.stack([np.arange(len(groups)), first[group]], axis=1)


def _merge(
    groups: Int64[np.ndarray, " images"], pairs: Int64[np.ndarray, "pairs 2"]
) -> Int64[np.ndarray, " images"]:
    """The groups, each named by its first row, once every pair of rows shares one."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    left, right = np.concatenate([_pairs(groups), pairs]).T
    edges = coo_array((np.ones(len(left), bool), (left, right)), (len(groups),) * 2)
    return _pairs(connected_components(edges, directed=False)[1].astype(np.int64))[:, 1]


def _merge_near(
    groups: Int64[np.ndarray, " images"], tiny: UInt8[np.ndarray, "images features"], alike: float
) -> Int64[np.ndarray, " images"]:
    """The groups, merged where thumbnails correlate by `alike` or more."""
    rows, keys = _keys(tiny, np.flatnonzero(groups == np.arange(len(groups))))
    for table in keys:
        order = np.argsort(table, kind="stable")
        alike_pairs = [np.zeros((0, 2), np.int64)]
        for near in _neighbors(table[order]):
            pairs = rows[order[near]]
            pairs = pairs[groups[pairs[:, 0]] != groups[pairs[:, 1]]]
            left, right = _vectors(tiny[pairs[:, 0]]), _vectors(tiny[pairs[:, 1]])
            alike_pairs.append(pairs[np.einsum("ij,ij->i", left, right) >= alike])
        groups = _merge(groups, np.concatenate(alike_pairs))
    return groups


def _vectors(tiny: UInt8[np.ndarray, "batch features"]) -> Float[np.ndarray, "batch features"]:
    """Thumbnails as unit vectors without each channel's mean; zero if they are plain."""
    pixels = tiny.reshape(len(tiny), tiny.shape[1] // 3, 3).astype(np.float32)
    shape = (pixels - pixels.mean(axis=1, keepdims=True)).reshape(tiny.shape)
    length = np.linalg.norm(shape, axis=1, keepdims=True)
    plain = shape.std(axis=1, keepdims=True) < PLAIN
    return np.where(plain, np.float32(0), shape / np.maximum(length, 1))


def _keys(
    tiny: UInt8[np.ndarray, "images features"], rows: Int64[np.ndarray, " chosen"]
) -> tuple[Int64[np.ndarray, " visible"], Int64[np.ndarray, "tables visible"]]:
    """The rows whose thumbnail is not plain, and their key in each table."""
    features = tiny.shape[1]
    planes = np.random.default_rng(0).standard_normal((TABLES, features, BITS), np.float32)
    flat = planes.transpose(1, 0, 2).reshape(features, TABLES * BITS)
    visible_rows, keys = [], []
    for block in np.array_split(rows, len(rows) // BLOCK + 1):
        vectors = _vectors(tiny[block])
        visible = vectors.any(axis=1)
        signs = (vectors[visible] @ flat > 0).reshape(-1, TABLES, BITS)
        visible_rows.append(block[visible])
        keys.append(signs @ (1 << np.arange(BITS, dtype=np.int64)))
    return np.concatenate(visible_rows), np.concatenate(keys).T


def _neighbors(keys: Int64[np.ndarray, " images"]) -> Iterator[Int64[np.ndarray, "pairs 2"]]:
    """Positions at most `REACH` apart in the sorted keys that have the same key."""
    for reach in range(1, REACH + 1):
        left = np.flatnonzero(keys[:-reach] == keys[reach:])
        for block in np.array_split(left, len(left) // BLOCK + 1):
            yield np.stack([block, block + reach], axis=1)
