"""A second round: classes that a user has named become known ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from nearkin.data.labels import Said
from nearkin.discovery.labeled import Labeled
from nearkin.errors import UsageError
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv
from nearkin.types import UNKNOWN


def accepted(run: Path) -> dict[str, str]:
    """The class of every picture that is sure to be of a class with a name, by its path.

    A class has a name if there is one in the column name of clusters.csv; a picture is sure if
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
    """Label the pictures of accepted classes too. Known classes keep their numbers."""
    found, images = accepted(run), labeled.images
    new, _ = Said(list(set(found.values()) - set(labeled.classes)), [], []).numbered()
    classes = (*labeled.classes, *new)
    number = {name: position for position, name in enumerate(classes)}
    label = labeled.label.copy()
    for row in np.flatnonzero(label == UNKNOWN).tolist():
        if images.names[row] in found:
            label[row] = number[found[images.names[row]]]
    note = f"{int((label != labeled.label).sum())} pictures of {len(set(found.values()))} classes "
    note += f"accepted from {run}"
    return replace(
        labeled,
        images=replace(images, labels=label, classes=classes),
        notes=(*labeled.notes, note),
    )
