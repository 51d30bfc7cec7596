"""Batches of images: augmented views for training, center crops for everything else."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from nearkin.data.cache import Cache
from nearkin.data.decode import MIDDLE_GRAY, BadImage, center, crops
from nearkin.data.images import Images
from nearkin.data.loading import loaded_ahead
from nearkin.data.order import Ordered
from nearkin.data.rng import uniform
from nearkin.data.views import Draws, View, augment, crop, draw, normalize
from nearkin.distributed import sent, share
from nearkin.errors import DataError
from nearkin.types import UNKNOWN, Batch

SUBSTITUTE: Final = 255
"""The view number whose draws choose a substitute for an image that turns out unreadable."""
SUBSTITUTES: Final = 8
"""How many substitutes are tried for one image."""


class Drawing:
    """Draws views and substitutes: functions of the seed, the epoch and the image alone.

    So they are the same with any number of workers, and in memory as from files.

    Args:
        images: What is shown.
        kinds: How each view is drawn.
        image_size: Side in pixels of whole views, and of small images before they are
            cropped.
        seed: The run's.
    """

    def __init__(
        self, images: Images, kinds: Sequence[View], *, image_size: int, seed: int
    ) -> None:
        self.images = images
        self.kinds = kinds
        self.seed = seed
        self.sides = [max(1, round(kind.size * image_size)) for kind in kinds]
        """Of each view, in pixels."""
        small = np.full((len(images), 2), image_size, np.int32)
        self.cropped = small if images.is_small else images.sizes
        """Width and height in pixels of the images that crops are cut from."""

    def views(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> list[Draws]:
        """What is drawn for each view of these images in one epoch."""
        width, height = self.cropped[rows].T
        return [
            draw(
                kind,
                seed=self.seed,
                epoch=epoch,
                index=rows,
                number=number,
                width=width,
                height=height,
            )
            for number, kind in enumerate(self.kinds)
        ]

    def candidates(self, epoch: int, row: int) -> Iterator[int]:
        """The image itself and then, for as long as none can be read, its substitutes.

        Raises:
            DataError: If more than `SUBSTITUTES` substitutes are asked for.
        """
        yield row
        places = uniform(self.seed, epoch, np.array([row]), SUBSTITUTE, SUBSTITUTES)[0]
        yield from (places * len(self.images)).astype(int).tolist()
        raise DataError(
            f"{self.images.names[row]} and {SUBSTITUTES} images drawn in its place cannot be "
            "read; `nearkin check` lists what is wrong"
        )


@dataclass(frozen=True, slots=True)
class Crops:
    """The views of some photographs in one epoch, cropped and not yet augmented."""

    views: tuple[UInt8[Tensor, "batch _ _ channel"], ...]
    epoch: int
    rows: np.ndarray
    """The images that are shown, substitutes included."""
    bad: dict[int, str]
    """Images that could not be read, with the reason."""


class Photographs(Dataset[Crops]):
    """The crops of each step, for the workers of a `DataLoader`; its items are steps.

    Args:
        drawing: How they are drawn.
        order: Which images each step sees.
        cache: What holds the images; without it, each crop is decoded as it is needed.
    """

    def __init__(self, drawing: Drawing, order: Ordered, cache: Cache | None = None) -> None:
        self.drawing = drawing
        self.order = order
        self.source = cache or drawing.images
        self.share = share(order.batch_size)

    def __getitem__(self, step: int) -> Crops:
        """This process's part of a step."""
        return self.load(self.order.epoch(step), self.order.rows(step)[self.share])

    def load(self, epoch: int, rows: np.ndarray) -> Crops:
        """The crops of these photographs, or of their substitutes, in one epoch."""
        bad: dict[int, str] = {}
        shown, drawn = [], []
        for row in rows.tolist():
            attempts = (
                (candidate, self._crops(epoch, candidate, bad))
                for candidate in self.drawing.candidates(epoch, row)
            )
            good, views = next(attempt for attempt in attempts if attempt[1])
            shown.append(good)
            drawn.append(views)
        stacked = (torch.from_numpy(np.stack(view)) for view in zip(*drawn, strict=True))
        return Crops(tuple(stacked), epoch, np.array(shown), bad)

    def _crops(self, epoch: int, row: int, bad: dict[int, str]) -> list[np.ndarray]:
        """The crops of an image, or none and a note in `bad`."""
        boxes = [draws.box[0] for draws in self.drawing.views(epoch, np.array([row]))]
        try:
            return crops(self.source.read(row), np.stack(boxes), self.drawing.sides)
        except BadImage as error:
            bad[row] = error.reason
            return []


