"""Classes from few labels: accuracy of each training of `nearkin classify` for 1 to 10 per class.

    python benchmarks/few_labels.py ENCODER DATA OUT [--train-layers linear,attentive,last:1]
        [--labels 1,2,5,10] [--seeds 5] [--minutes 8]

ENCODER is what `nearkin classify --from` takes, DATA has labels and names test images: an .npz
with x_train, y_train, x_test and y_test such as that of Fashion-MNIST, of which the first 1,000
training and 2,000 test images are taken, or a tar with train/CLASS/FILE and test/CLASS/FILE such
as Caltech-99. For each seed, so many training images of each class are drawn, the same for all
trainings; all other training images have no label. All test images are scored. Each call goes on
where the last one ended, for so many minutes, and prints what there is: the mean over the seeds,
and the standard deviation between them.
"""

import argparse
import csv
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

import numpy as np

import nearkin
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.recognize import class_names

NUM_TRAIN: Final = 1_000
NUM_TEST: Final = 2_000


def write_labels(images: Images, path: Path, per_class: int, seed: int) -> None:
    """Write a table of labels: of some training images of each class, and of all test images."""
    names, drawn = class_names(images), np.random.default_rng(seed).permutation(len(images))
    train = drawn[images.splits[drawn] == "train"]
    few = [train[images.labels[train] == c][:per_class] for c in range(len(images.classes))]
    rows = [*np.flatnonzero(images.splits == "test").tolist(), *np.concatenate(few).tolist()]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "label"))
        writer.writerows((images.names[row], names[row]) for row in sorted(rows))


def accuracy(folder: Path) -> float:
    """Return the accuracy on test images of a finished run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["measures"]["classifier"]["accuracy"]["value"])


def smaller(data: str, out: Path) -> str:
    """Return an .npz with the first images of another one; anything else as it is."""
    path = out / "data.npz"
    if not data.endswith(".npz"):
        return data
    if not path.exists():
        with np.load(data) as file:
            sides = {"train": NUM_TRAIN, "test": NUM_TEST}
            part = {f"{xy}_{s}": file[f"{xy}_{s}"][:n] for s, n in sides.items() for xy in "xy"}
        np.savez(path, **part)
    return str(path)


def run_folder(out: Path, layers: str, per_class: int, seed: int) -> Path:
    """Return the folder of one run."""
    return out / f"{layers.replace(':', '-')}-{per_class}-seed-{seed}"


def report(out: Path, layers: Sequence[str], counts: Sequence[int], seeds: int) -> None:
    """Print the mean over the seeds that are done, and the standard deviation between them."""
    for name, per_class in product(layers, counts):
        folders = [run_folder(out, name, per_class, seed) for seed in range(seeds)]
        values = [accuracy(each) for each in folders if (each / "summary.json").exists()]
        if values:
            spread = f" +- {stdev(values):.3f}" if len(values) > 1 else ""
            mean = f"{fmean(values):.3f}{spread}"
            print(f"{name:10} {per_class:3} per class  {mean}  ({len(values)} seeds)")


def main() -> None:
    """Run what is missing, until the time is up, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("encoder")
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train-layers", default="linear,attentive,last:1")
    parser.add_argument("--labels", default="1,2,5,10")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0)
    typed = parser.parse_args()
    end = time.monotonic() + 60 * typed.minutes
    counts = [int(number) for number in typed.labels.split(",")]
    layers = typed.train_layers.split(",")
    typed.out.mkdir(parents=True, exist_ok=True)
    data = smaller(typed.data, typed.out)
    images = open_images(data)
    # Seed by seed, so that what is printed early has all trainings and all numbers of labels.
    for seed, per_class, name in product(range(typed.seeds), counts, layers):
        table = typed.out / f"labels-{per_class}-seed-{seed}.csv"
        if not table.exists():
            write_labels(images, table, per_class, seed)
        folder = run_folder(typed.out, name, per_class, seed)
        if (folder / "summary.json").exists() or time.monotonic() > end:
            continue
        nearkin.classify(
            data,
            out=folder,
            resume=True,
            from_run=typed.encoder,
            labels=table,
            train_layers=name,
            seed=seed,
            baselines=False,
        )
    report(typed.out, layers, counts, typed.seeds)


if __name__ == "__main__":
    main()
