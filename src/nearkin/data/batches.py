"""Batches of images: augmented views for training, center crops for everything else."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, islice
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from nearkin.data.cache import Cache, check_cache
from nearkin.data.channels import preview
from nearkin.data.decode import MIDDLE_GRAY, BadImage, crops
from nearkin.data.images import SMALL_SIDE, Arrays, Images
from nearkin.data.loader import prefetch, workers_that_fit
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.rng import uniform
from nearkin.data.samplers import BatchSampler, Planned, PlannedBatchSampler
from nearkin.data.views import View, ViewParams, augment, crop, normalize, sample_views
from nearkin.distributed import rows_of_rank, to_device
from nearkin.errors import DataError
from nearkin.types import UNLABELED, Batch

SUBSTITUTE: Final = 255
"""The view number whose random numbers choose a substitute for an unreadable image."""
SUBSTITUTES: Final = 8  # Substitutes that are tried for one image
AT_ONCE: Final = 8
"""Steps whose views of images in memory a GPU makes together.

For those of one step it takes less time than a CPU takes to launch them; a CPU would lose its
cache."""
NUMBERS_AT_ONCE: Final = 2**24  # Of one view of them all, at most: 64 MiB


@dataclass(frozen=True, slots=True)
class Crops:
    """The views of some photographs in one epoch, cropped and not yet augmented."""

    views: tuple[Shaped[Tensor, "batch _ _ channel"], ...]  # of 8 bits, or from 0 to 1
    epoch: int
    rows: np.ndarray  # The images that were cropped, substitutes included
    bad: dict[int, str]  # Images that could not be read, with the reason


@dataclass(frozen=True, eq=False)
class ViewDataset(Dataset[Crops]):
    """The sampled views of images, and the substitutes of unreadable ones, step by step.

    Both are functions of the seed, the epoch and the image alone, so that they are the same with
    any number of workers, from memory and from files. The image counts by its row or, where it is
    to have the same views among other images, by its content.
    """

    images: Images
    views: Sequence[View]
    sampler: BatchSampler
    image_size: int
    """Side in pixels of views of size 1; small images are resized to it before the crop."""
    multiple: int = 1  # Of all sides in pixels
    cache: Cache | None = None
    shown_sizes: Sequence[int] = ()
    """Other sides of the views in pixels, which show the same of their images; of all views once
    more after those of all views."""
    by_content: bool = False
    part: slice = field(default_factory=partial(slice, None))  # Of each batch

    def sizes_at(self, view_size: int) -> list[int]:
        """Side in pixels of each view, where views of size 1 have this side."""
        patches = (max(1, round(view.size * view_size / self.multiple)) for view in self.views)
        return [count * self.multiple for count in patches]

    @property
    def sizes(self) -> Sequence[int]:
        """Side in pixels of each view."""
        return self.shown_sizes or self.sizes_at(self.image_size)

    @cached_property
    def source_sizes(self) -> Int[np.ndarray, "images 2"]:
        """Width and height that crops are cut from: small images are resized once, before.

        Boxes are shares, so those of an image squashed to a square show what they would of it.
        """
        images, size = self.images, self.image_size
        resized = self.held_side == size and images.are_square
        return np.full((len(images), 2), size, np.int32) if resized else images.sizes

    @property
    def held_side(self) -> int:
        """Side in pixels of the squares that are held in memory, see `Images`; 0 if none are.

        Images whose views must not depend on others are held if each would be by itself.
        """
        side = self.images.held_side(self.image_size)
        alone = self.images.are_square and self.image_size <= SMALL_SIDE
        return side if alone or not self.by_content else 0

    def sample(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> list[ViewParams]:
        """The parameters of each view of these images in one epoch."""
        sampled = sample_views(
            self.views,
            self.source_sizes[rows],
            seed=self.sampler.seed,
            epoch=epoch,
            index=self.images.contents[rows].view(np.int64) if self.by_content else rows,
            num_channels=self.images.num_channels,
        )
        own_sizes = self.sizes_at(self.image_size)
        shown = zip(cycle(sampled), cycle(own_sizes), self.sizes, strict=False)
        # The blur is in pixels of the view.
        return [replace(p, sigma=p.sigma * np.float32(size / own)) for p, own, size in shown]

    def candidates(self, epoch: int, row: int) -> Iterator[int]:
        """The image itself, then its substitutes, one by one; a DataError when they run out."""
        yield row
        u = uniform(self.sampler.seed, epoch, np.array([row]), SUBSTITUTE, SUBSTITUTES)[0]
        yield from (u * len(self.images)).astype(int).tolist()
        raise DataError(
            f"{self.images.names[row]} and {SUBSTITUTES} images drawn in its place cannot be "
            "read; `nearkin check DATA --scan full` lists what is wrong"
        )

    def __getitem__(self, step: int) -> Crops:
        """The crops of this part of a step's photographs, or of their substitutes."""
        epoch, rows = self.sampler.epoch(step), self.sampler.rows(step)[self.part]
        bad, readable, cropped = dict[int, str](), [], []
        self.images.source.warm(self.cache.undecoded(rows) if self.cache else rows.tolist())
        source = self.cache or self.images
        for row in rows.tolist():
            for candidate in self.candidates(epoch, row):
                boxes = [params.box[0] for params in self.sample(epoch, np.array([candidate]))]
                try:
                    views = crops(source.read(candidate), np.stack(boxes), self.sizes)
                except BadImage as error:
                    bad[candidate] = error.reason
                else:
                    readable.append(candidate)
                    cropped.append(views)
                    break
        stacked = (torch.from_numpy(np.stack(view)) for view in zip(*cropped, strict=True))
        return Crops(tuple(stacked), epoch, np.array(readable), bad)


