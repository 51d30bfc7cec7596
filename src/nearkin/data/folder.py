"""Pictures in a folder, flat or nested to any depth."""

import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nearkin.data.sources import BadFile, Listing, Stat, is_hidden, is_picture, no_pictures


@dataclass(frozen=True)
class Folder:
    """Reads files below a folder."""

    root: Path

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The file's first `limit` bytes, or all of it."""
        with (self.root / name).open("rb") as file:
            return file.read(-1 if limit is None else limit)


MARKER: Final = ".nearkin-run"
"""A file in every run folder, so that the plots of a run never count as pictures."""


def list_folder(root: Path) -> Listing:
    """Find the pictures below a folder.

    Hidden files and folders and the folders of runs are passed over. A link is followed only to
    a target inside the folder. Every folder is entered once, real ones before links to them,
    which cuts loops.

    Raises:
        DataError: there are none.
    """
    root = root.resolve()
    files: dict[str, Stat] = {}
    bad: list[BadFile] = []
    others: list[str] = []
    for name, found in _walk(root):
        if isinstance(found, BadFile):
            bad.append(found)
        elif not is_picture(name):
            others.append(name)
        elif stat.S_ISREG(found.st_mode):
            files[name] = Stat(found.st_size, found.st_mtime_ns)
        else:
            bad.append(BadFile(name, "not a regular file", 0))
    if not files and not bad:
        raise no_pictures(str(root), others)
    return Listing(str(root), Folder(root), files, bad)


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result | BadFile]]:
    """Every visible file's name and state, breadth first, links to folders last."""
    real, linked = deque([""]), deque[str]()
    entered = set[tuple[int, int]]()
    while real or linked:
        folder = real.popleft() if real else linked.popleft()
        here = (root / folder).stat()
        if (here.st_dev, here.st_ino) in entered:
            continue
        entered.add((here.st_dev, here.st_ino))
        for name, entry in _entries(root, folder):
            if isinstance(entry, BadFile):
                yield name, entry
            elif stat.S_ISDIR(entry.st_mode):
                (linked if (root / name).is_symlink() else real).append(name)
            else:
                yield name, entry


def _entries(root: Path, folder: str) -> Iterator[tuple[str, os.stat_result | BadFile]]:
    try:
        entries = sorted(os.listdir(root / folder))  # noqa: PTH208  (names, not paths)
    except OSError:
        yield folder, BadFile(folder, "unreadable folder", 0)
        return
    if MARKER in entries:
        return
    for entry in entries:
        name = f"{folder}/{entry}" if folder else entry
        if not is_hidden(entry):
            yield name, _state(root, name)


def state(root: Path, name: str) -> os.stat_result | BadFile:
    """What the file system knows of a file below a (resolved) folder, or what is wrong with it.

    Links are looked at on all of the way to the file, which may be one that no walk comes to.
    """
    folder = name
    while folder := folder.rpartition("/")[0]:
        if os.path.islink(f"{root}/{folder}"):  # noqa: PTH114  (tables have a million rows)
            link = _state(root, folder)
            if isinstance(link, BadFile):
                return replace(link, name=name)
    return _state(root, name)


def _state(root: Path, name: str) -> os.stat_result | BadFile:
    """The same of a file in a folder that is known to be below the root."""
    path = root / name
    try:
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode):
            return found
        if not path.resolve().is_relative_to(root):
            return BadFile(name, "link leaves the folder", 0)
        return path.stat()
    except (OSError, RuntimeError):  # a dangling link, or one that leads to itself
        return BadFile(name, "broken link", 0)
