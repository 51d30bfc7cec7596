"""Labels that an earlier discovery gives a next one: names of its classes, labels of images."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from nearkin.data.images import Images
from nearkin.data.labels import class_names, composed, numbered
from nearkin.data.notes import Note, noted
from nearkin.data.split import Split
from nearkin.data.tables import Resolver
from nearkin.errors import DataError, UsageError
from nearkin.labels.known import with_copies
from nearkin.run.folder import RunFolder
from nearkin.run.named import image_labels, named_classes, read_edited


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


def class_of_clusters(labeled: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the class of each cluster with labeled images: that of most, of equals the first.

    >>> class_of_clusters([("new-1", "cat"), ("new-2", "dog"), ("new-1", "eel"), ("new-1", "eel")])
    {'new-1': 'eel', 'new-2': 'dog'}
    """
    counts = defaultdict[str, Counter[str]](Counter)
    for cluster, label in labeled:
        counts[cluster][label] += 1
    return {cluster: each.most_common(1)[0][0] for cluster, each in counts.items()}


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
