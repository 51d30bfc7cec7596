"""Objects of Python as data: arrays, lists and sources of one's own; .npz files; known names."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from nearkin.data.channels import image_pixels
from nearkin.data.decode import DEEP, array_pixels
from nearkin.data.folders import list_table
from nearkin.data.images import Arrays, CustomSource, ImageSource
from nearkin.data.labels import NO_CLASS, Row, split_of, splits_of, text_of
from nearkin.data.listing import Listing, listed
from nearkin.data.notes import noted
from nearkin.data.remote import File, readable
from nearkin.distributed import free_memory
from nearkin.errors import DataError
from nearkin.files import read_arrays
from nearkin.places import exists, user_path
from nearkin.types import UNLABELED

KEPT: Final = ("uint8", *DEEP)  # Types of pixels that `image_pixels` leaves as they are


@dataclass(frozen=True)
class Part:
    """Images and labels of one split, or of none ('')."""

    split: str
    pixels: Any  # An array, or what becomes one
    labels: Any = None
    classes: tuple[str, ...] | None = None
    """Names of the classes 0, 1, ...; by default the labels as text."""


def list_arrays(where: str, parts: Sequence[Part]) -> Listing:
    """Join the parts in one array, and name each image by its split and number."""
    parts = sorted(parts, key=lambda part: part.split)
    try:
        pixels = [array_pixels(part.pixels, 4) for part in parts]
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}") from error
    if len({array.shape[1:] for array in pixels}) > 1:
        raise DataError(f"{where}: images of the parts differ in shape; give one shape")
    rows: dict[str, Row] = {}
    for part in parts:
        labels = values_of_each(where, "labels", part.labels, len(part.pixels))
        prefix = f"{part.split}/" if part.split else ""
        for number, label in zip(numbers(len(labels)), labels, strict=True):
            row = Row.of(label, split=part.split)
            name = f"{prefix}{number}"
            rows[name] = row if part.classes is None else _of_class(where, row, part.classes)
    joined = pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
    states = np.tile([joined[0].nbytes, 0], (len(rows), 1))
    return listed(Arrays(joined, np.arange(len(rows))), [*rows], states, rows)


def numbers(count: int) -> list[str]:
    """Return the names of images that have none: their numbers, which sort as they count.

    >>> numbers(11)[-2:], numbers(10)[-1]
    (['09', '10'], '9')
    """
    digits = len(str(count - 1))
    return [f"{number:0{digits}}" for number in range(count)]


def values_of_each(where: str, what: str, values: Any, count: int) -> list[Any]:
    """What labels, groups or splits are given for each image, None for none; or a `DataError`."""
    if values is None:
        return [None] * count
    given = values.tolist() if hasattr(values, "detach") else values
    given = given if isinstance(given, list | tuple) else np.asarray(given)
    if isinstance(given, np.ndarray) and given.ndim == 0:
        kind = type(values).__name__
        raise DataError(f"{where}: the {what} are a {kind}; give a list or an array, one each")
    if len(given) != count:
        raise DataError(f"{where}: {count} images but {len(given)} {what}; give one each")
    return list(given)


def _of_class(where: str, row: Row, classes: Sequence[str]) -> Row:
    """The same with the name of the class whose number the label is, which has to be one."""
    named = row.named(classes)
    if named.unusable not in ("", NO_CLASS) or (row.label and named is row):
        raise DataError(
            f"{where}: label {row.label or row.unusable} is no number of {len(classes)} classes; "
            f"count from 0, with {UNLABELED} for images without a label"
        )
    return named


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
    labels = values_of_each(where, "labels", labels, len(images))
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
    labels = values_of_each(where, "labels", labels, len(given))
    paths = [user_path(str(path)) for path in given]
    if missing := next((path for path in paths if not exists(path)), None):
        raise DataError(f"{where}: {missing}: no such file; give paths of images")
    folders = {path.parent: path.parent.resolve() for path in paths}
    root = Path(os.path.commonpath(folders.values()))
    absolute = [str(folders[path.parent] / path.name) for path in paths]
    rows = [Row.of(label, line=number) for number, label in enumerate(labels, 1)]
    table = root / Path(where).name  # which is not there, but named in errors
    # Nothing is kept of what has no name.
    return replace(list_table(table, [*zip(absolute, rows, strict=True)]), key="")


def _list_source(source: ImageSource, where: str) -> Listing:
    """The images of a user's own source; the scan finds out their states."""
    names = [str(name) for name in source.names]
    if len(set(names)) < len(names) or not names:
        raise DataError(f"{where}: {len(names)} names; give at least one, each of its own")
    given = {what: getattr(source, what, None) for what in ("labels", "groups", "splits")}
    columns = [values_of_each(where, what, values, len(names)) for what, values in given.items()]
    rows = dict(zip(names, map(Row.of, *columns), strict=True))
    splits_of([row.split for row in rows.values()], where)
    return listed(CustomSource(source, names), names, np.zeros((len(names), 2), np.int64), rows)


