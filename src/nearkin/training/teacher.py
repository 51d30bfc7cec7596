"""A teacher's features of the views that its student sees, as part of every batch.

The teacher sees exactly the student's view, at its own image size and in its own range of values
(Beyer et al. 2022, "Knowledge distillation: a good teacher is patient and consistent"). With views
that repeat after some epochs its features are computed once, before the first step, and kept in
the run folder; otherwise it runs in every step.
"""

import hashlib
import json
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor

from nearkin.config import TrainConfig
from nearkin.data.batches import Batches, BatchLoader
from nearkin.data.channels import Channels
from nearkin.data.images import Images
from nearkin.data.samplers import BatchSampler, SequentialBatchSampler
from nearkin.data.views import input_statistics, normalize
from nearkin.distributed import all_reduce_max, free_memory, rows_of_rank, to_device
from nearkin.encoders.encoder import Encoder, load, weight_bytes, write_encoder
from nearkin.encoders.inference import images_at_once
from nearkin.errors import DataError, OutputError, ResourceError
from nearkin.evaluation.embeddings import images_per_shard
from nearkin.files import read_sealed, write_sealed
from nearkin.networks.branch import eval_mode
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, count
from nearkin.run.auto import view_sides
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, Silent
from nearkin.training.start import load_for
from nearkin.types import Batch

HALF: Final = np.dtype(np.float16)
"""Features are kept in half precision.

Measured on features of 128 and 384 numbers: cosines change by 1e-5 on average, 7e-5 at most, and
a teacher's softmax at temperature 0.01 by 4e-4 of its mass.
"""
HEAD: Final = hashlib.sha256().digest_size  # Bytes before the features: what they belong to


def open_teacher(folder: RunFolder, config: TrainConfig, images: Images) -> Encoder | None:
    """Load the encoder that a training learns from, if it learns from one.

    A copy of it is in the run folder from the start of the run, so that a run goes on, and is
    evaluated, where its source is gone. It has the range of these images if it has none.

    Raises:
        DataError: If the images have other channels than it takes.
        ResourceError: If the encoder does not fit into memory, before it is read.
    """
    if not config.teacher:
        return None
    if folder.teacher.exists():
        copy = load_for(config, folder.teacher)
        if copy.details.get("named") == config.teacher:
            return copy
    size, free = weight_bytes(config.teacher), free_memory()
    if 0 < free < 2 * size:  # the file, and the network that it is copied into
        raise ResourceError(
            f"the teacher {config.teacher} has {size / 1e6:,.0f} MB of weights, which takes twice "
            f"as much, and {free / 1e6:,.0f} MB of memory are free; give a smaller one"
        )
    teacher = load_for(config, config.teacher)
    details = {**teacher.details, "named": config.teacher}
    view = teacher.preprocessing.for_images(images)
    write_encoder(folder.teacher, teacher.backbone, details, view)
    return load(folder.teacher, trust_remote_code=True)  # the same one, as written


