"""What an earlier discovery gives a next one: labels, and what images cannot be."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from nearkin.data.images import Images
from nearkin.data.labels import class_names, numbered
from nearkin.data.notes import Note, named, noted, plain
from nearkin.data.split import Split
from nearkin.errors import DataError, UsageError
from nearkin.files import replace_text, usable
from nearkin.labels.known import with_copies
from nearkin.pace import count
from nearkin.run.edits import cluster_rows, image_labels, named_classes, read_edited
from nearkin.run.folder import RunFolder
from nearkin.tables import write_csv

ACCEPTED_COLUMNS: Final = ("path", "label")
EXCLUDED_COLUMNS: Final = ("path", "class")
"""In earlier versions, also classes that single images do not have."""


@dataclass(frozen=True)
class Accepted:
    """What a round takes over from the one before it, by names of images and of classes."""

    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels, by image."""
    excluded: Sequence[str] = ()  # Known classes that no image without a label has
    num_left: int | None = None  # Novel classes that have no name yet; None if nobody has said
    notes: Sequence[Note] = ()  # On what is accepted, and what was named or labeled in vain

    def write(self, folder: RunFolder) -> None:
        """Write it into the folder of the round, which then needs the earlier one no more."""
        write_csv(folder.accepted, ACCEPTED_COLUMNS, self.labels.items())
        folder.accepted_notes.parent.mkdir(parents=True, exist_ok=True)
        replace_text(folder.accepted_notes, json.dumps(plain(self.notes)) + "\n")
        # Last: it marks the others complete.
        write_csv(folder.excluded, EXCLUDED_COLUMNS, (("", name) for name in self.excluded))

    @classmethod
    def read(cls, folder: RunFolder) -> "Accepted":
        """Return what was written into a folder; nothing of a first discovery."""
        if not folder.excluded.exists():
            return cls()
        labels = read_edited(folder.accepted, ACCEPTED_COLUMNS)
        excluded, notes = read_edited(folder.excluded, EXCLUDED_COLUMNS), list[Note]()
        if folder.accepted_notes.exists():  # earlier versions have none
            with usable(folder.accepted_notes, "remove it; it only notes what was accepted"):
                stored = json.loads(folder.accepted_notes.read_text(encoding="utf-8"))
                notes = [Note(**each | {"examples": (*each["examples"],)}) for each in stored]
        return cls(
            {row["path"]: row["label"] for row in labels},
            [row["class"] for row in excluded if not row["path"]],
            notes=notes,
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


def accepted(run: Path, parts: Split, labeled: str) -> Accepted:
    """Return what an earlier discovery gives a next one.

    Labels are those that it was given itself by the one before it; those of single images; and
    the names of classes, for core images. A name is a guess about an image: it goes behind any
    label, and labels none that is held out, since it would be scored as if it were true.

    `run` is the earlier discovery, and `labeled` is where the labels that images have by now come
    from, for messages.
    """
    folder, images = RunFolder(run), parts.images
    learned = {images.names[row] for row in parts.train_rows.tolist()}
    of_classes, of_images = accepted_classes(run), image_labels(folder, images.names)
    names = named_classes(folder)
    if not (of_images or names):
        raise UsageError(
            f"{folder.clusters} names no class; write names in the column name first, or labels "
            f"of single images in {folder.to_label.name}"
        )
    own = dict(zip(images.names, class_names(images), strict=True))
    for path, label in of_images.items():
        if own.get(path) and own[path] != label:
            raise DataError(
                f"{path!r} is labeled {own[path]!r} by {labeled} and {label!r} in "
                f"{folder.to_label}; keep one of them"
            )
    merged, _ = with_copies(images, [of_images.get(name, "") for name in images.names])
    of_copies = {name: label for name, label in zip(images.names, merged, strict=True) if label}
    of_images = of_images | of_copies
    earlier = Accepted.read(folder)
    known = {*own.values(), *earlier.labels.values()}
    if lost := sorted({*folder.read_summary().get("known", ())} - known):
        raise DataError(
            f"{count(len(lost), 'known class')} of {run} without a label by {labeled}, such as "
            f"{named(lost)}; give the earlier labels, too"
        )
    guessed = {path: name for path, name in of_classes.items() if path in learned}
    every = {**guessed, **earlier.labels, **of_images}
    labels = {path: label for path, label in every.items() if own.get(path) == ""}
    if not labels:
        raise DataError(
            f"{run} labels none of these images: no image of a class with a name is flagged as "
            f"core, or they are others; label single images in {folder.to_label.name}"
        )
    # A label of a class that is found elsewhere says nothing of the cluster that its image is in.
    found = known | {*names.values()}
    new = {path for path, label in of_images.items() if label not in found}
    num_left, notes = _num_left(folder, names, new), _accepted_notes(folder, labels, every, own)
    return Accepted(labels, earlier.excluded, num_left, notes)


def _num_left(folder: RunFolder, names: Collection[str], labeled: Collection[str]) -> int:
    """Return how many novel classes have images, but neither a name nor one of those `labeled`."""
    rows = read_edited(folder.assignments, ("path", "cluster"))
    known = {*names, *(row["cluster"] for row in rows if row["path"] in labeled)}
    unnamed = {row["cluster"] for row in rows} - known
    return len(
        {row["cluster"] for row in cluster_rows(folder) if row["kind"] == "novel"} & unnamed
    )


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


def accept(images: Images, given: Accepted) -> Images:
    """Label more images, with the notes on that. Known classes keep their numbers."""
    known, labels = class_names(images), given.labels
    every = [own or labels.get(name, "") for name, own in zip(images.names, known, strict=True)]
    classes, numbers = numbered(every, images.classes)
    return replace(images.noted(*given.notes), labels=numbers, classes=classes)
