"""What a discovery is about: images, known classes, and how many novel ones to find."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import basename
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import ClassifyConfig, DiscoverConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.data.labels import Annotations, class_of, composed, spellings
from nearkin.data.notes import Note, lines, named
from nearkin.data.recognize import (
    Either,
    class_names,
    copies,
    read_classes,
    recognize,
    union,
)
from nearkin.data.split import Split, open_readable, split_images
from nearkin.data.tables import Resolver, file_at, is_table, match
from nearkin.distributed import num_processes
from nearkin.errors import DataError, UsageError
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.run.data import decided
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.named import image_labels, named_classes, read_edited
from nearkin.run.settings import check_batch, known_classes, known_labels
from nearkin.schema import as_typed
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


def label_images(
    images: Images, labeled: str, known: Sequence[str] = (), *, all_labeled: bool = False
) -> Images:
    """Return the data with known classes as their only labels, so nothing sees what is hidden.

    Args:
        images: The data.
        labeled: What `recognize` takes. A labeled image is one of the data if its path says so, or
            if the data have exact copies of it, which are then all labeled. All others are
            added under their absolute paths.
        known: Instead: names of classes whose labels in the data count. The
            labels of a benchmark may contradict each other, so copies are not looked for.
        all_labeled: Whether all images may be labeled, so that none is left to discover.
    """
    if bool(labeled) == bool(known):
        raise UsageError("say which classes are known: either --labeled PATH, or --known A,B")
    return _by_name(images, known) if known else _by_image(images, labeled, all_labeled)


def own_images(images: Images) -> Bool[np.ndarray, " images"]:
    """Whether each image is one of the data, and not a labeled one from outside."""
    added = images.source.added if isinstance(images.source, Either) else frozenset()
    return np.array([name not in added for name in images.names], bool)


def _by_name(images: Images, known: Sequence[str]) -> Images:
    config = TrainConfig(method="ncl", known=tuple(known))
    names, label = known_classes(config), known_labels(config, images)
    if label is None or len(names) < 2:
        raise UsageError(f"--known {as_typed(known)}: name at least two classes")
    if (label != UNKNOWN).all():
        raise UsageError("--known names all classes, so none is left to discover; omit some")
    return replace(images, labels=label, classes=tuple(names))


def _by_image(images: Images, labeled: str, all_labeled: bool) -> Images:
    recognized = recognize(images, labeled)
    everything = union(images, recognized.outside, recognized.prefix)
    own = own_images(everything)
    labels = [composed(recognized.classes.get(name, "")) for name in everything.names]
    merged, keep = _merge_copies(everything, labels, own)
    classes, numbers = Annotations([merged[row] for row in keep], [], []).numbered()
    if len(classes) < 2:
        raise DataError(
            f"{labeled}: usable images are labeled as {named(classes) or 'nothing'}; "
            "give at least two known classes"
        )
    if (numbers != UNKNOWN).all() and not all_labeled:
        raise DataError(
            f"{labeled}: labels all {len(numbers)} images, so nothing is left to discover; "
            "give images without a label, too"
        )
    notes = [*recognized.notes, *spellings(recognized.classes.values())]
    lost = sorted(recognized.classes.keys() - set(everything.names))
    if lost:
        text = f"{len(lost)} labeled files that cannot be used"
        notes.append(Note("left out", text, len(lost), tuple(lost[:3])))
    spread = sum(merged[row] != labels[row] for row in np.flatnonzero(own))
    if spread:
        text = f"{spread} images of the data are labeled as exact copies of labeled ones"
        notes.append(Note("guessed", text, spread))
    outside = len(recognized.outside) + len(recognized.outside.bad)
    used = everything.subset(keep) if outside else images
    return replace(used.noted(*notes), labels=numbers, classes=classes)


def _merge_copies(
    images: Images, labels: Sequence[str], own: Bool[np.ndarray, " images"]
) -> tuple[list[str], Int64[np.ndarray, " rows"]]:
    """Return the class of each image, '' for none, with all exact copies of labeled ones labeled.

    And the rows to keep: not those of copies that need not be added. A copy without its label
    would be held out or discovered although its class is known.
    """
    merged, conflicts, spare = list(labels), list[str](), set[int]()
    for group in copies(images, [row for row, label in enumerate(labels) if label]):
        classes = {labels[row]: row for row in group if labels[row]}
        if len(classes) > 1:
            pair = [f"{images.names[row]!r} ({label!r})" for label, row in classes.items()]
            conflicts.append(" and ".join(pair[:2]))
        first = next((row for row in group if own[row]), group[0])
        spare.update(row for row in group if row != first and not own[row])
        for row in group:
            merged[row] = min(classes)
    if conflicts:
        raise DataError(
            f"{len(conflicts)} images are labeled as two classes, such as {conflicts[0]}, "
            "which are exact copies; keep one of them"
        )
    return merged, np.array([row for row in range(len(images)) if row not in spare], np.int64)


def truth_labels(
    images: Images, truth: str, data_images: Images
) -> tuple[Int64[np.ndarray, " images"], tuple[str, ...]]:
    """Return true classes of all images, known and hidden, for scoring only; and their names.

    Known classes keep their numbers, others come after them. `UNKNOWN` for images without a truth
    and for those that were added to the data.

    Args:
        images: What `label_images` returned.
        truth: "data" for the labels that the data carry; a table with the columns path and
            label, paths as in the data; or class folders, an archive of them or arrays, whose
            images have the same paths as the data, or the same but for the class folder.
        data_images: The data, with the labels that they carry.
    """
    label_of = _truth(truth, data_images)
    numbers, names = _numbered([label_of.get(name, "") for name in images.names], images.classes)
    for known, name in enumerate(images.classes):
        true = numbers[(images.labels == known) & (numbers != UNKNOWN)]
        if len(true) and (true != known).all():
            raise DataError(
                f"--truth {truth}: calls the images of the known class {name!r} "
                f"{named(names[other] for other in np.unique(true))}; use one name for both"
            )
    return numbers, names


def _numbered(
    labels: Sequence[str], known: Sequence[str]
) -> tuple[Int64[np.ndarray, " images"], tuple[str, ...]]:
    """Return labels as numbers, and their names: known ones first, in their order."""
    labels = list(map(composed, labels))
    others, _ = Annotations([label for label in labels if label not in known], [], []).numbered()
    names = (*known, *others)
    number = {name: number for number, name in enumerate(names)} | {"": UNKNOWN}
    return np.array([number[label] for label in labels], np.int64), names


def _truth(truth: str, data: Images) -> Mapping[str, str]:
    """Return the true class of each image by its name in the data."""
    if truth == "data":
        if not data.classes:
            raise DataError("--truth data: the data carry no labels; give a table or folders")
        return dict(zip(data.names, class_names(data), strict=True))
    if is_table(truth):
        rows, _ = match(file_at(truth), data.names, data.source)
        return class_of(rows)[0]
    images, labels = read_classes(truth)
    own = set(data.names)
    label_of: dict[str, str] = {}
    for path, label in zip(images.names, labels, strict=True):
        name = path if path in own else basename(path)
        if name in own and label_of.setdefault(name, label) != label:
            raise DataError(
                f"--truth {truth}: {name!r} is of the classes {label_of[name]!r} and {label!r}; "
                "give a table with the columns path and label"
            )
    if not label_of:
        raise DataError(
            f"--truth {truth}: has {named(images.names)}, but the data have "
            f"{named(data.names)}; keep the same paths"
        )
    return label_of


def check_disjoint(images: Images, truth: Int64[np.ndarray, " images"]) -> None:
    """Refuse unlabeled images whose true class is a known one."""
    hidden = truth[(images.labels == UNKNOWN) & (truth != UNKNOWN)]
    classes, counts = np.unique(hidden[np.isin(hidden, images.labels)], return_counts=True)
    if len(classes):
        pairs = zip(classes.tolist(), counts.tolist(), strict=True)
        listed = ", ".join(f"{images.classes[number]!r} ({size})" for number, size in pairs)
        raise DataError(
            f"{counts.sum()} unlabeled images are of known classes, by the truth: {listed}; "
            "take --mode gcd, or label them"
        )


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
    of_images = {**of_images, **_labels_of_copies(images, of_images)}
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


def _labels_of_copies(images: Images, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of images and of their exact copies, by path."""
    every = [labels.get(name, "") for name in images.names]
    merged, _ = _merge_copies(images, every, np.ones(len(images), bool))
    return {name: label for name, label in zip(images.names, merged, strict=True) if label}


