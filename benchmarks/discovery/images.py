"""Draw the images of one seed: some of every class for training, and others for testing.

    python benchmarks/discovery/images.py cifar10.npz --seed 1 -o cifar10-1.npz

Takes an .npz with x_train, y_train, x_test, y_test and, if there are any, class_names. Training
images come from its training part and test images from its test part.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def drawn(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of `per_class` images of every class, in ascending order."""
    rows = [
        rng.choice(np.flatnonzero(labels == label), per_class, replace=False)
        for label in np.unique(labels)
    ]
    return np.sort(np.concatenate(rows))


def main() -> None:
    """Read all images and write the drawn ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--train", type=int, default=1000, help="per class")
    parser.add_argument("--test", type=int, default=200, help="per class")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    source: Mapping[str, np.ndarray] = np.load(options.source)
    chosen: dict[str, np.ndarray] = {}
    for part, count in (("train", options.train), ("test", options.test)):
        rows = drawn(source[f"y_{part}"], count, rng)
        chosen |= {f"{axis}_{part}": source[f"{axis}_{part}"][rows] for axis in "xy"}
    if "class_names" in source:
        chosen["class_names"] = source["class_names"]
    np.savez(options.output, allow_pickle=False, **chosen)


if __name__ == "__main__":
    main()
