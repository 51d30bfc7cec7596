"""Stateless random numbers: functions of seed, epoch, image and view.

A counter-based hash in the manner of Salmon et al. 2011 ("Parallel random numbers: as easy as
1, 2, 3"), built on the finalizer of splitmix64 (Steele et al. 2014, figure 15). No generator has
to be saved, and an image's numbers do not depend on its batch, worker or process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt64

GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
WORD: Final = (1 << 64) - 1


def uniform(
    seed: int, epoch: int, index: Int64[np.ndarray, " batch"], view: int, count: int
) -> Float64[np.ndarray, "batch count"]:
    """Numbers in [0, 1), a row for each image, which depends on its own arguments only.

    The lowest 64 bits of seed, epoch and view count. A larger `count` of numbers per image leaves
    the first ones as they are.
    """
    key = _hash(_image_keys(seed, epoch, index), _word(view))
    bits = _hash(key[:, None], np.arange(count, dtype=np.uint64))
    numbers: np.ndarray = (bits >> np.uint64(11)) * 2.0**-53
    return numbers


def permutation(seed: int, epoch: int, size: int) -> Int64[np.ndarray, " size"]:
    """The numbers from 0 to `size` - 1 in an order that is new in every epoch."""
    keys = _image_keys(seed, epoch, np.arange(size, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


def _image_keys(
    seed: int, epoch: int, index: Int64[np.ndarray, " batch"]
) -> UInt64[np.ndarray, " batch"]:
    key = _hash(_hash(_word(0), _word(seed)), _word(epoch))
    return _hash(key, index.astype(np.uint64))


def _word(value: int) -> UInt64[np.ndarray, "1"]:
    return np.array([int(value) & WORD], np.uint64)


def _hash(
    start: UInt64[np.ndarray, "*#shape"], place: UInt64[np.ndarray, "*#shape"]
) -> UInt64[np.ndarray, "..."]:
    """The number at that place of the splitmix64 sequence with that start."""
    z = start + (place + np.uint64(1)) * GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators (CPU and device) within a `with` block, then restore them."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cpu":  # manual_seed would seed generators that are not restored
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
