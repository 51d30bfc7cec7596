"""Time and memory of a discovery among many images of many classes.

    python benchmarks/discovery/many.py FOLDER [--images 100000] [--classes 1000]

Images are 8 x 8 px: a random pattern of each class, and noise. Half of the classes are known. An
encoder is trained for one epoch, then `nearkin discover` runs twice: with the number of novel
classes given, and estimated. Printed are CPU and wall seconds and the largest memory of each
command, and its accuracy. FOLDER keeps the data, the encoder and the discoveries.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NUMBERS = ("given", "auto")
NOISE = 60.0  # Standard deviation, of gray values from 0 to 255


def write_images(path: Path, count: int, classes: int) -> None:
    """Write images of equally large classes, a tenth of them held out."""
    rng = np.random.default_rng(0)
    patterns = rng.uniform(0, 255, (classes, 8, 8))
    label = rng.permutation(np.arange(count) % classes)
    pixels = patterns[label] + rng.normal(0, NOISE, (count, 8, 8))
    images, test = pixels.clip(0, 255).astype(np.uint8), count // 10
    np.savez(
        path,
        x_train=images[test:],
        y_train=label[test:],
        x_test=images[:test],
        y_test=label[:test],
    )


def run(*words: str) -> dict[str, float]:
    """Run a command of nearkin; return its wall and CPU seconds and its largest memory in GiB."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "nearkin", *words])
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words[:2])} failed")
    cpu = used.ru_utime + used.ru_stime
    wall = time.perf_counter() - began
    return {"wall": round(wall), "cpu": round(cpu), "GiB": round(used.ru_maxrss / 2**20, 1)}


def main() -> None:
    """Make the data, train an encoder, discover."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument(
        "--numbers", nargs="+", choices=["given", "auto"], default=["given", "auto"]
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    data, encoder = options.folder / "images.npz", options.folder / "encoder"
    write_images(data, options.images, options.classes)
    if not (encoder / "encoder.safetensors").exists():
        settings = ["--epochs", "1", "--backbone", "tiny", "--labels", "none", "--no-report"]
        print("train", run("train", str(data), "-o", str(encoder), *settings), flush=True)
    known = ",".join(map(str, range(options.classes // 2)))
    for number in options.numbers:
        out = options.folder / number
        novel = str(options.classes - options.classes // 2) if number == "given" else "auto"
        words = ["--from", str(encoder), "--known", known, "--classes", novel, "--truth", "data"]
        used = run("discover", str(data), "-o", str(out), *words, "--train-layers", "top")
        summary = json.loads((out / "summary.json").read_text())
        scores = {each["name"]: round(each["value"], 3) for each in summary["scores"]["nearkin"]}
        print(f"discover, number {number}", used, scores, flush=True)


if __name__ == "__main__":
    main()