def _accepted_notes(
    folder: RunFolder, labels: Mapping[str, str], every: Mapping[str, str], own: Mapping[str, str]
) -> list[Note]:
    """Describe the labels that are accepted, and what was named or labeled in vain."""
    names = set(labels.values())
    text = f"labels of {len(labels)} images of {len(names)} classes, accepted from {folder.path}"
    notes = [Note("guessed", text, len(labels))]
    unsure = sorted(set(named_classes(folder).values()) - names - set(own.values()))
    if unsure:
        text = (
            f"{len(unsure)} named classes of which no image is flagged as core; they stay "
            f"unknown, unless you label images of them in {folder.to_label.name}"
        )
        notes.append(Note("left out", text, len(unsure), tuple(unsure[:3])))
    lost = sorted(every.keys() - own.keys())
    if lost:
        text = f"{len(lost)} images labeled in {folder.path} that are not among these"
        notes.append(Note("left out", text, len(lost), tuple(lost[:3])))
    return notes


def read_accepted(path: Path) -> dict[str, str]:
    """Return the labels that a discovery was given by the one before it, by image path."""
    return {row["path"]: row["label"] for row in read_edited(path, ("path", "label"))}


def accept(images: Images, labels: Mapping[str, str]) -> Images:
    """Label more images. Known classes keep their numbers."""
    known = class_names(images)
    every = [own or labels.get(name, "") for name, own in zip(images.names, known, strict=True)]
    label, classes = _numbered(every, images.classes)
    return replace(images, labels=label, classes=classes)


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
    opened = open_readable(data, config, on_progress=on_progress, on_open=on_open)
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