Views = list[Float[Tensor, "batch _ _ _"]]
Plan = tuple[Int64[np.ndarray, " batch"], Sequence[ViewParams]]
"""Images, and the parameters of each of their views."""


@runtime_checkable
class BatchLoader(Protocol):
    """Where a training takes its batches from."""

    @property
    def sampler(self) -> BatchSampler:
        """Which images each step sees."""

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a training run.

    Small images (see `Images.held_side`) are held on the device and cropped there by the batch.
    Photographs stay encoded; workers decode what a crop needs, and only the crops are augmented on
    the device. An image's index is its row in `images`.
    """

    dataset: ViewDataset
    device: torch.device
    workers: int  # Processes that decode photographs; this one if 0
    labels: Int64[np.ndarray, " images"]
    pixels: Tensor | None  # All images, if they are held in memory
    bad: dict[int, str]
    """Rows that turned out unreadable, with the reason; others took their place."""
    steps_at_once: int = 1
    """Steps whose views are made together, at most, if images are in memory: the same views."""

    @classmethod
    def of(
        cls,
        images: Images,
        views: Sequence[View],
        *,
        image_size: int,
        sampler: BatchSampler,
        device: torch.device,
        workers: int = 0,
        cache: str = "off",
        labels: Int64[np.ndarray, " images"] | None = None,
        multiple: int = 1,
        by_content: bool = False,
    ) -> "Batches":
        """Hold small images, and open the cache of others.

        `cache` is "ram" or "disk" to decode photographs once, at a bounded size; see `Cache`.
        Without the `labels` of the images, no method sees one. For the others see `ViewDataset`.
        """
        if sampler.steps_per_epoch == 0:
            raise DataError(
                f"{len(images)} images do not fill a batch of {sampler.batch_size}; "
                "give a smaller --batch-size or more images"
            )
        check_cache(cache, images)
        bad, pixels = dict[int, str](), None
        dataset = ViewDataset(images, views, sampler, image_size, multiple, by_content=by_content)
        if held := dataset.held_side:
            transform = Preprocessing(held, "squash", resize_to=held)
            squares, bad = center_crops(images, range(len(images)), transform)
            pixels = torch.from_numpy(squares).permute(0, 3, 1, 2).to(device)
        elif cache != "off":
            dataset = replace(dataset, cache=Cache(images, image_size, cache))
        own_labels = np.full(len(images), UNLABELED) if labels is None else labels
        at_once = 1 if device.type == "cpu" else AT_ONCE
        return cls(dataset, device, workers, own_labels, pixels, bad, at_once)

    @property
    def images(self) -> Images:
        """What is read."""
        return self.dataset.images

    @property
    def sampler(self) -> BatchSampler:
        """Which images each step sees."""
        return self.dataset.sampler

    @property
    def sizes(self) -> Sequence[int]:
        """Side in pixels of each view."""
        return self.dataset.sizes

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        # Not before: other processes may have joined since the batches were built.
        for views, rows in self.sampled(start, stop, rows_of_rank(self.sampler.batch_size)):
            yield self.batch(views, rows)

    def batch(self, views: Views, rows: np.ndarray) -> Batch:
        """The batch of some views and the rows that they show."""
        index, label = (
            to_device(torch.from_numpy(x), self.device) for x in (rows, self.labels[rows])
        )
        return Batch(tuple(map(normalize, views)), index, label)

    def sampled(self, start: int, stop: int, part: slice) -> Iterator[tuple[Views, np.ndarray]]:
        """The views, in [0, 1], of a part of each step's images, and the rows that they show.

        Unreadable images are replaced by others.
        """
        if self.pixels is not None:
            yield from self._sampled_from_memory(self.pixels, start, stop, part)
            return
        dataset = replace(self.dataset, part=part)
        most = len(range(self.sampler.batch_size)[part])
        item_bytes = most * sum(side**2 for side in self.sizes) * self.images.pixel_bytes
        workers = workers_that_fit(self.workers, item_bytes)
        for cropped in prefetch(dataset, start, stop, workers, images=most):
            yield self._from_files(cropped)

    def resized(self, view_size: int) -> "Batches":
        """The same views at another size, in the same order, of the same pixels in memory."""
        return self._changed(shown_sizes=self.dataset.sizes_at(view_size))

    def shown_at(self, sizes: Sequence[int]) -> "Batches":
        """The same views of these sides in pixels; all of them once more, if there are more sides.

        A photograph is decoded once for all; not from a cache, whose images may be too small.
        """
        return self._changed(shown_sizes=sizes, cache=None)

    def _changed(self, **changes: Any) -> "Batches":
        return replace(self, dataset=replace(self.dataset, **changes))

    def planned(self, plan: Sequence[Planned]) -> Iterator[tuple[Views, np.ndarray]]:
        """As `sampled`, of the images of each pair of an epoch and rows, in turn."""
        following = self._changed(sampler=PlannedBatchSampler(plan, self.sampler.seed))
        return following.sampled(0, len(plan), slice(None))

    def _sampled_from_memory(
        self, pixels: Tensor, start: int, stop: int, part: slice
    ) -> Iterator[tuple[Views, np.ndarray]]:
        """The views of several steps at a time; those of later ones are sampled one by one."""
        plans = (self._plan(step, part) for step in range(start, stop))
        numbers = self.sampler.batch_size * self.images.num_channels * max(self.sizes) ** 2
        planned = list(islice(plans, max(1, min(self.steps_at_once, NUMBERS_AT_ONCE // numbers))))
        while planned:
            made = zip(self._from_memory(pixels, planned), planned, strict=True)
            planned = []
            for views, (rows, _) in made:
                planned.extend(islice(plans, 1))
                yield views, rows

    def _plan(self, step: int, part: slice) -> Plan:
        """A part of a step's images or their substitutes, and the parameters of each view."""
        epoch, rows = self.sampler.epoch(step), self.sampler.rows(step)[part]
        if self.bad:
            tried = (self.dataset.candidates(epoch, row) for row in rows.tolist())
            rows = np.array([next(row for row in each if row not in self.bad) for each in tried])
        return rows, self.dataset.sample(epoch, rows)

    def _from_memory(self, pixels: Tensor, plans: Sequence[Plan]) -> list[Views]:
        """The views of each plan, made together."""
        shown, sampled = zip(*plans, strict=True)
        images = pixels[to_device(torch.from_numpy(np.concatenate(shown)), self.device)]
        joined = map(ViewParams.joined, zip(*sampled, strict=True))
        views = zip(cycle(self.dataset.views), self.sizes, joined, strict=False)
        made = [
            augment(crop(images, params.box, size, view.interpolation), params)
            for view, size, params in views
        ]
        parts = (view.split(list(map(len, shown))) for view in made)
        return list(map(list, zip(*parts, strict=True)))

    def _from_files(self, cropped: Crops) -> tuple[Views, np.ndarray]:
        """The views, and the rows that they show."""
        self.bad.update(cropped.bad)
        # Workers sampled the same parameters for their boxes. Sampling them again costs less than
        # sending them from process to process.
        sampled = self.dataset.sample(cropped.epoch, cropped.rows)
        images = (to_device(pixels, self.device).permute(0, 3, 1, 2) for pixels in cropped.views)
        views = [augment(*pair) for pair in zip(images, sampled, strict=True)]
        return views, cropped.rows


