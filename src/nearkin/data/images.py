"""All kinds of data that hold encoded images, by the name of the file or folder."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, SupportsIndex

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from nearkin.data.arrays import Part, from_memory, from_name, from_npz, is_name, join
from nearkin.data.decode import FORMATS, BadImage
from nearkin.data.labels import (
    TABLES,
    Annotations,
    Row,
    annotations_from_folders,
    annotations_from_rows,
    annotations_from_sidecars,
    list_table,
    match,
    read_table,
)
from nearkin.data.scan import scan
from nearkin.data.sources import (
    ARCHIVES,
    BadFile,
    ImageFiles,
    Source,
    in_bytes,
    list_archive,
    list_folder,
)
from nearkin.errors import DataError, UsageError
from nearkin.extensions import load_extension
from nearkin.pace import ProgressCallback, ignore_progress
from nearkin.types import UNKNOWN


def find_files(path: Path) -> tuple[ImageFiles, dict[str, Row] | None]:
    """Find the images in a folder, an archive or a table; and, of a table, its rows.

    Raises:
        DataError: it is none of these, is damaged, or holds no images.
    """
    if path.is_dir():
        return list_folder(path), None
    if path.name.lower().endswith(ARCHIVES):
        return list_archive(path), None
    if path.suffix.lower() in TABLES:
        return list_table(path, read_table(path))
    kinds = ", ".join((*ARCHIVES, *TABLES, ".npz"))
    raise DataError(f"{path}: not a kind of data that is known; give a folder, or a {kinds}")


SMALL_SIDE: Final = 64
MAX_PIXELS: Final = 50_000_000


@dataclass(frozen=True, eq=False)
class Images:
    """Images in a fixed order: that of their names' bytes. An image's row is its index.

    Can be pickled, and read from any thread or worker process.
    """

    names: Sequence[str]
    """Unique and sorted; relative to the data, with '/'."""
    labels: Int64[np.ndarray, " images"]
    """Class numbers, or `UNKNOWN`."""
    groups: Int64[np.ndarray, " images"]
    """Images of one group, such as near-duplicates, never fall on two sides of a split."""
    splits: Shaped[np.ndarray, " images"]
    """The side of the split that the data themselves name: 'train', 'test', or '' for none."""
    classes: tuple[str, ...]
    """The class names; a label is a position among them."""
    sizes: Int32[np.ndarray, "images 2"]
    """Width and height in pixels, after exif orientation."""
    num_bytes: Int64[np.ndarray, " images"]
    """Of the encoded image, or of its pixels."""
    kinds: Shaped[np.ndarray, " images"]
    """Each image's format: JPEG, PNG, ..., or array."""
    modified: Int64[np.ndarray, " images"]
    """When each file was last written, in nanoseconds."""
    source: Source
    key: str = ""
    """The data's absolute path, by which findings are remembered; '' where none are to be."""
    bad: tuple[BadFile, ...] = ()
    """Files of the whole data that cannot be used."""
    notes: tuple[str, ...] = ()
    """What else the user should know about the data, one line each."""

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: SupportsIndex) -> bytes | np.ndarray:
        """An image's encoded bytes or, from arrays, its uint8 pixels (height, width, 3).

        Raises:
            BadImage: the file has become unreadable.
        """
        try:
            return self.source.read(self.names[row.__index__()])
        except OSError as error:
            raise BadImage("unreadable") from error

    def subset(self, rows: Shaped[np.ndarray, " rows"]) -> "Images":
        """The images in these rows, given in ascending order, with the same classes.

        Raises:
            ValueError: rows are out of order, so the subset would not be sorted by name.
        """
        if (np.diff(rows) <= 0).any():
            raise ValueError("rows must ascend, each once; sort them")
        rows = rows.astype(np.int64)
        return replace(
            self,
            names=tuple(map(self.names.__getitem__, rows.tolist())),
            labels=self.labels[rows],
            groups=self.groups[rows],
            splits=self.splits[rows],
            sizes=self.sizes[rows],
            num_bytes=self.num_bytes[rows],
            kinds=self.kinds[rows],
            modified=self.modified[rows],
        )

    def spread(self, count: int) -> "Images":
        """At most `count` images, evenly spread over the rows, first and last included."""
        rows = np.linspace(0, len(self) - 1, min(count, len(self)))
        return self.subset(np.unique(rows.astype(np.int64)))

    @property
    def states(self) -> Int64[np.ndarray, "images 2"]:
        """What tells that a file has changed: its bytes, and when it was last written."""
        return np.stack([self.num_bytes, self.modified], axis=1)

    @property
    def formats(self) -> Mapping[str, int]:
        """How many images there are of each format, the most frequent first."""
        return dict(Counter(self.kinds.tolist()).most_common())

    @property
    def is_small(self) -> bool:
        """Whether all pixels are to be held in memory: no side is above 64 pixels."""
        return bool((self.sizes <= SMALL_SIDE).all())

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of all names and sizes in bytes or, of arrays, all pixels. Not of labels."""
        digest = hashlib.sha256()
        for name, size, kind in zip(self.names, self.num_bytes, self.kinds, strict=True):
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0%d\n" % size)
            if kind == "array":
                digest.update(np.asarray(self.source.read(name)).tobytes())
        return digest.hexdigest()


def open_images(
    data: str | Path | np.ndarray | tuple[np.ndarray, np.ndarray],
    *,
    labels: str = "auto",
    max_pixels: int = MAX_PIXELS,
    cache: bool = True,
    full: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> Images:
    """Find all images, check their headers, and read off what is said about them.

    Args:
        data: a folder, flat or nested; a .csv or .parquet with the column path and, optionally,
            label, group and split; a .zip, .tar or .tar.gz (the last up to 1 GiB unpacked); an
            .npz with x and y, or x_train, y_train, x_test, y_test; pixels, or (pixels, labels),
            as arrays; "digits", or "torchvision:NAME" for a set that is already on disk; or
            FILE.py:NAME, module:NAME, or a name that an installed package declares: a function
            that returns any of these.
        labels: "auto": what the data say or, in folders, the class folders if they look like
            some; "none"; "folders": each image's folder, in any case; or the path of a table
            with the columns path and label. Such a table may say something of only some
            images; its rows without an image are counted in `notes`.
        max_pixels: larger images are bad.
        cache: remember headers and thumbnails, so that a second start reads and decodes none.
        full: decode every image now, which also finds damage behind the header.
        on_progress: hears how far the look at all files is.

    Raises:
        DataError: there are no usable images, or what is said about them contradicts itself.
            A damaged file does not raise: it is listed in `bad`.
    """
    if not isinstance(data, str | Path):
        return _from_parts("the array", from_memory(data), labels)
    if is_name(str(data)):
        return _from_parts(str(data), from_name(str(data)), labels)
    path = Path(data).expanduser()
    source = None if path.exists() else load_extension("sources", str(data))
    if source is not None:
        return _imported(source, str(data), labels)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; give the path of your images")
    if path.suffix.lower() == ".npz":
        return _from_parts(str(path), from_npz(path), labels)
    listing, rows = find_files(path)
    images = open_files(
        listing, max_pixels=max_pixels, cache=cache, full=full, on_progress=on_progress
    )
    if not images.names:
        raise DataError(
            f"{path}: none of {len(images.bad)} images can be used, such as "
            f"{images.bad[0].name!r} ({images.bad[0].reason}); look at the files"
        )
    own = annotations_from_rows(rows, images.names) if rows is not None else None
    if listing.labels:
        own = annotations_from_sidecars(images.names, listing.labels)
    return _labeled(images, own, labels)


def _imported(source: Any, name: str, labels: str) -> Images:
    """The images of a function from outside of the package."""
    if not callable(source):
        raise UsageError(f"data {name} is no function; give one that returns images or a path")
    data = source()
    if isinstance(data, str | Path):
        return open_images(data, labels=labels)
    return _from_parts(name, from_memory(data), labels)


def open_files(
    listing: ImageFiles,
    *,
    max_pixels: int = MAX_PIXELS,
    cache: bool = True,
    full: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> Images:
    """Check the headers of listed files, as `open_images` does; there may be no usable ones."""
    pixels = max_pixels if full else 0
    kinds, sizes = scan(listing, decoded_pixels=pixels, cache=cache, on_progress=on_progress)
    kinds[sizes.prod(axis=1, dtype=np.int64) > max_pixels] = b"too-large"
    good = np.isin(kinds, np.array(FORMATS, np.bytes_))
    (names, states), rows = listing.columns, np.flatnonzero(good)
    bad = [*listing.bad]
    for row in np.flatnonzero(~good).tolist():
        bad += [BadFile(names[row], kinds[row].decode(), int(states[row, 0]))]
    return _unlabeled(
        names if good.all() else tuple(map(names.__getitem__, rows.tolist())),
        sizes=sizes[rows],
        num_bytes=states[rows, 0],
        kinds=kinds[rows].astype(np.dtype(f"U{max(map(len, FORMATS))}")),
        modified=states[rows, 1],
        source=listing.source,
        key=listing.key if cache else "",
        bad=tuple(sorted(bad, key=lambda file: in_bytes(file.name))),
    )


def _from_parts(where: str, parts: Sequence[Part], labels: str) -> Images:
    source, said = join(where, parts)
    count, height, width = source.pixels.shape[:3]
    images = _unlabeled(
        list(source.rows),
        sizes=np.full((count, 2), (width, height), np.int32),
        num_bytes=np.full(count, source.pixels[0].nbytes, np.int64),
        kinds=np.full(count, "array"),
        modified=np.zeros(count, np.int64),
        source=source,
    )
    return _labeled(images, said, labels)


def _unlabeled(names: Sequence[str], **known: Any) -> Images:
    count = len(names)
    nothing = np.full(count, UNKNOWN, np.int64), np.arange(count), np.full(count, "")
    return Images(tuple(names), *nothing, (), **known)


def _labeled(images: Images, own: Annotations | None, labels: str) -> Images:
    """Add what is said by the data themselves, by folders or by a table of labels."""
    names = images.names
    said = own or annotations_from_folders(names, labels if labels == "auto" else "none")
    notes: tuple[str, ...] = ()
    if labels == "none":
        said = replace(said, labels=[""] * len(names))
    elif labels == "folders":
        said = replace(said, labels=annotations_from_folders(names, labels).labels)
    elif labels != "auto":
        table = Path(labels).expanduser()
        rows, notes = match(table, read_table(table, ("path", "label")), names)
        said = annotations_from_rows(rows, names).or_else(said)
    classes, numbers = said.numbered()
    return replace(
        images,
        labels=numbers,
        groups=said.grouped(),
        splits=np.array(said.splits, np.str_),
        classes=classes,
        notes=notes,
    )
