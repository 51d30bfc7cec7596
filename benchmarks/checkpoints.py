"""Time of a checkpoint, beside the time between two.

    python -m benchmarks checkpoints [--networks simclr/small/32 ...] [--folder FOLDER]

Serializing, sealing, syncing and reading back, in FOLDER (by default the current one). `share` is
that of a checkpoint in the time of a training which makes one as often as it may.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.training import checkpoint
from nearkin.training.checkpoint import INTERVAL, SHARE
from nearkin.training.optimizer import build_optimizer

RUNS = ["simclr/small/32", "simclr/resnet18/224", "byol/resnet50/224"]
OPTIONS: Final = (
    Option("networks", RUNS, "method, backbone and side of images", quick=RUNS[:1]),
    Option("folder", ".", "where the files are written"),
)


def saved(asked: str, folder: Path, rounds: int) -> Row:
    """Measure the checkpoint of one network."""
    name, backbone, size = asked.split("/")
    method = METHODS[name](build_backbone(backbone, int(size)))
    optimizer = build_optimizer(method, name="adamw", lr=1e-3, weight_decay=0.0)
    for parameter in method.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    laps = []
    for step in range(rounds):
        before = time.perf_counter()
        path = checkpoint.save(folder, step, method, optimizer)
        laps.append(time.perf_counter() - before)
    middle = statistics.median(laps)
    pause = max(INTERVAL, middle / SHARE)
    more = {"MB": path.stat().st_size / 1e6, "every": pause, "share": middle / (pause + middle)}
    return Row(asked, middle, rounds=rounds, more=more | {"longest": max(laps)})


def run(options: Namespace) -> Iterator[Row]:
    """Measure network after network."""
    for asked in options.networks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            yield saved(asked, Path(folder), options.rounds)
