"""What a person says of a run: names of classes, classes split off, labels of single images."""

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from nearkin.data.labels import Row as Described
from nearkin.data.labels import class_of, composed
from nearkin.data.tables import Resolver
from nearkin.errors import DataError, OutputError, UsageError
from nearkin.files import usable, write_whole, writing
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, write_csv
from nearkin.text import printable

MAX_NAME: Final = 100  # characters of a class name
CLUSTER_KEYS: Final = ("cluster", "name", "kind")
"""Columns that are required of clusters.csv."""
ASSIGNMENT_COLUMNS: Final = ("path", "cluster", "flag")
"""Columns that are required of assignments.csv."""

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


def names_by_now(folder: RunFolder) -> dict[str, str]:
    """Return the same of any run; of a classification, whose classes are its labels, none."""
    return named_classes(folder) if is_discovery(folder) else {}


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


def is_discovery(folder: RunFolder) -> bool:
    """Return whether a run has classes to edit."""
    return folder.clusters.exists() and folder.assignments.exists()


def name_classes(folder: RunFolder, clusters: Collection[str], name: str) -> None:
    """Name clusters of clusters.csv; those of one name are one class, '' removes their names."""
    name = _valid(name)
    with _editing(folder):
        rows = cluster_rows(folder)
        if unknown := set(clusters) - {row["cluster"] for row in rows}:
            raise UsageError(f"{folder.clusters} has no class {min(unknown)!r}; reload the page")
        for row in rows:
            if row["cluster"] in clusters:
                row["name"] = name
        check_names(folder.clusters, rows)
        _replace(folder.clusters, folder.original_clusters, rows)


def split_off(folder: RunFolder, paths: Collection[str], name: str) -> str:
    """Make unlabeled images a new class, whose cluster (such as `new-1`) is returned."""
    name = _valid(name)
    with _editing(folder):
        clusters = cluster_rows(folder)
        assignments = read_edited(folder.assignments, ASSIGNMENT_COLUMNS)
        _check_unlabeled(paths, {row["path"] for row in assignments})
        taken = {row[column] for row in clusters for column in ("cluster", "name")}
        # Known classes without an image are in no table.
        taken |= {*folder.read_summary().get("known", ()), *written_labels(folder).values()}
        new = next(free for number in count(1) if (free := f"new-{number}") not in taken)
        for row in assignments:
            if row["path"] in paths:  # its core, since the user selected them by hand
                row |= {"cluster": new, "flag": "core"}
        sizes = Counter(row["cluster"] for row in assignments)
        clusters.append({"cluster": new, "name": name, "kind": "novel"})
        check_names(folder.clusters, clusters)
        for row in clusters:
            row["size"] = str(sizes[row["cluster"]])
        # In this order, an interruption leaves an empty class, never an image without one.
        _replace(folder.clusters, folder.original_clusters, clusters)
        _replace(folder.assignments, folder.original_assignments, assignments)
    return new


def label_images(folder: RunFolder, paths: Collection[str], label: str) -> None:
    """Label images in to_label.csv; '' removes their labels.

    Images that came to a discovery with a label keep that one.
    """
    label = _valid(label)
    with _locked(folder):
        clusters = _clusters(folder) if is_discovery(folder) else dict.fromkeys(paths, "")
        _check_unlabeled(paths, clusters)
        rows = written_rows(folder)
        for path in sorted(set(paths) - {row["path"] for row in rows}):
            of = {"cluster": clusters[path]} if clusters[path] else {}
            rows.append({"path": path, **of, "label": ""})
        for row in rows:
            if row["path"] in paths:
                row["label"] = label
        _replace(folder.to_label, folder.original_to_label, rows)


def _check_unlabeled(paths: Collection[str], unlabeled: Collection[str]) -> None:
    others = set(paths).difference(unlabeled)
    if others or not paths:
        which = f"{min(others)!r} came with a label" if others else "no images are selected"
        raise UsageError(f"{which}; select unlabeled images")


def classes(folder: RunFolder, names: Sequence[str]) -> dict[str, Any]:
    """Return the classes of a discovery and the cluster of each image, or none; and labels."""
    editable = is_discovery(folder)
    rows = cluster_rows(folder) if editable else []
    assigned = _clusters(folder) if editable else {}
    sizes = Counter(assigned.values())
    return {
        "editable": editable,
        "classes": [
            {key: row[key].strip() for key in CLUSTER_KEYS} | {"size": sizes[row["cluster"]]}
            for row in rows
        ],
        "cluster_of": _numbered(assigned, names),
        "labels": labels(folder, names),
    }


def labels(folder: RunFolder, names: Sequence[str]) -> dict[str, str]:
    """Return the label that a person has given to each image, by its number."""
    return _numbered(written_labels(folder), names)


def _numbered(by_path: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """What is said of images, by their numbers, which are the keys of JSON."""
    return {str(row): by_path[name] for row, name in enumerate(names) if name in by_path}


def class_names(folder: RunFolder) -> dict[str, str]:
    """Return the class name of every image that a run assigned to a class, by path."""
    assigned = _clusters(folder) if folder.assignments.exists() else {}
    rows = read_edited(folder.clusters, ("cluster", "name")) if is_discovery(folder) else []
    names = {row["cluster"]: display_name(row) for row in rows}
    return {path: names.get(cluster, cluster) for path, cluster in assigned.items()}


def _clusters(folder: RunFolder) -> dict[str, str]:
    return {
        row["path"]: row["cluster"] for row in read_edited(folder.assignments, ("path", "cluster"))
    }


def _valid(name: str) -> str:
    name = name.strip()
    if len(name) > MAX_NAME or printable(name) != name or "\n" in name:
        raise UsageError(f"a name is one line of at most {MAX_NAME} characters; choose another")
    return name


@contextmanager
def _editing(folder: RunFolder) -> Iterator[None]:
    if not is_discovery(folder):
        raise UsageError(
            f"{folder.path} is no finished discovery; it has no classes to edit. Those of a "
            "classification are its labels: change these, and classify again"
        )
    with _locked(folder):
        yield


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    if not folder.path.is_dir():  # which the lock would make anew
        raise OutputError(f"{folder.path} is gone; put it back to change it")
    with writing(folder.path, "free some space, or allow writing"), folder.locked():
        yield


def _replace(path: Path, original: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a table with its own columns and any of the user's; keep the first version.

    Where there was none, that is a table without rows.
    """
    there, columns = path.exists(), list(rows[0])
    marked = not there or path.read_bytes().startswith(BOM_UTF8)  # as the user's program left it
    if there and not original.exists():
        write_whole(original, path.read_bytes())
    elif not original.exists():
        write_csv(original, columns, [], to_edit=True)
    cells = ([row.get(name, "") for name in columns] for row in rows)
    write_csv(path, columns, cells, to_edit=marked)
