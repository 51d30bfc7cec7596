"""One training of the search: settings in, accuracy on held-out training images out.

A budget is CPU time of one thread, so that trials beside other work are as long as on a quiet
machine: the number of steps is what fits, measured at the start, and the schedule ends with it.
"""

import argparse
import copy
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data.augmentations import augmentation
from nearkin.data.batches import CenterCrops, Feed, Growing
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.rng import permutation
from nearkin.evaluation.embeddings import encode_pixels
from nearkin.evaluation.measures import num_neighbors, predict
from nearkin.method import Method
from nearkin.run.settings import resolve, view_sides
from nearkin.training.fit import optimizer_for, training_steps
from nearkin.training.session import build

CPU = torch.device("cpu")
BANK = 15_000  # Training images, at most, by which images are recognized
TIMED = 8  # Steps that are timed for each size of the views; the fastest counts


@dataclass(frozen=True)
class Pool:
    """A data set of the search: where it is, and how many images are trained on and scored."""

    file: str
    train: int
    queries: int


POOLS = {
    "cifar10": Pool("cifar10.npz", 45_000, 5_000),
    "fashion": Pool("fashion_mnist.npz", 10_000, 2_000),
    "caltech99": Pool("caltech99.tar", 1_742, 436),
}


def open_pool(name: str, folder: Path) -> tuple[Images, Images]:
    """Return images to train on and images to score, both of the data's training part."""
    pool = POOLS[name]
    images = open_images(folder / pool.file, cache=False)
    rows = np.flatnonzero(images.splits == "train")
    order = rows[permutation(20_261_123, 0, len(rows))]
    held_out, train = order[: pool.queries], order[pool.queries :][: pool.train]
    return images.subset(np.sort(train)), images.subset(np.sort(held_out))


def settings_of(trial: dict[str, Any]) -> TrainConfig:
    """Return the settings of a trial: fields of `TrainConfig`, options of the method, a view's."""
    names = {field.name for field in fields(TrainConfig)}
    known = {key: value for key, value in trial.items() if key in names}
    options = {key[7:]: value for key, value in trial.items() if key.startswith("option.")}
    return TrainConfig(**known, options=options)


def with_views(config: TrainConfig, trial: dict[str, Any]) -> TrainConfig:
    """Replace fields of all views: `view.scale` and the like."""
    changes = {key[5:]: value for key, value in trial.items() if key.startswith("view.")}
    if not changes:
        return config
    changes = {key: tuple(v) if isinstance(v, list) else v for key, v in changes.items()}
    views = [replace(view, **changes).to_dict() for view in augmentation(config.augment)]
    return replace(config, augment=views)


def steps_within(
    seconds: float, config: TrainConfig, method: Method[Any], parts: Sequence[Feed]
) -> int:
    """Return how many steps fit into CPU seconds, from the time of a few steps of each part."""
    costs = []
    for part in parts:
        trial, laps, before = copy.deepcopy(method), [], time.process_time()
        optimizer = optimizer_for(trial, replace(config, freeze_epochs=0))
        batches = part.between(0, TIMED)
        for _ in training_steps(config, trial, optimizer, batches, start=0, total=TIMED):
            laps.append(time.process_time() - before)
            before = time.process_time()
        costs.append(min(laps))  # the others were slowed down by other work
    return max(2, int(seconds / (sum(costs) / len(costs))))


def accuracy(method: Method[Any], config: TrainConfig, train: Images, held_out: Images) -> float:
    """Return the kNN accuracy of held-out images by the training images."""
    train = train.spread(BANK)
    bank, queries = (
        encode_pixels(method.backbone, CenterCrops(part, int(config.image_size)), CPU)
        for part in (train, held_out)
    )
    predicted = predict(bank, train.labels, queries, k=num_neighbors(len(train)))
    return float((predicted == held_out.labels).mean())


def run(trial: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and score one trial; return what is added to its row."""
    torch.set_num_threads(1)
    train, held_out = open_pool(trial["data"], folder)
    config = resolve(settings_of(trial), train, CPU)
    config = with_views(replace(config, freeze_epochs=0), trial)
    before = time.monotonic()
    method, batches = build(config, train, CPU)
    parts = [batches.resized(side) for side in view_sides(config)]
    total = steps_within(trial["seconds"], config, method, parts)
    optimizer, feed = optimizer_for(method, config), Growing(parts, total)
    losses, began = [], time.process_time()
    for _, step in training_steps(
        config, method, optimizer, feed.between(0, total), start=0, total=total
    ):
        losses.append(step.loss.item())
    spent = time.process_time() - began
    images = total * int(config.batch_size)
    return {
        "knn": accuracy(method, config, train, held_out),
        "steps": total,
        "epochs": round(images / len(train), 2),
        "cpu_seconds": round(spent, 1),
        "wall_seconds": round(time.monotonic() - before, 1),
        "images_per_second": round(images / spent, 1),
        "loss": round(float(np.mean(losses[-20:])), 4),
        "backbone": config.backbone,
        "image_size": config.image_size,
        "view_sizes": config.view_sizes,
        "augment": trial.get("augment", "auto"),
        "lr_used": config.lr,
    }


def main() -> None:
    """Run one trial, given as JSON, and print its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("trial", type=json.loads)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(json.dumps({**run(options.trial, options.data), "commit": commit}))


if __name__ == "__main__":
    main()
