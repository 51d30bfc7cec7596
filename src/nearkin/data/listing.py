"""Lists of images, by name, before any of them is opened; and which files are none."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from posixpath import splitext
from typing import Any, Final
from unicodedata import normalize

import numpy as np
from jaxtyping import Int64

from nearkin.data.decode import looks_like_image
from nearkin.data.images import BadFile, Folder, Rows, Source, in_bytes, picked
from nearkin.data.labels import Row
from nearkin.data.notes import Note, note_on, noted
from nearkin.errors import DataError
from nearkin.pace import count
from nearkin.text import abridged

EXTENSIONS: Final = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".mpo", ".png", ".apng", ".webp", ".gif"),
        *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".avif", ".avifs"),
        *(".heic", ".heif", ".hif"),
    }
)
"""What is used or, if its content is no image, listed as bad."""
NEVER: Final = frozenset(
    {
        *(".dng", ".nef", ".nrw", ".cr2", ".cr3", ".crw", ".arw", ".srf", ".sr2", ".orf", ".rw2"),
        *(".raf", ".pef", ".srw", ".3fr", ".fff", ".iiq", ".x3f", ".kdc", ".dcr", ".erf", ".mef"),
        *(".mos", ".mrw", ".rwl", ".raw", ".thm", ".part", ".partial", ".crdownload", ".tmp"),
    }
)
"""Camera raw, which begins like a TIFF and holds a thumbnail; thumbnails; unfinished downloads."""
SAMPLED: Final = 32
"""Files of any other suffix that are opened: if one is an image, all of that suffix are tried."""
SUFFIXES: Final = 64  # The most frequent ones, of which some are opened
START: Final = 128  # Bytes by which an image is recognized
HIDDEN: Final = frozenset(
    {
        *("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir"),
        *("#recycle", "#snapshot"),
        *("@recycle", "@recently-snapshot", "@tmp", "$recycle.bin", "recycler", "lost+found"),
        *("system volume information", "found.000", "icon\r"),
    }
)
"""What systems leave in folders: copies in small, what was deleted, shadows of other files."""


@dataclass(frozen=True, eq=False)
class Listing:
    """Files by name, in the order of `source`, before any of them is opened."""

    source: Source
    names: tuple[str, ...]
    """Unique, in the order of their bytes; with composed letters (NFC), unless two would be the
    same."""
    states: Int64[np.ndarray, "files 2"]
    """Bytes, and time of the last write in nanoseconds (of a member, that of its archive)."""
    bad: list[BadFile] = field(default_factory=list[BadFile])
    key: str = ""  # The absolute path, which the index of headers is filed under; '' for no index
    rows: Mapping[str, Row] = field(default_factory=dict[str, Row])
    """What the data say of each image or, where these are what they hold, of each of its regions.
    Without it, folders may be classes."""
    renamed: Collection[str] = ()  # Names that the data spell otherwise
    tried: Collection[str] = ()  # Names that do not say of an image that it is one
    others: Sequence[str] = ()  # Files that are passed over
    notes: Sequence[Note] = ()

    def only(self, rows: Rows) -> "Listing":
        """The files of these rows."""
        source, names = self.source.only(rows), picked(self.names, rows)
        return replace(self, source=source, names=names, states=self.states[rows])

    @property
    def written(self) -> Sequence[str]:
        """The names of files below a folder as the disk spells them."""
        assert isinstance(self.source, Folder)
        return self.source.names


def listed(
    source: Source,
    written: Sequence[str],
    states: Int64[np.ndarray, "files 2"],
    rows: Mapping[str, Row] | None = None,
) -> Listing:
    """The files of a source in order, with what is said of each as it is written."""
    names = written = tuple(written)
    keys: Sequence[Any] = names  # ASCII is composed, and sorts like its bytes
    renamed = set[str]()
    if not all(map(str.isascii, written)):
        forms = [name if name.isascii() else normalize("NFC", name) for name in written]
        times = Counter(forms)
        pairs = zip(forms, written, strict=True)
        names = tuple(form if times[form] == 1 else name for form, name in pairs)
        keys = list(map(in_bytes, names))
        renamed = {*names} - {*written}
    order = np.array(sorted(range(len(names)), key=keys.__getitem__), np.int64)
    both = zip(names, written, strict=True)
    said = {name: rows[own] for name, own in both if own in rows} if rows else {}
    return Listing(source, names, states, rows=said, renamed=renamed).only(order)


def images_among(files: Listing) -> Listing:
    """The files that are images, or may be; all others are passed over.

    Of other suffixes than those of images, a sample is opened. Files of which the data say
    anything are images.
    """
    names, tried, unknown = files.names, list[int](), dict[str, list[int]]()
    taken = np.array([is_image(name) or name in files.rows for name in names], np.bool_)
    for row in np.flatnonzero(~taken).tolist():
        if not is_hidden(names[row]):
            unknown.setdefault(suffix(names[row]), []).append(row)
    by_count = sorted(unknown.items(), key=lambda group: (-len(group[1]), group[0]))
    for ending, members in by_count[:SUFFIXES]:
        if ending in NEVER:
            continue
        sample = members[:: max(1, len(members) // SAMPLED)] if ending else members
        alike = [row for row in sample if _begins_like_image(files.source, row)]
        tried += members if alike and ending else alike
    taken[tried] = True
    others = picked(names, np.flatnonzero(~taken))
    images = files if taken.all() else files.only(np.flatnonzero(taken))
    return replace(images, tried={names[row] for row in tried}, others=others)


def _begins_like_image(source: Source, row: int) -> bool:
    with suppress(OSError):
        start = source.read(row, START)
        return isinstance(start, bytes) and looks_like_image(start)
    return False


def suffix(name: str) -> str:
    """From the last dot on, in small letters; '' for none, or for a number."""
    ending = splitext(name)[1].lower()
    return "" if ending[1:].isdecimal() else ending


def is_hidden(name: str) -> bool:
    """Whether a file or one of its folders is hidden, or of a system."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return any(part.startswith(".") or part.casefold() in HIDDEN for part in parts)