def growing(
    parts: Sequence[BatchLoader], start: int, stop: int, total: int
) -> Generator[Batch, None, None]:
    """The batches of the steps from `start` to before `stop`, in views that change their size.

    Each of `parts` has the batches of one size, for an equal part of the `total` steps.
    """
    ends = [total * (number + 1) // len(parts) for number in range(len(parts))]
    for first, end, part in zip([0, *ends], ends, parts, strict=False):
        yield from part.load(max(start, first), max(start, min(stop, end)))


def center_crops(
    images: Images, rows: Sequence[int], transform: Preprocessing
) -> tuple[Shaped[np.ndarray, "rows _ _ _"], dict[int, str]]:
    """The evaluation views, mid-gray where unreadable, and the reason for each such row.

    They are of 8 bits or, of images with `channels`, from 0 to 1.
    """
    plain = images.channels is None
    source = images.source
    if (
        plain
        and isinstance(source, Arrays)
        and source.pixels.dtype == np.uint8
        and transform.keeps(source.pixels.shape[1:3])
    ):
        return source.stacked(np.array(rows, np.int64)), {}
    size, gray = transform.image_size, MIDDLE_GRAY if plain else 0.5
    shape = len(rows), size, size, images.num_channels
    pixels = np.full(shape, gray, np.uint8 if plain else np.float32)
    bad: dict[int, str] = {}
    source.warm(rows)
    for position, row in enumerate(rows):
        try:
            pixels[position] = transform.pixels(images.read(row))
        except BadImage as error:
            bad[row] = error.reason
    return pixels, bad


class CenterCrops(Dataset[tuple[Tensor, dict[int, str]]]):
    """All images in order, batch by batch: uint8 of shape (batch, 3, size, size).

    Of images with `channels` they are floats from 0 to 1, of as many channels. `transform` is the
    preprocessing of a network, or the side in pixels of the center of any images. Unreadable
    images are mid-gray and listed in `bad`; leave them out of whatever is computed.
    """

    def __init__(
        self,
        images: Images,
        transform: int | Preprocessing,
        *,
        batch_size: int = 256,
        workers: int = 0,
    ) -> None:
        self.transform = Preprocessing(transform) if isinstance(transform, int) else transform
        self.images = images if isinstance(transform, int) else transform.applied(images)
        self.batch_size = batch_size
        self.workers = 0 if images.is_small else workers
        self.bad: dict[int, str] = {}
        """Rows that could not be read, with the reason; complete after an iteration."""

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __getitem__(self, number: int) -> tuple[Tensor, dict[int, str]]:
        """The center crops of one batch, for a worker."""
        rows = range(len(self.images))[number * self.batch_size :][: self.batch_size]
        pixels, bad = center_crops(self.images, rows, self.transform)
        return torch.from_numpy(pixels), bad  # tensors leave a worker by shared memory, arrays not

    def __iter__(self) -> Iterator[Shaped[Tensor, "batch _ size size"]]:
        """The batches; see `prefetch` for what happens if workers are lost."""
        item_bytes = self.batch_size * self.transform.image_size**2 * self.images.pixel_bytes
        workers = workers_that_fit(self.workers, item_bytes)
        loaded = prefetch(self, 0, len(self), workers, images=self.batch_size)
        for pixels, bad in loaded:
            self.bad.update(bad)
            yield pixels.permute(0, 3, 1, 2)  # without a copy: channels last in memory


def squares(
    images: Images, rows: Int[np.ndarray, " rows"], side: int, workers: int
) -> Iterator[tuple[int, UInt8[np.ndarray, "side side 3"]]]:
    """Yield the row and the center crop of each readable image, all of one size, in RGB."""
    rows = np.unique(rows)
    if not len(rows):
        return
    chosen = images.subset(rows)
    size = min(side, int(chosen.sizes.min(axis=1).max()))
    batches = CenterCrops(chosen, size, workers=workers)
    for position, square in enumerate(square for batch in batches for square in batch):
        if position not in batches.bad:
            yield int(rows[position]), preview(square.permute(1, 2, 0).numpy())
