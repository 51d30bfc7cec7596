"""The images below a folder or an address of a store, and those that a table lists."""

import os
import stat
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from posixpath import normpath
from typing import Final
from urllib.parse import unquote

import numpy as np
from jaxtyping import Int64

from nearkin.data.archives import forbidden, is_shard, list_shards
from nearkin.data.boxes import region
from nearkin.data.columns import may_have_images
from nearkin.data.images import BadFile, Folder, in_bytes
from nearkin.data.labels import Row
from nearkin.data.listing import (
    Listing,
    images_among,
    is_hidden,
    is_image,
    listed,
    not_read,
    require_files,
)
from nearkin.data.members import Archives, Place
from nearkin.data.notes import Note, note_on
from nearkin.data.remote import File, RemoteFile, address, files_below, remote_files, written_at
from nearkin.data.tables import Rows, absent, by_name, folder_of, places_of
from nearkin.errors import DataError, UsageError, redacted
from nearkin.pace import count
from nearkin.places import NO_HANDLES

MARKER: Final = ".nearkin-run"
"""A file in every run folder, so that the plots of a run never count as images."""
UNREADABLE: Final = "unreadable folder"
LINKS: Final = "NEARKIN_LINKS"
State = os.stat_result | str  # Or why a file cannot be used


def list_folder(root: Path) -> Listing:
    """Find the images below a folder, or in the shards below it if these hold more.

    Hidden files and folders, those of systems and the folders of runs are passed over. Links are
    followed within the folder; `NEARKIN_LINKS=follow` allows those that lead out of it, but not to
    a folder around it. Every folder is entered once, real ones before links to them, which cuts
    loops.
    """
    root = root.resolve()
    walk = _Walk(root)
    found, states, unusable = _sorted_out(walk.files())
    files = listed(Folder(root, found), found, states)
    images = images_among(files)
    bad = [file for file in unusable if is_image(file.name) or file.reason == UNREADABLE]
    unused = {file.name for file in unusable} - {file.name for file in bad}
    others = [*images.others, *walk.passed, *sorted(unused, key=in_bytes)]
    loose = replace(images, bad=bad, key=str(root), others=others, notes=walk.notes())
    passed, written = {*images.others}, zip(files.names, files.written, strict=True)
    shards = {name: root / path for name, path in written if is_shard(name) and name in passed}
    return require_files(images_or_shards(root, loose, shards), root)


def images_or_shards(where: Path | str, loose: Listing, shards: Mapping[str, File]) -> Listing:
    """The images in files of their own or those in shards, whichever are more, and a note."""
    if not shards:
        return loose
    try:
        # Archives and tables with images; all if there are none, so that an error says why.
        shards = {n: x for n, x in shards.items() if may_have_images(x)} or shards
        packed = list_shards(where, shards)
    except DataError as error:
        if not loose.names:
            raise
        text = f"{count(len(shards), 'shard')} beside the images ({error})"
        return replace(loose, notes=[*loose.notes, *note_on("left out", [*shards], text)])
    files, images = count(len(loose.names), "file"), count(len(packed.names), "image")
    several = count(len(shards), "shard")
    if len(loose.names) >= len(packed.names):
        text = f"{files} are the data, not the images in {several} beside them"
        note = Note("guessed", text, len(packed.names), tuple([*shards][:3]))
        return replace(loose, notes=[*loose.notes, note])
    text = f"{images} in {several} are the data, not {files} beside them"
    notes = [*packed.notes, *note_on("guessed", loose.names, text)]
    others = [*packed.others, *(name for name in loose.others if name not in shards)]
    return replace(packed, bad=packed.bad + loose.bad, others=others, notes=notes)


def list_store(url: str) -> Listing:
    """The same as `list_folder` for an address of a store, which knows neither links nor runs.

    The suffixes of names decide which files are images: to open others would cost requests.
    """
    root = url.rstrip("/")
    files, others = files_below(root, lambda n: (is_image(n) or is_shard(n)) and not is_hidden(n))
    images = {name: file for name, file in files.items() if is_image(name)}
    shards = {name: file for name, file in files.items() if name not in images}
    loose = replace(_of_store(root, images), others=[*sorted(others, key=in_bytes), *shards])
    where = redacted(root)
    return require_files(images_or_shards(where, loose, shards), where)


