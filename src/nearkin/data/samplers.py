"""Which images each step sees: a function of the seed and the step, with nothing to save."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from jaxtyping import Int64

from nearkin.data.rng import permutation, uniform
from nearkin.errors import DataError

RUN: Final = 512  # Neighboring rows that are read together, where a sampler has a window
DELAY: Final = 253  # The view number whose draws delay the rows of a window


@dataclass(frozen=True, eq=False)
class RandomBatchSampler:
    """A new permutation of the images every epoch, cut into batches.

    Or, with values, into batches of one value, such as one camera: as shuffled images come, each
    value collects its own until they fill a batch. What values have left over fills the last
    batches, value by value: none is passed over because it has few.
    """

    num_images: int
    batch_size: int  # Images per step, over all processes
    seed: int
    window: int = 0
    """Images that are mixed with each other, as runs of neighboring rows come by; 0: all."""
    view_epochs: int = 0
    """Epochs after which the views of an epoch come again, in new batches; 0: never."""
    values: Int64[np.ndarray, " images"] | None = None  # The value of each image, from 0

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches; the images left over differ from epoch to epoch."""
        return self.num_images // self.batch_size

    @property
    def num_pure(self) -> int:
        """Batches of the first epoch that have a single value."""
        assert self.values is not None
        values = self.values[_batches(self, 0)]
        return int((values == values[:, :1]).all(axis=1).sum())

    def epoch(self, step: int) -> int:
        """The epoch, from 0, whose views a step sees."""
        epoch = step // self.steps_per_epoch
        return epoch % self.view_epochs if self.view_epochs else epoch

    def rows(self, step: int) -> Int64[np.ndarray, " batch"]:
        """The images of one step, over all processes."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return np.asarray(_batches(self, epoch)[batch])


@lru_cache(maxsize=2)  # every step of an epoch needs the same
def _batches(sampler: RandomBatchSampler, epoch: int) -> Int64[np.ndarray, "steps batch"]:
    """The batches of an epoch, in the order in which the shuffled images complete them."""
    size = sampler.batch_size
    order = _shuffled(sampler.seed, epoch, sampler.num_images, sampler.window)
    order = order[: sampler.steps_per_epoch * size]
    if sampler.values is None:
        return order.reshape(-1, size)
    values = sampler.values[order]
    ends = np.bincount(values).cumsum()
    of_values = np.split(values.argsort(kind="stable"), ends[:-1])  # places in the order
    whole = [places[: len(places) // size * size] for places in of_values]
    rest = [places[len(full) :] for places, full in zip(of_values, whole, strict=True)]
    places = np.concatenate(whole + rest).reshape(-1, size)
    return np.asarray(order[places[places.max(axis=1).argsort()]])


def _shuffled(seed: int, epoch: int, size: int, window: int) -> np.ndarray:
    """All rows in a new order or, with a window, runs of rows in a new order and then mixed.

    A row is at most `window` places late, so that few shards are in use at a time, and each once.
    """
    if window == 0:
        return permutation(seed, epoch, size)
    runs = permutation(seed, epoch, -(-size // RUN))
    rows = (RUN * runs[:, None] + np.arange(RUN)).ravel()
    rows = rows[rows < size]
    late = window * uniform(seed, epoch, rows, DELAY, 1)[:, 0]
    return np.asarray(rows[np.argsort(np.arange(size) + late, kind="stable")])


@dataclass(frozen=True, eq=False)
class TwoStreamBatchSampler:
    """Batches of two streams: half of each is labeled, or less where there are too few images.

    An epoch is one pass over the unlabeled images; those that are left over at its end differ from
    pass to pass. The labeled ones are drawn anew at each step, as many of each class as far as its
    images last: a few labels of one class count beside many of another (as in the steps of
    ActiveGCD, Ma et al. 2024, arXiv:2403.04272). No batch has an image twice.
    """

    labeled: Int64[np.ndarray, " labeled"]  # Rows of the labeled images; there may be none
    classes: Int64[np.ndarray, " labeled"]  # The class of each of them
    unlabeled: Int64[np.ndarray, " unlabeled"]  # Rows of the unlabeled images
    batch_size: int  # Images per step, over all processes
    seed: int

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise DataError(
                f"{len(self.unlabeled)} unlabeled images do not fill their "
                f"{self._of_unlabeled.batch_size} places in a batch of {self.batch_size}; "
                "give more of them, or a smaller --batch-size"
            )

    @property
    def num_labeled(self) -> int:
        """How many images of a batch are labeled."""
        return min(self.batch_size // 2, len(self.labeled))

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a pass over the unlabeled images."""
        return self._of_unlabeled.steps_per_epoch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""
        return self._of_unlabeled.epoch(step)

    def rows(self, step: int) -> Int64[np.ndarray, " batch"]:
        """The images of one step; both streams spread evenly, so each process has its share."""
        unlabeled: np.ndarray = self.unlabeled[self._of_unlabeled.rows(step)]
        if self.num_labeled == 0:
            return unlabeled
        labeled = self.labeled[self._by_class(step)]
        positions = [(np.arange(len(rows)) + 0.5) / len(rows) for rows in (labeled, unlabeled)]
        order = np.concatenate(positions).argsort(kind="stable")
        return np.asarray(np.concatenate([labeled, unlabeled])[order])

    def _by_class(self, step: int) -> Int64[np.ndarray, " drawn"]:
        """The labeled images of a step, by their places: each class goes through its own in turn.

        Where not all classes can have one image more, chance decides.
        """
        epoch, before = divmod(step, self.steps_per_epoch)
        number, turn = self._turns
        size, first = self._sizes[number], np.cumsum(self._sizes)[number] - self._sizes[number]
        most = np.minimum(self._sizes, turn.max() + 1)[number]
        place = first + (before * most + turn) % size
        mixed = permutation(~self.seed, ~step, len(turn))
        drawn = place[mixed[turn[mixed].argsort(kind="stable")]][: self.num_labeled]
        return np.asarray(_in_classes(self, epoch)[drawn])

    @cached_property
    def _sizes(self) -> Int64[np.ndarray, " classes"]:
        return np.unique(self.classes, return_counts=True)[1]

    @cached_property
    def _turns(self) -> tuple[Int64[np.ndarray, " turns"], Int64[np.ndarray, " turns"]]:
        """Which class has a place in a batch, and for the how manyth time: turn by turn."""
        turns, left = list[np.ndarray](), self.num_labeled
        while left > 0:
            turns.append(np.flatnonzero(self._sizes > len(turns)))
            left -= len(turns[-1])
        return np.concatenate(turns), np.repeat(np.arange(len(turns)), list(map(len, turns)))

    @cached_property
    def _of_unlabeled(self) -> RandomBatchSampler:
        num_unlabeled = self.batch_size - self.num_labeled
        return RandomBatchSampler(len(self.unlabeled), num_unlabeled, self.seed)


@lru_cache(maxsize=2)
def _in_classes(sampler: TwoStreamBatchSampler, epoch: int) -> Int64[np.ndarray, " labeled"]:
    """The places of the labeled images, class by class, in each class in the order of an epoch."""
    # Another seed than that of the other stream, or both would always have the same pairs.
    order = permutation(~sampler.seed, epoch, len(sampler.labeled))
    return np.asarray(order[sampler.classes[order].argsort(kind="stable")])


Planned = tuple[int, Int64[np.ndarray, " _"]]
"""The epoch whose views a step sees, and its images."""


@dataclass(frozen=True, eq=False)
class PlannedBatchSampler:
    """Steps that are given one by one."""

    plan: Sequence[Planned]
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """All batches."""
        return len(self.plan)

    @property
    def batch_size(self) -> int:
        """Images per step, at most."""
        return max((len(rows) for _, rows in self.plan), default=1)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, whose views a step sees."""
        return self.plan[step][0]

    def rows(self, step: int) -> Int64[np.ndarray, " batch"]:
        """The images of one step."""
        return self.plan[step][1]


BatchSampler = RandomBatchSampler | TwoStreamBatchSampler | PlannedBatchSampler
"""Which images each step sees, and the epoch whose views: functions of the step alone."""
