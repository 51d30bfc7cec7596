"""Images that are pixels already: arrays, .npz files and data sets known by name."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from nearkin.data.cache import free_memory
from nearkin.data.channels import array_pixels
from nearkin.data.images import Arrays
from nearkin.data.labels import File, Row
from nearkin.data.listing import Listing
from nearkin.errors import DataError
from nearkin.places import user_path
from nearkin.tables import read_arrays
from nearkin.types import UNKNOWN


@dataclass(frozen=True)
class Part:
    """Images and labels of one side of a split, or of none ('')."""

    split: str
    pixels: np.ndarray
    labels: np.ndarray | None = None
    classes: tuple[str, ...] | None = None
    """Names of the classes 0, 1, ...; by default the labels as text."""


def list_arrays(where: str, parts: Sequence[Part]) -> Listing:
    """Join the parts in one array, and name each image by its split and number."""
    parts = sorted(parts, key=lambda part: part.split)
    pixels = [_images(where, np.asarray(part.pixels)) for part in parts]
    if len({array.shape[1:] for array in pixels}) > 1:
        raise DataError(f"{where}: train and test images differ in shape; give one shape")
    rows: dict[str, Row] = {}
    for part in parts:
        count = len(part.pixels)
        prefix, digits = f"{part.split}/" if part.split else "", len(str(count - 1))
        for row, label in enumerate(_labels(where, part)):
            rows[f"{prefix}{row:0{digits}}"] = Row(label, split=part.split)
    joined = pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
    source = Arrays(joined, {name: row for row, name in enumerate(rows)})
    return Listing(source, tuple(rows), np.tile([joined[0].nbytes, 0], (len(rows), 1)), rows=rows)


def _images(where: str, pixels: np.ndarray) -> np.ndarray:
    try:
        return array_pixels(pixels, 4)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}") from error


def _labels(where: str, part: Part) -> list[str]:
    count = len(part.pixels)
    if part.labels is None:
        return [""] * count
    labels = np.asarray(part.labels).ravel()
    if len(labels) != count:
        raise DataError(f"{where}: {count} images but {len(labels)} labels; give one each")
    if labels.dtype.kind not in "iuUS":
        raise DataError(f"{where}: labels of type {labels.dtype}; give whole numbers or text")
    if labels.dtype.kind in "US":
        return [str(label) for label in labels.astype(np.str_)]
    numbers, classes = np.unique(labels).tolist(), part.classes
    if numbers[0] < UNKNOWN or (classes is not None and numbers[-1] >= len(classes)):
        known = "" if classes is None else f" for {len(classes)} classes"
        raise DataError(
            f"{where}: labels from {numbers[0]} to {numbers[-1]}{known}; "
            f"count from 0, with {UNKNOWN} for unknown"
        )
    names = {number: classes[number] if classes else str(number) for number in numbers}
    names[UNKNOWN] = ""
    return [names[label] for label in labels.tolist()]


def from_npz(path: File) -> list[Part]:
    """The images of an .npz file: x (or images), y (or labels), or x_train, y_train, x_test...

    Without x_test, x_val is held out; with it, x_val is not used. The key class_names, if there,
    names the classes 0, 1, ... Nothing is ever unpickled.
    """
    try:
        with path.open("rb") as file:
            arrays = read_arrays(file, free_memory())
    except Exception as error:  # of any kind: the file may hold anything
        raise DataError(f"{path}: not a readable .npz ({error}); save plain arrays") from error
    names = arrays.get("class_names")
    classes = None if names is None else tuple(str(name) for name in names)
    parts = []
    held_out = "_test" if {"x_test", "images_test"} & arrays.keys() else "_val"
    for split, suffix in (("", ""), ("train", "_train"), ("test", held_out)):
        pixels = arrays.get(f"x{suffix}", arrays.get(f"images{suffix}"))
        if pixels is not None:
            labels = arrays.get(f"y{suffix}", arrays.get(f"labels{suffix}"))
            parts.append(Part(split, pixels, labels, classes))
    if not parts:
        keys = ", ".join(arrays) or "none"
        raise DataError(f"{path}: keys are {keys}; call the images x, or x_train and x_test")
    return parts


PREFIX: Final = "torchvision:"
TORCHVISION: Final = ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "SVHN")
DIGITS_SIDE: Final = 16


def is_name(data: str) -> bool:
    """Whether this names a data set rather than a path."""
    return data == "digits" or data.startswith(PREFIX)


def from_name(data: str) -> list[Part]:
    """The images of "digits" or "torchvision:NAME", from disk. Nothing is ever downloaded."""
    if data == "digits":  # of scikit-learn: 1,797 of 8 by 8 pixels, enlarged to 16 by 16
        from sklearn.datasets import load_digits

        stored, side = load_digits(), (DIGITS_SIDE, DIGITS_SIDE)
        small = map(Image.fromarray, np.rint(stored.images * (255 / 16)).astype(np.uint8))
        large = [np.asarray(image.resize(side, Image.Resampling.BICUBIC)) for image in small]
        return [Part("", np.stack(large), stored.target)]
    name = data.removeprefix(PREFIX)
    if name not in TORCHVISION:
        raise DataError(f"{data}: not a known data set; there are {', '.join(TORCHVISION)}")
    root = user_path(os.environ.get("NEARKIN_TORCHVISION") or "~/.cache/nearkin/torchvision")
    return [_torchvision(name, root, split) for split in ("train", "test")]


def _torchvision(name: str, root: Path, split: str) -> Part:
    from torchvision import datasets

    dataset = getattr(datasets, name)
    side: dict[str, Any] = {"split": split} if name == "SVHN" else {"train": split == "train"}
    try:
        data = dataset(str(root), download=False, **side)
    except Exception as error:  # missing, damaged and half-downloaded files all raise differently
        fetch = ", ".join(f"{key}={value!r}" for key, value in side.items())
        raise DataError(
            f'{PREFIX}{name}: not found in {root}; download it once with python -c "import '
            f'torchvision; torchvision.datasets.{name}({str(root)!r}, {fetch}, download=True)"'
        ) from error
    pixels = np.asarray(data.data)
    if name == "SVHN":
        return Part(split, pixels.transpose(0, 2, 3, 1), np.asarray(data.labels))
    return Part(split, pixels, np.asarray(data.targets), tuple(data.classes))