def list_remote_table(table: RemoteFile, written: Rows) -> Listing:
    """The images that rows of a table in a store list, by paths or addresses below its folder."""
    if any(row.box for _, row in written):
        raise DataError(f"{table}: boxes of images in a store; copy them and the table")
    root = table.url.partition("?")[0].rpartition("/")[0]
    rows, _ = by_name(table, written, lambda name: normpath(name.removeprefix(f"{root}/")))
    if root.startswith("http"):  # which may have no list of its files
        files = remote_files({name: address(root, name) for name in rows})
    else:
        files, _ = files_below(root, rows.__contains__)
    if missing := [name for name in rows if name not in files]:
        raise absent(table, missing, len(rows), redacted(root))
    return replace(_of_store(root, files, rows), key=str(table))


def list_remote_image(image: RemoteFile) -> Listing:
    """A single image in a store, by its address as it is: with its signature, if it has one."""
    root = image.url.partition("?")[0].rpartition("/")[0]
    name = unquote(image.name) if root.startswith("http") else image.name
    return replace(_of_store(root, {name: image}), key=str(image))


def _of_store(
    root: str, files: Mapping[str, RemoteFile], rows: Mapping[str, Row] | None = None
) -> Listing:
    reasons = {name: forbidden(name) or not_read(name) for name in files}
    used = {name: file for name, file in files.items() if not reasons[name]}
    sizes = [file.size for file in used.values()]
    states = np.array([sizes, [file.tag for file in used.values()]], np.int64).T
    places = np.array([Place(0, size, size) for size in sizes], np.int64)
    source = Archives([*used.values()], np.arange(len(used)), places.reshape(-1, 4))
    bad = [BadFile(name, reason, files[name].size) for name, reason in reasons.items() if reason]
    return replace(listed(source, [*used], states, rows), bad=bad, key=redacted(root))


def list_table(path: Path, written: Rows, folders: Sequence[str] = ()) -> Listing:
    """The images that a table's rows list, by absolute paths or relative to the table's folder.

    If any row has a box, these are boxes of images, and rows without one are left out. Paths may
    also be relative to other folders.
    """
    boxed = [(file, row) for file, row in written if row.box]
    used = boxed or written
    root, places = places_of(path, (file for file, _ in used), folders or [folder_of(path)])
    name_of = {region(file, row.box): region(places[file], row.box) for file, row in used}
    rows, _ = by_name(path, used, name_of.get)
    without, again = len(written) - len(used), len(used) - len(rows)
    notes = note_on("left out", without, f"{count(without, 'row')} of {path} without a box")
    what = "boxes" if boxed else "files"
    notes += note_on("merged", again, f"{count(again, 'row')} of {path} with the {what} of others")
    listing = list_files(root, dict.fromkeys(places.values()), {} if boxed else rows)
    if boxed:
        composed = dict(zip(listing.written, listing.names, strict=True))
        files = ((name.rpartition("#")[0], row) for name, row in rows.items())
        named = {region(composed.get(file, file), row.box): row for file, row in files}
        listing = replace(listing, rows=named)
    if str(root) != folder_of(path) and not boxed:
        text = f"{len(rows)} images by their paths below {root}, for some lie outside of the"
        notes.append(Note("renamed", f"{text} table's folder", len(rows), listing.names[:3]))
    return replace(listing, key=str(path.resolve()), notes=notes)


def list_files(root: Path, names: Iterable[str], rows: Mapping[str, Row] | None = None) -> Listing:
    """These files below a folder, also those that no walk comes to, and what is said of them."""
    files = ((name, not_read(name) or _state(f"{root}/{name}")) for name in names)
    found, states, bad = _sorted_out(files)
    return replace(listed(Folder(root, found), found, states, rows), bad=bad)


