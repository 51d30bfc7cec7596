"""Batches of images: augmented views for training, center crops for everything else."""

import copy
import math
import shutil
import signal
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nearkin.data.cache import Cache
from nearkin.data.channels import named, preview
from nearkin.data.decode import MIDDLE_GRAY, BadImage, crops
from nearkin.data.images import Arrays, Images
from nearkin.data.order import BatchOrder
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.rng import uniform
from nearkin.data.views import (
    View,
    ViewParams,
    augment,
    crop_and_augment,
    normalize,
    sample_views,
)
from nearkin.distributed import rows_of_rank, to_device
from nearkin.errors import DataError, NearkinError, UsageError
from nearkin.types import UNKNOWN, Batch

SUBSTITUTE: Final = 255
"""The view number whose random numbers choose a substitute for an unreadable image."""
SUBSTITUTES: Final = 8  # Substitutes that are tried for one image
# A GPU takes less time for the operations of small views than a CPU for launching them, so those
# of several steps are launched together. On a CPU they would only leave its cache.
AT_ONCE: Final = 8
NUMBERS_AT_ONCE: Final = 2**26  # Of one view of them all, at most: 256 MiB


@dataclass(frozen=True, slots=True)
class Crops:
    """The views of some photographs in one epoch, cropped and not yet augmented."""

    views: tuple[Shaped[Tensor, "batch _ _ channel"], ...]  # of 8 bits, or from 0 to 1
    epoch: int
    rows: np.ndarray  # The images that were cropped, substitutes included
    bad: dict[int, str]  # Images that could not be read, with the reason


