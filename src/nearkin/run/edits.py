"""Edits of a run: names of classes and splits of a discovery, labels of single images."""

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from nearkin.errors import OutputError, UsageError
from nearkin.files import write_whole, writing
from nearkin.run.folder import RunFolder
from nearkin.run.named import (
    CLUSTER_KEYS,
    check_names,
    cluster_rows,
    display_name,
    read_edited,
    written_labels,
    written_rows,
)
from nearkin.tables import write_csv
from nearkin.text import printable

MAX_NAME: Final = 100  # characters of a class name
ASSIGNMENT_COLUMNS: Final = ("path", "cluster", "flag")
"""Columns that are required of assignments.csv."""


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
