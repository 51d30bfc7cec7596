"""Thumbnails and digests: as much of every picture as it takes to find copies."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from nearkin.data.header import BadImage
from nearkin.data.images import Images
from nearkin.data.index import index_path, recall, remember
from nearkin.data.rgb import decode
from nearkin.pace import Tell, nobody, tracked

SIDE: Final = 16
"""Of a thumbnail. Finer ones tell resized copies apart."""
DIGEST: Final = 32
"""Bytes of a SHA-256."""
THREADS: Final = 8
BLOCK: Final = 2**10
"""Pictures that are looked at before it is told how far it is."""


def thumbnails(
    images: Images, tell: Tell = nobody
) -> tuple[UInt8[np.ndarray, "images digest"], UInt8[np.ndarray, "images features"]]:
    """Each picture's SHA-256 and its tiny version; zeros for one that cannot be read.

    Of files, both are remembered, so that none is decoded twice unless it changes.
    """
    digests = np.zeros((len(images), DIGEST), np.uint8)
    tiny = np.zeros((len(images), 3 * SIDE**2), np.uint8)
    columns = {"digests": digests, "thumbnails": tiny}
    path = index_path(images.key, "thumbnails")
    known = np.zeros(len(images), np.bool_)
    if images.key:
        known = recall(path, images.names, images.states, columns)
    # One that could not be read is tried again.
    fresh = np.flatnonzero(~(known & digests.any(axis=1)))
    blocks = np.split(fresh, range(BLOCK, len(fresh), BLOCK)) if len(fresh) else []
    with ThreadPoolExecutor(THREADS) as pool:
        for rows in tracked(blocks, len(fresh), "looking for copies", tell):
            looks = pool.map(lambda row: _look(images, row), rows.tolist())
            for row, look in zip(rows, looks, strict=True):
                digests[row], tiny[row] = look
    if images.key and digests[fresh].any():
        remember(path, images.names, images.states, columns)
    return digests, tiny


def _look(images: Images, row: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        held = images.read(row)
        if isinstance(held, bytes):
            picture = decode(held, min_side=4 * SIDE)
        else:
            picture = Image.fromarray(held)
            held = held.tobytes()
    except BadImage:
        return np.zeros(DIGEST, np.uint8), np.zeros(3 * SIDE**2, np.uint8)
    digest = np.frombuffer(hashlib.sha256(held).digest(), np.uint8)
    return digest, np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX)).ravel()
