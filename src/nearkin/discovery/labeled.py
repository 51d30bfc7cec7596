"""Which pictures come with a known class, and what a truth says of all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import basename

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import TrainConfig
from nearkin.data.images import Images
from nearkin.data.labels import Said
from nearkin.data.recognize import class_names, examples, is_table, read_classes, recognize
from nearkin.data.table import match, read_table
from nearkin.data.union import copies, union
from nearkin.errors import DataError, UsageError
from nearkin.run.settings.known import known_classes, known_labels
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Labeled:
    """Pictures, some of which come with a known class."""

    images: Images
    """The data and, among them, the labeled pictures from outside. Their labels are the known
    ones and no others, so that nothing that comes after can see what is hidden."""
    own: Bool[np.ndarray, " images"]
    """Whether a picture is one of the data, not added from outside."""
    notes: tuple[str, ...] = ()
    """What the user should know about the labels, one line each."""

    @property
    def label(self) -> Int64[np.ndarray, " images"]:
        """Each picture's known class, from 0, or `UNKNOWN`."""
        return self.images.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the known classes, in order."""
        return self.images.classes


def label_pictures(images: Images, labeled: str, known: str) -> Labeled:
    """Find out which pictures come with a known class, and add those that the data do not have.

    Args:
        images: The data.
        labeled: Class folders, an archive of them, arrays with labels, or a table with the
            columns path and label. A labeled picture is one of the data if its path says so, or
            if the data have exact copies of it, which are then all labeled. All others are
            added: their names are their absolute paths.
        known: Instead: names, after commas, of classes whose labels in the data count. The
            labels of a benchmark may contradict each other, so copies are not looked for.

    Raises:
        UsageError: Both or none of the two are given, or `known` cannot be carried out.
        DataError: What is labeled cannot be read or does not exist, gives one picture two
            classes, knows fewer than two classes, or leaves nothing to discover.
    """
    if bool(labeled) == bool(known):
        raise UsageError("say which classes are known: either --labeled PATH, or --known A,B")
    found = _by_name(images, known) if known else _by_picture(images, labeled)
    counts = np.bincount(found.label[found.label != UNKNOWN])
    single = [found.classes[number] for number in np.flatnonzero(counts == 1)]
    if not single:
        return found
    note = f"{len(single)} of {len(counts)} known classes have one picture only"
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


def _by_picture(images: Images, labeled: str) -> Labeled:
    found = recognize(images, labeled)
    added = {found.prefix + name for name in found.outside.names}
    everything = union(images, found.outside, found.prefix)
    own = np.array([name not in added for name in everything.names], bool)
    said = [found.classes.get(name, "") for name in everything.names]
    merged, keep = _merge_copies(everything, said, own)
    classes, numbers = Said([merged[row] for row in keep], [], []).numbered()
    if len(classes) < 2:
        raise DataError(
            f"{labeled}: usable pictures are labeled as {examples(classes) or 'nothing'}; "
            "give at least two known classes"
        )
    if (numbers != UNKNOWN).all():
        raise DataError(
            f"{labeled}: labels all {len(numbers)} pictures, so nothing is left to discover; "
            "give pictures without a label, too"
        )
    kept = everything.subset(keep) if added or found.outside.bad else images
    notes = []
    lost = sorted(found.classes.keys() - set(everything.names))
    if lost:
        notes.append(f"{len(lost)} labeled files cannot be used, such as {examples(lost)}")
    spread = sum(merged[row] != said[row] for row in np.flatnonzero(own))
    if spread:
        notes.append(f"{spread} pictures of the data are labeled as exact copies of labeled ones")
    return Labeled(replace(kept, labels=numbers, classes=classes), own[keep], tuple(notes))


def _merge_copies(
    images: Images, said: Sequence[str], own: Bool[np.ndarray, " images"]
) -> tuple[list[str], Int64[np.ndarray, " kept"]]:
    """Label all exact copies of labeled pictures, and leave those out that need not be added.

    Args:
        images: All pictures.
        said: The class of each, '' for none.
        own: Whether they are of the data.

    Returns:
        The class of each picture, copies included, and the rows to keep.
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
            f"{len(contrary)} pictures are labeled as two classes, such as {contrary[0]}, "
            "which are exact copies; keep one of them"
        )
    return merged, np.array([row for row in range(len(images)) if row not in spare], np.int64)


def truth_labels(
    images: Images, truth: str, data_images: Images, classes: Sequence[str]
) -> tuple[Int64[np.ndarray, " images"], tuple[str, ...]]:
    """What is said of the classes of all pictures, known and hidden; for scoring only.

    Args:
        images: Those of a `Labeled`.
        truth: "data" for the labels that the data carry; a table with the columns path and
            label, paths as in the data; or class folders, an archive of them or arrays, whose
            pictures have the same paths as the data, or the same but for the class folder.
        data_images: The data, with the labels that they carry.
        classes: Names of the known classes.

    Returns:
        Each picture's class, and the names of all classes: the known ones keep their numbers,
        and others come after them. `UNKNOWN` for pictures of which nothing is said, and for
        those that were added to the data.

    Raises:
        DataError: The truth cannot be read, says nothing of any picture, contradicts itself or
            calls the pictures of a known class by other names.
    """
    said = _truth(truth, data_images)
    found = [said.get(name, "") for name in images.names]
    others, _ = Said([label for label in found if label not in classes], [], []).numbered()
    names = (*classes, *others)
    number = {name: number for number, name in enumerate(names)} | {"": UNKNOWN}
    numbers = np.array([number[label] for label in found], np.int64)
    for known, name in enumerate(classes):
        called = numbers[(images.labels == known) & (numbers != UNKNOWN)]
        if len(called) and (called != known).all():
            raise DataError(
                f"--truth {truth}: calls the pictures of the known class {name!r} "
                f"{examples(names[other] for other in np.unique(called))}; use one name for both"
            )
    return numbers, names


def _truth(truth: str, data: Images) -> Mapping[str, str]:
    """The class of each picture by its name in the data."""
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
    """Refuse, in mode ncd, unlabeled pictures that are of a known class.

    Args:
        truth: Each picture's class, or `UNKNOWN`.
        label: Each picture's known class, or `UNKNOWN`.
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
        f"{counts.sum()} unlabeled pictures are of known classes, by the truth: {listed}; "
        "take --mode gcd, or label them"
    )
