"""How the cost of a step grows: one curve for each size that can grow.

    python benchmarks/growth.py [--rounds 3] [--only batch,queue] -o docs/benchmarks

Batch, side of the images, keys in MoCo's queue, number of views (DINO's multi-crop), number of
images in memory, and processes that share a batch and the CPU cores of this machine. Each curve
is measured in turns, from its smallest point to its largest, and written as growth.csv and
growth.png. Times depend on this machine and its other work; slopes do not. benchmarks/index.py
measures the cost of files.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from processes import turn
from wired import CPU, trained

from nearkin.distributed import device_name, native_precision
from nearkin.objectives import info_nce, unit

WARM, TIMED = 2, 3
"""Warm-up steps and timed steps of a turn."""

ACROSS = 3
"""Panels per row."""


def stepping(method: str, backbone: str, batch: int, **options: Any) -> Callable[[], float]:
    """Return the median seconds of a step of a newly built method."""

    def run() -> float:
        laps, before = [], time.perf_counter()
        for _ in trained(method, backbone, batch, WARM + TIMED, **options):
            laps.append(time.perf_counter() - before)
            before = time.perf_counter()
        return statistics.median(laps[WARM:])

    return run


def looking_up(num_keys: int) -> Callable[[], float]:
    """Return the seconds of MoCo's objective and its gradient: 256 queries of dimension 128."""

    def run() -> float:
        rng = torch.Generator().manual_seed(0)
        keys, query, key = (unit(torch.randn(n, 128, generator=rng)) for n in (num_keys, 256, 256))
        query.requires_grad_()

        laps = []
        for _ in range(WARM + TIMED):
            start = time.perf_counter()
            info_nce(query, key, keys, 0.2).backward()
            laps.append(time.perf_counter() - start)
        return statistics.median(laps[WARM:])

    return run


def sharing(processes: int) -> Callable[[], float]:
    """Return the median seconds of a step that several processes share."""
    asked = argparse.Namespace(method="simclr", backbone="resnet18", batch=128)
    return lambda: turn(processes, asked)["step"]


SMALL = ("simclr", "small")
CURVES: dict[str, dict[int, Callable[[], float]]] = {
    "batch": {size: stepping(*SMALL, size) for size in (32, 64, 128, 256, 512, 1024)},
    "side in pixels": {side: stepping(*SMALL, 32, side=side) for side in (16, 32, 64, 128)},
    "keys in the queue": {2**power: looking_up(2**power) for power in range(10, 19, 2)},
    "views of an image": {
        count: stepping("dino", "small", 32, side=64, augment="dino", views=count)
        for count in (2, 4, 6, 8)
    },
    "images in memory": {
        count: stepping(*SMALL, 64, images=count) for count in (10**3, 10**4, 10**5, 10**6)
    },
    "processes for a batch of 128": {count: sharing(count) for count in (1, 2, 4)},
}
"""Each size that grows, its values, and how to measure it."""


def measured(names: list[str], rounds: int) -> Iterator[tuple[str, int, float]]:
    """Return the median seconds at every point of every curve."""
    for name in names:
        laps: dict[int, list[float]] = {value: [] for value in CURVES[name]}
        for _ in range(rounds):
            for value, run in CURVES[name].items():
                laps[value].append(run())
        for value, seconds in laps.items():
            yield name, value, statistics.median(seconds)


def short(value: int) -> str:
    """Format a number for an axis.

    >>> short(96), short(2048), short(10**6)
    ('96', '2k', '1M')
    """
    thousands = next(power for power in (2, 1, 0) if value >= 1000**power)
    return f"{value / 1000**thousands:.0f}{('', 'k', 'M')[thousands]}"


def draw(rows: list[tuple[str, int, float]], path: Path) -> None:
    """Draw a panel per curve, both axes logarithmic, with a line of slope one."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    names = list(dict.fromkeys(name for name, _, _ in rows))
    down = -(-len(names) // ACROSS)
    figure, panels = plt.subplots(
        down, ACROSS, figsize=(3.2 * ACROSS, 2.8 * down), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(names) :]:
        panel.set_axis_off()
    for name, panel in zip(names, panels.flat, strict=False):
        points = [(value, seconds) for each, value, seconds in rows if each == name]
        values, seconds = zip(*points, strict=True)
        panel.loglog(values, seconds, "o-", color="#0072b2", label="measured")
        straight = [seconds[-1] * value / values[-1] for value in values]
        panel.loglog(values, straight, ":", color="#666666", label="proportional")
        panel.minorticks_off()
        panel.set_xticks(values, [short(value) for value in values])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.set_xlabel(name)
        panel.set_ylabel("seconds")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CURVES))
    parser.add_argument("-o", type=Path, required=True, dest="folder")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"torch {torch.__version__}, {device_name(CPU)}, {native_precision(CPU)}")
    rows = []
    for name, value, seconds in measured(options.only.split(","), options.rounds):
        print(f"{name:20} {value:9,}  {seconds:8.4f} s", flush=True)
        rows.append((name, value, seconds))
    with (options.folder / "growth.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("what", "value", "seconds"), *rows])
    draw(rows, options.folder / "growth.png")


if __name__ == "__main__":
    main()
