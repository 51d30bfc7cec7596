"""True classes of images, known and hidden, which only score what was found."""

from collections.abc import Mapping
from posixpath import basename

import numpy as np
from jaxtyping import Int64

from nearkin.data.images import Images
from nearkin.data.labels import class_names, class_of, numbered
from nearkin.data.notes import Note, named, noted
from nearkin.data.tables import file_at, is_table, match, read_table
from nearkin.errors import DataError
from nearkin.labels.known import read_classes
from nearkin.types import UNLABELED


def truth_labels(
    images: Images, truth: str, data_images: Images
) -> tuple[Int64[np.ndarray, " images"], tuple[str, ...], list[Note]]:
    """Return true classes of all images, known and hidden, for scoring only; names, and notes.

    Known classes keep their numbers, others come after them. `UNLABELED` for images without a
    truth and for those that were added to the data.

    Args:
        images: What `label_images` returned.
        truth: "data" for the labels that the data carry; a table with the columns path and
            label, paths as in the data; or class folders, an archive of them or arrays, whose
            images have the same paths as the data, or the same but for the class folder.
        data_images: The data, with the labels that they carry.
    """
    label_of, notes = _truth(truth, data_images)
    names, numbers = numbered([label_of.get(n, "") for n in images.names], images.classes)
    for known, name in enumerate(images.classes):
        true = numbers[(images.labels == known) & (numbers != UNLABELED)]
        if len(true) and (true != known).all():
            raise DataError(
                f"--truth {truth}: calls the images of the known class {name!r} "
                f"{named(names[other] for other in np.unique(true))}; use one name for both"
            )
    return numbers, names, notes


def _truth(truth: str, data: Images) -> tuple[Mapping[str, str], list[Note]]:
    """Return the true class of each image by its name in the data, and what has none there."""
    if truth == "data":
        if not data.classes:
            raise DataError("--truth data: the data carry no labels; give a table or folders")
        return dict(zip(data.names, class_names(data), strict=True)), []
    if is_table(truth):
        table = file_at(truth)
        rows, stray = match(table, read_table(table, "label"), data.names, data)
        label_of, notes = class_of(rows)
        return label_of, stray + notes
    images, labels = read_classes(truth)
    own = set(data.names)
    label_of, others = dict[str, str](), list[str]()
    for path, label in zip(images.names, labels, strict=True):
        name = path if path in own else basename(path)
        if name not in own:
            others.append(path)
        elif label_of.setdefault(name, label) != label:
            raise DataError(
                f"--truth {truth}: {name!r} is of the classes {label_of[name]!r} and {label!r}; "
                "give a table with the columns path and label"
            )
    if not label_of:
        raise DataError(
            f"--truth {truth}: has {named(images.names)}, but the data have "
            f"{named(data.names)}; keep the same paths"
        )
    return label_of, noted("left out", others, f"images of {truth} that are not in the data")


def check_disjoint(images: Images, truth: Int64[np.ndarray, " images"]) -> None:
    """Refuse unlabeled images whose true class is a known one."""
    hidden = truth[(images.labels == UNLABELED) & (truth != UNLABELED)]
    classes, counts = np.unique(hidden[np.isin(hidden, images.labels)], return_counts=True)
    if len(classes):
        pairs = zip(classes.tolist(), counts.tolist(), strict=True)
        listed = ", ".join(f"{images.classes[number]!r} ({size})" for number, size in pairs)
        raise DataError(
            f"{counts.sum()} unlabeled images are of known classes, by the truth: {listed}; "
            "take --mode gcd, or label them"
        )
