"""Lists of images, by name, before any of them is opened; and which files are none."""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """Images by name, before any of them is opened."""

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


Entry = tuple[str, Sequence[int] | BadFile]  # The name of a file, and numbers that belong to it


class Entries(NamedTuple):
    """Files by name, in the order of the names' bytes, and the bad ones among them."""

    names: tuple[str, ...]  # With composed letters (NFC), unless two would be the same
    numbers: Int64[np.ndarray, "files width"]
    bad: list[BadFile]
    written: Mapping[str, str]  # How names are spelled in the data, where they are not so here

    def only(self, rows: Sequence[int]) -> "Entries":
        """The files of these rows."""
        names = tuple(map(self.names.__getitem__, rows))
        return self._replace(names=names, numbers=self.numbers[np.array(rows, np.int64)])

    def spelled(self, name: str) -> str:
        """How a name of the data is spelled here."""
        form = name if name.isascii() else normalize("NFC", name)
        return form if self.written.get(form) == name else name

    def notes(self) -> list[Note]:
        """Note which names are spelled otherwise than in the data."""
        changed = sorted(self.written.keys() & {*self.names}, key=in_bytes) if self.written else []
        text = f"{len(changed)} names, spelled with composed letters (NFC)"
        return [Note("renamed", text, len(changed), tuple(changed[:3]))] if changed else []


def in_order(entries: Iterable[Entry], width: int) -> Entries:
    """The entries in the order of their names' bytes, with `width` numbers of each."""
    names, numbers, bad = list[str](), array("q"), list[BadFile]()
    for name, entry in entries:  # there may be millions
        if isinstance(entry, BadFile):
            bad.append(entry)
        else:
            names.append(name)
            numbers.extend(entry)
    written = dict[str, str]()
    # ASCII text is composed, sorts like its bytes, and needs no copies to be compared.
    plain = all(map(str.isascii, names))
    if not plain:
        written = composed(names)
        spelled = {name: new for new, name in written.items()}
        names = [spelled.get(name, name) for name in names]
    key = names.__getitem__ if plain else lambda row: in_bytes(names[row])
    rows = sorted(range(len(names)), key=key)
    columns = np.array(numbers, np.int64).reshape(-1, width)[np.array(rows, np.int64)]
    return Entries(tuple(map(names.__getitem__, rows)), columns, bad, written)


def composed(names: Sequence[str]) -> dict[str, str]:
    """Names by how they are spelled with composed letters (NFC), where that is another one.

    Names that would become the same stay what they are.
    """
    forms = [name if name.isascii() else normalize("NFC", name) for name in names]
    times = Counter(forms)
    pairs = zip(forms, names, strict=True)
    return {form: name for form, name in pairs if form != name and times[form] == 1}


def chosen(
    entries: Entries, start: Callable[[int], bytes], known: Collection[str] = ()
) -> tuple[list[int], set[str], list[str]]:
    """The rows of files that are images, or may be; the names of the latter; and all other names.

    The suffix of an image is believed until the file is opened. Of other suffixes, a sample is
    opened: `start` gives the first bytes of a row. Those of `known` names are images.
    """
    rows, unknown = list[int](), dict[str, list[int]]()
    for row, name in enumerate(entries.names):
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
        alike = [row for row in sample if looks_like_image(start(row))]
        tried += members if alike and ending else alike
    rows = sorted([*rows, *tried])
    taken = {*rows}
    others = [name for row, name in enumerate(entries.names) if row not in taken]
    return rows, {entries.names[row] for row in tried}, others


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
