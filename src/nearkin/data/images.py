"""Images in a fixed order, each with its label, group and split, and how one of them is read.

A source holds no open files, so it can be pickled, forked, and read from any thread or process.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int32, Int64, Shaped, UInt64
from PIL import Image

from nearkin.data.channels import Channels, as_color, image_pixels, in_8_bits
from nearkin.data.decode import BadImage, PixelType
from nearkin.data.notes import Note, lines, note_on
from nearkin.errors import ResourceError
from nearkin.places import NO_HANDLES, TOO_MANY_OPEN

SMALL_SIDE: Final = 64
MAX_HELD: Final = 2**32  # Bytes of pixels
COLUMNS: Final = (
    *("labels", "groups", "splits", "sizes", "num_bytes", "formats", "modified", "contents"),
)
PREFIX: Final = 2**16
"""Bytes of a file that nearly always hold its whole header, and that tell it from others."""

Rows = Int64[np.ndarray, " rows"]


class Source(ABC):
    """Reads images by their rows."""

    @abstractmethod
    def read(self, row: int, limit: int | None = None) -> bytes | np.ndarray:
        """An image's encoded bytes (the first `limit`) or its pixels; else OSError, BadImage."""

    @abstractmethod
    def only(self, rows: Rows) -> "Source":
        """The source of these images alone, which takes with it nothing of the others."""

    def warm(self, rows: Iterable[int]) -> None:  # noqa: B027
        """Fetch these images at once, if they lie in a store, before they are read one by one."""

    def region(self, row: int) -> "Region | None":
        """Where an image lies in the one that it is cut from; None of a whole image."""
        del row
        return None


class Region(NamedTuple):
    """An image in a source, and a box in it."""

    source: Source
    row: int
    corners: Float64[np.ndarray, "4"]
    """Left, top, right and bottom as shares of the image's upright width and height."""


@dataclass(frozen=True, eq=False)
class Folder(Source):
    """Reads files below a folder."""

    root: Path
    names: Sequence[str]  # As the disk spells them

    def path(self, row: int) -> str:
        """Where a file lies."""
        return f"{self.root}/{self.names[row]}"

    def read(self, row: int, limit: int | None = None) -> bytes:
        """The file's first `limit` bytes, or all of it."""
        with open(self.path(row), "rb") as file:  # noqa: PTH123  (a million times)
            return file.read(-1 if limit is None else limit)

    def only(self, rows: Rows) -> "Folder":
        """The source of these files alone."""
        return Folder(self.root, picked(self.names, rows))


