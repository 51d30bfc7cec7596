"""Time of a checkpoint, beside the time between two.

    python benchmarks/checkpoints.py

Serializing, sealing, syncing and reading back, in the current folder; the median of five.
"""

import statistics
import tempfile
import time
from pathlib import Path

from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.training import checkpoint
from nearkin.training.checkpoint import INTERVAL, SHARE
from nearkin.training.optimizer import build_optimizer

RUNS = (("simclr", "small", 32), ("simclr", "resnet18", 224), ("byol", "resnet50", 224))
REPEATED = 5


def main() -> None:
    """Print a line per network."""
    for name, backbone, size in RUNS:
        method = METHODS[name](build_backbone(backbone, size))
        optimizer = build_optimizer(method, name="adamw", lr=1e-3, weight_decay=0.0)
        for parameter in method.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach().clone()
        optimizer.step()
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            laps = []
            for step in range(REPEATED):
                before = time.perf_counter()
                path = checkpoint.save(Path(folder), step, method, optimizer)
                laps.append(time.perf_counter() - before)
            megabytes = path.stat().st_size / 1e6
        middle = statistics.median(laps)
        pause = max(INTERVAL, middle / SHARE)
        print(
            f"{name} {backbone}: {megabytes:.0f} MB, {middle:.2f} s (from {min(laps):.2f} to "
            f"{max(laps):.2f}), every {pause:.0f} s: {middle / (pause + middle):.2%} of the time"
        )


if __name__ == "__main__":
    main()
