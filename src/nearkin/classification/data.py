"""What a classification is about: images, the classes of some of them, and what is held out."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from nearkin.config import ClassifyConfig
from nearkin.data.images import Images
from nearkin.data.labels import class_names, numbered
from nearkin.data.notes import Note, lines, named
from nearkin.data.split import Split, trained_or_scored
from nearkin.errors import DataError
from nearkin.labels.known import keep_few, label_images
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.run.data import hold_out, learnable, open_usable
from nearkin.run.folder import RunFolder
from nearkin.types import UNLABELED


@dataclass(frozen=True, eq=False)
class LabeledData:
    """Images with their split. The classes to learn come first among all classes of the images."""

    parts: Split
    num_classes: int  # Classes with training images; test images may have others, too

    @property
    def images(self) -> Images:
        """All images, those without a label among them."""
        return self.parts.images

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes to learn."""
        return self.images.classes[: self.num_classes]

    @property
    def train_rows(self) -> Int64[np.ndarray, " train"]:
        """The images to learn from."""
        return np.flatnonzero(~self.parts.held_out & (self.images.labels != UNLABELED))

    @property
    def test_rows(self) -> Int64[np.ndarray, " test"]:
        """The images to score."""
        return np.flatnonzero(self.parts.held_out & (self.images.labels != UNLABELED))

    @property
    def train_labels(self) -> Int64[np.ndarray, " images"]:
        """The classes of the images to learn from, `UNLABELED` for all others."""
        return np.where(self.parts.held_out, UNLABELED, self.images.labels)

    @property
    def sizes(self) -> dict[str, int]:
        """How many images are learned from and scored, and how many have no label."""
        train, test = len(self.train_rows), len(self.test_rows)
        return {"train": train, "test": test, "unlabeled": len(self.images) - train - test}

    def lines(self) -> Iterator[str]:
        """Describe the data for the log."""
        images, (train, test, unlabeled) = self.images, self.sizes.values()
        counts = np.bincount(images.labels[self.train_rows], minlength=self.num_classes)
        each = " to ".join(map(str, sorted({counts.min(), counts.max()})))
        bad = f"; {len(images.bad)} unreadable, see bad_files.csv" if images.bad else ""
        yield (
            f"labels {count(train, 'image')} of {count(self.num_classes, 'class')} to learn from, "
            f"{each} of each; {test} labeled images held out for scoring; {unlabeled} without a "
            f"label{bad}"
        )
        yield from lines(images.notes)
        single = [self.classes[number] for number in np.flatnonzero(counts == 1)]
        if single:
            yield (
                f"warning: {count(len(single), 'class')} with one training image, such as "
                f"{named(single)}: nothing tells how well they are learned; label another"
            )
        unseen = images.classes[self.num_classes :]
        if unseen:
            yield (
                f"warning: {count(len(unseen), 'class')} of test images without a training "
                f"image, such as {named(unseen)}: they count as wrong"
            )

    def without(self, bad_rows: Collection[int], notes: Iterable[Note]) -> "LabeledData":
        """Return the same images less those that turned out unreadable, with notes on them."""
        return _numbered(self.parts.without(bad_rows, notes)) if bad_rows else self


def open_labeled_data(
    data: Any,
    config: ClassifyConfig,
    on_progress: ProgressCallback = ignore_progress,
    folder: RunFolder | None = None,
    resumed: RunFolder | None = None,
) -> LabeledData:
    """Open the data, find the class of each image that has one, and hold images out.

    `folder` is that of a new run, see `open_usable`; `resumed` is the run that goes on.

    Raises:
        DataError: If there are not two classes with a training image.
    """
    images = open_usable(data, config, on_progress, folder)
    if config.labeled:
        images = label_images(images, config.labeled)
    if not images.classes:
        raise DataError(
            "no image has a label; give --labels TABLE, --labels folders or --labeled PATH"
        )
    images = trained_or_scored(images)
    return _numbered(keep_few(learnable(hold_out(images, config, on_progress, resumed))))


def _numbered(split: Split) -> LabeledData:
    """Number the classes to learn before those that only test images have."""
    images = split.images
    train = images.labels[split.train_rows]
    present = np.unique(train[train != UNLABELED])
    if len(present) < 2:
        have = "no training image has a label"
        if len(present):
            have = f"all labeled training images are {images.classes[present[0]]!r}"
        raise DataError(f"{have}; label images of two classes or more")
    learned = [images.classes[label] for label in present.tolist()]
    classes, labels = numbered(class_names(images), learned)
    renumbered = replace(images, labels=labels, classes=classes)
    return LabeledData(replace(split, images=renumbered), len(learned))
