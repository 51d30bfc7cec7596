"""The images of any kind of data, in a fixed order, with their labels, groups and splits."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, SupportsIndex

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from nearkin.data.arrays import Part, from_name, from_npz, is_name, join
from nearkin.data.decode import FORMATS, BadImage
from nearkin.data.labels import (
    SIDES,
    TABLES,
    Annotations,
    Row,
    annotations_from_folders,
    annotations_from_rows,
    list_table,
    match,
    read_table,
)
from nearkin.data.scan import scan, scan_source
from nearkin.data.sources import (
    ARCHIVES,
    BadFile,
    CustomSource,
    Files,
    ImageFiles,
    ImageSource,
    Source,
    in_bytes,
    list_archives,
    list_folder,
    stem,
)
from nearkin.errors import DataError, UsageError
from nearkin.extensions import load_extension
from nearkin.pace import ProgressCallback, ignore_progress
from nearkin.types import UNKNOWN


def find_files(path: Path) -> tuple[ImageFiles, dict[str, Row] | None]:
    """The images in a folder, an archive or a table, and the rows of a table."""
    if path.is_dir():
        return list_folder(path), None
    if path.name.lower().endswith(ARCHIVES):
        return list_archives(path, {"": path}), None
    if path.suffix.lower() in TABLES:
        return list_table(path, read_table(path))
    kinds = ", ".join((*ARCHIVES, *TABLES, ".npz"))
    raise DataError(f"{path}: not a kind of data that is known; give a folder, or a {kinds}")


SMALL_SIDE: Final = 64
MAX_PIXELS: Final = 50_000_000
COLUMNS: Final = ("labels", "groups", "splits", "sizes", "num_bytes", "kinds", "modified")


@dataclass(frozen=True, eq=False)
class Images:
    """Images in the order of their names' bytes, an image's row its index. Can be pickled."""

    names: Sequence[str]  # Unique and sorted; relative to the data, with '/'
    labels: Int64[np.ndarray, " images"]  # Class numbers, or `UNKNOWN`
    groups: Int64[np.ndarray, " images"]
    """Images of one group, such as near-duplicates, never fall on two sides of a split."""
    splits: Shaped[np.ndarray, " images"]
    """The side of the split that the data declare: 'train', 'test', or '' for none."""
    classes: tuple[str, ...]  # The class names; a label is a position among them
    sizes: Int32[np.ndarray, "images 2"]  # Width and height in pixels, after exif orientation
    num_bytes: Int64[np.ndarray, " images"]  # Of the encoded image, or of its pixels
    kinds: Shaped[np.ndarray, " images"]  # Each image's format: JPEG, PNG, ..., or array
    modified: Int64[np.ndarray, " images"]  # When each file was last written, in nanoseconds
    source: Source
    key: str = ""  # The absolute path that indices are filed under; '' where none are stored
    bad: tuple[BadFile, ...] = ()  # Files of the whole data that cannot be used
    notes: tuple[str, ...] = ()  # Notes for the user, one line each

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: SupportsIndex) -> bytes | np.ndarray:
        """An image's encoded bytes or, from arrays, its uint8 pixels (height, width, 3)."""
        try:
            return self.source.read(self.names[row.__index__()])
        except OSError as error:
            raise BadImage("unreadable") from error

    def subset(self, rows: Shaped[np.ndarray, " rows"]) -> "Images":
        """The images in these ascending rows, with the same classes."""
        if (np.diff(rows) <= 0).any():
            raise ValueError("rows must ascend, each once; sort them")
        rows = rows.astype(np.int64)
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        return replace(self, names=tuple(map(self.names.__getitem__, rows.tolist())), **columns)

    def spread(self, count: int) -> "Images":
        """At most `count` images, evenly spread over the rows, first and last included."""
        rows = np.linspace(0, len(self) - 1, min(count, len(self)))
        return self.subset(np.unique(rows.astype(np.int64)))

    @property
    def states(self) -> Int64[np.ndarray, "images 2"]:
        """Bytes and time of the last write of each file, which tell whether it has changed."""
        return np.stack([self.num_bytes, self.modified], axis=1)

    @property
    def formats(self) -> Mapping[str, int]:
        """How many images there are of each format, the most frequent first."""
        return dict(Counter(self.kinds.tolist()).most_common())

    @property
    def is_small(self) -> bool:
        """Whether no side is above 64 pixels, so that all pixels are held in memory."""
        return bool((self.sizes <= SMALL_SIDE).all())

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of all names and sizes in bytes and, of arrays, all pixels. Not of labels."""
        digest = hashlib.sha256()
        custom = isinstance(self.source, CustomSource)
        for row, (name, kind) in enumerate(zip(self.names, self.kinds, strict=True)):
            digest.update(in_bytes(name) + b"\0%d\n" % self.num_bytes[row])
            if custom:
                digest.update(b"%d\n" % self.modified[row])  # a checksum of the content
            elif kind == "array":
                digest.update(np.asarray(self.source.read(name)).tobytes())
        return digest.hexdigest()


def open_images(
    data: str | Path | np.ndarray | tuple[np.ndarray, np.ndarray] | ImageSource,
    *,
    labels: str = "auto",
    max_pixels: int = MAX_PIXELS,
    cache: bool = True,
    full: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> Images:
    """Find all images, check their headers, and read their labels, groups and splits.

    Args:
        data: A folder, flat or nested; a .csv or .parquet with the column path and, optionally,
            label, group and split; a .zip, .tar or .tar.gz (the last up to 1 GiB unpacked); an
            .npz with x and y, or x_train, y_train, x_test, y_test; pixels, or (pixels, labels),
            as arrays; an `ImageSource`; "digits", or "torchvision:NAME" for a set that is already
            on disk; or FILE.py:NAME, module:NAME, or a name that an installed package declares,
            of a function or class whose call gives any of these.
        labels: "auto": what the data declare or, in folders, the class folders if they look like
            some; "none"; "folders": each image's folder, in any case; or the path of a table
            with the columns path and label. Such a table may cover only some images; its rows
            without an image are counted in `notes`.
        max_pixels: Larger images are bad.
        cache: Store headers and thumbnails, so that a second start reads and decodes none.
        full: Decode every image now, which also finds damage behind the header.
        on_progress: Progress of the scan of all files.

    Raises:
        DataError: There are no usable images, or their annotations contradict each other. A
            damaged file does not raise: it is listed in `bad`.
    """
    resolved, where = _resolve(data)
    if isinstance(resolved, ImageSource):
        return _from_source(resolved, where, labels, max_pixels, full, on_progress)
    if not isinstance(resolved, str):
        pixels, numbers = resolved if isinstance(resolved, tuple) else (resolved, None)
        numbers = None if numbers is None else np.asarray(numbers)
        return _from_parts(where, [Part("", np.asarray(pixels), numbers)], labels)
    if is_name(resolved):
        return _from_parts(resolved, from_name(resolved), labels)
    path = Path(resolved).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; give the path of your images")
    if path.suffix.lower() == ".npz":
        return _from_parts(resolved, from_npz(path), labels)
    files, rows = find_files(path)
    images = open_files(
        files, max_pixels=max_pixels, cache=cache, full=full, on_progress=on_progress
    )
    _require_images(images, path)
    own = annotations_from_rows(rows, images.names) if rows is not None else None
    if files.labels:  # files beside the images, as in WebDataset; splits are those of folders
        beside = [files.labels.get(stem(name), "") for name in images.names]
        own = replace(annotations_from_folders(images.names, "none"), labels=beside)
    return _annotated(images, own, labels)


def _resolve(data: Any) -> tuple[Any, str]:
    """The data that a reference stands for, a path as text, and what to call them in messages."""
    where = str(data) if isinstance(data, str | Path) else "the data"
    if where and not is_name(where) and not Path(where).expanduser().exists():
        factory = load_extension("sources", where)
        if factory is not None:
            if not callable(factory):
                raise UsageError(f"data {where} is no function; give one that returns images")
            data = factory()
    return str(data) if isinstance(data, str | Path) else data, where


def _require_images(images: Images, where: object) -> None:
    if not images.names:
        raise DataError(
            f"{where}: none of {len(images.bad)} images can be used, such as "
            f"{images.bad[0].name!r} ({images.bad[0].reason}); look at the files"
        )


def open_files(
    files: ImageFiles,
    *,
    max_pixels: int = MAX_PIXELS,
    cache: bool = True,
    full: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> Images:
    """Check the headers of files, as `open_images` does; there may be no usable ones."""
    pixels = max_pixels if full else 0
    kinds, sizes = scan(files, decoded_pixels=pixels, cache=cache, on_progress=on_progress)
    return _usable(files, kinds, sizes, max_pixels, files.key if cache else "")


def _usable(
    files: ImageFiles,
    kinds: Shaped[np.ndarray, " files"],
    sizes: Int32[np.ndarray, "files 2"],
    max_pixels: int,
    key: str,
) -> Images:
    """The images whose header is good; the others are listed as bad."""
    names, states = files.files
    kinds[sizes.prod(axis=1, dtype=np.int64) > max_pixels] = b"too-large"
    known = (*FORMATS, "array")
    good = np.isin(kinds, np.array(known, np.bytes_))
    rows = np.flatnonzero(good)
    bad = [*files.bad]
    for row in np.flatnonzero(~good).tolist():
        bad += [BadFile(names[row], kinds[row].decode(), int(states[row, 0]))]
    return _unlabeled(
        names if good.all() else tuple(map(names.__getitem__, rows.tolist())),
        sizes=sizes[rows],
        num_bytes=states[rows, 0],
        kinds=kinds[rows].astype(np.dtype(f"U{max(map(len, known))}")),
        modified=states[rows, 1],
        source=files.source,
        key=key,
        bad=tuple(sorted(bad, key=lambda file: in_bytes(file.name))),
    )


def _from_source(
    source: ImageSource,
    where: str,
    labels: str,
    max_pixels: int,
    full: bool,
    on_progress: ProgressCallback,
) -> Images:
    """The images of a user's own source."""
    source_names = [str(name) for name in source.names]
    names, reader = tuple(sorted(source_names, key=in_bytes)), CustomSource(source)
    if len(set(names)) < len(names) or not names:
        raise DataError(f"{where}: {len(names)} names; give at least one, each of its own")
    pixels = max_pixels if full else 0
    (kinds, sizes), states = scan_source(
        reader, names, decoded_pixels=pixels, on_progress=on_progress
    )
    images = _usable(ImageFiles("", reader, Files(names, states)), kinds, sizes, max_pixels, "")
    _require_images(images, where)
    own = annotations_from_rows(_rows(source, where, source_names), images.names)
    return _annotated(images, own.or_else(annotations_from_folders(images.names, "none")), labels)


