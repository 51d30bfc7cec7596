"""Holding pictures out: what is scored is never trained on."""

import hashlib

import numpy as np
from jaxtyping import Bool, Float, Int64

from nearkin.data.images import Images
from nearkin.errors import DataError


def split(
    images: Images, share: float, seed: int
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]:
    """Divide the pictures into rows to train on and rows to score.

    Where the data themselves name test pictures, those are scored, and all others trained on.
    Otherwise a group goes to the test side if a hash of the seed and its smallest name, spread
    evenly over 0...1, lies below `share`. So a picture stays on its side when others come or
    go. Only where that would leave a class, or everything, on one side alone does the group
    with the most extreme hash change over.

    Args:
        images: the pictures; no group is divided.
        share: how much to hold out, between 0 and 1.
        seed: another seed, another split.

    Raises:
        DataError: a side would be empty.
    """
    named = images.splits == "test"
    test = named if 0 < named.sum() < len(images) else _drawn(images, share, seed)
    if test.all() or not test.any():
        raise DataError(
            f"{len(images)} pictures cannot be divided in two parts of {1 - share:g} and "
            f"{share:g}; give more pictures, or none that are all alike"
        )
    return np.flatnonzero(~test), np.flatnonzero(test)


def _drawn(images: Images, share: float, seed: int) -> Bool[np.ndarray, " images"]:
    # Rows are sorted by name, so the first row of a group holds its smallest name.
    _, first, group = np.unique(images.groups, return_index=True, return_inverse=True)
    place = np.array([_place(images.names[row], seed) for row in first], np.float64)
    held_out = place < share
    labels = images.labels[first]
    for label in np.unique(labels):
        _mend(held_out, place, np.flatnonzero(labels == label))
    _mend(held_out, place, np.arange(len(first)))
    return held_out[group]


def _place(name: str, seed: int) -> float:
    """Where a name lies in 0...1, evenly spread over names and over seeds."""
    key = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64


def _mend(
    held_out: Bool[np.ndarray, " groups"],
    place: Float[np.ndarray, " groups"],
    members: Int64[np.ndarray, " members"],
) -> None:
    """Give both sides at least one of these groups, if there are two."""
    if len(members) < 2:
        return
    if not held_out[members].any():
        held_out[members[place[members].argmin()]] = True
    elif held_out[members].all():
        held_out[members[place[members].argmax()]] = False
