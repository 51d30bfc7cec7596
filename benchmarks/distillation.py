"""Distill an encoder into a network of a tenth of its FLOPs, beside training that from scratch.

    python benchmarks/pack_cifar10.py SHEETS cifar10.npz
    python benchmarks/distillation.py cifar10.npz OUT [--minutes 8]

Trains a teacher by SimCLR, then a student by each method that has a teacher, then the same network
from scratch for as long as the distillation took, and for three times as long, at the method's own
rate and at that of the students. Each call goes on where the last one ended, for so many minutes;
the last one prints a table, and the curves of kNN over seconds of training. These are epochs times
the measured pace, without evaluation; those of a student hold the teacher's features as well.
"""

import argparse
import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nearkin.networks.backbone import build_backbone, small_resnet

SIZE: Final = 32
BATCH: Final = 256
METHODS: Final = ("seed", "feature_matching")
RATE: Final = 0.004  # of students, as in a trial with 3,000 images of 16 px
LONGEST: Final = 3
SCRATCH: Final[dict[str, tuple[int, dict[str, object]]]] = {
    "scratch-1": (1, {}),
    f"scratch-{LONGEST}": (LONGEST, {}),
    f"scratch-{LONGEST}-rate": (LONGEST, {"lr": RATE}),
}
"""From scratch: how many times as long as the distillation, and settings. The students' rate is
tried too, so that they are not the only ones whose rate was chosen."""


def student() -> nn.Module:
    """The student's network: the teacher's `small` with fewer channels, above all early ones."""
    return small_resnet(8, (16, 32, 112))


def flops(network: nn.Module) -> int:
    """Count the operations of a forward pass with one image."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network.eval()(torch.zeros(1, 3, SIZE, SIZE))
    return int(counter.get_total_flops())


def subset(source: Path, out: Path, num_train: int, num_test: int) -> Path:
    """Write the first images of both parts of CIFAR-10, which are in random order."""
    file = out / f"cifar10-{num_train}.npz"
    if not file.exists():
        with np.load(source) as whole:
            counts = {"train": num_train, "test": num_test}
            parts = {
                f"{name}_{part}": whole[f"{name}_{part}"][:count]
                for part, count in counts.items()
                for name in ("x", "y")
            }
        np.savez(file, **parts)
    return file


class Clock:
    """Trains one run after another until the time is over."""

    def __init__(self, data: Path, out: Path, minutes: float) -> None:
        self.data, self.out = data, out
        self.end = time.monotonic() + 60 * minutes

    def train(self, name: str, **settings: object) -> Path | None:
        """Go on with a run; return its folder once it is complete."""
        folder = self.out / name
        if (folder / "report.html").exists():
            return folder
        typed = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "nearkin", "train", str(self.data), "-o", str(folder)]
        command += ["--resume", f"--batch-size={BATCH}", f"--image-size={SIZE}", *typed]
        process = subprocess.Popen(command)
        try:
            code = process.wait(timeout=max(1.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it saves a checkpoint first
            code = process.wait()
        if code not in (0, 128 + signal.SIGTERM):
            sys.exit(f"{name} failed with exit code {code}")
        return folder if code == 0 else None


def seconds(folder: Path, num_images: int) -> tuple[float, float]:
    """Read the seconds of an epoch, and those of the teacher before the first, from a log."""
    log = (folder / "train.log").read_text(encoding="utf-8")
    pace = [float(text) for text in re.findall(r"(\d+) img/s", log)]
    taught = [float(text) for text in re.findall(r"features of .* in ([\d.]+) s", log)]
    return num_images // BATCH * BATCH / float(np.median(pace)), sum(taught)


def curve(folder: Path, num_images: int) -> list[tuple[float, float]]:
    """Read kNN over seconds of training."""
    epoch, before = seconds(folder, num_images)
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["knn"]]
    return [(before + epoch * float(row["epoch"]), float(row["knn"])) for row in rows]


def summary(folder: Path) -> dict[str, Any]:
    """Read the measures of a run."""
    stored: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return stored


def main() -> None:
    """Go on for some minutes; at the end, print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--images", type=int, default=8_000)
    parser.add_argument("--teacher-epochs", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = subset(options.data, options.out, options.images, options.images // 5)
    clock = Clock(data, options.out, options.minutes)
    tenth = f"{Path(__file__).resolve()}:student"
    common: dict[str, object] = {"seed": options.seed, "evaluate_every": 2}
    teacher = clock.train("teacher", backbone="small", epochs=options.teacher_epochs, **common)
    if teacher is None:
        return
    runs = {"teacher": teacher}
    for method in METHODS:
        how = {"method": method, "teacher": teacher, "backbone": tenth, "lr": RATE}
        run = clock.train(method, epochs=options.epochs, **how, **common)
        if run is None:
            return
        runs[method] = run
    epoch, before = seconds(runs[METHODS[0]], options.images)
    # A first epoch measures the pace: two views of each image, and no teacher.
    short = clock.train("pace", backbone=tenth, epochs=2, **common)
    if short is None:
        return
    pace, _ = seconds(short, options.images)
    for name, (times, settings) in SCRATCH.items():
        length = round(times * (before + epoch * options.epochs) / pace)
        run = clock.train(name, backbone=tenth, epochs=length, **settings, **common)
        if run is None:
            return
        runs[name] = run
    report(runs, options.images)


def report(runs: dict[str, Path], num_images: int) -> None:
    """Print what was reached, and when."""
    large, tiny = flops(build_backbone("small", SIZE)), flops(student())
    print(f"FLOPs of an image: teacher {large:,}, student {tiny:,}, {tiny / large:.3f} of them")
    print("| run | seconds | kNN [95 %] | share of the teacher's kNN [95 %] |\n|---|---|---|---|")
    curves = {name: curve(run, num_images) for name, run in runs.items()}
    for name, run in runs.items():
        stored = summary(run)
        knn = stored["measures"]["encoder"]["kNN top-1"]
        kept = stored.get("kept", {}).get("shares", [])
        share = next((x for x in kept if x["measure"] == "kNN top-1"), None)
        text = f"{share['share']:.3f} [{share['low']:.3f}, {share['high']:.3f}]" if share else ""
        value = f"{knn['value']:.3f} [{knn['low']:.3f}, {knn['high']:.3f}]"
        print(f"| {name} | {curves[name][-1][0]:.0f} | {value} | {text} |")
    goal = summary(runs["teacher"])["measures"]["encoder"]["kNN top-1"]["value"]
    longest = (curves[name] for name, (times, _) in SCRATCH.items() if times == LONGEST)
    best = max(knn for points in longest for _, knn in points)
    for method in METHODS:
        reached = next((at for at, knn in curves[method] if knn >= best), None)
        when = f"after {reached:.0f} s" if reached else "never"
        print(
            f"{method}: the best kNN from scratch, {best:.3f} ({best / goal:.3f} of the "
            f"teacher's), is reached {when}"
        )
    for name, points in curves.items():
        print(name, " ".join(f"{at:.0f}s:{knn:.3f}" for at, knn in points))


if __name__ == "__main__":
    main()