def distilled_origin(
    teacher: Mapping[str, str], start: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the origin of a student by those of its teacher and its start, with both licenses.

    >>> teacher = {"source": "big.pth", "license": "CC-BY-NC-4.0", "sha256": "ab"}
    >>> print(distilled_origin(teacher, None)["source"])
    distilled from big.pth
    >>> start = {"source": "s.pth", "license": "MIT", "sha256": "cd"}
    >>> print(*distilled_origin(teacher, start).values())
    distilled from big.pth into s.pth MIT and CC-BY-NC-4.0 cd
    """
    source = f"distilled from {teacher['source']}"
    if not start:
        return {**teacher, "source": source}
    licenses = dict.fromkeys((start["license"], teacher["license"]))
    source = f"{source} into {start['source']}"
    return {**start, "source": source, "license": " and ".join(licenses)}


def _in_own_range(teacher: Encoder, view: Tensor, channels: Channels | None) -> Tensor:
    """Return normalized images of these channels, from 0 to 1 in the teacher's range of values."""
    own = teacher.preprocessing.channels
    if own is None or channels is None or (own.low, own.high) == (channels.low, channels.high):
        return view
    numbers = (*input_statistics(len(own.low)), channels.low, channels.high, own.low, own.high)
    table = to_device(torch.tensor(numbers), view.device)[..., None, None]
    mean, std, low, high, own_low, own_high = table
    values = low + (high - low) * (view * std + mean)
    return normalize(((values - own_low) / (own_high - own_low)).clamp(0, 1))


@torch.no_grad()
def _features(
    teacher: Encoder, view: Tensor, channels: Channels | None
) -> Float[Tensor, "batch dim"]:
    """Return unit features of normalized images of these channels."""
    view = _in_own_range(teacher, view, channels)
    pieces = view.split(images_at_once(teacher.image_size, view.device))
    with eval_mode(teacher):
        return unit(torch.cat([teacher(piece).float() for piece in pieces]))


@dataclass(frozen=True, eq=False)
class LiveTeacher:
    """Batches with the features of a teacher that runs in every step."""

    batches: Batches
    teacher: Encoder

    @property
    def sampler(self) -> BatchSampler:
        """Which images each step sees."""
        return self.batches.sampler

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        count, side = len(self.batches.sizes), self.teacher.image_size
        same = all(size == side for size in self.batches.sizes)
        batches = self.batches if same else self.batches.shown_again(side)
        channels = batches.images.channels
        for batch in batches.load(start, stop):
            seen = batch.views[-count:]
            features = tuple(_features(self.teacher, view, channels) for view in seen)
            yield replace(batch, views=batch.views[:count], teacher=features)


@dataclass(frozen=True, eq=False)
class CachedTeacher:
    """Batches with features of a teacher that are computed once, for the views of some epochs.

    Features of a view depend on the seed, its epoch and its image alone, so the files that hold
    them may be made in any order, by any process, and a run that was killed makes only those that
    are missing. They are sealed.
    """

    batches: Batches
    folder: Path
    key: bytes  # A digest of all that the features depend on
    epochs: int
    dim: int

    @property
    def sampler(self) -> BatchSampler:
        """Which images each step sees."""
        return self.batches.sampler

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        sampler = self.batches.sampler
        sampled = self.batches.sampled(start, stop, rows_of_rank(sampler.batch_size))
        for step, (views, rows) in enumerate(sampled, start):
            features = torch.from_numpy(self.rows(sampler.epoch(step), rows))
            if not features.isfinite().all():
                raise DataError(
                    f"{self.folder} lacks images that could not be read when it was made; "
                    "remove it, and give the same command with --resume"
                )
            on_device = to_device(features, self.batches.device).float()
            teacher = tuple(unit(on_device).unbind(dim=1))
            yield replace(self.batches.batch(views, rows), teacher=teacher)

    @property
    def shard_size(self) -> int:
        """Images in a file: as on a CPU, or files of one device would be of no use to another."""
        return images_per_shard(len(self.batches.images), torch.device("cpu"))

    @property
    def bytes(self) -> int:
        """Bytes of all features."""
        return sum(prod(self.shape(first)) for _, first in self.shards()) * HALF.itemsize

    def shards(self) -> list[tuple[int, int]]:
        """The epoch and the first image of each file."""
        firsts = range(0, len(self.batches.images), self.shard_size)
        return [(epoch, first) for epoch in range(self.epochs) for first in firsts]

    def path(self, epoch: int, first: int) -> Path:
        """The file of the images from `first` in an epoch."""
        return self.folder / f"{epoch:04d}-{first:09d}.features"

    def shape(self, first: int) -> tuple[int, int, int]:
        """Images, views and dimension of a file."""
        images = min(self.shard_size, len(self.batches.images) - first)
        return images, len(self.batches.dataset.views), self.dim

    def is_whole(self, epoch: int, first: int) -> bool:
        """Whether a file is there, undamaged, and of these views."""
        content = read_sealed(self.path(epoch, first))
        expected = HEAD + prod(self.shape(first)) * HALF.itemsize
        return content is not None and content[:HEAD] == self.key and len(content) == expected

    def rows(
        self, epoch: int, rows: Int64[np.ndarray, " rows"]
    ) -> Float16[np.ndarray, "rows views dim"]:
        """Read the features of some images."""
        features = np.empty((len(rows), *self.shape(0)[1:]), HALF)
        firsts = rows // self.shard_size * self.shard_size
        for first in np.unique(firsts).tolist():
            chosen = firsts == first
            features[chosen] = self._open[epoch, first][rows[chosen] - first]
        return features

    @cached_property
    def _open(self) -> dict[tuple[int, int], np.ndarray]:
        """The features of each file, read from disk when they are used."""
        return {
            (epoch, first): np.memmap(
                self.path(epoch, first), HALF, "r", offset=HEAD, shape=self.shape(first)
            )
            for epoch, first in self.shards()
        }


def parts_of(
    folder: RunFolder,
    config: TrainConfig,
    batches: Batches,
    teacher: Encoder | None,
    log: Reporter | None = None,
) -> list[BatchLoader]:
    """Return the batches of each part of a training, whose views have a size of their own.

    They have the features of its teacher, if it learns from one. Where views repeat, all features
    are computed now, but for those that are in the run folder already. Several processes share
    the work, and then read all files.

    Raises:
        ResourceError: If the disk has no room for the features.
        OutputError: If another process's files are not to be seen here.
    """
    parts = [batches.resized(side) for side in view_sides(config)]
    if teacher is None:
        return [*parts]
    teacher.to(batches.device).to(memory_format=torch.channels_last)
    if not config.teacher_views:
        return [LiveTeacher(part, teacher) for part in parts]
    cached = cached_teacher(folder, config, batches, teacher)
    shards = cached.shards()
    missing = [shard for shard in shards if not cached.is_whole(*shard)]
    needed = cached.bytes * len(missing) / len(shards)
    if needed > (free := shutil.disk_usage(folder.path).free):
        raise ResourceError(
            f"the teacher's features of {cached.epochs} epochs of views take "
            f"{needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB of the disk are free; give fewer "
            "--teacher-views"
        )
    log, own = log or Silent(), missing[rows_of_rank(len(missing))]
    all_reduce_max(0)  # every process has listed what is missing before the first one writes
    compute(cached, own, teacher, log.progress)
    all_reduce_max(0)  # all files are there
    if not all(cached.is_whole(*shard) for shard in missing):
        raise OutputError(
            f"{cached.folder} lacks what other processes have written; put -o where all of them "
            "can read it, or give --teacher-views 0"
        )
    views = count(cached.epochs * len(batches.dataset.views), "view")
    megabytes = f"{cached.bytes / 1e6:,.1f} MB"
    log.info(f"teacher features of {views} of {len(batches.images):,} images ({megabytes})")
    return [replace(cached, batches=part) for part in parts]


def cached_teacher(
    folder: RunFolder, config: TrainConfig, batches: Batches, teacher: Encoder
) -> CachedTeacher:
    """Return batches with the features of a training's views, which may not be there yet."""
    epochs = int(config.teacher_views)
    if not config.max_time:
        epochs = min(epochs, int(config.epochs))
    views = [view.to_dict() for view in batches.dataset.views]
    named = [views, config.seed, batches.dataset.image_size, len(batches.images)]
    weights = hashlib.sha256(folder.teacher.read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([weights, *named]).encode()).digest()
    return CachedTeacher(batches, folder.teacher_features, key, epochs, teacher.num_features)


def compute(
    cached: CachedTeacher,
    shards: list[tuple[int, int]],
    teacher: Encoder,
    on_progress: ProgressCallback,
) -> None:
    """Run the teacher on the views of these files, and write them one by one.

    Images that cannot be read have features that are no numbers.
    """
    batches = cached.batches
    size = images_at_once(teacher.image_size, batches.device)  # divides the size of a file
    sampler = SequentialBatchSampler(len(batches.images), size, batches.sampler.seed)
    views, channels = batches.enlarged(teacher.image_size, sampler), batches.images.channels
    done, total = 0, sum(cached.shape(first)[0] for _, first in shards)
    for epoch, first in shards:
        features = np.full(cached.shape(first), np.nan, HALF)
        start = epoch * sampler.steps_per_epoch + first // size
        stop = start + -(-len(features) // size)
        expected = np.arange(first, first + len(features))
        for number, (pixels, rows) in enumerate(views.sampled(start, stop, slice(None))):
            on_progress(done, total, f"teacher's features of views {epoch + 1}/{cached.epochs}")
            chunk = slice(number * size, number * size + len(rows))
            of_views = [_features(teacher, normalize(view), channels) for view in pixels]
            readable = rows == expected[chunk]
            features[chunk][readable] = (
                torch.stack(of_views, dim=1).cpu().numpy()[readable].astype(HALF)
            )
            done += len(rows)
        cached.folder.mkdir(parents=True, exist_ok=True)
        write_sealed(cached.path(epoch, first), cached.key + features.tobytes())
