"""What a person says about a discovery: names of its classes, and labels of single images."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from nearkin.data.labels import Row as Described
from nearkin.data.labels import class_of, composed
from nearkin.data.tables import Resolver
from nearkin.errors import DataError
from nearkin.files import usable
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv

CLUSTER_KEYS: Final = ("cluster", "name", "kind")
"""Columns that are required of clusters.csv."""

Row = dict[str, str]


def read_edited(path: Path, required: Collection[str]) -> list[Row]:
    """Return the rows of a table that people edit, or raise CheckpointError."""
    with usable(path, "restore it, or discover again"):
        rows = [dict(row) for row in read_csv(path)]
        if rows and (absent := set(required) - rows[0].keys()):
            raise ValueError(f"it has no column {min(absent)}")
    return rows


def cluster_rows(folder: RunFolder) -> list[Row]:
    """Return the rows of clusters.csv."""
    return read_edited(folder.clusters, CLUSTER_KEYS)


def check_names(path: Path, rows: Collection[Row]) -> None:
    """Refuse names of classes in the rows of clusters.csv, `path`, that say two things.

    Classes of one name are one class, and a novel class may have the name of a known one. But no
    class may be called what another novel class is called by itself, and a known class keeps the
    name of its labels.
    """
    kinds, names = {row["cluster"]: row["kind"] for row in rows}, dict[str, str]()
    for row in rows:
        cluster, name = row["cluster"], row["name"].strip()
        if name and names.setdefault(cluster, name) != name:
            raise DataError(
                f"{path}: {cluster!r} is named {names[cluster]!r} and, in another row, {name!r}; "
                "keep one of them"
            )
        if name in ("", cluster):
            continue
        if kinds[cluster] == "known":
            raise DataError(
                f"{path}: the known class {cluster!r} is named {name!r}, but its labels say "
                f"{cluster!r}; leave the name empty, or change the labels"
            )
        if kinds.get(name) == "novel":
            raise DataError(
                f"{path}: {cluster!r} is named {name!r}, which is another class; if they are one, "
                "give both the same new name"
            )


def display_name(row: Mapping[str, str]) -> str:
    """Return the name that the user gave to a class in clusters.csv, or else its cluster."""
    return row["name"].strip() or row["cluster"]


def named_classes(folder: RunFolder) -> dict[str, str]:
    """Return the name of each class that a person has named, by what it is called by itself."""
    rows, classes = cluster_rows(folder), _written_classes(folder)
    check_names(folder.clusters, rows)
    names = {row["cluster"]: name for row in rows if (name := row["name"].strip())}
    return {cluster: own for cluster, name in names.items() if (own := classes.get(name, name))}


def _written_classes(folder: RunFolder) -> dict[str, str]:
    """Return the class that each name and label means, '' for none, as in any table of labels.

    Spreadsheets make `3.0` of the known class `3`. What a novel class is called by itself is none.
    """
    rows, known = cluster_rows(folder), folder.read_summary().get("known", ())
    novel = {row["cluster"] for row in rows if row["kind"] == "novel"}
    written = {row["cluster"] for row in rows} | {row["name"].strip() for row in rows}
    written |= {*known, *(row["label"].strip() for row in written_rows(folder))}
    classes, _ = class_of({text: Described(text) for text in written - novel})
    return {text: composed(name) for text, name in classes.items()}


def written_labels(folder: RunFolder) -> dict[str, str]:
    """Return what a person has written for single images in to_label.csv, by path, unchecked."""
    return {row["path"]: label for row in written_rows(folder) if (label := row["label"].strip())}


def written_rows(folder: RunFolder) -> list[Row]:
    """Return the rows of to_label.csv; none where a run has no such table."""
    there = folder.to_label.exists()
    return read_edited(folder.to_label, ("path", "label")) if there else []


def image_labels(folder: RunFolder, names: Collection[str]) -> dict[str, str]:
    """Return the labels that a person has given to single images, by path.

    That is an image's name, of those with `names`, however it is spelled. What a named class is
    called by itself stands for its name.
    """
    rows = written_rows(folder)
    if not rows:
        return {}
    named, classes, labels = named_classes(folder), _written_classes(folder), dict[str, str]()
    kinds = {row["cluster"]: row["kind"] for row in cluster_rows(folder)}
    find = Resolver(folder.to_label, names).named
    for row in rows:
        path, label = find(row["path"]) or row["path"], row["label"].strip()
        if label not in named and kinds.get(label) == "novel":
            raise DataError(
                f"{folder.to_label}: {path!r} is labeled {label!r}, a class without a name; name "
                f"it in {folder.clusters.name}, or write another label"
            )
        label = named.get(label) or classes.get(label, label)
        if label and labels.setdefault(path, label) != label:
            raise DataError(
                f"{folder.to_label}: {path!r} is labeled {labels[path]!r} and, in another row, "
                f"{label!r}; keep one of them"
            )
    return labels
