"""Pack CIFAR-10 from lossless contact sheets into one .npz that nearkin reads.

    python benchmarks/pack_cifar10.py SHEETS cifar10.npz

SHEETS is a folder with labels.npz and train_00.webp ... test_03.webp, each 50 x 50 tiles. If
torchvision has downloaded CIFAR-10, use `torchvision:CIFAR10` as data instead.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image


def images(folder: Path, part: str) -> np.ndarray:
    """Return all tiles of a split, uint8 of shape (n, 32, 32, 3)."""
    sheets = []
    for path in sorted(folder.glob(f"{part}_*.webp")):
        sheet = np.asarray(Image.open(path).convert("RGB"))
        sheets.append(sheet.reshape(50, 32, 50, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3))
    return np.concatenate(sheets)


def main() -> None:
    """Read the sheets and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sheets", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    labels = np.load(options.sheets / "labels.npz")
    np.savez(
        options.output,
        x_train=images(options.sheets, "train"),
        y_train=labels["train_y"],
        x_test=images(options.sheets, "test"),
        y_test=labels["test_y"],
        class_names=labels["class_names"],
    )


if __name__ == "__main__":
    main()