def _sorted_out(
    files: Iterable[tuple[str, State]],
) -> tuple[list[str], Int64[np.ndarray, "files 2"], list[BadFile]]:
    """The names of regular files, with size and time of the last write; and all others."""
    names, states, bad = list[str](), array("q"), list[BadFile]()
    for name, state in files:  # there may be millions
        if isinstance(state, str):
            bad.append(BadFile(name, state))
        elif not stat.S_ISREG(state.st_mode):
            bad.append(BadFile(name, "not a regular file"))
        else:
            names.append(name)
            states.extend((state.st_size, written_at(state)))
    return names, np.array(states, np.int64).reshape(-1, 2), bad


def _state(path: str) -> State:
    """The state of what a path leads to."""
    try:
        return os.stat(path)  # noqa: PTH116  (a million times)
    except PermissionError:
        return "unreadable"
    except (OSError, ValueError):  # a dangling link, or one that leads to itself
        return "broken link"


def _state_of_entry(entry: os.DirEntry[str]) -> State:
    """The same of an entry that is no link."""
    try:
        return entry.stat()
    except OSError:  # a mount of somebody else or without a connection, a file that is gone
        return UNREADABLE if entry.is_dir() else "unreadable"


class _Walk:
    """Finds the files below a folder, and keeps in mind which links lead out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.inside = f"{root}{os.sep}".replace(os.sep * 2, os.sep)
        self.passed = list[str]()  # What is hidden, and links to what is entered anyway
        self.leading_out = list[tuple[str, str]]()  # Names, and where they lead
        # A downloaded folder may have links to images of the user, which would then be in
        # embeddings, pages and exports.
        links = os.environ.get(LINKS) or "inside"
        if links not in ("inside", "follow"):
            raise UsageError(f"{LINKS} {links!r} is not inside or follow")
        self.follow = links == "follow"

    def files(self) -> Iterator[tuple[str, State]]:
        """Every file's name and state, breadth first, links to folders last."""
        real, linked = deque([""]), deque[str]()
        entered = set[tuple[int, int]]()
        while real or linked:
            folder = real.popleft() if real else linked.popleft()
            below = list[tuple[str, bool]]()
            try:
                here = (self.root / folder).stat()
                if (here.st_dev, here.st_ino) in entered:
                    self.passed.append(folder)
                    continue
                entered.add((here.st_dev, here.st_ino))
                for name, is_link, state in self._in_folder(folder):
                    if isinstance(state, str) or not stat.S_ISDIR(state.st_mode):
                        yield name, state
                    else:
                        below.append((name, is_link))
            except OSError as error:
                if error.errno in NO_HANDLES:  # which says nothing of the folder
                    raise
                yield folder, UNREADABLE
            for name, is_link in sorted(below):
                (linked if is_link else real).append(name)

    def _in_folder(self, folder: str) -> Iterator[tuple[str, bool, State]]:
        """The name of each entry, whether it is a link, and the state of what it leads to."""
        start = f"{folder}/" if folder else ""
        if os.path.lexists(f"{self.root}/{start}{MARKER}"):
            self.passed.append(start + MARKER)
            return
        with os.scandir(f"{self.root}/{folder}") as entries:  # one at a time, of maybe a million
            for entry in entries:
                name = start + entry.name
                if is_hidden(entry.name):
                    self.passed.append(name)
                elif not entry.is_symlink():
                    yield name, False, _state_of_entry(entry)
                elif state := self._followed(name):
                    yield name, True, state

    def _followed(self, name: str) -> State | None:
        """The state of what a link leads to; None if it is not to be followed."""
        path = f"{self.root}/{name}"
        state = _state(path)
        if isinstance(state, str):
            return state
        target = os.path.realpath(path)
        below = f"{target.rstrip(os.sep)}{os.sep}"
        if stat.S_ISDIR(state.st_mode) and self.inside.startswith(below):
            self.passed.append(name)  # it leads to what it is in
            return None
        if target.startswith(self.inside):
            return state
        self.leading_out.append((name, target))
        return state if self.follow else None

    def notes(self) -> list[Note]:
        """Note links that lead out of the folder."""
        links = sorted(self.leading_out)
        if not links:
            return []
        text = f"{count(len(links), 'link')} out of {self.root}, to {Path(links[0][1]).parent}"
        names = [name for name, _ in links]
        if self.follow:
            return note_on("guessed", names, f"{text}, followed as {LINKS} says")
        return note_on("left out", names, f"{text}; {LINKS}=follow reads them")
