"""Which pictures each step sees: a function of the seed and the step, with nothing to save."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from nearkin.data.draws import permutation


@runtime_checkable
class Ordered(Protocol):
    """What says which pictures each step sees, whatever came before it."""

    @property
    def batch_size(self) -> int:
        """Pictures per step, over all processes."""

    @property
    def seed(self) -> int:
        """Of what is drawn for the pictures, too."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in a pass over the pictures."""

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""

    def rows(self, step: int) -> np.ndarray:
        """The pictures of one step, over all processes; int64 of shape (batch,)."""


@dataclass(frozen=True)
class Order:
    """A new permutation of the pictures every epoch, cut into batches."""

    num_images: int
    batch_size: int
    """Pictures per step, over all processes."""
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the data; the pictures left over differ from epoch to epoch."""
        return self.num_images // self.batch_size

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> np.ndarray:
        """The pictures of one step, over all processes; int64 of shape (batch,)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _shuffled(self.seed, epoch, self.num_images)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


@lru_cache(maxsize=2)  # every step of an epoch asks for the same one
def _shuffled(seed: int, epoch: int, size: int) -> np.ndarray:
    return permutation(seed, epoch, size)
