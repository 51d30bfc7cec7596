"""Continue the training of an encoder on other images, beside training from random weights.

    python benchmarks/continued.py DATA OUT [--minutes 8]

DATA holds cifar10/ (the sheets that `pack_cifar10.py` reads), fashion_mnist.npz and
caltech99/caltech99.tar. Trains an encoder on each of the three by SimCLR, then continues: from
CIFAR-10 to the other two, and from these to CIFAR-10. Beside each continued training, one from
random weights runs for the same time, at the same time, on one CPU each. Each call goes on where
the last one ended, and starts nothing that would not end within so many minutes; the last one
prints a table. The measures of each pair are in OUT/pairs/.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from pack_cifar10 import images as cifar10_images
from PIL import Image, ImageOps

SIDE: Final = 32  # of photographs of Caltech-99, as small as the others
PAIRS: Final = (
    ("cifar10", "fashion"),
    ("cifar10", "caltech99"),
    ("fashion", "cifar10"),
    ("caltech99", "cifar10"),
)
"""Where the encoder is from, and what its training is continued on."""
COLUMNS: Final = ("pixels", "frozen start", "from scratch", "continued")


def caltech99(tar: Path) -> dict[str, Any]:
    """Return photographs as squares of 32 px, and the numbers of their classes."""
    parts: dict[str, list[Any]] = {
        f"{axis}_{part}": [] for axis in "xy" for part in ("train", "test")
    }
    with tarfile.open(tar) as archive:
        files = [member for member in archive if member.isfile()]
        classes = sorted({member.name.split("/")[1] for member in files})
        for member in files:
            part, name, _ = member.name.split("/")
            content = archive.extractfile(member)
            assert content is not None
            photo = Image.open(io.BytesIO(content.read())).convert("RGB")
            parts[f"x_{part}"].append(np.asarray(ImageOps.fit(photo, (SIDE, SIDE))))
            parts[f"y_{part}"].append(classes.index(name))
    return {name: np.stack(values) for name, values in parts.items()}


def pack(data: Path, out: Path, num_train: int, num_test: int) -> dict[str, Path]:
    """Write the first images of both parts of each data set, which are in random order."""
    counts = {"train": num_train, "test": num_test}
    files = {name: out / f"{name}.npz" for name in ("cifar10", "fashion", "caltech99")}
    if not files["cifar10"].exists():
        with np.load(data / "cifar10" / "labels.npz") as labels:
            arrays: dict[str, Any] = {
                f"y_{part}": labels[f"{part}_y"][:count] for part, count in counts.items()
            }
        for part, count in counts.items():
            arrays[f"x_{part}"] = cifar10_images([data / "cifar10"], part)[:count]
        np.savez(files["cifar10"], **arrays)
    if not files["fashion"].exists():
        with np.load(data / "fashion_mnist.npz") as whole:
            first = {
                f"{axis}_{part}": whole[f"{axis}_{part}"][:count]
                for part, count in counts.items()
                for axis in "xy"
            }
        np.savez(files["fashion"], **first)
    if not files["caltech99"].exists():
        np.savez(files["caltech99"], **caltech99(data / "caltech99" / "caltech99.tar"))
    return files


def train(jobs: Mapping[Path, Sequence[object]]) -> None:
    """Run trainings at the same time, one CPU each; leave those out that are complete."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = []
    for folder, words in jobs.items():
        if (folder / "report.html").exists():
            continue
        again = ["--overwrite"] if (folder / "data.json").exists() else []
        command = [sys.executable, "-m", "nearkin", "train", *map(str, words), "-o", str(folder)]
        begun.append(subprocess.Popen([*command, "--quiet", *again], env=environment))
    codes = [process.wait() for process in begun]
    if any(codes):
        sys.exit("a training failed; its train.log says why")


def measures(folder: Path, table: str) -> dict[str, Any]:
    """Read kNN and linear probe of a table of a run: value and interval."""
    stored = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    of = stored["measures"][table]
    return {
        name: {key: of[name][key] for key in ("value", "low", "high")}
        for name in ("kNN top-1", "linear probe")
    }


def write_pair(file: Path, continued: Path, scratch: Path) -> None:
    """Write the measures of a pair, and the verdict of the run that was continued."""
    summary = json.loads((continued / "summary.json").read_text(encoding="utf-8"))
    result = {
        "pixels": measures(continued, "pixels"),
        "frozen start": measures(continued, "start"),
        "from scratch": measures(scratch, "encoder"),
        "continued": measures(continued, "encoder"),
        "comparison": summary["comparison"],
        "epochs": summary["epochs"],
    }
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def cell(results: Sequence[Mapping[str, Any]], column: str, measure: str) -> str:
    """Format the mean over seeds, and the mean interval over test images."""
    value, low, high = (
        fmean(result[column][measure][key] for result in results)
        for key in ("value", "low", "high")
    )
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def table(files: Mapping[tuple[str, str], Sequence[Path]]) -> str:
    """Return the results as a table for the documentation."""
    lines = [f"| from | to | measure | {' | '.join(COLUMNS)} | verdicts |", "|---" * 8 + "|"]
    for (source, target), pair_files in files.items():
        results = [json.loads(file.read_text(encoding="utf-8")) for file in pair_files]
        verdicts = ", ".join(result["comparison"]["verdict"] for result in results)
        for measure in ("kNN top-1", "linear probe"):
            cells = " | ".join(cell(results, column, measure) for column in COLUMNS)
            lines.append(f"| {source} | {target} | {measure} | {cells} | {verdicts} |")
    return "\n".join(lines)


def main() -> None:
    """Go on for some minutes; at the end, print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--source-seconds", type=int, default=150)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    end, longest = time.monotonic() + 60 * options.minutes, 0.0
    (options.out / "pairs").mkdir(parents=True, exist_ok=True)
    data = pack(options.data, options.out, options.images, options.images // 2)
    sources = {name: options.out / f"source-{name}" for name in data}
    steps = [
        {sources[name]: [data[name], "--max-time", f"{options.source_seconds}s"] for name in names}
        for names in (("cifar10", "fashion"), ("caltech99",))
    ]
    files: dict[tuple[str, str], list[Path]] = {pair: [] for pair in PAIRS}
    for pair in [pair for pair in PAIRS for _ in range(options.seeds)]:
        source, target = pair
        seed = len(files[pair])
        name = f"{source}-{target}-{seed}"
        files[pair].append(options.out / "pairs" / f"{name}.json")
        common = [data[target], "--seed", seed, "--max-time", f"{options.seconds}s"]
        runs = [options.out / f"{arm}-{name}" for arm in ("continued", "scratch")]
        steps.append({runs[0]: [*common, "--init-from", sources[source]], runs[1]: common})
    written = [None, None, *(file for pair in files.values() for file in pair)]
    for step, file in zip(steps, written, strict=True):
        before = time.monotonic()
        if not all((folder / "report.html").exists() for folder in step):
            if before + longest > end:
                print("more to do; call again")
                return
            train(step)
            longest = max(longest, time.monotonic() - before)
        if file:
            write_pair(file, *step)
    print(table(files))


if __name__ == "__main__":
    main()