Views = list[Float[Tensor, "batch 3 _ _"]]


@runtime_checkable
class Feed(Protocol):
    """What a training is fed with."""

    @property
    def order(self) -> Ordered:
        """Which images each step sees."""

    def between(self, start: int, stop: int) -> Iterator[Batch]:
        """This process's part of the batches of the steps from `start` to before `stop`."""


class Batches:
    """The batches of a training run. Without `labels`, no method meets one.

    Args:
        images: What to train on; an image's index is its row here.
        kinds: How each view is drawn.
        image_size: Side in pixels of whole views.
        order: Which images each step sees.
        device: Where views are computed.
        workers: Processes that decode photographs; 0 decodes in this one.
        cache: "ram" or "disk" to decode photographs once, at a bounded size; see `Cache`.
        labels: Classes for a method that uses labels; unknown ones if None.

    Raises:
        DataError: If the images do not fill a batch.
        UsageError, ResourceError: If they cannot be kept as `cache` says.
    """

    def __init__(
        self,
        images: Images,
        kinds: Sequence[View],
        *,
        image_size: int,
        order: Ordered,
        device: torch.device,
        workers: int = 0,
        cache: str = "off",
        labels: Int64[np.ndarray, " images"] | None = None,
    ) -> None:
        if order.steps_per_epoch == 0:
            raise DataError(
                f"{len(images)} images do not fill a batch of {order.batch_size}; "
                "give a smaller --batch-size or more images"
            )
        self.images = images
        self.order = order
        self.device = device
        self.workers = workers
        self.labels = np.full(len(images), UNKNOWN) if labels is None else labels
        self.drawing = Drawing(images, kinds, image_size=image_size, seed=order.seed)
        self.sizes = self.drawing.sides
        """Side in pixels of each view."""
        kept = None if cache == "off" or images.is_small else Cache(images, image_size, cache)
        self.photographs = Photographs(self.drawing, order, kept)
        self.bad: dict[int, str] = {}
        """Rows that turned out unreadable, with the reason; others took their place."""
        self.pixels: Tensor | None = None
        """All images, if they are small."""
        if images.is_small:
            pixels, self.bad = load_small(images, image_size)
            self.pixels = channels_first(torch.from_numpy(pixels)).to(device)

    def between(self, start: int, stop: int) -> Iterator[Batch]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        if self.pixels is not None:
            for step in range(start, stop):
                rows = self.order.rows(step)[share(self.order.batch_size)]
                yield self._batch(*self._from_memory(self.pixels, self.order.epoch(step), rows))
            return
        size = len(range(self.order.batch_size)[share(self.order.batch_size)])
        data, workers = self.photographs, self.workers
        for loaded in loaded_ahead(data, start, stop, workers, images=size):
            yield self._batch(*self._from_files(loaded))

    def views(self, epoch: int, rows: np.ndarray) -> Views:
        """The views of these images in one epoch, as images in [0, 1].

        An image that cannot be read is replaced as in training.
        """
        if self.pixels is None:
            return self._from_files(self.photographs.load(epoch, rows))[0]
        return self._from_memory(self.pixels, epoch, rows)[0]

    def _from_memory(
        self, pixels: Tensor, epoch: int, rows: np.ndarray
    ) -> tuple[Views, np.ndarray]:
        """The views, and the rows that they show."""
        rows = np.array([self._readable(epoch, row) for row in rows.tolist()])
        shown = pixels[sent(torch.from_numpy(rows), self.device)]
        drawn = zip(self.drawing.views(epoch, rows), self.sizes, strict=True)
        return [augment(crop(shown, draws.box, size), draws) for draws, size in drawn], rows

    def _readable(self, epoch: int, row: int) -> int:
        candidates = self.drawing.candidates(epoch, row)
        return next(candidate for candidate in candidates if candidate not in self.bad)

    def _from_files(self, loaded: Crops) -> tuple[Views, np.ndarray]:
        """What was cropped while it was decoded, augmented, and the rows that it shows."""
        self.bad.update(loaded.bad)
        finished = []
        drawn = self.drawing.views(loaded.epoch, loaded.rows)
        for pixels, draws in zip(loaded.views, drawn, strict=True):
            shown = channels_first(sent(pixels, self.device))
            finished.append(augment(shown / 255, draws))
        return finished, loaded.rows

    def _batch(self, views: Views, rows: np.ndarray) -> Batch:
        index, label = (sent(torch.from_numpy(x), self.device) for x in (rows, self.labels[rows]))
        return Batch(tuple(map(normalize, views)), index, label)


