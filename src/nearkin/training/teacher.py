"""A teacher's features of the views that its student sees, as part of every batch.

The teacher sees exactly the student's view, at its own image size and in its own range of values
(Beyer et al. 2022, "Knowledge distillation: a good teacher is patient and consistent"). With views
that repeat after some epochs its features are computed once, before the first step, and kept in
the run folder; otherwise it runs in every step.
"""

import hashlib
import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, prod
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
from nearkin.data.samplers import BatchSampler
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
FEATURES: Final = (
    2  # Version of what is kept: those of 1 were not in the teacher's own mean and std
)
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
    teacher = read_teacher(config, images)
    details = {**teacher.details, "named": config.teacher}
    write_encoder(folder.teacher, teacher.backbone, details, teacher.preprocessing)
    return load(folder.teacher, trust_remote_code=True)  # the same one, as written


def read_teacher(config: TrainConfig, images: Images) -> Encoder:
    """Load the encoder to learn from, in the range of these images, from its source.

    Raises what `open_teacher` does.
    """
    size, free = weight_bytes(config.teacher), free_memory()
    if 0 < free < 2 * size:  # the file, and the network that it is copied into
        raise ResourceError(
            f"the teacher {config.teacher} has {size / 1e6:,.0f} MB of weights, which takes twice "
            f"as much, and {free / 1e6:,.0f} MB of memory are free; give a smaller one"
        )
    teacher = load_for(config, config.teacher)
    teacher.preprocessing = teacher.preprocessing.for_images(images)
    return teacher


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
    """Return unit features of images of these channels, as `normalize` gives them."""
    view = _in_own_range(teacher, view, channels)
    pieces = view.split(images_at_once(teacher.image_size, view.device))
    with eval_mode(teacher):
        return unit(torch.cat([teacher.backbone(piece).float() for piece in pieces]))


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
        own, count = [*self.batches.sizes], len(self.batches.sizes)
        larger = [self.teacher.image_size] * count
        batches = self.batches if own == larger else self.batches.shown_at(own + larger)
        channels = batches.images.channels
        for batch in batches.load(start, stop):
            seen = batch.views[-count:]
            features = tuple(_features(self.teacher, view, channels) for view in seen)
            yield replace(batch, views=batch.views[:count], teacher=features)


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """A sealed file of the features of some images' views in one epoch."""

    path: Path
    key: bytes  # A digest of all that the features depend on
    epoch: int
    first: int  # The first of the images, which follow each other
    shape: tuple[int, int, int]  # Images, views and dimension

    @property
    def num_bytes(self) -> int:
        """Bytes of the features."""
        return prod(self.shape) * HALF.itemsize

    def is_whole(self) -> bool:
        """Whether the file is there, undamaged, and of these views."""
        content = read_sealed(self.path)
        if content is None or content[:HEAD] != self.key:
            return False
        return len(content) == HEAD + self.num_bytes

    @cached_property
    def features(self) -> Float16[np.ndarray, "images views dim"]:
        """The features, read from disk when they are used."""
        return np.memmap(self.path, HALF, "r", offset=HEAD, shape=self.shape)


