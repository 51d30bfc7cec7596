"""What a discovery is about: images, known classes, and how many novel ones to find."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import DiscoverConfig
from nearkin.data.images import Images
from nearkin.data.labels import spellings
from nearkin.data.notes import Note, lines, named
from nearkin.data.split import Split, trained_or_scored
from nearkin.discovery.rounds import Accepted, accept, accepted
from nearkin.discovery.task import DiscoveryTask, Mode
from nearkin.errors import DataError, UsageError
from nearkin.labels.known import keep_few, label_images, own_images
from nearkin.labels.truth import check_disjoint, truth_labels
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.run.auto import check_batch
from nearkin.run.data import hold_out, learnable, open_usable
from nearkin.run.folder import RunFolder
from nearkin.run.options import method_options
from nearkin.types import UNLABELED

BATCH_SIZE: Final = 128
FEWEST: Final = 4  # Unlabeled images to count classes of


@dataclass(frozen=True, eq=False)
class DiscoveryData:
    """Images with their split, their known classes and their truth."""

    parts: Split  # `parts.images` carries the known labels and no others
    truth: Int64[np.ndarray, " images"] | None
    """True classes, for scoring only; known ones keep their numbers, others come after them."""
    names: tuple[str, ...]  # Of all true classes, or of the known ones if there is no truth
    accepted: Accepted
    """What comes from an earlier discovery, and what unlabeled images cannot be."""

    @property
    def images(self) -> Images:
        """All images."""
        return self.parts.images

    @property
    def label(self) -> Int64[np.ndarray, " images"]:
        """Known classes, `UNLABELED` for images without one."""
        return self.images.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the known classes."""
        return self.images.classes

    def excluded(self, num_classes: int) -> Bool[np.ndarray, "images classes"]:
        """Return which classes, of the known and the novel ones, images are known not to have."""
        mask = np.zeros((len(self.images), num_classes), bool)
        for number, name in enumerate(self.classes):
            if name in self.accepted.excluded:
                mask[self.label == UNLABELED, number] = True
        return mask

    def lines(self) -> Iterator[str]:
        """Describe the data for the log."""
        labeled = int((self.label != UNLABELED).sum())
        outside = int((~own_images(self.images)).sum())
        added = f", {outside} of them from outside the data" if outside else ""
        bad = f"; {len(self.images.bad)} unreadable, see bad_files.csv" if self.images.bad else ""
        yield (
            f"known  {labeled} images of {len(self.classes)} classes{added}; "
            f"{len(self.images) - labeled} without a label; {len(self.parts.test_rows)} held out "
            f"for scoring{bad}"
        )
        counts = np.bincount(self.label[self.label != UNLABELED])
        single = [self.classes[number] for number in np.flatnonzero(counts == 1)]
        if single:
            yield (
                f"warning: {len(single)} of {len(counts)} known classes have one image only, "
                f"such as {named(single)}"
            )
        yield from lines(self.images.notes)

    def task(self, mode: Mode) -> DiscoveryTask:
        """Return what everything that trains is told, as yet without novel classes."""
        label = self.label.copy()
        # Known classes are scored on held-out images, so their labels may train nothing.
        label[self.parts.test_rows] = UNLABELED
        return DiscoveryTask(label, self.parts.train_rows, len(self.classes), 0, mode)

    def pretraining_parts(self) -> Split:
        """Return the split of the data alone, without labels, for the first stage."""
        unlabeled = replace(self.images, labels=np.full(len(self.images), UNLABELED), classes=())
        outside = np.flatnonzero(~own_images(unlabeled))
        return replace(self.parts, images=unlabeled).without(outside.tolist())

    def without(self, bad_rows: Collection[int], notes: Iterable[Note]) -> "DiscoveryData":
        """Return the same images less those that turned out unreadable, with notes on them."""
        truth = None if self.truth is None else np.delete(self.truth, sorted(bad_rows))
        return replace(self, parts=self.parts.without(bad_rows, notes), truth=truth)


def open_discovery_data(
    data: Any,
    config: DiscoverConfig,
    on_progress: ProgressCallback = ignore_progress,
    folder: RunFolder | None = None,
    resumed: RunFolder | None = None,
) -> DiscoveryData:
    """Open the data, find the known class of each image, and hold images out.

    `folder` is that of a new run, see `open_usable`; `resumed` is the run that goes on, or whose
    images are opened again. What it has noted counts, of the labels that it accepts and of what it
    holds out: names may have been changed since, and the runs that it started from may be gone.
    """
    opened = open_usable(data, config, on_progress, folder)
    images = trained_or_scored(label_images(opened, config.labeled, config.known))
    parts = learnable(hold_out(images, config, on_progress, resumed))
    given = Accepted()
    if resumed is not None and resumed.excluded.exists():
        given = Accepted.read(resumed)
    elif config.accept:
        given = accepted(Path(config.accept), parts, config.labeled or "the data")
    elif config.mode == "ncd":
        given = Accepted(excluded=parts.images.classes)
    images = accept(parts.images, given)
    images = images.noted(*(n for n in spellings(images.classes) if n not in images.notes))
    parts = keep_few(replace(parts, images=images))
    truth, names = None, images.classes
    if config.truth:
        truth, names, notes = truth_labels(images, config.truth, opened)
        if config.mode == "ncd":
            check_disjoint(images, truth)
        parts = replace(parts, images=images.noted(*notes))
    return DiscoveryData(parts, truth, names, given)


def check_sizes(dataset: DiscoveryData, config: DiscoverConfig) -> None:
    """Refuse settings that ask for more images than there are."""
    task = dataset.task(config.mode)
    unlabeled = len(task.unlabeled)
    if not unlabeled:
        raise DataError(
            f"all {len(task.rows)} images to learn from have a label, so nothing is left to "
            "discover; give images without a label, fewer --known classes, or take `nearkin "
            "classify`"
        )
    least = FEWEST if config.classes == "auto" else config.classes
    if unlabeled < least:
        raise DataError(
            f"{count(unlabeled, 'unlabeled image')} to learn from, and --classes {config.classes} "
            f"takes {least}; give another number of classes, or more images"
        )
    without = np.setdiff1d(np.arange(task.num_known), task.label[task.rows])
    if len(without):
        names = named(dataset.classes[number] for number in without.tolist())
        raise DataError(
            f"all labeled images of {count(len(without), 'known class')} are held out ({names}) "
            "or cannot be read; label others of the same classes"
        )
    half = max(1, batch_size(task, config) // 2)
    method_options(task.method, config.options, max(2, unlabeled), half)


def batch_size(task: DiscoveryTask, config: DiscoverConfig) -> int:
    """Return the batch size of the stages that learn from labels, or refuse the requested one."""
    most = task.largest_batch
    batch = min(BATCH_SIZE, most) if config.batch_size == "auto" else config.batch_size
    check_batch(batch, len(task.rows), 1)
    if batch > most:
        raise UsageError(
            f"--batch-size {batch} is more than a step can have: {len(task.unlabeled)} unlabeled "
            f"images and at most as many labeled ones; give at most {most}"
        )
    return batch