def hold_out(
    images: Images,
    config: DiscoverConfig | ClassifyConfig,
    on_progress: ProgressCallback = ignore_progress,
    resumed: RunFolder | None = None,
) -> Split:
    """Hold images out; those that an earlier run had stay on the side on which they were.

    So an image that the encoder was trained on is never scored. The earlier run is `resumed`, if
    it has noted its images; else the one that is accepted, or that of the encoder.
    """
    runs = (run for run in (resumed, _origin(config)) if run)
    earlier = next(filter(None, map(decided, runs)), None)
    share = TrainConfig.val if config.val == "auto" else config.val
    return split_images(images, share, config.seed, on_progress, earlier)


def held_share(data: Any, config: DiscoverConfig | ClassifyConfig) -> float:
    """Return the share of the images to hold out: that of the encoder's run on the same data."""
    run = _origin(config)
    if run and run.config.exists():
        earlier, its_data = run.any_settings()
        if its_data == data_name(data) and earlier.val != "auto":
            return float(earlier.val)
    return TrainConfig.val if config.val == "auto" else config.val


def check_share(data: Any, config: DiscoverConfig | ClassifyConfig) -> None:
    """Refuse to hold out another share of the images than the run of the encoder did."""
    share, run = held_share(data, config), _origin(config)
    if run and config.val not in ("auto", share):
        raise UsageError(
            f"--val {config.val}, but {run.path} was made with --val {share} of the same images, "
            "and what it held out stays held out; leave --val out"
        )


def _origin(config: DiscoverConfig | ClassifyConfig) -> RunFolder | None:
    """Return the run that has held images out before: the one accepted, or that of the encoder."""
    accepted = config.accept if isinstance(config, DiscoverConfig) else ""
    path = Path(accepted or config.from_run)
    run = RunFolder(path.parent if path.is_file() else path)
    named = path in (run.path, run.encoder) and (accepted or config.from_run)
    return run if named and run.data.exists() else None  # other folders may have such files, too


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