@dataclass(frozen=True, eq=False)
class Arrays(Source):
    """Pixels in memory, channels last: gray, RGB, or as `array_pixels` leaves them."""

    pixels: np.ndarray
    rows: Rows  # The position of each image among the pixels

    def read(self, row: int, limit: int | None = None) -> np.ndarray:
        """An image's pixels: RGB, if they are of 8 bits and of one channel or three."""
        del limit
        return np.asarray(self.stacked(np.array([row]))[0])

    def only(self, rows: Rows) -> "Arrays":
        """The source of these images alone, without a copy of their pixels."""
        return Arrays(self.pixels, self.rows[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrays, (self.pixels[self.rows], np.arange(len(self.rows)))

    def stacked(self, rows: Rows) -> Shaped[np.ndarray, "images height width _"]:
        """The pixels of several images, which are all of one size."""
        return as_color(self.pixels[self.rows[rows]])


@runtime_checkable
class ImageSource(Protocol):
    """What a source of your own has: names, and a method that reads one image.

    It must be picklable, and `read` must give the same image for a name every time. Optional
    attributes, each a sequence with one text per name, '' where nothing is known:

        labels    the class of each image
        groups    images of one group never fall on two sides of a split
        splits    train, val or test
    """

    names: Sequence[str]
    """Unique names, in any order."""

    def read(self, name: str, /) -> bytes | np.ndarray | Image.Image:
        """A file's bytes, a PIL image, or an array or tensor; see `image_pixels`."""


@dataclass(frozen=True, eq=False)
class CustomSource(Source):
    """Reads an `ImageSource`; whatever it raises, or returns that is no image, is a `BadImage`."""

    source: ImageSource
    names: Sequence[str]

    def read(self, row: int, limit: int | None = None) -> bytes | np.ndarray:
        """The encoded bytes, or pixels."""
        try:
            image: Any = self.source.read(self.names[row])
            if isinstance(image, bytes):
                return image[:limit]
            return as_color(image_pixels(image))
        except Exception as error:
            message = " ".join(str(error).split())  # on one line, as in bad_files.csv
            raise BadImage(f"unreadable: {type(error).__name__}: {message}") from error

    def only(self, rows: Rows) -> "CustomSource":
        """The source of these images alone."""
        return CustomSource(self.source, picked(self.names, rows))


@dataclass(frozen=True, eq=False)
class Either(Source):
    """Reads images of one source and of another."""

    first: Source
    second: Source
    start: int  # Images of the first
    rows: Rows  # The position of each image, those of the second behind those of the first

    def read(self, row: int, limit: int | None = None) -> bytes | np.ndarray:
        """The image's bytes, or the first `limit` of them; or its pixels."""
        source, own = self.place(row)
        return source.read(own, limit)

    def region(self, row: int) -> Region | None:
        """Where an image lies in the one that it is cut from; None of a whole image."""
        source, own = self.place(row)
        return source.region(own)

    def place(self, row: int) -> tuple[Source, int]:
        """The source that has an image, and its row there."""
        position = int(self.rows[row])
        if position < self.start:
            return self.first, position
        return self.second, position - self.start

    def only(self, rows: Rows) -> "Either":
        """The source of these images alone."""
        positions, inverse = np.unique(self.rows[rows], return_inverse=True)
        start = int(np.searchsorted(positions, self.start))
        first, second = positions[:start], positions[start:] - self.start
        return Either(self.first.only(first), self.second.only(second), start, inverse)

    def warm(self, rows: Iterable[int]) -> None:
        """Fetch the images of either that lie in a store, at once."""
        positions = self.rows[list(rows)]
        self.first.warm(positions[positions < self.start].tolist())
        self.second.warm((positions[positions >= self.start] - self.start).tolist())


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that cannot be used."""

    name: str
    reason: str
    bytes: int = 0


@dataclass(frozen=True, eq=False)
class Images:
    """Images in the order of their names' bytes, an image's row its index. Can be pickled."""

    names: Sequence[str]  # Unique and sorted; relative to the data, with '/'; for people
    labels: Int64[np.ndarray, " images"]  # Class numbers, or `UNLABELED`
    groups: Int64[np.ndarray, " images"]
    """Images of one group, such as near-duplicates, never fall on two sides of a split."""
    group_names: Sequence[str]  # The group of each image as the data name it, '' for none
    splits: Shaped[np.ndarray, " images"]
    """The part that the data declare: 'train', 'val', 'test', or '' for none."""
    classes: tuple[str, ...]  # The class names; a label is a position among them
    sizes: Int32[np.ndarray, "images 2"]  # Width and height in pixels, after exif orientation
    num_bytes: Int64[np.ndarray, " images"]  # Of the encoded image, or of its pixels
    formats: Shaped[np.ndarray, " images"]
    """Each image's format, as people read it: JPEG, array, TIFF of 13 uint16, ..."""
    modified: Int64[np.ndarray, " images"]  # When each file was last written, in nanoseconds
    contents: UInt64[np.ndarray, " images"]  # See `content_id`
    source: Source
    key: str = ""  # The absolute path that indices are filed under; '' where none are stored
    pixel_type: PixelType | None = None  # Of all of them, if they are not RGB of 8 bits
    channels: Channels | None = None  # Of such images, if they are read as they are
    bad: tuple[BadFile, ...] = ()  # Files of the whole data that cannot be used
    notes: tuple[Note, ...] = ()  # What was decided about the data without being asked

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: SupportsIndex) -> bytes | np.ndarray:
        """An image's encoded bytes; its uint8 pixels (height, width, 3); or floats from 0 to 1.

        The floats, of shape (height, width, channels), are those of images with `channels`.
        """
        return self.scaled(self.stored(row))

    def scaled(self, content: bytes | np.ndarray) -> bytes | np.ndarray:
        """An image as it is stored, in 8 bits or with its `channels` scaled."""
        return in_8_bits(content) if self.channels is None else self.channels.scaled(content)

    def stored(self, row: SupportsIndex) -> bytes | np.ndarray:
        """An image as it is stored: encoded, or its pixels of any type."""
        return read(self.source, int(row))

    @property
    def num_channels(self) -> int:
        """Channels of the pixels: three, if they are RGB or gray."""
        return 3 if self.channels is None else len(self.channels.low)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a decoded pixel: a byte a channel, or a float if they have `channels`."""
        return self.num_channels * (4 if self.channels else 1)

    def subset(self, rows: Shaped[np.ndarray, " rows"]) -> "Images":
        """The images in these ascending rows, with the same classes."""
        if (np.diff(rows) <= 0).any():
            raise ValueError("rows must ascend, each once; sort them")
        return self.at(rows.astype(np.int64))

    def at(self, rows: Rows) -> "Images":
        """The images in these rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        columns |= {name: picked(getattr(self, name), rows) for name in ("names", "group_names")}
        return replace(self, source=self.source.only(rows), **columns)

    def noted(self, *notes: Note) -> "Images":
        """The same images with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def decisions(self, *more: Note) -> list[str]:
        """Lines of the notes, of more, and of files that cannot be used, for want of a list."""
        text = f"{len(self.bad)} of {len(self) + len(self.bad)} images, which cannot be read"
        bad = [f"{file.name} ({file.reason})" for file in self.bad]
        return lines((*self.notes, *more, *note_on("left out", bad, text)))

    @property
    def reasons(self) -> dict[str, str]:
        """Why each file that cannot be used is left out, by its name."""
        return {file.name: file.reason for file in self.bad}

    def spread(self, count: int) -> "Images":
        """At most `count` images, evenly spread over the rows, first and last included."""
        return self.subset(spread_rows(len(self), count))

    @property
    def states(self) -> Int64[np.ndarray, "images 2"]:
        """Bytes and time of the last write of each file, which tell whether it has changed."""
        return np.stack([self.num_bytes, self.modified], axis=1)

    @property
    def format_counts(self) -> Mapping[str, int]:
        """How many images there are of each format, the most frequent first."""
        return dict(Counter(self.formats.tolist()).most_common())

    @property
    def is_small(self) -> bool:
        """Whether no side is above 64 pixels."""
        return bool((self.sizes <= SMALL_SIDE).all())

    @property
    def are_square(self) -> bool:
        """Whether all images are as wide as high."""
        return bool((self.sizes[:, 0] == self.sizes[:, 1]).all())

    def held_side(self, image_size: int) -> int:
        """The side in pixels of the squares that trainings at this size hold in memory.

        Images that are not all square are squashed. 0 if they are not small, or take over 4 GiB.
        """
        side = image_size if self.are_square else max(image_size, int(self.sizes.max(initial=0)))
        fits = self.is_small and len(self) * side**2 * self.pixel_bytes <= MAX_HELD
        return side if fits else 0

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of all names and contents. Not of labels."""
        whole = hashlib.sha256(self.contents.tobytes())
        for name in self.names:
            whole.update(in_bytes(name) + b"\0")
        return whole.hexdigest()


def picked(names: Sequence[str], rows: Rows) -> tuple[str, ...]:
    """The names of these rows."""
    return tuple(map(names.__getitem__, rows.tolist()))


def spread_rows(total: int, most: int) -> Rows:
    """At most so many of all rows, evenly spread, first and last included.

    >>> spread_rows(9, 3).tolist()
    [0, 4, 8]
    """
    return np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))


