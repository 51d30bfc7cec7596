"""Data sets known by name: those that scikit-learn brings, and those of torchvision on disk."""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from nearkin.data.arrays import Part
from nearkin.errors import DataError

PREFIX: Final = "torchvision:"
TORCHVISION: Final = ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "SVHN")
DIGITS_SIDE: Final = 16


def is_name(data: str) -> bool:
    """Whether this names a data set rather than a path."""
    return data == "digits" or data.startswith(PREFIX)


def from_name(data: str) -> list[Part]:
    """The images of "digits" or "torchvision:NAME". Nothing is ever downloaded.

    The root of torchvision's sets is the environment variable NEARKIN_TORCHVISION, or
    ~/.cache/nearkin/torchvision.

    Raises:
        DataError: the name is not known, or the files are not there.
    """
    if data == "digits":
        return [digits()]
    name = data.removeprefix(PREFIX)
    if name not in TORCHVISION:
        raise DataError(f"{data}: not a known data set; there are {', '.join(TORCHVISION)}")
    root = Path(
        os.environ.get("NEARKIN_TORCHVISION") or "~/.cache/nearkin/torchvision"
    ).expanduser()
    return [_torchvision(name, root, split) for split in ("train", "test")]


def digits() -> Part:
    """The 1,797 handwritten digits of scikit-learn, 8 by 8 pixels, enlarged to 16 by 16."""
    from sklearn.datasets import load_digits

    data = load_digits()
    small = np.rint(data.images * (255 / 16)).astype(np.uint8)
    side = (DIGITS_SIDE, DIGITS_SIDE)
    large = [Image.fromarray(image).resize(side, Image.Resampling.BICUBIC) for image in small]
    return Part("", np.stack([np.asarray(image) for image in large]), data.target)


def _torchvision(name: str, root: Path, split: str) -> Part:
    from torchvision import datasets

    known = getattr(datasets, name)
    side: dict[str, Any] = {"split": split} if name == "SVHN" else {"train": split == "train"}
    try:
        data = known(str(root), download=False, **side)
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
