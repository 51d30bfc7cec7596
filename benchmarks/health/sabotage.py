"""Train every method, healthy and sabotaged, and record its health.

    python benchmarks/health/sabotage.py fashion.npz -o docs/health/fashion.csv

One row per run, with the health at its end; the same command continues after an interruption.
bounds.py applies the bounds of `nearkin.training.health` to the rows.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.split import Split, split_images
from nearkin.errors import DivergedError
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.run.settings import resolve
from nearkin.tables import read_csv, write_csv
from nearkin.training.fit import optimizer_for, training_steps
from nearkin.training.health import Monitor
from nearkin.training.session import build
from nearkin.types import Batch, Step

CPU = torch.device("cpu")
PICTURES = 2000
SEEDS = (1, 2, 3)
COLUMNS = (
    "method", "arm", "seed", "effective_rank", "directions", "feature_std", "mean_cosine", "knn",
    "untrained", "diverged", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """A kind of sabotage."""

    lr: float = 1.0
    weight_decay: float = 1.0
    aligned: bool = False
    """Whether the loss is only that views of an image are alike; collapse minimizes it."""
    seeds: tuple[int, ...] = SEEDS[:1]


ARMS = {
    "healthy": Arm(seeds=SEEDS),
    "aligned": Arm(aligned=True),
    "rate x 100": Arm(lr=100.0),
    "decay x 1000": Arm(weight_decay=1000.0),
}


def align(method: Method[Any]) -> None:
    """Replace the loss of a method by the mean distance of two views' unit embeddings."""
    taught = type(method).forward

    def forward(batch: Batch, progress: float) -> Step[Any]:
        z1, z2 = (F.normalize(method.online(view).flatten(1)) for view in batch.views[:2])
        memo = taught(method, batch, progress).memo
        return Step(-(z1 * z2).sum(dim=1).mean(), memo, {})

    method.forward = forward  # type: ignore[method-assign]


def config_for(method: str, seed: int, arm: Arm, parts: Split) -> TrainConfig:
    """Return the usual settings, small, changed by the arm."""
    classes = parts.images.classes
    known = ",".join(classes[: len(classes) // 2]) if METHODS[method].uses_labels else ""
    asked = TrainConfig(
        method=method, backbone="tiny", image_size=16, epochs=8, batch_size=128, seed=seed,
        known=known, precision="fp32", workers=0,
    )  # fmt: skip
    usual = resolve(asked, parts.train, CPU)
    decay = float(usual.weight_decay) * arm.weight_decay
    return replace(usual, lr=float(usual.lr) * arm.lr, weight_decay=decay)


def run(method: str, arm: str, seed: int, parts: Split) -> dict[str, Any]:
    """Run once, and return the health at the end."""
    config = config_for(method, seed, ARMS[arm], parts)
    trained, batches = build(config, parts.train, CPU)
    monitor = Monitor(parts, config, CPU)
    row: dict[str, Any] = {"method": method, "arm": arm, "seed": seed, "diverged": ""}
    row["untrained"] = monitor.evaluate(trained).get("knn", "")
    if ARMS[arm].aligned:
        align(trained)
    total, started = int(config.epochs) * batches.order.steps_per_epoch, time.perf_counter()
    try:
        optimizer, fed = optimizer_for(trained, config), batches.between(0, total)
        for _ in training_steps(config, trained, optimizer, fed, start=0, total=total):
            pass
        row |= monitor.evaluate(trained)
    except DivergedError:
        row["diverged"] = "yes"
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def pending(done: set[tuple[str, str, int]]) -> Iterator[tuple[str, str, int]]:
    """Return the missing runs. A method of one view has nothing to align."""
    plan = [(m, name, seed) for name, arm in ARMS.items() for m in METHODS for seed in arm.seeds]
    for method, name, seed in plan:
        possible = len(METHODS[method].views) > 1 or not ARMS[name].aligned
        if possible and (method, name, seed) not in done:
            yield method, name, seed


def main() -> None:
    """Run all missing runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    images = open_images(asked.data).spread(PICTURES)
    parts = split_images(images, 0.2, 0)
    rows: list[dict[str, Any]] = []
    if asked.output.exists():
        rows = [dict(row) for row in read_csv(asked.output)]
    for method, arm, seed in pending({(r["method"], r["arm"], int(r["seed"])) for r in rows}):
        rows.append(run(method, arm, seed, parts))
        print({k: v if isinstance(v, str | int) else round(v, 3) for k, v in rows[-1].items()})
        write_csv(asked.output, COLUMNS, [[row.get(name, "") for name in COLUMNS] for row in rows])


if __name__ == "__main__":
    main()
