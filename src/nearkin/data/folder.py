"""Images in a folder, flat or nested to any depth."""

import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nearkin.data.archive import list_shards
from nearkin.data.sources import BadFile, Files, Found, Listing, is_hidden, is_image, no_images


@dataclass(frozen=True)
class Folder:
    """Reads files below a folder."""

    root: Path

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The file's first `limit` bytes, or all of it."""
        with open(f"{self.root}/{name}", "rb") as file:  # noqa: PTH123  (a million times)
            return file.read(-1 if limit is None else limit)


MARKER: Final = ".nearkin-run"
"""A file in every run folder, so that the plots of a run never count as images."""


def list_folder(root: Path) -> Listing:
    """Find the images below a folder or, where it holds none, in the .tar files below it.

    Hidden files and folders and the folders of runs are passed over. A link is followed only to
    a target inside the folder. Every folder is entered once, real ones before links to them,
    which cuts loops.

    Raises:
        DataError: there are none.
    """
    root = root.resolve()
    files, bad, others = Found(2), list[BadFile](), list[str]()
    for name, found in _walk(root):
        if isinstance(found, BadFile):
            bad.append(found)
        elif not is_image(name):
            others.append(name)
        elif stat.S_ISREG(found.st_mode):
            files.add(name, found.st_size, found.st_mtime_ns)
        else:
            bad.append(BadFile(name, "not a regular file", 0))
    shards = [name for name in others if name.lower().endswith(".tar")]
    if shards and not files.names:
        listing = list_shards(root, sorted(shards))
        return replace(listing, bad=listing.bad + bad)
    if not files.names and not bad:
        raise no_images(str(root), others)
    return Listing(str(root), Folder(root), Files(*files.in_order()), bad)


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
        below = list[str]()
        for name, entry in _entries(root, folder):
            if isinstance(entry, BadFile) or not stat.S_ISDIR(entry.st_mode):
                yield name, entry
            else:
                below.append(name)
        for name in sorted(below):
            (linked if (root / name).is_symlink() else real).append(name)


def _entries(root: Path, folder: str) -> Iterator[tuple[str, os.stat_result | BadFile]]:
    start = f"{folder}/" if folder else ""
    try:
        if (root / folder / MARKER).exists():
            return
        with os.scandir(f"{root}/{folder}") as entries:  # one at a time: there may be a million
            for entry in entries:
                if not is_hidden(entry.name):
                    yield start + entry.name, _state(root, start + entry.name)
    except OSError:
        yield folder, BadFile(folder, "unreadable folder", 0)


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
    try:
        found = os.lstat(f"{root}/{name}")
        if not stat.S_ISLNK(found.st_mode):
            return found
        path = root / name
        if not path.resolve().is_relative_to(root):
            return BadFile(name, "link leaves the folder", 0)
        return path.stat()
    except (OSError, RuntimeError):  # a dangling link, or one that leads to itself
        return BadFile(name, "broken link", 0)
