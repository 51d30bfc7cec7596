"""The pictures of a discovery: which come with a known class, and which are held out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import DiscoverConfig
from nearkin.data.images import Images, open_images
from nearkin.data.parts import Parts, divide, refuse_bad
from nearkin.discovery.accept import accept
from nearkin.discovery.labeled import check_disjoint, label_pictures, truth_labels
from nearkin.distributed import num_processes
from nearkin.errors import UsageError
from nearkin.pace import Tell, nobody
from nearkin.run.folder import RunFolder, data_name
from nearkin.types import UNKNOWN

USUAL_BATCH: Final = 128


@dataclass(frozen=True, eq=False)
class Material:
    """Pictures, what is known of them, and what is true of them.

    `parts.images` carries the known labels and no others.
    """

    parts: Parts
    own: Bool[np.ndarray, " images"]
    """Whether a picture is one of the data, and not a labeled one from outside."""
    truth: Int64[np.ndarray, " images"] | None
    """Classes, for scoring only; the known ones have their numbers, others come after them."""
    names: tuple[str, ...]
    """Of all true classes, or of the known ones if there is no truth."""
    notes: tuple[str, ...]

    @property
    def images(self) -> Images:
        """All pictures."""
        return self.parts.images

    @property
    def label(self) -> Int64[np.ndarray, " images"]:
        """Each picture's known class, `UNKNOWN` for the others."""
        return self.images.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the known classes."""
        return self.images.classes

    def learned(self) -> Bool[np.ndarray, " images"]:
        """Which pictures are learned from."""
        learned = np.zeros(len(self.images), bool)
        learned[self.parts.train_rows] = True
        return learned

    def lines(self) -> Iterator[str]:
        """What there is, for people."""
        labeled = int((self.label != UNKNOWN).sum())
        outside = int((~self.own).sum())
        added = f", {outside} of them from outside the data" if outside else ""
        bad = f"; {len(self.images.bad)} unreadable, see bad_files.csv" if self.images.bad else ""
        yield (
            f"known  {labeled} pictures of {len(self.classes)} classes{added}; "
            f"{len(self.images) - labeled} without a label; {len(self.parts.test_rows)} held out "
            f"for scoring{bad}"
        )
        yield from self.notes


def open_material(
    data: Any, config: DiscoverConfig, listed: Path | None = None, tell: Tell = nobody
) -> Material:
    """Open the data and find out what is known of each picture.

    The pictures that an earlier run held out are held out again, if it had the same data.

    Args:
        data: What `open_images` takes.
        config: Settings.
        listed: The file to list unreadable pictures in.
        tell: Hears how far the looks at all files are.

    Raises:
        DataError: If the pictures or the labels cannot be used.
        UsageError: If the settings contradict each other.
    """
    opened = open_images(data, full=config.scan == "full", tell=tell)
    refuse_bad(opened, config.max_bad, listed)
    labeled = label_pictures(opened, config.labeled, config.known)
    if config.accept:
        labeled = accept(labeled, Path(config.accept))
    truth, names = None, labeled.classes
    if config.truth:
        truth, names = truth_labels(labeled.images, config.truth, opened, labeled.classes)
        check_disjoint(truth, labeled.label, names, config.mode)
    parts = divide(labeled.images, *division(data, config), tell)
    return Material(parts, labeled.own, truth, names, (*opened.notes, *labeled.notes))


def division(data: Any, config: DiscoverConfig) -> tuple[float, int]:
    """The share that is held out and the seed that decides which pictures these are."""
    run = RunFolder(Path(config.from_run))
    if config.from_run and run.config.exists():
        earlier, its_data = run.settings()
        if its_data == data_name(data):
            return earlier.val, earlier.seed
    return config.val, config.seed


def batch_size(material: Material, config: DiscoverConfig) -> int:
    """Pictures per step in the stages that learn from labels, as far as there are enough.

    Raises:
        UsageError: If there are fewer, or processes that share a network cannot divide them.
    """
    count, processes = len(material.parts.train_rows), num_processes(config.devices)
    batch = min(USUAL_BATCH, count) if config.batch_size == "auto" else config.batch_size
    if batch > count:
        raise UsageError(
            f"--batch-size {batch} is more than the {count} pictures; give at most that"
        )
    if config.trained != "top" and batch % processes:
        raise UsageError(
            f"--batch-size {batch} cannot be divided evenly among {processes} processes; give a "
            f"multiple of {processes}"
        )
    return batch


def without(material: Material, bad: set[int]) -> Material:
    """The same pictures less those that turned out unreadable."""
    if not bad:
        return material
    keep = np.setdiff1d(np.arange(len(material.images)), sorted(bad))
    place = np.full(len(material.images), UNKNOWN)
    place[keep] = np.arange(len(keep))
    train, test = (place[rows] for rows in (material.parts.train_rows, material.parts.test_rows))
    parts = Parts(material.images.subset(keep), train[train >= 0], test[test >= 0])
    truth = None if material.truth is None else material.truth[keep]
    return replace(material, parts=parts, own=material.own[keep], truth=truth)
