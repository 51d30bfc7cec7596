"""Seconds and memory of each protocol of `nearkin evaluate`, and of each corruption.

    python benchmarks/evaluation.py [--train 10000] [--test 10000] [--dim 384] [-o FILE.csv]

Features are Gaussian clusters of 100 classes, so no image is read and no network runs: what
is added by these is forward passes, whose number each protocol states (docs/evaluation.md). Every
protocol is measured in a process of its own; memory is its peak above that after all imports and
after the features were made. With -o, rows that the file has are not measured again.
"""

import argparse
import csv
import resource
import subprocess
import sys
import time
from pathlib import Path

CLASSES = 100
COLUMNS = ("what", "train", "test", "dim", "seconds", "cpu_seconds", "mb")
WITH_IMAGES = ("attentive", "robustness")  # Protocols that need images and a network


def features(train: int, test: int, dim: int):  # type: ignore[no-untyped-def]
    """Make training and test embeddings, the second with a second view of some images."""
    import numpy as np

    from nearkin.evaluation.embeddings import Embeddings
    from nearkin.evaluation.measures import geometry_rows

    rng = np.random.default_rng(0)
    scale = np.arange(1, dim + 1, dtype=np.float32) ** -0.5
    centers = rng.standard_normal((CLASSES, dim), np.float32) * scale
    tables = []
    for n in (train, test):
        labels = rng.integers(CLASSES, size=n)
        vectors = centers[labels] + 2 * scale * rng.standard_normal((n, dim), np.float32)
        rows = geometry_rows(n)
        noise = 0.2 * scale * rng.standard_normal((len(rows), dim), np.float32)
        view = Embeddings(vectors[rows] + noise, labels[rows], rows=rows)
        tables.append(Embeddings(vectors, labels, second_view=view))
    return tables


def measure(what: str, train: int, test: int, dim: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds and megabytes of one protocol, or of LiDAR of finished views."""
    import torch

    from nearkin.evaluation.evaluate import evaluate_tables
    from nearkin.measures.spectrum import lidar

    if what == "LiDAR":
        views = torch.randn(1000, 1, dim) + torch.randn(1000, 10, dim)
        return timed(lambda: lidar(views))
    tables = {"encoder": tuple(features(train, test, dim))}
    k = 200 if train >= 10_000 else 20
    return timed(lambda: evaluate_tables(tables, seed=0, k=k, protocol=what))


def measure_corruption(name: str, side: int) -> tuple[float, float, float]:
    """Seconds per 1,000 images of one corruption at severity 3."""
    import numpy as np

    from nearkin.data.corruptions import corrupt

    images = np.random.default_rng(0).integers(0, 256, (20, side, side, 3), dtype=np.uint8)
    corrupt(images[0], name, 3)  # imports
    seconds, cpu, memory = timed(lambda: [corrupt(image, name, 3) for image in images])
    return 50 * seconds, 50 * cpu, memory


def timed(run) -> tuple[float, float, float]:  # type: ignore[no-untyped-def]
    """Seconds, CPU seconds and megabytes that a function takes."""
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu, peak() - before


def peak() -> float:
    """Megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure what the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=10_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--one")
    args = parser.parse_args()
    sizes = args.train, args.test, args.dim
    if args.one:
        name, _, side = args.one.partition("@")
        result = measure_corruption(name, int(side)) if side else measure(name, *sizes)
        print(*(f"{x:.2f}" for x in result))
        return

    from nearkin.config import PROTOCOLS
    from nearkin.data.corruptions import CORRUPTIONS

    names = [name for name in PROTOCOLS if name not in (*WITH_IMAGES, "labelfree")]
    whats = [*names, "LiDAR", *(f"{name}@{side}" for side in (32, 224) for name in CORRUPTIONS)]
    done = set()
    if args.output and args.output.exists():
        with args.output.open(encoding="utf-8") as file:
            done = {
                (row["what"], row["train"], row["test"], row["dim"])
                for row in csv.DictReader(file)
            }
    print(",".join(COLUMNS))
    for what in whats:
        if (what, *map(str, sizes)) in done:
            continue
        command = [sys.executable, __file__, "--one", what]
        command += [f"--{n}={v}" for n, v in zip(("train", "test", "dim"), sizes, strict=True)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        row = ",".join([what, *map(str, sizes), *answer.stdout.split()])
        print(row, flush=True)
        if args.output:
            new = not args.output.exists()
            with args.output.open("a", encoding="utf-8") as file:
                file.write(f"{','.join(COLUMNS)}\n" * new + row + "\n")


if __name__ == "__main__":
    main()
