"""What a discovery is about: images, known classes, and how many novel ones to find."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import basename
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.images import Images, open_images
from nearkin.data.labels import Annotations, match, read_table
from nearkin.data.recognize import (
    class_names,
    copies,
    examples,
    is_table,
    read_classes,
    recognize,
    union,
)
from nearkin.data.split import Parts, divide, refuse_bad
from nearkin.distributed import num_processes
from nearkin.errors import DataError, UsageError
from nearkin.pace import ProgressCallback, ignore_progress
from nearkin.run.data import write_bad_files
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.settings.options import known_classes, known_labels
from nearkin.tables import read_csv
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class DiscoveryTask:
    """Images to learn classes from.

    A hidden class is unlabeled here, whatever else is known about it.
    """

    label: Int64[np.ndarray, " images"]
    """Known classes of all images, `UNKNOWN` for the others."""
    rows: Int64[np.ndarray, " learned"]
    """The images to learn from."""
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


@dataclass(frozen=True, eq=False)
class Labeled:
    """Images, some of which come with a known class."""

    images: Images
    """The data and, among them, the labeled images from outside. Their labels are the known
    ones and no others, so that nothing that comes after can see what is hidden."""
    own: Bool[np.ndarray, " images"]
    """Whether an image is one of the data, not added from outside."""
    notes: tuple[str, ...] = ()
    """What the user should know about the labels, one line each."""

    @property
    def label(self) -> Int64[np.ndarray, " images"]:
        """Each image's known class, from 0, or `UNKNOWN`."""
        return self.images.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the known classes, in order."""
        return self.images.classes


def label_images(images: Images, labeled: str, known: str) -> Labeled:
    """Find out which images come with a known class, and add those that the data do not have.

    Args:
        images: The data.
        labeled: Class folders, an archive of them, arrays with labels, or a table with the
            columns path and label. A labeled image is one of the data if its path says so, or
            if the data have exact copies of it, which are then all labeled. All others are
            added: their names are their absolute paths.
        known: Instead: names, after commas, of classes whose labels in the data count. The
            labels of a benchmark may contradict each other, so copies are not looked for.

    Raises:
        UsageError: Both or none of the two are given, or `known` cannot be carried out.
        DataError: What is labeled cannot be read or does not exist, gives one image two
            classes, knows fewer than two classes, or leaves nothing to discover.
    """
    if bool(labeled) == bool(known):
        raise UsageError("say which classes are known: either --labeled PATH, or --known A,B")
    found = _by_name(images, known) if known else _by_image(images, labeled)
    counts = np.bincount(found.label[found.label != UNKNOWN])
    single = [found.classes[number] for number in np.flatnonzero(counts == 1)]
    if not single:
        return found
    note = f"{len(single)} of {len(counts)} known classes have one image only"
    return replace(found, notes=(*found.notes, f"{note}, such as {examples(single)}"))


def _by_name(images: Images, known: str) -> Labeled:
    config = TrainConfig(method="ncl", known=known)
    names = known_classes(config)
    label = known_labels(config, images)
    if label is None or len(names) < 2:
        raise UsageError(f"--known {known}: name at least two classes")
    if (label != UNKNOWN).all():
        raise UsageError("--known names all classes, so none is left to discover; omit some")
    named = replace(images, labels=label, classes=tuple(names))
    return Labeled(named, np.ones(len(images), bool))


def _by_image(images: Images, labeled: str) -> Labeled:
    found = recognize(images, labeled)
    added = {found.prefix + name for name in found.outside.names}
    everything = union(images, found.outside, found.prefix)
    own = np.array([name not in added for name in everything.names], bool)
    said = [found.classes.get(name, "") for name in everything.names]
    merged, keep = _merge_copies(everything, said, own)
    classes, numbers = Annotations([merged[row] for row in keep], [], []).numbered()
    if len(classes) < 2:
        raise DataError(
            f"{labeled}: usable images are labeled as {examples(classes) or 'nothing'}; "
            "give at least two known classes"
        )
    if (numbers != UNKNOWN).all():
        raise DataError(
            f"{labeled}: labels all {len(numbers)} images, so nothing is left to discover; "
            "give images without a label, too"
        )
    kept = everything.subset(keep) if added or found.outside.bad else images
    notes = []
    lost = sorted(found.classes.keys() - set(everything.names))
    if lost:
        notes.append(f"{len(lost)} labeled files cannot be used, such as {examples(lost)}")
    spread = sum(merged[row] != said[row] for row in np.flatnonzero(own))
    if spread:
        notes.append(f"{spread} images of the data are labeled as exact copies of labeled ones")
    return Labeled(replace(kept, labels=numbers, classes=classes), own[keep], tuple(notes))


def _merge_copies(
    images: Images, said: Sequence[str], own: Bool[np.ndarray, " images"]
) -> tuple[list[str], Int64[np.ndarray, " kept"]]:
    """Label all exact copies of labeled images, and leave those out that need not be added.

    Args:
        images: All images.
        said: The class of each, '' for none.
        own: Whether they are of the data.

    Returns:
        The class of each image, copies included, and the rows to keep.
    """
    merged, contrary, spare = list(said), list[str](), set[int]()
    for group in copies(images, [row for row, label in enumerate(said) if label]):
        classes = {said[row]: row for row in group if said[row]}
        if len(classes) > 1:
            pair = [f"{images.names[row]!r} ({label!r})" for label, row in classes.items()]
            contrary.append(" and ".join(pair[:2]))
        first = next((row for row in group if own[row]), group[0])
        spare.update(row for row in group if row != first and not own[row])
        for row in group:
            merged[row] = min(classes)
    if contrary:
        raise DataError(
            f"{len(contrary)} images are labeled as two classes, such as {contrary[0]}, "
            "which are exact copies; keep one of them"
        )
    return merged, np.array([row for row in range(len(images)) if row not in spare], np.int64)


def truth_labels(
    images: Images, truth: str, data_images: Images, classes: Sequence[str]
) -> tuple[Int64[np.ndarray, " images"], tuple[str, ...]]:
    """What is said of the classes of all images, known and hidden; for scoring only.

    Args:
        images: Those of a `Labeled`.
        truth: "data" for the labels that the data carry; a table with the columns path and
            label, paths as in the data; or class folders, an archive of them or arrays, whose
            images have the same paths as the data, or the same but for the class folder.
        data_images: The data, with the labels that they carry.
        classes: Names of the known classes.

    Returns:
        Each image's class, and the names of all classes: the known ones keep their numbers,
        and others come after them. `UNKNOWN` for images of which nothing is said, and for
        those that were added to the data.

    Raises:
        DataError: The truth cannot be read, says nothing of any image, contradicts itself or
            calls the images of a known class by other names.
    """
    said = _truth(truth, data_images)
    found = [said.get(name, "") for name in images.names]
    others, _ = Annotations([label for label in found if label not in classes], [], []).numbered()
    names = (*classes, *others)
    number = {name: number for number, name in enumerate(names)} | {"": UNKNOWN}
    numbers = np.array([number[label] for label in found], np.int64)
    for known, name in enumerate(classes):
        called = numbers[(images.labels == known) & (numbers != UNKNOWN)]
        if len(called) and (called != known).all():
            raise DataError(
                f"--truth {truth}: calls the images of the known class {name!r} "
                f"{examples(names[other] for other in np.unique(called))}; use one name for both"
            )
    return numbers, names


def _truth(truth: str, data: Images) -> Mapping[str, str]:
    """The class of each image by its name in the data."""
    if truth == "data":
        if not data.classes:
            raise DataError("--truth data: the data carry no labels; give a table or folders")
        return dict(zip(data.names, class_names(data), strict=True))
    if is_table(truth):
        table = Path(truth).expanduser()
        rows, _ = match(table, read_table(table, ("path", "label")), data.names)
        return {name: row.label for name, row in rows.items()}
    images, said = read_classes(truth)
    own = set(data.names)
    found: dict[str, str] = {}
    for written, label in zip(images.names, said, strict=True):
        name = written if written in own else basename(written)
        if name in own and found.setdefault(name, label) != label:
            raise DataError(
                f"--truth {truth}: {name!r} is of the classes {found[name]!r} and {label!r}; "
                "give a table with the columns path and label"
            )
    if not found:
        raise DataError(
            f"--truth {truth}: has {examples(images.names)}, but the data have "
            f"{examples(data.names)}; keep the same paths"
        )
    return found


def check_disjoint(
    truth: Int64[np.ndarray, " images"],
    label: Int64[np.ndarray, " images"],
    names: Sequence[str],
    mode: str,
) -> None:
    """Refuse, in mode ncd, unlabeled images that are of a known class.

    Args:
        truth: Each image's class, or `UNKNOWN`.
        label: Each image's known class, or `UNKNOWN`.
        names: Those of all classes.
        mode: ncd for classes that are either known or novel, gcd for any.

    Raises:
        DataError: There are some, by the truth; the number for each class.
    """
    hidden = truth[(label == UNKNOWN) & (truth != UNKNOWN)]
    classes, counts = np.unique(hidden[np.isin(hidden, label)], return_counts=True)
    if mode == "gcd" or len(classes) == 0:
        return
    found = zip(classes.tolist(), counts.tolist(), strict=True)
    listed = ", ".join(f"{names[number]!r} ({count})" for number, count in found)
    raise DataError(
        f"{counts.sum()} unlabeled images are of known classes, by the truth: {listed}; "
        "take --mode gcd, or label them"
    )


def accepted(run: Path) -> dict[str, str]:
    """The class of every image that is sure to be of a class with a name, by its path.

    A class has a name if there is one in the column name of clusters.csv; an image is sure if
    it is flagged as core. Two classes of one name become one.

    Raises:
        UsageError: If this is no finished discovery, or no class has a name.
    """
    folder = RunFolder(run)
    if not (folder.clusters.exists() and folder.assignments.exists()):
        raise UsageError(f"{run} is no finished discovery; --accept wants one")
    named = {row["cluster"]: row["name"].strip() for row in read_csv(folder.clusters)}
    if not any(named.values()):
        raise UsageError(f"{folder.clusters} names no class; write names in the column name first")
    return {
        row["path"]: named[row["cluster"]]
        for row in read_csv(folder.assignments)
        if row["flag"] == "core" and named.get(row["cluster"])
    }


def accept(labeled: Labeled, run: Path) -> Labeled:
    """Label the images of accepted classes too. Known classes keep their numbers."""
    found, images = accepted(run), labeled.images
    new, _ = Annotations(list(set(found.values()) - set(labeled.classes)), [], []).numbered()
    classes = (*labeled.classes, *new)
    number = {name: position for position, name in enumerate(classes)}
    label = labeled.label.copy()
    for row in np.flatnonzero(label == UNKNOWN).tolist():
        if images.names[row] in found:
            label[row] = number[found[images.names[row]]]
    note = f"{int((label != labeled.label).sum())} images of {len(set(found.values()))} classes "
    note += f"accepted from {run}"
    return replace(
        labeled,
        images=replace(images, labels=label, classes=classes),
        notes=(*labeled.notes, note),
    )


BATCH_SIZE: Final = 128


@dataclass(frozen=True, eq=False)
class DiscoveryData:
    """Images, what is known of them, and what is true of them.

    `parts.images` carries the known labels and no others.
    """

    parts: Parts
    own: Bool[np.ndarray, " images"]
    """Whether an image is one of the data, and not a labeled one from outside."""
    truth: Int64[np.ndarray, " images"] | None
    """Classes, for scoring only; the known ones have their numbers, others come after them."""
    names: tuple[str, ...]
    """Of all true classes, or of the known ones if there is no truth."""
    notes: tuple[str, ...]

    @property
    def images(self) -> Images:
        """All images."""
        return self.parts.images

    @property
    def label(self) -> Int64[np.ndarray, " images"]:
        """Each image's known class, `UNKNOWN` for the others."""
        return self.images.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the known classes."""
        return self.images.classes

    def learned(self) -> Bool[np.ndarray, " images"]:
        """Which images are learned from."""
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
            f"known  {labeled} images of {len(self.classes)} classes{added}; "
            f"{len(self.images) - labeled} without a label; {len(self.parts.test_rows)} held out "
            f"for scoring{bad}"
        )
        yield from self.notes


def open_discovery_data(
    data: Any,
    config: DiscoverConfig,
    listed: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> DiscoveryData:
    """Open the data and find out what is known of each image.

    The images that an earlier run held out are held out again, if it had the same data.

    Args:
        data: What `open_images` takes.
        config: Settings.
        listed: The file to list unreadable images in.
        on_progress: Hears how far the looks at all files are.

    Raises:
        DataError: If the images or the labels cannot be used.
        UsageError: If the settings contradict each other.
    """
    opened = open_images(data, full=config.scan == "full", on_progress=on_progress)
    if listed is not None:
        write_bad_files(listed, opened)
    refuse_bad(opened, config.max_bad)
    labeled = label_images(opened, config.labeled, config.known)
    if config.accept:
        labeled = accept(labeled, Path(config.accept))
    truth, names = None, labeled.classes
    if config.truth:
        truth, names = truth_labels(labeled.images, config.truth, opened, labeled.classes)
        check_disjoint(truth, labeled.label, names, config.mode)
    parts = divide(labeled.images, *division(data, config), on_progress)
    return DiscoveryData(parts, labeled.own, truth, names, (*opened.notes, *labeled.notes))


def division(data: Any, config: DiscoverConfig) -> tuple[float, int]:
    """The share that is held out and the seed that decides which images these are."""
    run = RunFolder(Path(config.from_run))
    if config.from_run and run.config.exists():
        earlier, its_data = run.settings()
        if its_data == data_name(data):
            return earlier.val, earlier.seed
    return config.val, config.seed


def pretraining_parts(dataset: DiscoveryData, share: float, seed: int) -> Parts:
    """Return the data, without labels and without labeled images from outside, and their split.

    Workers open and split the data on their own, so this must be the split that they find.
    """
    images = dataset.images
    unlabeled = replace(images, labels=np.full(len(images), UNKNOWN), classes=())
    if dataset.own.all():
        return replace(dataset.parts, images=unlabeled)
    return divide(unlabeled.subset(np.flatnonzero(dataset.own)), share, seed)


def batch_size(dataset: DiscoveryData, config: DiscoverConfig) -> int:
    """Images per step in the stages that learn from labels, as far as there are enough.

    Raises:
        UsageError: If there are fewer, or processes that share a network cannot divide them.
    """
    count, processes = len(dataset.parts.train_rows), num_processes(config.devices)
    batch = min(BATCH_SIZE, count) if config.batch_size == "auto" else config.batch_size
    if batch > count:
        raise UsageError(
            f"--batch-size {batch} is more than the {count} images; give at most that"
        )
    if config.train_layers != "top" and batch % processes:
        raise UsageError(
            f"--batch-size {batch} cannot be divided evenly among {processes} processes; give a "
            f"multiple of {processes}"
        )
    return batch


def without(dataset: DiscoveryData, bad: set[int]) -> DiscoveryData:
    """The same images less those that turned out unreadable."""
    if not bad:
        return dataset
    keep = np.setdiff1d(np.arange(len(dataset.images)), sorted(bad))
    place = np.full(len(dataset.images), UNKNOWN)
    place[keep] = np.arange(len(keep))
    train, test = (place[rows] for rows in (dataset.parts.train_rows, dataset.parts.test_rows))
    parts = Parts(dataset.images.subset(keep), train[train >= 0], test[test >= 0])
    truth = None if dataset.truth is None else dataset.truth[keep]
    return replace(dataset, parts=parts, own=dataset.own[keep], truth=truth)
