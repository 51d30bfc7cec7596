"""Pack CIFAR-10 from lossless contact sheets into one .npz that nearkin reads.

    python examples/data/pack_cifar10.py SHEETS [SHEETS...] cifar10.npz

SHEETS are folders that hold, together, labels.npz and train_00.webp ... test_03.webp, each 50 x 50
tiles. If torchvision has downloaded CIFAR-10, use `torchvision:CIFAR10` as data instead.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def images(folders: Sequence[Path], part: str) -> np.ndarray:
    """Return all tiles of a split, uint8 of shape (n, 32, 32, 3)."""
    files = {path.name: path for folder in folders for path in folder.glob(f"{part}_*.webp")}
    sheets = []
    for name in sorted(files):
        sheet = np.asarray(Image.open(files[name]).convert("RGB"))
        sheets.append(sheet.reshape(50, 32, 50, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3))
    return np.concatenate(sheets)


def main() -> None:
    """Read the sheets and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sheets", type=Path, nargs="+", metavar="SHEETS")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    labeled = [path for folder in options.sheets for path in folder.glob("labels.npz")]
    if not labeled:
        raise SystemExit(f"no labels.npz in {', '.join(map(str, options.sheets))}")
    labels = np.load(labeled[0])
    arrays = {"class_names": labels["class_names"]}
    for part in ("train", "test"):
        x, y = images(options.sheets, part), labels[f"{part}_y"]
        if len(x) != len(y):
            raise SystemExit(f"{len(x)} {part} images of {len(y)}; name all folders of sheets")
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    np.savez(options.output, **arrays)


if __name__ == "__main__":
    main()
