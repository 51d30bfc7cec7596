"""What a discovery is about: images, known classes, and how many novel ones to find."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Int64

from nearkin.config import DiscoverConfig
from nearkin.data.images import Images
from nearkin.data.labels import class_names, composed, numbered, spellings
from nearkin.data.notes import Note, lines, named, noted
from nearkin.data.split import Split
from nearkin.data.tables import Resolver
from nearkin.distributed import num_processes
from nearkin.errors import DataError, UsageError
from nearkin.labels.known import label_images, own_images, with_copies
from nearkin.labels.truth import check_disjoint, truth_labels
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.run.auto import check_batch
from nearkin.run.data import hold_out, open_usable
from nearkin.run.folder import RunFolder
from nearkin.run.named import image_labels, named_classes, read_edited
from nearkin.types import UNKNOWN

BATCH_SIZE: Final = 128
FEWEST: Final = 4  # Unlabeled images to count classes of
Mode = Literal["gcd", "ncd"]


@dataclass(frozen=True, eq=False)
class DiscoveryTask:
    """Images to learn classes from, as seen by everything that trains.

    Images of hidden classes have no label here, whatever else is known about them.
    """

    label: Int64[np.ndarray, " images"]  # Known classes of all images, `UNKNOWN` for the others
    rows: Int64[np.ndarray, " learned"]  # The images to learn from
    num_known: int
    num_novel: int

    @property
    def labeled(self) -> Int64[np.ndarray, " labeled"]:
        """The rows of images with a known class."""
        return self.rows[np.flatnonzero(self.label[self.rows] != UNKNOWN)]

    @property
    def unlabeled(self) -> Int64[np.ndarray, " unlabeled"]:
        """The rows of the others."""
        return self.rows[np.flatnonzero(self.label[self.rows] == UNKNOWN)]


def accepted_classes(run: Path) -> dict[str, str]:
    """Return the names that the user gave to the classes of core images, by image path.

    Only images flagged as core are sure enough to train on. Two classes of one name become one.
    """
    folder = RunFolder(run)
    if not (folder.clusters.exists() and folder.assignments.exists()):
        raise UsageError(f"{run} is no finished discovery; --accept wants one")
    names = named_classes(folder)
    return {
        row["path"]: names[row["cluster"]]
        for row in read_edited(folder.assignments, ("path", "cluster", "flag"))
        if row["flag"] == "core" and row["cluster"] in names
    }


def accepted_labels(run: Path, parts: Split, labeled: str) -> tuple[dict[str, str], list[Note]]:
    """Return the labels that an earlier discovery gives a next one, by image path; and notes.

    Those that it was given itself by the one before it; those of single images; and the names of
    classes, for core images. A name is a guess about an image: it goes behind any label, and
    labels none that is held out, since it would be scored as if it were true.

    Args:
        run: The earlier discovery.
        parts: The images with the labels that they have by now.
        labeled: Where these labels come from, for messages.
    """
    folder, images = RunFolder(run), parts.images
    learned = {images.names[row] for row in parts.train_rows.tolist()}
    of_classes, of_images = accepted_classes(run), image_labels(folder)
    if not (of_images or named_classes(folder)):
        raise UsageError(
            f"{folder.clusters} names no class; write names in the column name first, or labels "
            f"of single images in {folder.to_label.name}"
        )
    own = dict(zip(images.names, class_names(images), strict=True))
    find = Resolver(folder.to_label, images.names).named
    of_images = {find(path) or path: composed(label) for path, label in of_images.items()}
    for path, label in of_images.items():
        if own.get(path) and own[path] != label:
            raise DataError(
                f"{path!r} is labeled {own[path]!r} by {labeled} and {label!r} in "
                f"{folder.to_label}; keep one of them"
            )
    merged, _ = with_copies(images, [of_images.get(name, "") for name in images.names])
    of_images |= {name: label for name, label in zip(images.names, merged, strict=True) if label}
    of_earlier = read_accepted(folder.accepted) if folder.accepted.exists() else {}
    guessed = {path: name for path, name in of_classes.items() if path in learned}
    every = {**guessed, **of_earlier, **of_images}
    labels = {path: label for path, label in every.items() if own.get(path) == ""}
    if not labels:
        raise DataError(
            f"{run} labels none of these images: no image of a class with a name is flagged as "
            f"core, or they are others; label single images in {folder.to_label.name}"
        )
    return labels, _accepted_notes(folder, labels, every, own)


def _accepted_notes(
    folder: RunFolder, labels: Mapping[str, str], every: Mapping[str, str], own: Mapping[str, str]
) -> list[Note]:
    """Describe the labels that are accepted, and what was named or labeled in vain."""
    names = set(labels.values())
    text = f"labels of {len(labels)} images of {len(names)} classes, accepted from {folder.path}"
    notes = [Note("guessed", text, len(labels))]
    unsure = sorted(set(named_classes(folder).values()) - names - set(own.values()))
    text = (
        "named classes of which no image is flagged as core; they stay unknown, unless you label "
        f"images of them in {folder.to_label.name}"
    )
    notes += noted("left out", unsure, text)
    lost = sorted(every.keys() - own.keys())
    text = f"images labeled in {folder.path} that are not among these"
    return notes + noted("left out", lost, text)


def read_accepted(path: Path) -> dict[str, str]:
    """Return the labels that a discovery was given by the one before it, by image path."""
    return {row["path"]: row["label"] for row in read_edited(path, ("path", "label"))}


def accept(images: Images, labels: Mapping[str, str]) -> Images:
    """Label more images. Known classes keep their numbers."""
    known = class_names(images)
    every = [own or labels.get(name, "") for name, own in zip(images.names, known, strict=True)]
    classes, numbers = numbered(every, images.classes)
    return replace(images, labels=numbers, classes=classes)


@dataclass(frozen=True, eq=False)
class DiscoveryData:
    """Images with their split, their known classes and their truth."""

    parts: Split  # `parts.images` carries the known labels and no others
    truth: Int64[np.ndarray, " images"] | None
    """True classes, for scoring only; known ones keep their numbers, others come after them."""
    names: tuple[str, ...]  # Of all true classes, or of the known ones if there is no truth
    accepted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that come from an earlier discovery, by image path."""

    @property
    def images(self) -> Images:
        """All images."""
        return self.parts.images

    @property
    def label(self) -> Int64[np.ndarray, " images"]:
        """Known classes, `UNKNOWN` for images without one."""
        return self.images.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the known classes."""
        return self.images.classes

    def lines(self) -> Iterator[str]:
        """Describe the data for the log."""
        labeled = int((self.label != UNKNOWN).sum())
        outside = int((~own_images(self.images)).sum())
        added = f", {outside} of them from outside the data" if outside else ""
        bad = f"; {len(self.images.bad)} unreadable, see bad_files.csv" if self.images.bad else ""
        yield (
            f"known  {labeled} images of {len(self.classes)} classes{added}; "
            f"{len(self.images) - labeled} without a label; {len(self.parts.test_rows)} held out "
            f"for scoring{bad}"
        )
        counts = np.bincount(self.label[self.label != UNKNOWN])
        single = [self.classes[number] for number in np.flatnonzero(counts == 1)]
        if single:
            yield (
                f"warning: {len(single)} of {len(counts)} known classes have one image only, "
                f"such as {named(single)}"
            )
        yield from lines(self.images.notes)

    def pretraining_parts(self) -> Split:
        """Return the split of the data alone, without labels, for the first stage."""
        unlabeled = replace(self.images, labels=np.full(len(self.images), UNKNOWN), classes=())
        outside = np.flatnonzero(~own_images(unlabeled))
        return replace(self.parts, images=unlabeled).without(outside.tolist())

    def without(self, bad_rows: set[int]) -> "DiscoveryData":
        """Return the same images less those that turned out unreadable."""
        if not bad_rows:
            return self
        truth = None if self.truth is None else np.delete(self.truth, sorted(bad_rows))
        return replace(self, parts=self.parts.without(bad_rows), truth=truth)


def open_discovery_data(
    data: Any,
    config: DiscoverConfig,
    on_progress: ProgressCallback = ignore_progress,
    on_open: Callable[[Images], None] = lambda _: None,
    resumed: RunFolder | None = None,
) -> DiscoveryData:
    """Open the data, find the known class of each image, and hold images out.

    `on_open` gets the images before any are refused. `resumed` is the run that goes on, or whose
    images are opened again. What it has noted counts, of the labels that it accepts and of what it
    holds out: names may have been changed since, and the runs that it started from may be gone.
    """
    opened = open_usable(data, config, on_progress, on_open)
    images = label_images(opened, config.labeled, config.known)
    parts = hold_out(images, config, on_progress, resumed)
    labels = dict[str, str]()
    if resumed is not None and resumed.accepted.exists():
        labels = read_accepted(resumed.accepted)
    elif config.accept:
        where = config.labeled or "the data"
        labels, notes = accepted_labels(Path(config.accept), parts, where)
        parts = replace(parts, images=parts.images.noted(*notes))
    images = accept(parts.images, labels)
    images = images.noted(*(n for n in spellings(images.classes) if n not in images.notes))
    truth, names = None, images.classes
    if config.truth:
        truth, names = truth_labels(images, config.truth, opened)
        if config.mode == "ncd":
            check_disjoint(images, truth)
    return DiscoveryData(replace(parts, images=images), truth, names, labels)


def check_sizes(dataset: DiscoveryData, config: DiscoverConfig) -> None:
    """Refuse settings that ask for more images than there are."""
    rows = dataset.parts.train_rows
    unlabeled = int((dataset.label[rows] == UNKNOWN).sum())
    if not unlabeled:
        raise DataError(
            f"all {len(rows)} images to learn from have a label, so nothing is left to discover; "
            "give images without a label, or take `nearkin classify`"
        )
    if config.classes != "auto" and config.classes > unlabeled:
        raise DataError(
            f"{config.classes} novel classes among {unlabeled} unlabeled images; give fewer "
            "with --classes, or more images"
        )
    if config.classes == "auto" and unlabeled < FEWEST:
        raise DataError(
            f"{unlabeled} unlabeled images to learn from, and counting classes takes {FEWEST}; "
            "say how many classes there are with --classes, or give more images"
        )
    without = np.setdiff1d(np.arange(len(dataset.classes)), dataset.label[rows])
    if len(without):
        names = named(dataset.classes[number] for number in without.tolist())
        raise DataError(
            f"all labeled images of {count(len(without), 'known class')} are held out ({names}) "
            "or cannot be read; label others of the same classes"
        )
    batch_size(dataset, config)


def batch_size(dataset: DiscoveryData, config: DiscoverConfig) -> int:
    """Return the batch size of the stages that learn from labels, or refuse the requested one."""
    num_images, processes = len(dataset.parts.train_rows), num_processes(config.devices)
    batch = min(BATCH_SIZE, num_images) if config.batch_size == "auto" else config.batch_size
    # On top of a frozen encoder the first process trains alone, and `auto` may come to that.
    check_batch(batch, num_images, 1 if config.train_layers in ("auto", "top") else processes)
    return batch