ROLES: Final = {"images": {"x", "images"}, "labels": {"y", "labels"}}
"""Words for the arrays of a file."""


def list_npz(path: File) -> Listing:
    """The images of an .npz file: x (or images), y (or labels), or a pair of them for each part.

    As in x_train, y_train, x_val, y_val, x_test, y_test, or train_images, train_labels, ... The
    key class_names, if there, names the classes 0, 1, ... Nothing is ever unpickled.
    """
    # Errors may be of any kind: the file may hold anything.
    with readable(path, ".npz", "save plain arrays", Exception), path.open("rb") as file:
        arrays = read_arrays(file, free_memory())
    names = arrays.get("class_names")
    if names is not None and names.ndim != 1:
        raise DataError(f"{path}: class_names has {names.ndim} dimensions; give a name per class")
    classes = None if names is None else tuple(map(text_of, names))
    found: dict[str, dict[str, str]] = {"images": {}, "labels": {}}  # Keys, by split
    for key in arrays:
        if role := _role(key):
            first = found[role].setdefault(split_of(key), key)
            if first != key:
                raise DataError(f"{path}: {first} and {key} are both {role} of one part; keep one")
    images = found["images"]
    labels = {split: arrays[key] for split, key in found["labels"].items() if split in images}
    if not images:
        keys = ", ".join(arrays) or "none"
        raise DataError(f"{path}: keys are {keys}; call the images x, or x_train and x_test")
    parts = [Part(s, arrays[key], labels.get(s), classes) for s, key in images.items()]
    used = {*images.values(), *map(found["labels"].get, labels), "class_names"}
    others = [key for key in arrays if key not in used]
    notes = noted("left out", others, "arrays that are neither images nor their labels")
    return replace(list_arrays(str(path), parts), notes=notes)


def _role(key: str) -> str:
    """Whether an array of this name holds images or labels; '' if neither."""
    words = set(key.lower().split("_"))
    one = len(words) == 1 or split_of(key)
    return next((role for role, names in ROLES.items() if one and words & names), "")


PREFIX: Final = "torchvision:"
TORCHVISION: Final = ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "SVHN")
DIGITS_SIZE: Final = 16


def is_name(data: str) -> bool:
    """Whether this names a data set rather than a path."""
    return data == "digits" or data.startswith(PREFIX)


def from_name(data: str) -> list[Part]:
    """The images of "digits" or "torchvision:NAME", from disk. Nothing is ever downloaded."""
    if data == "digits":  # of scikit-learn: 1,797 of 8 by 8 pixels, enlarged to 16 by 16
        from sklearn.datasets import load_digits

        stored, size = load_digits(), (DIGITS_SIZE, DIGITS_SIZE)
        small = map(Image.fromarray, np.rint(stored.images * (255 / 16)).astype(np.uint8))
        large = [np.asarray(image.resize(size, Image.Resampling.BICUBIC)) for image in small]
        return [Part("", np.stack(large), stored.target)]
    name = data.removeprefix(PREFIX)
    if name not in TORCHVISION:
        raise DataError(f"{data}: not a known data set; there are {', '.join(TORCHVISION)}")
    root = user_path(os.environ.get("NEARKIN_TORCHVISION") or "~/.cache/nearkin/torchvision")
    return [_torchvision(name, root, split) for split in ("train", "test")]


def _torchvision(name: str, root: Path, split: str) -> Part:
    from torchvision import datasets

    dataset = getattr(datasets, name)
    which: dict[str, Any] = {"split": split} if name == "SVHN" else {"train": split == "train"}
    try:
        data = dataset(str(root), download=False, **which)
    except Exception as error:  # missing, damaged and half-downloaded files all raise differently
        fetch = ", ".join(f"{key}={value!r}" for key, value in which.items())
        raise DataError(
            f'{PREFIX}{name}: not found in {root}; download it once with python -c "import '
            f'torchvision; torchvision.datasets.{name}({str(root)!r}, {fetch}, download=True)"'
        ) from error
    pixels = np.asarray(data.data)
    if name == "SVHN":
        return Part(split, pixels.transpose(0, 2, 3, 1), np.asarray(data.labels))
    return Part(split, pixels, np.asarray(data.targets), tuple(data.classes))
