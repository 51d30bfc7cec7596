"""Lists of images, by name, before any of them is opened; and which files are none."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from posixpath import splitext
from typing import Final, NamedTuple
from unicodedata import normalize

import numpy as np
from jaxtyping import Int64

from nearkin.data.decode import looks_like_image
from nearkin.data.images import BadFile, Source, in_bytes
from nearkin.data.labels import Row
from nearkin.data.notes import Note
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
        *(
            "__macosx",
            "thumbs.db",
            "ehthumbs.db",
            "desktop.ini",
            "@eadir",
            "#recycle",
            "#snapshot",
        ),
        *("@recycle", "@recently-snapshot", "@tmp", "$recycle.bin", "recycler", "lost+found"),
        *("system volume information", "found.000", "icon\r"),
    }
)
"""What systems leave in folders: copies in small, what was deleted, shadows of other files."""


@dataclass(frozen=True, eq=False)
class Listing:
    """Images by name, before any of them is opened; in the order of `source`."""

    source: Source
    names: tuple[str, ...]  # Unique, in the order of their bytes
    states: Int64[np.ndarray, "files 2"]
    """Bytes, and time of the last write in nanoseconds (of a member, that of its archive)."""
    bad: list[BadFile] = field(default_factory=list[BadFile])
    key: str = ""  # The absolute path, which the index of headers is filed under; '' for no index
    rows: Mapping[str, Row] = field(default_factory=dict[str, Row])
    """What the data say of each image. Without it, folders may be classes."""
    folders: bool = True  # Whether folders may be the sides of a split
    tried: Collection[str] = ()  # Names that do not say of an image that it is one
    others: Sequence[str] = ()  # Files that are passed over
    notes: Sequence[Note] = ()


class Files(NamedTuple):
    """Files in the order of their names' bytes."""

    names: tuple[str, ...]  # With composed letters (NFC), unless two would be the same
    written: tuple[str, ...]  # As the data spell them: `names` itself where they are the same
    found: Int64[np.ndarray, " files"]  # The position of each in the list that they came in

    def only(self, rows: Sequence[int]) -> "Files":
        """The files of these rows."""
        names, written = (tuple(map(each.__getitem__, rows)) for each in self[:2])
        written = names if self.written is self.names else written
        return Files(names, written, self.found[np.array(rows, np.int64)])

    def said(self, rows: Mapping[str, Row]) -> dict[str, Row]:
        """By name, what is said of files as they are spelled in the data."""
        pairs = zip(self.names, self.written, strict=True)
        return {name: rows[written] for name, written in pairs if written in rows}

    def notes(self) -> list[Note]:
        """Note which names are spelled otherwise than in the data."""
        if self.written is self.names:
            return []
        pairs = zip(self.names, self.written, strict=True)
        changed = [name for name, written in pairs if name != written]
        text = f"{len(changed)} names, spelled with composed letters (NFC)"
        return [Note("renamed", text, len(changed), tuple(changed[:3]))] if changed else []


def in_order(names: Sequence[str]) -> Files:
    """The files of these names in order. Names that would become the same stay what they are."""
    # ASCII text is composed, sorts like its bytes, and needs no copies to be compared.
    if all(map(str.isascii, names)):
        rows = sorted(range(len(names)), key=names.__getitem__)
        plain = tuple(map(names.__getitem__, rows))
        return Files(plain, plain, np.array(rows, np.int64))
    forms = [name if name.isascii() else normalize("NFC", name) for name in names]
    times = Counter(forms)
    pairs = zip(forms, names, strict=True)
    spelled = [form if times[form] == 1 else name for form, name in pairs]
    rows = sorted(range(len(names)), key=lambda row: in_bytes(spelled[row]))
    ordered, written = (tuple(map(each.__getitem__, rows)) for each in (spelled, names))
    return Files(ordered, written, np.array(rows, np.int64))


def chosen(
    names: Sequence[str], source: Source, known: Collection[str] = ()
) -> tuple[list[int], set[str], list[str]]:
    """The rows of files that are images, or may be; the names of the latter; and all other names.

    The suffix of an image is believed until the file is opened. Of other suffixes, a sample is
    opened. Those of `known` names are images.
    """
    rows, unknown = list[int](), dict[str, list[int]]()
    for row, name in enumerate(names):
        if is_image(name) or name in known:
            rows.append(row)
        elif not is_hidden(name):
            unknown.setdefault(suffix(name), []).append(row)
    tried = list[int]()
    by_count = sorted(unknown.items(), key=lambda group: (-len(group[1]), group[0]))
    for ending, members in by_count[:SUFFIXES]:
        if ending in NEVER:
            continue
        sample = members[:: max(1, len(members) // SAMPLED)] if ending else members
        alike = [row for row in sample if _begins_like_image(source, row)]
        tried += members if alike and ending else alike
    rows = sorted([*rows, *tried])
    taken = {*rows}
    others = [name for row, name in enumerate(names) if row not in taken]
    return rows, {names[row] for row in tried}, others


def _begins_like_image(source: Source, row: int) -> bool:
    with suppress(OSError):
        start = source.read(row, START)
        return isinstance(start, bytes) and looks_like_image(start)
    return False


def suffix(name: str) -> str:
    """From the last dot on, in small letters; '' for none, or for a number."""
    ending = splitext(name)[1].lower()
    return "" if ending[1:].isdecimal() else ending


def stem(name: str) -> str:
    """What files that belong together have in common: all up to the first dot after the folder.

    >>> stem("shard.tar/0001.left.jpg")
    'shard.tar/0001'
    """
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def is_hidden(name: str) -> bool:
    """Whether a file or one of its folders is hidden, or of a system."""
    parts = name.split("/")
    return any(part[:1] == "." or part.casefold() in HIDDEN for part in parts if part not in _HERE)


_HERE: Final = ("", ".", "..")


def is_image(name: str) -> bool:
    """Whether a file has the name of an image."""
    return suffix(name) in EXTENSIONS and not is_hidden(name)


def found(names: Iterable[str]) -> str:
    """How many files of each suffix there are, in words."""
    counts = Counter(
        "hidden" if is_hidden(name) else suffix(name) or "without a suffix" for name in names
    )
    kinds = [f"{number:,} {kind}" for kind, number in counts.most_common()]
    return ", ".join(abridged(kinds, 5))


def left_out(names: Sequence[str]) -> list[Note]:
    """Note the files that are passed over, with their suffixes."""
    if not names:
        return []
    text = f"{count(len(names), 'file')} ({found(names)})"
    examples = sorted(names, key=lambda name: (is_hidden(name), in_bytes(name)))[:3]
    return [Note("left out", text, len(names), tuple(examples))]


MASKS: Final = frozenset(
    {
        *("mask", "masks", "annotation", "annotations", "segmentation", "segmentations", "seg"),
        *("gt", "groundtruth", "ground_truth", "trimap", "trimaps", "depth", "depths"),
        *("label", "labels"),
    }
)
"""What folders and fields are called that mostly hold no photographs."""


def masks(names: Sequence[str]) -> list[Note]:
    """Note images in folders called masks or the like, if there are others."""
    alike = [name for name in names if MASKS.intersection(name.casefold().split("/")[:-1])]
    if not alike or len(alike) == len(names):
        return []
    text = f"{count(len(alike), 'file')} in folders of masks are images like all others; "
    text += "if they are masks, give the folder of the photographs alone"
    return [Note("guessed", text, len(alike), tuple(alike[:3]))]


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