class ViewSampler(Dataset[Crops]):
    """Samples the views of images, and the substitutes of unreadable ones.

    Both are functions of the seed, the epoch and the image alone, so that they are the same with
    any number of workers, from memory and from files. Views of size 1 have a side of `image_size`
    pixels; small images are resized to it before the crop. With `side`, all views have that side
    and show what they would show at their own: so a network of another size sees the same views.
    As a data set, its items are the crops of a step, for the workers of a `DataLoader`.
    """

    def __init__(
        self,
        images: Images,
        views: Sequence[View],
        *,
        image_size: int,
        order: BatchOrder,
        cache: Cache | None = None,
        side: int = 0,
        multiple: int = 1,
    ) -> None:
        self.images, self.views, self.order = images, views, order
        self.image_size, self.multiple = image_size, multiple
        self.source = cache or images
        own = self._sides(image_size)
        self._resize([side] * len(own) if side else own)
        # Small images are resized once, and crops are cut from that. Boxes are shares of an image,
        # so those of one that was squashed to a square show what they show of the whole.
        resized = images.held_side(image_size) == image_size and images.are_square
        small = np.full((len(images), 2), image_size, np.int32)
        self.source_sizes = small if resized else images.sizes
        self.share = rows_of_rank(order.batch_size)

    def _sides(self, view_size: int) -> list[int]:
        patches = (max(1, round(view.size * view_size / self.multiple)) for view in self.views)
        return [count * self.multiple for count in patches]

    def _resize(self, sizes: list[int]) -> None:
        self.sizes = sizes
        """Side in pixels of each view."""
        own = self._sides(self.image_size)
        self.enlarged = [size / before for size, before in zip(sizes, own, strict=True)]

    def resized(self, view_size: int) -> "ViewSampler":
        """The same views, of which those of size 1 have another side in pixels."""
        other = copy.copy(self)
        other._resize(self._sides(view_size))
        return other

    def sample(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> list[ViewParams]:
        """The parameters of each view of these images in one epoch."""
        sampled = sample_views(
            self.views,
            self.source_sizes[rows],
            seed=self.order.seed,
            epoch=epoch,
            index=rows,
            num_channels=self.images.num_channels,
        )
        # The blur is in pixels of the view.
        return [
            params if scale == 1 else replace(params, sigma=params.sigma * np.float32(scale))
            for params, scale in zip(sampled, self.enlarged, strict=True)
        ]

    def candidates(self, epoch: int, row: int) -> Iterator[int]:
        """The image itself, then its substitutes, one by one; a DataError when they run out."""
        yield row
        u = uniform(self.order.seed, epoch, np.array([row]), SUBSTITUTE, SUBSTITUTES)[0]
        yield from (u * len(self.images)).astype(int).tolist()
        raise DataError(
            f"{self.images.names[row]} and {SUBSTITUTES} images drawn in its place cannot be "
            "read; `nearkin check DATA --scan full` lists what is wrong"
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of this process's part of a step, at most."""
        images = len(range(self.order.batch_size)[self.share])
        return images * sum(side**2 for side in self.sizes) * self.images.pixel_bytes

    def __getitem__(self, step: int) -> Crops:
        """This process's part of a step."""
        return self.load(self.order.epoch(step), self.order.rows(step)[self.share])

    def load(self, epoch: int, rows: np.ndarray) -> Crops:
        """The crops of these photographs, or of their substitutes, in one epoch."""
        bad, readable, cropped = dict[int, str](), [], []
        cached = self.source
        self.images.warm(cached.undecoded(rows) if isinstance(cached, Cache) else rows.tolist())
        for row in rows.tolist():
            for candidate in self.candidates(epoch, row):
                boxes = [params.box[0] for params in self.sample(epoch, np.array([candidate]))]
                try:
                    views = crops(self.source.read(candidate), np.stack(boxes), self.sizes)
                except BadImage as error:
                    bad[candidate] = error.reason
                else:
                    readable.append(candidate)
                    cropped.append(views)
                    break
        stacked = (torch.from_numpy(np.stack(view)) for view in zip(*cropped, strict=True))
        return Crops(tuple(stacked), epoch, np.array(readable), bad)


Views = list[Float[Tensor, "batch _ _ _"]]


@runtime_checkable
class Feed(Protocol):
    """Where a training takes its batches from."""

    @property
    def order(self) -> BatchOrder:
        """Which images each step sees."""

    def between(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""


class Batches:
    """The batches of a training run. Without `labels`, no method sees one.

    Small images (see `Images.held_side`) are held on the device and cropped there by the batch.
    Photographs stay encoded; `workers` processes (or this one) decode what a crop needs, and only
    the crops are augmented on the device. `cache` is "ram" or "disk" to decode photographs once,
    at a bounded size; see `Cache`. An image's index is its row in `images`; `image_size` is the
    side in pixels of views of size 1, and all sides are multiples of `multiple`.
    """

    def __init__(
        self,
        images: Images,
        views: Sequence[View],
        *,
        image_size: int,
        order: BatchOrder,
        device: torch.device,
        workers: int = 0,
        cache: str = "off",
        labels: Int64[np.ndarray, " images"] | None = None,
        multiple: int = 1,
    ) -> None:
        if order.steps_per_epoch == 0:
            raise DataError(
                f"{len(images)} images do not fill a batch of {order.batch_size}; "
                "give a smaller --batch-size or more images"
            )
        self.images, self.order = images, order
        self.device, self.workers = device, workers
        self.labels = np.full(len(images), UNKNOWN) if labels is None else labels
        if images.channels and cache != "off":
            raise UsageError(
                f"--cache {cache} holds RGB of 8 bits, and images have "
                f"{named(images.pixel_type)}; give --cache off"
            )
        held = images.held_side(image_size)
        decoded = None if cache == "off" or held else Cache(images, image_size, cache)
        self.sampler = ViewSampler(
            images, views, image_size=image_size, order=order, cache=decoded, multiple=multiple
        )
        self.sizes = self.sampler.sizes  # Side in pixels of each view
        numbers = order.batch_size * images.num_channels * image_size**2
        most = 1 if device.type == "cpu" else AT_ONCE
        self.steps_at_once = max(1, min(most, NUMBERS_AT_ONCE // numbers))
        """Steps whose views are made together, if images are in memory: the same views."""
        self.bad: dict[int, str] = {}
        """Rows that turned out unreadable, with the reason; others took their place."""
        self.pixels: Tensor | None = None  # All images, if they are held in memory
        if held:
            view = Preprocessing(held)
            view = view if images.are_square else replace(view, crop="squash", resize_to=held)
            pixels, self.bad = center_crops(images, range(len(images)), view)
            self.pixels = channels_first(torch.from_numpy(pixels)).to(device)

    def between(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        # Not before: other processes may have joined since the batches were built.
        for views, rows in self.sampled(start, stop, rows_of_rank(self.order.batch_size)):
            yield self.batch(views, rows)

    def batch(self, views: Views, rows: np.ndarray) -> Batch:
        """The batch of some views and the rows that they show."""
        index, label = (
            to_device(torch.from_numpy(x), self.device) for x in (rows, self.labels[rows])
        )
        return Batch(tuple(map(normalize, views)), index, label)

    def sampled(self, start: int, stop: int, part: slice) -> Iterator[tuple[Views, np.ndarray]]:
        """The views, in [0, 1], of a part of each step's images, and the rows that they show."""
        self.sampler.share = part
        if self.pixels is not None:
            for first in range(start, stop, self.steps_at_once):
                steps = range(start, stop)[first - start :][: self.steps_at_once]
                epoch_rows = [
                    (self.order.epoch(step), self.order.rows(step)[part]) for step in steps
                ]
                yield from self._from_memory(self.pixels, epoch_rows)
            return
        num_images = len(range(self.order.batch_size)[part])
        workers = workers_that_fit(self.workers, self.sampler.item_bytes)
        for cropped in prefetch(self.sampler, start, stop, workers, images=num_images):
            yield self._from_files(cropped)

    def resized(self, view_size: int) -> "Batches":
        """The same views at another size, in the same order, of the same pixels in memory."""
        other = copy.copy(self)
        other.sampler = self.sampler.resized(view_size)
        other.sizes = other.sampler.sizes
        return other

    def enlarged(self, side: int, order: BatchOrder) -> "Batches":
        """The same views of the same images at another size, in another order.

        Photographs are cropped anew from their files; small images are held once.
        """
        other = copy.copy(self)
        other.order = order
        sampler = self.sampler
        other.sampler = ViewSampler(
            self.images,
            sampler.views,
            image_size=sampler.image_size,
            order=order,
            side=side,
            multiple=sampler.multiple,
        )
        other.sizes = other.sampler.sizes
        return other

    def views(self, epoch: int, rows: np.ndarray) -> Views:
        """The views of these images, in [0, 1]; unreadable ones are replaced as in training."""
        if self.pixels is None:
            return self._from_files(self.sampler.load(epoch, rows))[0]
        return self._from_memory(self.pixels, [(epoch, rows)])[0][0]

    def _from_memory(
        self, pixels: Tensor, epoch_rows: Sequence[tuple[int, np.ndarray]]
    ) -> list[tuple[Views, np.ndarray]]:
        """The views of each epoch and its rows, and the rows that they show."""
        readable = [(epoch, self._readable(epoch, rows)) for epoch, rows in epoch_rows]
        sampled = [self.sampler.sample(epoch, rows) for epoch, rows in readable]
        views = crop_and_augment(
            pixels,
            np.concatenate([rows for _, rows in readable]),
            [ViewParams.joined(of_view) for of_view in zip(*sampled, strict=True)],
            self.sizes,
            [view.interpolation for view in self.sampler.views],
        )
        parts = zip(
            *(view.split([len(rows) for _, rows in epoch_rows]) for view in views), strict=True
        )
        return [(list(part), rows) for part, (_, rows) in zip(parts, readable, strict=True)]

    def _readable(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """The same rows, with substitutes for those that cannot be read."""
        candidates = (self.sampler.candidates(epoch, row) for row in rows.tolist())
        return np.array([next(row for row in each if row not in self.bad) for each in candidates])

    def _from_files(self, cropped: Crops) -> tuple[Views, np.ndarray]:
        """The views, and the rows that they show."""
        self.bad.update(cropped.bad)
        # Workers sampled the same parameters for their boxes. Sampling them again costs less than
        # sending them from process to process.
        sampled = self.sampler.sample(cropped.epoch, cropped.rows)
        views = []
        for pixels, params in zip(cropped.views, sampled, strict=True):
            images = channels_first(to_device(pixels, self.device))
            views.append(augment(from_zero_to_one(images), params))
        return views, cropped.rows


@dataclass(frozen=True)
class Growing:
    """Batches whose views change their size: equal parts of training, one after the other."""

    parts: Sequence[Feed]  # The batches of each size
    total: int  # Steps of the whole training

    @property
    def order(self) -> BatchOrder:
        """Which images each step sees."""
        return self.parts[0].order

    def between(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        ends = [self.total * (number + 1) // len(self.parts) for number in range(len(self.parts))]
        for first, end, part in zip([0, *ends], ends, self.parts, strict=False):
            yield from part.between(max(start, first), max(start, min(stop, end)))


def from_zero_to_one(pixels: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Pixels of 8 bits divided by 255; others are from 0 to 1 already."""
    return pixels / 255 if pixels.dtype == torch.uint8 else pixels


def channels_first(
    pixels: Shaped[Tensor, "batch height width channel"],
) -> Shaped[Tensor, "batch channel height width"]:
    """The same pixels as networks take them, without a copy: channels last in memory."""
    return pixels.permute(0, 3, 1, 2)


def center_crops(
    images: Images, rows: Sequence[int], view: Preprocessing
) -> tuple[Shaped[np.ndarray, "rows _ _ _"], dict[int, str]]:
    """The evaluation views, mid-gray where unreadable, and the reason for each such row.

    They are of 8 bits or, of images with `channels`, from 0 to 1.
    """
    plain = images.channels is None
    if plain and isinstance(images.source, Arrays) and view.keeps(images.source.pixels.shape[1:3]):
        return images.source.stacked([images.names[row] for row in rows]), {}
    size, gray = view.image_size, MIDDLE_GRAY if plain else 0.5
    shape = len(rows), size, size, images.num_channels
    pixels = np.full(shape, gray, np.uint8 if plain else np.float32)
    bad: dict[int, str] = {}
    images.warm(rows)
    for position, row in enumerate(rows):
        try:
            pixels[position] = view.pixels(images.read(row))
        except BadImage as error:
            bad[row] = error.reason
    return pixels, bad


class CenterCrops(Dataset[tuple[Tensor, dict[int, str]]]):
    """All images in order, batch by batch: uint8 of shape (batch, 3, size, size).

    Of images with `channels` they are floats from 0 to 1, of as many channels. `view` is the
    preprocessing of a network, or the side in pixels of nearkin's own. Unreadable
    images are mid-gray and listed in `bad`; leave them out of whatever is computed.
    Photographs are decoded by `workers` processes, by this one if 0.
    """

    def __init__(
        self,
        images: Images,
        view: int | Preprocessing,
        *,
        batch_size: int = 256,
        workers: int = 0,
    ) -> None:
        self.view = Preprocessing.of(view, images.channels) if isinstance(view, int) else view
        self.images, self.batch_size = self.view.applied(images), batch_size
        self.workers = 0 if images.is_small else workers
        self.bad: dict[int, str] = {}
        """Rows that could not be read, with the reason; complete after an iteration."""

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __getitem__(self, number: int) -> tuple[Tensor, dict[int, str]]:
        """The center crops of one batch, for a worker."""
        rows = range(len(self.images))[number * self.batch_size :][: self.batch_size]
        pixels, bad = center_crops(self.images, rows, self.view)
        return torch.from_numpy(pixels), bad  # tensors leave a worker by shared memory, arrays not

    def __iter__(self) -> Iterator[Shaped[Tensor, "batch _ size size"]]:
        """The batches; see `prefetch` for what happens if workers are lost."""
        item_bytes = self.batch_size * self.view.image_size**2 * self.images.pixel_bytes
        workers = workers_that_fit(self.workers, item_bytes)
        loaded = prefetch(self, 0, len(self), workers, images=self.batch_size)
        for pixels, bad in loaded:
            self.bad.update(bad)
            yield channels_first(pixels)


def to_input(pixels: Shaped[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _ _ _"]:
    """Pixels of 8 bits, or from 0 to 1, as the normalized input of a network."""
    return normalize(from_zero_to_one(pixels))


def squares(
    images: Images, rows: Int[np.ndarray, " rows"], side: int, workers: int
) -> Iterator[tuple[int, UInt8[Tensor, "3 side side"]]]:
    """Yield the row and the center crop of each readable image, all of one size, in RGB."""
    rows = np.unique(rows)
    if not len(rows):
        return
    chosen = images.subset(rows)
    size = min(side, int(chosen.sizes.min(axis=1).max()))
    batches = CenterCrops(chosen, size, workers=workers)
    for position, square in enumerate(square for batch in batches for square in batch):
        if position not in batches.bad:
            rgb = preview(square.permute(1, 2, 0).numpy())
            yield int(rows[position]), torch.from_numpy(rgb).permute(2, 0, 1)


Loaded = TypeVar("Loaded")

PATIENCE: Final = 120  # Seconds after which a worker counts as hung; more for very large batches


def worker_lost(error: Exception) -> bool:
    """Whether an error says that a worker died or hung, not that what it computed failed."""
    if isinstance(error, ConnectionError | EOFError):  # while it was sending a result
        return "Caught" not in str(error)
    return str(error).startswith("DataLoader worker (pid")


def first_sentence(error: Exception) -> str:
    """The first sentence of an error; and what to do if it is for want of shared memory."""
    first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return f"{first}; {ENLARGE}" if "shared memory" in str(error) else first


SHARED: Final = Path("/dev/shm")
ENLARGE: Final = f"enlarge {SHARED}, as by docker run --shm-size=2g"
HELD: Final = 2  # Items that a worker prepares; torch's default


def workers_that_fit(workers: int, item_bytes: int) -> int:
    """The same number of workers, or none, with a warning, if their items do not fit.

    Items leave a worker by shared memory, of which a container has 64 MB by default. A worker that
    finds none left only prints so, and the training waits for what never comes.
    """
    if not (workers and SHARED.exists()):
        return workers
    needed, free = (HELD * workers + 1) * item_bytes, shutil.disk_usage(SHARED).free
    if needed <= free:
        return workers
    warnings.warn(
        f"{workers} workers would need {needed / 1e6:.0f} MB of shared memory, and {SHARED} has "
        f"{free / 1e6:.0f} MB, so that images are loaded by this process; {ENLARGE}, or give "
        "fewer --workers",
        stacklevel=3,
    )
    return 0


def prefetch(
    data: Dataset[Loaded], start: int, stop: int, workers: int, *, images: int
) -> Iterator[Loaded]:
    """The items of the steps from `start` to before `stop`, in order.

    If a worker dies or hangs, all are replaced, once, and continue at the same step: no step
    depends on another, so the result is the same. With 0 workers, this process loads each item
    when it is needed. Very many `images` per step may take longer before a worker counts as hung.
    """
    seconds = max(PATIENCE, images // 4)
    step, replaced = start, False
    while step < stop:
        items, processes = _start_workers(data, range(step, stop), workers)
        try:
            for item in _with_timeout(items, processes, seconds):
                yield item
                step += 1
        except NearkinError as error:
            if processes:  # torch puts the traceback of the worker into the message
                kind = type(error).__name__
                raise type(error)(str(error).strip().rpartition(f"{kind}: ")[2]) from None
            raise
        except (RuntimeError, ConnectionError, EOFError) as error:
            _kill(processes)  # torch only asks them to end, and waits
            if replaced or not worker_lost(error):
                raise
            replaced = True
            reason = first_sentence(error)
            warnings.warn(f"{reason}; workers are replaced at step {step}", stacklevel=2)


def _start_workers(
    data: Dataset[Loaded], steps: range, workers: int
) -> tuple[Iterator[Loaded], set[BaseProcess]]:
    """An iterator over the steps, and the processes that it has started."""
    loader: Any = DataLoader(
        data,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        collate_fn=_identity,
        generator=torch.Generator(),  # or iterating would draw from the global one
    )
    # torch's handler raises wherever the main thread is when a worker dies, such as in the middle
    # of an optimizer's step. Without it, the next request for an item finds out.
    ended = getattr(signal, "SIGCHLD", None)  # Windows has none
    before = ended and signal.getsignal(ended)
    items: Iterator[Loaded] = iter(loader)
    if ended and threading.current_thread() is threading.main_thread():
        torchs = getattr(before, "__module__", "").startswith("torch.")  # of an earlier loader
        signal.signal(ended, signal.SIG_DFL if torchs else before)
    return items, set(getattr(items, "_workers", ()))  # other threads may start processes, too


def _identity(item: Loaded) -> Loaded:
    # At the top of a module, so that it can be pickled for a worker that is not a fork.
    return item


def _with_timeout(
    items: Iterator[Loaded], processes: set[BaseProcess], seconds: int
) -> Iterator[Loaded]:
    """The same items; kills workers that take longer for one."""
    while True:  # torch's own timeout does not hold while a worker sends shared memory
        timer = threading.Timer(seconds, _kill, [processes])
        timer.daemon = True
        if processes:
            timer.start()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            timer.cancel()
        yield item


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        process.kill()