def read(source: Source, row: int, limit: int | None = None) -> bytes | np.ndarray:
    """What a source reads; a `BadImage` if that fails, unless no file can be opened at all."""
    try:
        return source.read(row, limit)
    except OSError as error:
        if error.errno in NO_HANDLES:
            raise ResourceError(TOO_MANY_OPEN) from error
        raise BadImage(getattr(error, "reason", "unreadable")) from error


def content_bytes(image: bytes | np.ndarray) -> bytes:
    """The bytes that tell an image from others: its encoded ones, or its pixels."""
    return image if isinstance(image, bytes) else image.tobytes()


def content_id(start: bytes | np.ndarray, size: int) -> int:
    """64 bits that tell an image from others: of its pixels, or of its file, and its size.

    Of a file only the first `PREFIX` bytes count, so that of a million no more is read: edits of
    an uncompressed file behind them are not noticed.
    """
    told_by = start[:PREFIX] if isinstance(start, bytes) else start
    whole = hashlib.sha256(content_bytes(told_by) + b"%d" % size)
    return int.from_bytes(whole.digest()[:8])


def digest(image: bytes | np.ndarray) -> bytes:
    """The SHA-256 of the content of an image, which exact copies share."""
    return hashlib.sha256(content_bytes(image)).digest()


def in_bytes(name: str) -> bytes:
    """A sort key that does not depend on locale, and keeps names that are not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")