def is_image(name: str) -> bool:
    """Whether a file has the name of an image."""
    return suffix(name) in EXTENSIONS and not is_hidden(name)


def not_read(name: str) -> str:
    """Why a file of this name is never read, whatever it holds; '' if it may be."""
    ending = suffix(name)
    return f"{ending} is not read; convert it first" if ending in NEVER else ""


def found(names: Iterable[str]) -> str:
    """How many files of each suffix there are, in words."""
    kinds = ("hidden" if is_hidden(name) else suffix(name) for name in names)
    counts = Counter(kind or "without a suffix" for kind in kinds)
    suffixes = [f"{number:,} {ending}" for ending, number in counts.most_common()]
    return ", ".join(abridged(suffixes, 5))


def notes_on(listing: Listing, others: Sequence[str]) -> list[Note]:
    """Names that the data spell otherwise, the listing's notes, and files that are passed over."""
    changed = [name for name in listing.names if name in listing.renamed]
    renamed = noted("renamed", changed, "names, spelled with composed letters (NFC)")
    examples = sorted(others, key=lambda name: (is_hidden(name), in_bytes(name)))
    text = f"{count(len(others), 'file')} ({found(others)})"
    return [*renamed, *listing.notes, *note_on("left out", examples, text)]


def require_files(listing: Listing, where: object) -> Listing:
    """Refuse data without images, and say what there is instead."""
    if listing.names or listing.bad:
        return listing
    present = found(listing.others)
    also = "".join(f"; {note}" for note in listing.notes if note.decision == "left out")
    raise DataError(
        f"{where}: no images ({f'found {present}' if present else 'it is empty'}{also}); "
        f"give files ending in {' '.join(sorted(EXTENSIONS))}"
    )
