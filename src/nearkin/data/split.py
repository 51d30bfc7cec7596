"""Holding pictures out: what is scored is never trained on."""

import hashlib

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.data.images import Images
from nearkin.errors import DataError


def names_a_test_part(images: Images) -> bool:
    """Whether the data themselves say which pictures to score: some, but not all."""
    return bool(0 < (images.splits == "test").sum() < len(images))


def split(
    images: Images, share: float, seed: int
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]:
    """Divide the pictures into rows to train on and rows to score. Labels have no say in it.

    Where the data themselves name test pictures, those are scored, and all others trained on.
    Otherwise a group goes to the test side if a hash of the seed and its smallest name, spread
    evenly over 0...1, lies below `share`. So a picture stays on its side when others come or
    go. A group that is larger than all that is to be held out always trains. Only where all
    this would leave a side empty does one group change over: the one with the most extreme hash
    or, where all are that large, a smallest one.

    Args:
        images: the pictures; no group is divided.
        share: how much to hold out, between 0 and 1.
        seed: another seed, another split.

    Raises:
        DataError: a side would be empty.
    """
    test = images.splits == "test" if names_a_test_part(images) else _drawn(images, share, seed)
    if test.all() or not test.any():
        raise DataError(
            f"{len(images)} pictures cannot be divided in two parts of {1 - share:g} and "
            f"{share:g}; give more pictures, or none that are all alike"
        )
    return np.flatnonzero(~test), np.flatnonzero(test)


def _drawn(images: Images, share: float, seed: int) -> Bool[np.ndarray, " images"]:
    # Rows are sorted by name, so the first row of a group holds its smallest name.
    _, first, group, size = np.unique(
        images.groups, return_index=True, return_inverse=True, return_counts=True
    )
    place = np.array([_place(images.names[row], seed) for row in first], np.float64)
    large = size > share * len(images)
    held_out = (place < share) & ~large
    if not held_out.any():
        held_out[np.lexsort((place, size * large))[0]] = True
    if held_out.all():
        held_out[place.argmax()] = False
    return held_out[group]


def _place(name: str, seed: int) -> float:
    """Where a name lies in 0...1, evenly spread over names and over seeds."""
    key = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64
