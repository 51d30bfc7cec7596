"""Copies of images in a folder per class."""

import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from posixpath import splitext
from typing import Final
from unicodedata import normalize

import numpy as np
from jaxtyping import Int
from PIL import Image

from nearkin.data.decode import BadImage
from nearkin.data.images import Images
from nearkin.errors import OutputError, UsageError
from nearkin.files import check_writable, remove_partial, whole
from nearkin.places import user_path
from nearkin.text import JOINERS

MAX_STEM: Final = 180
"""Bytes of a file name; with a number, `.png` and the mark of a partial file, it fits in 255."""
FORBIDDEN: Final = frozenset('/\\:*?"<>|')
"""What some file system takes in no name."""
DEVICE: Final = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(?=\.|$)")
"""What Windows takes for a device, with any extension."""
MAX_SUFFIX: Final = 8  # Bytes of a file extension; what is longer belongs to the name


def copy_to(
    folder: Path,
    images: Images,
    rows: Int[np.ndarray, " rows"],
    classes: Sequence[str],
    *,
    data: Iterable[str],
    begun: bool = False,
) -> int:
    """Write a copy of each image into the folder of its class; return the number of copies.

    Encoded images keep their bytes, pixels become a PNG or, if they are not RGB of 8 bits, a
    .npy. Unreadable images are left out. `data` are the folders of the images, which must not hold
    the copies. Copying that has `begun` before goes on: no file is replaced.
    """
    if not begun:
        check_destination(folder, data)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in zip(rows.tolist(), classes, strict=True):
        members[name].append(row)
    count = 0
    try:
        for name, rows_of_class in zip(file_names(members), members.values(), strict=True):
            (folder / name).mkdir(parents=True, exist_ok=begun)
            remove_partial(folder / name)
            copies = file_names(_name(images, row) for row in rows_of_class)
            for row, copy in zip(rows_of_class, copies, strict=True):
                count += _copy(images, row, folder / name / copy)
    except OSError as error:
        raise _unwritable(folder, error, f" after {count} copies") from error
    return count


def check_destination(folder: Path, data: Iterable[str]) -> None:
    """Refuse a folder for copies before anything has been computed."""
    for root in map(user_path, data):
        # Path.resolve would raise on a loop of links.
        if root.is_dir() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root)):
            raise UsageError(
                f"{folder} lies inside {root}, where the next run would read the copies too; "
                "choose one outside"
            )
    try:
        occupied = folder.is_symlink() or (folder.exists() and any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if occupied:
        raise OutputError(f"{folder} is a link or not empty; give a new folder")
    check_writable(folder)


def file_names(names: Iterable[str]) -> list[str]:
    r"""Return a distinct name for a file or folder per name, also where case does not count.

    It keeps letters of all scripts and all else that every file system takes, does not begin with
    `.`, `-` or `~` nor end with `.`, and is no device of Windows.

    >>> file_names(["cat", "Cat", "a/b.png", "../..", "\u732b", "", "Con", "aux.png"])
    ['cat', 'Cat-2', 'a-b.png', '_.-._', '\u732b', '_', '_Con', '_aux.png']
    """
    used, result = set[str](), list[str]()
    repeats = Counter[str]()
    for name in names:
        stem, suffix = _safe(name)
        plain = free = stem + suffix
        while _folded(free) in used:
            repeats[plain] += 1
            free = f"{stem}-{repeats[plain] + 1}{suffix}"
        used.add(_folded(free))
        result.append(free)
    return result


def _folded(name: str) -> str:
    """Return what file systems may take for the same name, if it is the same."""
    return normalize("NFC", name).casefold()


def _safe(name: str) -> tuple[str, str]:
    """Return stem and extension, both short and of safe characters only."""
    plain = "".join(c if _is_safe(c) else "_" for c in name.replace("/", "-"))
    plain = re.sub(r"^[-.~\s]|[.\s]$", "_", plain) or "_"
    plain = "_" + plain if DEVICE.match(plain) else plain
    stem, suffix = splitext(plain)
    if len(suffix.encode()) > MAX_SUFFIX:
        stem, suffix = plain, ""
    cut = stem.encode()[:MAX_STEM].decode(errors="ignore")
    return (cut if cut == stem else cut.rstrip(". ")), suffix


def _is_safe(character: str) -> bool:
    return character not in FORBIDDEN and (character.isprintable() or character in JOINERS)


def _name(images: Images, row: int) -> str:
    """The name of an image, with an extension if it is an array, or a region of another image."""
    if not images.formats[row].startswith("array") and images.source.region(row) is None:
        return images.names[row]
    return images.names[row] + (".npy" if images.channels else ".png")


def _copy(images: Images, row: int, path: Path) -> bool:
    """Write an image to a file, unless it is there; return whether it could be read."""
    try:
        content = _encoded(images.stored(row), path.suffix)
    except BadImage:
        return False
    if not os.path.lexists(path):
        with whole(path, lasting=False) as partial:
            partial.write_bytes(content)
    elif path.read_bytes() != content:
        raise OutputError(
            f"{path} is another file than the copy of {images.names[row]!r}; move it away, or "
            "choose another folder"
        )
    return True


def _encoded(content: bytes | np.ndarray, suffix: str) -> bytes:
    """Return the bytes of the file of an image: its own, or those of its pixels."""
    if isinstance(content, bytes):
        return content
    file = io.BytesIO()
    if suffix == ".npy":
        np.save(file, content)
    else:
        Image.fromarray(content).save(file, "PNG")
    return file.getvalue()


def _unwritable(folder: Path, error: OSError, when: str = "") -> OutputError:
    why = error.strerror or error
    return OutputError(
        f"cannot write to {folder}{when}: {why}; make room, or choose another folder"
    )
