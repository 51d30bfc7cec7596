"""Images sorted into folders, a folder per class."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from posixpath import splitext
from typing import Final

import numpy as np
from jaxtyping import Int
from PIL import Image

from nearkin.data.decode import BadImage
from nearkin.data.images import Images
from nearkin.errors import OutputError, UsageError

LONGEST: Final = 230
"""Characters of a file name; with a number and `.png` behind it, it stays within 255 bytes."""
SUFFIX: Final = 8
"""Characters of an ending; what is longer belongs to the name."""


def copy_to(
    folder: Path,
    images: Images,
    rows: Int[np.ndarray, " rows"],
    classes: Sequence[str],
    *,
    data: Iterable[str],
) -> int:
    """Write a copy of each image into the folder of its class.

    Encoded images keep their bytes, pixels become a PNG. Folders and copies are called as
    `file_names` says; the folders that an image was in become a part of its name.

    Args:
        folder: Where to: a new folder, or an empty one.
        images: The images.
        rows: Which of them.
        classes: The name of the class of each row.
        data: What the images came from, as the user wrote it.

    Returns:
        How many were written. An image that cannot be read is left out.

    Raises:
        UsageError: The folder lies inside the data, where the next run would find the copies.
        OutputError: It is not empty, is a link, or cannot be written.
    """
    check_destination(folder, data)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in zip(rows.tolist(), classes, strict=True):
        members[name].append(row)
    written = 0
    try:
        for own, held in zip(file_names(members), members.values(), strict=True):
            (folder / own).mkdir(parents=True)
            for row, name in zip(held, file_names(_names(images, held)), strict=True):
                written += _copy(images, row, folder / own / name)
    except OSError as error:
        raise _unwritable(folder, error, f" after {written} copies") from error
    return written


def check_destination(folder: Path, data: Iterable[str]) -> None:
    """Refuse a folder for copies before anything has been computed.

    Raises:
        UsageError, OutputError: As `copy_to` does.
    """
    for root in (Path(name).expanduser() for name in data):
        if root.is_dir() and _real(folder).is_relative_to(_real(root)):
            raise UsageError(
                f"{folder} lies inside {root}, and copies would be taken for more images; "
                "choose a --copy-to outside"
            )
    try:
        taken = folder.is_symlink() or (folder.exists() and any(folder.iterdir()))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if taken:
        raise OutputError(f"{folder} is a link or not empty; give --copy-to a new folder")


def file_names(names: Iterable[str]) -> list[str]:
    r"""A name for a file or folder per name, each another one, also where case does not count.

    It has letters, digits, `.`, `_` and `-` only and does not begin with `.` or `-`. Of a letter
    outside ASCII, its number is kept.

    >>> file_names(["cat", "Cat", "a/b.png", "../..", "\u732b", ""])
    ['cat', 'Cat-2', 'a-b.png', '_.-..', '_u732b', '_']
    """
    used, made = set[str](), list[str]()
    again = Counter[str]()
    for name in names:
        stem, suffix = _safe(name)
        plain = free = stem + suffix
        while free.lower() in used:
            again[plain] += 1
            free = f"{stem}-{again[plain] + 1}{suffix}"
        used.add(free.lower())
        made.append(free)
    return made


def _safe(name: str) -> tuple[str, str]:
    """The name without its ending, and the ending, both of harmless characters and short."""
    ascii_only = name.replace("/", "-").encode("ascii", "backslashreplace").decode()
    plain = re.sub(r"^[.-]", "_", re.sub(r"[^A-Za-z0-9._-]", "_", ascii_only)) or "_"
    stem, suffix = splitext(plain)
    if len(suffix) > SUFFIX:
        stem, suffix = plain, ""
    return stem[:LONGEST], suffix


def _names(images: Images, rows: Iterable[int]) -> list[str]:
    return [images.names[row] + ".png" * (images.kinds[row] == "array") for row in rows]


def _copy(images: Images, row: int, path: Path) -> bool:
    """Write an image to a file that is not there yet; whether it could be read."""
    try:
        held = images.read(row)
    except BadImage:
        return False
    with path.open("xb") as file:
        try:
            if isinstance(held, bytes):
                file.write(held)
            else:
                Image.fromarray(held).save(file, "PNG")
            file.flush()
        except OSError:
            path.unlink()
            raise
    return True


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # a loop of links raises in Path.resolve


def _unwritable(folder: Path, error: OSError, when: str = "") -> OutputError:
    why = error.strerror or error
    return OutputError(
        f"cannot write to {folder}{when}: {why}; make room, or choose another --copy-to"
    )