@dataclass(frozen=True, eq=False)
class CachedTeacher:
    """Batches with features of a teacher that are computed once, for the views of some epochs.

    Features of a view depend on the seed, its epoch and its image alone, so the files that hold
    them may be made in any order, by any process, and a run that was killed makes only those that
    are missing.
    """

    batches: Batches
    files: Sequence[FeatureFile]  # Epoch by epoch, in the order of the images

    @property
    def sampler(self) -> BatchSampler:
        """Which images each step sees."""
        return self.batches.sampler

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        sampler = self.batches.sampler
        sampled = self.batches.sampled(start, stop, rows_of_rank(sampler.batch_size))
        for step, (views, rows) in enumerate(sampled, start):
            features = torch.from_numpy(self.features(sampler.epoch(step), rows))
            if not features.isfinite().all():
                raise DataError(
                    f"{self.files[0].path.parent} lacks images that could not be read when it was "
                    "made; remove it, and give the same command with --resume"
                )
            on_device = to_device(features, self.batches.device).float()
            teacher = tuple(unit(on_device).unbind(dim=1))
            yield replace(self.batches.batch(views, rows), teacher=teacher)

    def features(
        self, epoch: int, rows: Int64[np.ndarray, " rows"]
    ) -> Float16[np.ndarray, "rows views dim"]:
        """Read the features of some images."""
        size, *others = self.files[0].shape
        features = np.empty((len(rows), *others), HALF)
        per_epoch = ceil(len(self.batches.images) / size)
        for number in np.unique(rows // size).tolist():
            file, chosen = self.files[epoch * per_epoch + number], rows // size == number
            features[chosen] = file.features[rows[chosen] - file.first]
        return features


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
    files = feature_files(folder, config, batches, teacher)
    missing = [file for file in files if not file.is_whole()]
    needed, free = sum(file.num_bytes for file in missing), shutil.disk_usage(folder.path).free
    if needed > free:
        raise ResourceError(
            f"the teacher's features of {files[-1].epoch + 1} epochs of views take "
            f"{needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB of the disk are free; give fewer "
            "--teacher-views"
        )
    log, own = log or Silent(), missing[rows_of_rank(len(missing))]
    all_reduce_max(0)  # every process has listed what is missing before the first one writes
    compute(batches, own, teacher, log.progress)
    all_reduce_max(0)  # all files are there
    if not all(file.is_whole() for file in missing):
        raise OutputError(
            f"{folder.teacher_features} lacks what other processes have written; put -o where all "
            "of them can read it, or give --teacher-views 0"
        )
    views = count((files[-1].epoch + 1) * len(batches.dataset.views), "view")
    megabytes = f"{sum(file.num_bytes for file in files) / 1e6:,.1f} MB"
    log.info(f"teacher features of {views} of {len(batches.images):,} images ({megabytes})")
    return [CachedTeacher(part, files) for part in parts]


def feature_files(
    folder: RunFolder, config: TrainConfig, batches: Batches, teacher: Encoder
) -> list[FeatureFile]:
    """Return the files of a teacher's features of a training's views, which may not be there.

    They are as large as on a CPU, or those of one device would be of no use to another.
    """
    epochs, num_images = int(config.teacher_views), len(batches.images)
    if not config.max_time:
        epochs = min(epochs, int(config.epochs))
    views = [view.to_dict() for view in batches.dataset.views]
    weights = hashlib.sha256(folder.teacher.read_bytes()).hexdigest()
    named = [FEATURES, weights, views, config.seed, batches.dataset.image_size, num_images]
    key = hashlib.sha256(json.dumps(named).encode()).digest()
    size, files = images_per_shard(num_images, torch.device("cpu")), list[FeatureFile]()
    for epoch, first in product(range(epochs), range(0, num_images, size)):
        path = folder.teacher_features / f"{epoch:04d}-{first:09d}.features"
        shape = min(size, num_images - first), len(views), teacher.num_features
        files.append(FeatureFile(path, key, epoch, first, shape))
    return files


def compute(
    batches: Batches, files: Sequence[FeatureFile], teacher: Encoder, on_progress: ProgressCallback
) -> None:
    """Run the teacher on the views of these files, and write them one by one.

    Images that cannot be read have features that are no numbers.
    """
    size = images_at_once(teacher.image_size, batches.device)
    large = batches.shown_at([teacher.image_size] * len(batches.dataset.views))
    channels = batches.images.channels
    done, total = 0, sum(file.shape[0] for file in files)
    for file in files:
        features = np.full(file.shape, np.nan, HALF)
        expected = np.split(np.arange(len(features)), range(size, len(features), size))
        plan = [(file.epoch, file.first + places) for places in expected]
        for places, (pixels, rows) in zip(expected, large.planned(plan), strict=True):
            on_progress(done, total, f"teacher's features of views, epoch {file.epoch + 1}")
            of_views = [_features(teacher, normalize(view), channels) for view in pixels]
            readable = rows == file.first + places
            features[places[readable]] = (
                torch.stack(of_views, dim=1).cpu().numpy()[readable].astype(HALF)
            )
            done += len(rows)
        file.path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(file.path, file.key + features.tobytes())