def load_small(
    images: Images, size: int
) -> tuple[UInt8[np.ndarray, "images {size} {size} 3"], dict[int, str]]:
    """Every image's `center` in one array, for data that fit in memory.

    Returns:
        The pixels, and the reason for each row that turned out to be bad. Those are gray.
    """
    pixels = np.full((len(images), size, size, 3), MIDDLE_GRAY, np.uint8)
    bad: dict[int, str] = {}
    for row in range(len(images)):
        try:
            pixels[row] = center(images.read(row), size)
        except BadImage as error:
            bad[row] = error.reason
    return pixels, bad


def channels_first(
    pixels: UInt8[Tensor, "batch height width channel"],
) -> UInt8[Tensor, "batch channel height width"]:
    """The same pixels as networks take them, without a copy: channels last in memory."""
    return pixels.permute(0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class Middles:
    """The middles of some images."""

    pixels: UInt8[Tensor, "batch size size 3"]
    bad: dict[int, str]
    """Rows that could not be read, with the reason; those are gray."""


class Centered(Dataset[Middles]):
    """Images batch by batch: each one's central square, mid-gray if it cannot be read."""

    def __init__(self, images: Images, size: int, batch_size: int) -> None:
        self.images = images
        self.size = size
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __getitem__(self, number: int) -> Middles:
        """One batch."""
        rows = range(len(self.images))[number * self.batch_size :][: self.batch_size]
        pixels = np.full((len(rows), self.size, self.size, 3), MIDDLE_GRAY, np.uint8)
        bad: dict[int, str] = {}
        for place, row in enumerate(rows):
            try:
                pixels[place] = center(self.images.read(row), self.size)
            except BadImage as error:
                bad[row] = error.reason
        return Middles(torch.from_numpy(pixels), bad)


class Pixels:
    """All images in order, batch by batch: uint8 of shape (batch, 3, size, size).

    Unreadable ones are mid-gray, so that all others keep their places, and are listed in `bad`:
    whoever computes anything of them must leave those out.

    Args:
        images: Which images.
        size: Their side in pixels.
        batch_size: How many at a time.
        workers: Processes that decode photographs; 0 decodes in this one.
    """

    def __init__(
        self, images: Images, size: int, *, batch_size: int = 256, workers: int = 0
    ) -> None:
        self.bad: dict[int, str] = {}
        """Rows that could not be read, with the reason; complete after an iteration."""
        self.centered = Centered(images, size, batch_size)
        self.workers = 0 if images.is_small else workers

    def __iter__(self) -> Iterator[UInt8[Tensor, "batch 3 size size"]]:
        """The batches; see `loaded_ahead` for what happens if workers are lost."""
        data, size = self.centered, self.centered.batch_size
        for shown in loaded_ahead(data, 0, len(data), self.workers, images=size):
            self.bad.update(shown.bad)
            yield channels_first(shown.pixels)


def to_network(shown: UInt8[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch 3 _ _"]:
    """Pixels from 0 to 255 as networks are trained on them."""
    return normalize(shown / 255)


def squares(
    images: Images, rows: Int[np.ndarray, " rows"], side: int, workers: int
) -> Iterator[tuple[int, UInt8[Tensor, "3 side side"]]]:
    """Yield the row and the central square of each readable image, all of one size."""
    rows = np.unique(rows)
    if not len(rows):
        return
    some = images.subset(rows)
    pixels = Pixels(some, min(side, int(some.sizes.min(axis=1).max())), workers=workers)
    shown = (square for batch in pixels for square in batch)
    for place, square in enumerate(shown):
        if place not in pixels.bad:
            yield int(rows[place]), square