def _rows(source: ImageSource, where: str, names: Sequence[str]) -> dict[str, Row]:
    """The annotations of a user's own source, by name."""
    columns = []
    for column in ("label", "group", "split"):
        values = getattr(source, f"{column}s", None)
        texts = [""] * len(names) if values is None else [str(value) for value in values]
        if len(texts) != len(names):
            raise DataError(
                f"{where}: {len(texts)} {column}s for {len(names)} names; give one for each"
            )
        columns.append(texts)
    sides = columns[2]
    unknown = sorted({side for side in sides if side and side not in SIDES})
    if unknown:
        raise DataError(f"{where}: split {unknown[0]!r}; say train, val or test")
    rows = zip(names, *columns, strict=True)
    return {name: Row(label, group, SIDES.get(side, ""), 0) for name, label, group, side in rows}


def _from_parts(where: str, parts: Sequence[Part], labels: str) -> Images:
    source, annotations = join(where, parts)
    count, height, width = source.pixels.shape[:3]
    images = _unlabeled(
        list(source.rows),
        sizes=np.full((count, 2), (width, height), np.int32),
        num_bytes=np.full(count, source.pixels[0].nbytes, np.int64),
        kinds=np.full(count, "array"),
        modified=np.zeros(count, np.int64),
        source=source,
    )
    return _annotated(images, annotations, labels)


def _unlabeled(names: Sequence[str], **known: Any) -> Images:
    count = len(names)
    nothing = np.full(count, UNKNOWN, np.int64), np.arange(count), np.full(count, "")
    return Images(tuple(names), *nothing, (), **known)


def _annotated(images: Images, own: Annotations | None, labels: str) -> Images:
    """Add the data's own annotations, those of folders or those of a table of labels."""
    names = images.names
    annotations = own or annotations_from_folders(names, labels if labels == "auto" else "none")
    notes: tuple[str, ...] = ()
    if labels == "none":
        annotations = replace(annotations, labels=[""] * len(names))
    elif labels == "folders":
        annotations = replace(annotations, labels=annotations_from_folders(names, labels).labels)
    elif labels != "auto":
        table = Path(labels).expanduser()
        rows, notes = match(table, read_table(table, ("path", "label")), names)
        annotations = annotations_from_rows(rows, names).or_else(annotations)
    classes, numbers = annotations.numbered()
    return replace(
        images,
        labels=numbers,
        groups=annotations.grouped(),
        splits=np.array(annotations.splits, np.str_),
        classes=classes,
        notes=notes,
    )
