"""Pack a data set of torchvision into one .npz that nearkin and the benchmarks read.

    python examples/data/pack_torchvision.py CIFAR10 cifar10.npz
    python examples/data/pack_torchvision.py FashionMNIST fashion_mnist.npz

torchvision downloads it into ROOT, unless it is there. To train on it alone, use
`torchvision:CIFAR10` as data instead.
"""

import argparse
from pathlib import Path

import numpy as np
import torchvision


def main() -> None:
    """Read both parts and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", choices=["CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--root", type=Path, default=Path("torchvision"))
    options = parser.parse_args()
    arrays = {}
    for part in ("train", "test"):
        found = getattr(torchvision.datasets, options.name)(
            options.root, train=part == "train", download=True
        )
        arrays |= {f"x_{part}": np.asarray(found.data), f"y_{part}": np.asarray(found.targets)}
    np.savez(options.output, **arrays, class_names=found.classes)


if __name__ == "__main__":
    main()
