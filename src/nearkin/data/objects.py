"""Objects of Python as data: arrays and lists of images, and sources of one's own."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from nearkin.data.arrays import Part, labels_of, list_arrays, numbers
from nearkin.data.channels import DEEP, image_pixels
from nearkin.data.folders import list_table
from nearkin.data.images import CustomSource, ImageSource
from nearkin.data.labels import Row, split_of
from nearkin.data.listing import Listing, listed
from nearkin.errors import DataError
from nearkin.places import exists, user_path

KEPT: Final = ("uint8", *DEEP)  # Types of pixels that `image_pixels` leaves as they are


def list_object(data: Any, where: str) -> Listing:
    """An `ImageSource`; an array or a list of images; or one of these two, and labels."""
    if isinstance(data, ImageSource):
        return _list_source(data, where)
    images, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if are_paths(images):
        return _list_paths(images, labels, where)
    # NumPy makes an array of objects of a list of arrays of several shapes.
    of_objects = isinstance(images, np.ndarray) and images.dtype.kind == "O"
    if isinstance(images, list | tuple) or of_objects:
        return _list_images(images, labels, where)
    if not hasattr(images, "__array__"):
        raise DataError(
            f"{where}: type {type(images).__name__} is not read; give a folder, an array or a "
            "list of images, a pair of images and labels, or an object with names and read (an "
            "ImageSource)"
        )
    return list_arrays(where, [Part("", images, labels)])


def are_paths(images: Any) -> bool:
    """Whether this is a list, an array or a series of texts or paths."""
    is_list = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 1
    return is_list and len(images) > 0 and all(isinstance(each, str | Path) for each in images)


@dataclass(eq=False)
class ImageList:
    """An `ImageSource` of a list's images and files, by their numbers; one may be there twice."""

    images: Sequence[Any]
    labels: Sequence[Any] | None = None
    names: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = numbers(len(self.images))

    def read(self, name: str, /) -> Any:
        """An image, or the bytes of a file."""
        image = self.images[int(name)]
        return Path(image).read_bytes() if isinstance(image, str | Path) else image


def _list_images(images: Sequence[Any] | np.ndarray, labels: Any, where: str) -> Listing:
    """Images of any sizes: encoded, Pillow's, arrays or tensors."""
    if not len(images):
        raise DataError(f"{where}: a list of no images; give one or more")
    labels = labels_of(where, Part("", images, labels))
    try:
        read = [image if isinstance(image, bytes) else image_pixels(image) for image in images]
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}") from error
    arrays = [image for image in read if isinstance(image, np.ndarray)]
    kinds = {(image.shape, str(image.dtype)) for image in arrays}
    if len(arrays) == len(read) and len(kinds) == 1 and arrays[0].dtype in KEPT:
        return list_arrays(where, [Part("", np.stack(arrays), labels)])
    pairs = zip(read, images, strict=True)
    kept = [x if isinstance(x, bytes) or x.dtype in KEPT else image for x, image in pairs]
    return _list_source(ImageList(kept, labels), where)


def _list_paths(given: Any, labels: Any, where: str) -> Listing:
    """Files, as if a table in the deepest folder that has all of them listed them."""
    labels = labels_of(where, Part("", given, labels))
    paths = [user_path(str(path)) for path in given]
    if missing := next((path for path in paths if not exists(path)), None):
        raise DataError(f"{where}: {missing}: no such file; give paths of images")
    folders = {path.parent: path.parent.resolve() for path in paths}
    root = Path(os.path.commonpath(folders.values()))
    absolute = [str(folders[path.parent] / path.name) for path in paths]
    told = [Row.of(label, line=number) for number, label in enumerate(labels, 1)]
    table = root / Path(where).name  # which is not there, but named in errors
    # Nothing is kept of what has no name.
    return replace(list_table(table, [*zip(absolute, told, strict=True)]), key="")


def _list_source(source: ImageSource, where: str) -> Listing:
    """The images of a user's own source; the scan finds out their states."""
    names = [str(name) for name in source.names]
    if len(set(names)) < len(names) or not names:
        raise DataError(f"{where}: {len(names)} names; give at least one, each of its own")
    states = np.zeros((len(names), 2), np.int64)
    return listed(CustomSource(source, names), names, states, _rows(source, where, names))


def _rows(source: ImageSource, where: str, names: Sequence[str]) -> dict[str, Row]:
    """The annotations of a user's own source, by name."""
    columns = []
    for column in ("label", "group", "split"):
        values = getattr(source, f"{column}s", None)
        cells = [None] * len(names) if values is None else list(values)
        if len(cells) != len(names):
            raise DataError(
                f"{where}: {len(cells)} {column}s for {len(names)} names; give one for each"
            )
        columns.append(cells)
    rows = dict(zip(names, map(Row.of, *columns), strict=True))
    if unknown := {row.split for row in rows.values() if row.split and not split_of(row.split)}:
        raise DataError(f"{where}: split {min(unknown)!r}; say train, val or test")
    return rows
