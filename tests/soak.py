"""Many steps of a tiny network, and what they leave behind in memory, files and threads.

    python tests/soak.py STEPS

Prints a JSON object: steps, the slope of the resident memory in MB per 1,000 steps over the second
half, and the change of open files and threads over it. Fails if there are more of these at the end.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch

from nearkin.commands.train import train
from nearkin.config import TrainConfig

LOOKS = 20
"""At memory, over the second half."""


def resident() -> float:
    """Megabytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Watch:
    """Samples the process at some of the steps."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, float, int, int]] = []

    def info(self, text: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, text: str) -> None:
        every = max(1, total // (2 * LOOKS))
        if text.startswith("epoch") and done % every == 0 and 2 * done >= total:
            self.samples.append((done, resident(), open_files(), threading.active_count()))


def soak(steps: int) -> dict[str, float]:
    watch = Watch()
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)
    config = TrainConfig(
        method="moco", backbone="tiny", image_size=8, batch_size=8, epochs=steps // 8, val=0.0,
        evaluate_every=max(1, steps // 80), save_every=max(1, steps // 40), workers=0,
        options={"queue_size": 32, "dim": 8, "hidden_dim": 8},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(images, config, output=Path(folder) / "run", verbose=watch)
    done, memory, files, threads = np.array(watch.samples).T
    slope = np.polyfit(done / 1000, memory, 1)[0]
    return {
        "steps": int(done[-1]),
        "mb_per_1000_steps": round(float(slope), 3),
        "files": int(files[-1] - files[0]),
        "threads": int(threads[-1] - threads[0]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    left = soak(int(sys.argv[1]))
    print(json.dumps(left))
    sys.exit(left["files"] > 0 or left["threads"] > 0)
