"""The classes of a discovery as its user sees them: named, merged, split."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from nearkin.errors import OutputError, UsageError
from nearkin.run.folder import RunFolder
from nearkin.run.opened import locked
from nearkin.tables import read_csv, replace_csv, usable, write_whole

LONGEST: Final = 100
"""Characters of a name."""
CLASS: Final = ("cluster", "name", "kind")
"""Columns that are needed of clusters.csv."""
PICTURE: Final = ("path", "cluster", "flag")
"""Columns that are needed of assignments.csv."""

Row = dict[str, str]


def is_discovery(folder: RunFolder) -> bool:
    """Whether there are classes to be named."""
    return folder.clusters.exists() and folder.assignments.exists()


def name_classes(folder: RunFolder, clusters: Collection[str], name: str) -> None:
    """Give classes a name, or none: several of one name are one, as `discover --accept` reads it.

    Args:
        folder: The discovery.
        clusters: What the classes are called in the column cluster of clusters.csv.
        name: Empty to take their names away.

    Raises:
        UsageError: If there is no such class, or the name is none.
        OutputError: If another process writes there, or nothing can be written.
        CheckpointError: If the tables are damaged.
    """
    name = _checked(name)
    with _editing(folder):
        rows = _read(folder.clusters, CLASS)
        if unknown := set(clusters) - {row["cluster"] for row in rows}:
            raise UsageError(f"{folder.clusters} has no class {min(unknown)!r}; reload the page")
        for row in rows:
            if row["cluster"] in clusters:
                row["name"] = name
        _replace(folder.clusters, folder.found_clusters, rows)


def split_off(folder: RunFolder, paths: Collection[str], name: str) -> str:
    """Make images a class of their own, and sure of it: their user has picked them by hand.

    Args:
        folder: The discovery.
        paths: The images, which are to have been sorted into classes by it.
        name: Of the new class; may be empty.

    Returns:
        What the class is called in the column cluster.

    Raises:
        UsageError: If there are none, or some came with a class; else as `name_classes`.
    """
    name = _checked(name)
    with _editing(folder):
        clusters, assignments = _read(folder.clusters, CLASS), _read(folder.assignments, PICTURE)
        moved = [row for row in assignments if row["path"] in paths]
        if not moved or len(moved) < len(paths):
            others = set(paths) - {row["path"] for row in moved}
            which = f"{min(others)!r} came with its class" if others else "none were chosen"
            raise UsageError(f"{which}; choose images that were sorted into classes")
        taken = {row["cluster"] for row in clusters}
        new = next(free for number in count(1) if (free := f"new-{number}") not in taken)
        for row in moved:
            row |= {"cluster": new, "flag": "core"}
        sizes = Counter(row["cluster"] for row in assignments)
        clusters.append({"cluster": new, "name": name, "kind": "novel"})
        for row in clusters:
            row["size"] = str(sizes[row["cluster"]])
        # In this order, so that an end in between leaves an empty class and loses none.
        _replace(folder.clusters, folder.found_clusters, clusters)
        _replace(folder.assignments, folder.found_assignments, assignments)
    return new


def classes(folder: RunFolder, names: Sequence[str]) -> dict[str, Any]:
    """The classes of a run, if it is a discovery, and which images they have.

    Args:
        folder: The run.
        names: Of all its images, by their numbers.

    Raises:
        CheckpointError: If the tables are damaged.
    """
    if not is_discovery(folder):
        return {"editable": False, "classes": [], "cluster_of": {}}
    found = _clusters(folder)
    sizes = Counter(found.values())
    shown = [
        {key: row[key].strip() for key in CLASS} | {"size": sizes[row["cluster"]]}
        for row in _read(folder.clusters, CLASS)
    ]
    cluster_of = {str(row): found[name] for row, name in enumerate(names) if name in found}
    return {"editable": True, "classes": shown, "cluster_of": cluster_of}


def called(folder: RunFolder) -> dict[str, str]:
    """What the class of every image that was sorted into one is called, by its path."""
    if not is_discovery(folder):
        return {}
    named = {row["cluster"]: row["name"].strip() for row in _read(folder.clusters, CLASS)}
    found = _clusters(folder)
    return {path: named.get(cluster) or cluster for path, cluster in found.items()}


def _clusters(folder: RunFolder) -> dict[str, str]:
    """The class of every image that was sorted into one, by its path."""
    return {row["path"]: row["cluster"] for row in _read(folder.assignments, PICTURE)}


def _checked(name: str) -> str:
    name = name.strip()
    if len(name) > LONGEST or not name.isprintable():
        raise UsageError(f"a name is one line of at most {LONGEST} characters; choose another")
    return name


@contextmanager
def _editing(folder: RunFolder) -> Iterator[None]:
    if not is_discovery(folder):
        raise UsageError(f"{folder.path} is no finished discovery; it has no classes to be named")
    try:
        with locked(folder):
            yield
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder.path}: {error.strerror}; make room, or allow writing there"
        ) from error


def _read(path: Path, needed: Collection[str]) -> list[Row]:
    with usable(path, "bring back what was there, or discover again"):
        rows = [dict(row) for row in read_csv(path)]
        if rows and (absent := set(needed) - rows[0].keys()):
            raise ValueError(f"it has no column {min(absent)}")
    return rows


def _replace(path: Path, original: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a table with the columns it had, and maybe others of the user's; keep the first."""
    if not original.exists():
        write_whole(original, path.read_bytes())
    columns = list(rows[0])
    replace_csv(path, columns, ([row.get(name, "") for name in columns] for row in rows))
