"""Twenty continued trainings whose effect is known, and what `nearkin train` says about each.

    python benchmarks/verdicts.py OUT --data DATA [--case NAME ...] [--seed 0] [--budget 480]
    python benchmarks/verdicts.py OUT --table

DATA holds fashion_mnist.npz (keys x_train, y_train, x_test, y_test) and cifar10/ (contact sheets
of 50 by 50 images and labels.npz). The digits of scikit-learn are the third data set. Images are
16 px, the network is `tiny`, and every training runs on one thread.

Each case continues an encoder and reads the verdict from its summary.json. Where only 20 images
are trained on, the verdict is that of `nearkin evaluate RUN` on the data of the other cases: a
bank of 20 images could show no difference.

The truth comes from images that neither training nor verdict has seen: the difference of kNN
top-1 of the encoder and its start on up to 7,000 others, with a bank of 2,000 others (of digits,
797 and that of the training). It is `helped` or `worse` where the interval of that difference
excludes 0 and the difference is .01 or more, `no difference` where it is smaller and its interval
within .02 of 0, and else `unclear`, of which no verdict is right. Without labels the verdict is
right if it says `worse` of what is worse, and `unknown` of all else.

OUT keeps a line of JSON per case and seed; what is there is not computed again, so a run that
was cut short goes on. After `--budget` seconds no further case is started.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from nearkin.commands.evaluate import evaluate
from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.encoders.encoder import Encoder, load
from nearkin.evaluation.embeddings import Embeddings, encode
from nearkin.evaluation.measures import knn, num_neighbors
from nearkin.evaluation.verdict import MATTERS
from nearkin.measures.intervals import paired_difference

SIDE: Final = 16
# Images of a training, and those that its verdict is from. With 1,000 test images an interval is
# about .05 wide, and differences of .02, which several cases have, would be seen in half of them.
TRAIN, TEST = 1_000, 2_500
BANK, QUERIES = 2_000, 7_000  # Other images, which the truth is from
CLEAR: Final = 0.02  # Half-width that the truth of no difference may have at most
HUES: Final = 6  # Classes of the images whose color is the class

CROPS = [{"scale": [0.2, 1.0], "flip": 0.5}]  # Views that keep their color
# Views that differ in color only by chance: what a training on them has to forget
ANY_HUE = [{"scale": [0.2, 1.0], "flip": 0.5, "jitter": 1.0, "hue": 0.5, "saturation": 0.9}]
HIGH, NONE = 30.0, 1e-7  # Learning rates far too high, and of no effect

Pixels = tuple[np.ndarray, np.ndarray]  # Images and their labels


@dataclass(frozen=True)
class Case:
    """A continued training, and what it is expected to do."""

    name: str
    expected: str  # what it is constructed to do: helped, no difference or worse
    data: str  # what it is continued on
    start: str  # name of an entry of `STARTS`
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: int = TRAIN  # number of training images
    labels: bool = True


STARTS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "digits": ("digits", {"epochs": 20}),
    "fashion": ("fashion", {"epochs": 20}),
    "cifar": ("cifar", {"epochs": 20}),
    "hues": ("hues", {"epochs": 10, "augment": CROPS}),
    "short digits": ("digits", {"epochs": 1, "lr": 0.001}),
    "short fashion": ("fashion", {"epochs": 1, "lr": 0.001}),
    "short cifar": ("cifar", {"epochs": 1, "lr": 0.001}),
}
"""The encoders that are continued: their data and settings, SimCLR where nothing else is said."""

FEW = {"epochs": 400, "lr": 0.3}
COLLAPSE = {"method": "vicreg", "epochs": 20, "options": {"variance": 0.0, "dim": 128}}
CASES: Final = (
    Case("cifar to fashion", "helped", "fashion", "cifar", {"epochs": 20}),
    Case("digits to fashion", "helped", "fashion", "short digits", {"epochs": 20}),
    Case("short fashion, longer", "helped", "fashion", "short fashion", {"epochs": 20}),
    Case("short cifar, longer", "helped", "cifar", "short cifar", {"epochs": 20}),
    Case("short digits, longer", "helped", "digits", "short digits", {"epochs": 20}),
    Case("fashion to digits", "helped", "digits", "short fashion", {"epochs": 20}),
    Case("fashion, no rate", "no difference", "fashion", "fashion", {"epochs": 2, "lr": NONE}),
    Case("cifar, no rate", "no difference", "cifar", "cifar", {"epochs": 2, "lr": NONE}),
    Case("digits, no rate", "no difference", "digits", "digits", {"epochs": 2, "lr": NONE}),
    Case(
        "fashion, one epoch of little", "no difference", "fashion", "fashion",
        {"epochs": 1, "lr": 1e-4},
    ),
    Case("fashion, rate too high", "worse", "fashion", "fashion", {"epochs": 4, "lr": HIGH}),
    Case("cifar, rate too high", "worse", "cifar", "cifar", {"epochs": 4, "lr": HIGH}),
    Case("digits, rate too high", "worse", "digits", "digits", {"epochs": 4, "lr": HIGH}),
    Case("fashion, 20 images", "worse", "fashion", "fashion", FEW, images=20),
    Case("cifar, 20 images", "worse", "cifar", "cifar", FEW, images=20),
    Case("hues, jittered", "worse", "hues", "hues", {"epochs": 30, "augment": ANY_HUE}),
    Case("cifar, 8 px", "worse", "cifar", "cifar", {"epochs": 20, "image_size": 8}),
    Case("fashion, collapsed", "worse", "fashion", "fashion", COLLAPSE),
    Case(
        "fashion, rate too high, no labels", "worse", "fashion", "fashion",
        {"epochs": 4, "lr": HIGH}, labels=False,
    ),
    Case(
        "short fashion, longer, no labels", "helped", "fashion", "short fashion", {"epochs": 20},
        labels=False,
    ),
)  # fmt: skip


def _sheets(root: Path, split: str, number: int) -> Pixels:
    """Return the images of CIFAR-10's first contact sheets, 2,500 each."""
    names = [root / "cifar10" / f"{split}_{sheet:02d}.webp" for sheet in range(number)]
    sheets = [np.asarray(Image.open(name).convert("RGB")) for name in names]
    tiles = [s.reshape(50, 32, 50, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3) for s in sheets]
    labels = np.load(root / "cifar10" / "labels.npz")[f"{split}_y"]
    return np.concatenate(tiles), labels[: 2_500 * number].astype(np.int64)


def _fashion(root: Path) -> Pixels:
    with np.load(root / "fashion_mnist.npz") as file:
        return file["x_train"][:12_500], file["y_train"][:12_500].astype(np.int64)


def _digits(root: Path) -> Pixels:
    del root
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target


def _hues(root: Path) -> Pixels:
    """Return pieces of clothing dyed in one of six hues, which is their class."""
    gray, _ = _fashion(root)
    hue = np.random.default_rng(0).integers(HUES, size=len(gray))
    angle = 2 * np.pi * (hue[:, None] / HUES + np.arange(3) / 3)
    tint = 0.6 + 0.4 * np.cos(angle)
    return (gray[..., None] * tint[:, None, None]).astype(np.uint8), hue


LOADERS: Final[Mapping[str, Callable[[Path], Pixels]]] = {
    "cifar": partial(_sheets, split="train", number=5),
    "fashion": _fashion,
    "digits": _digits,
    "hues": _hues,
}


@dataclass(frozen=True)
class Parts:
    """Images of one data set: of trainings, of verdicts, and the others, of the truth."""

    train: Pixels
    test: Pixels
    bank: Pixels
    queries: Pixels


@cache
def parts(name: str, root: Path) -> Parts:
    """Divide a data set. Where images are few, the truth has the bank of the trainings."""
    pixels, labels = LOADERS[name](root)
    order = np.random.default_rng(0).permutation(len(pixels))
    pixels, labels = _small(pixels[order]), labels[order]
    few = len(pixels) < 10_000
    sizes = (500, 500, 0) if few else (TRAIN, TEST, BANK)
    ends = np.cumsum([*sizes, QUERIES])
    pieces = [
        (pixels[end - size : end], labels[end - size : end])
        for end, size in zip(ends, [*sizes, QUERIES], strict=True)
    ]
    return Parts(pieces[0], pieces[1], pieces[0] if few else pieces[2], pieces[3])


def _small(pixels: np.ndarray) -> np.ndarray:
    size = (SIDE, SIDE)
    images = [Image.fromarray(each).resize(size, Image.Resampling.BILINEAR) for each in pixels]
    return np.stack([np.asarray(image.convert("RGB")) for image in images])


def data_file(out: Path, name: str, root: Path, images: int = TRAIN) -> Path:
    """Write the images that are trained on, and those of the verdict, as a file for nearkin."""
    file = out / "data" / f"{name}-{images}.npz"
    if not file.exists():
        (x, y), (x_test, y_test) = parts(name, root).train, parts(name, root).test
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, x_train=x[:images], y_train=y[:images], x_test=x_test, y_test=y_test)
    return file


def trained(out: Path, name: str, file: Path, settings: Mapping[str, Any]) -> Path:
    """Train with these settings, if that was not done before, and return the run folder."""
    folder = out / "runs" / name.replace(" ", "-").replace(",", "")
    if (folder / "report.html").exists():
        return folder
    usual: dict[str, Any] = {
        "backbone": "tiny",
        "image_size": SIDE,
        "batch_size": 20 if "-20." in file.name else 100,
        "augment": "characters" if file.name.startswith("digits") else "simclr_cifar",
        "evaluate_every": 0,
        "device": "cpu",
    }
    train(str(file), TrainConfig(**usual | dict(settings)), out=folder, overwrite=folder.exists())
    return folder


def features(encoder: Encoder, pixels: Pixels) -> Embeddings:
    """Encode images in memory."""
    pieces = np.array_split(pixels[0], math.ceil(len(pixels[0]) / 500))
    return Embeddings(encode(encoder, map(encoder.transform, pieces)).numpy(), pixels[1])


def truth(start: Path, encoder: Path, data: Parts) -> tuple[str, float, float, float]:
    """What training has done, on images that had no part in it: verdict, difference, interval."""
    outcomes = []
    for path in (encoder, start):
        network = load(path)
        bank, queries = features(network, data.bank), features(network, data.queries)
        measure = knn(bank, queries, k=num_neighbors(len(bank)))
        assert measure.outcome is not None
        outcomes.append(measure.outcome.correct)
    value, low, high = paired_difference(outcomes[0], outcomes[1])
    if abs(value) < MATTERS:
        within = max(abs(low), abs(high)) < CLEAR
        return ("no difference" if within else "unclear"), value, low, high
    clear = "helped" if value > 0 else "worse"
    return ("unclear" if low <= 0 <= high else clear), value, low, high


def is_right(verdict: str, truth: str, labels: bool) -> bool:
    """Whether a verdict is right; without labels, nothing but harm can be known."""
    return verdict == (truth if labels or truth == "worse" else "unknown")


def measured(case: Case, seed: int, out: Path, root: Path) -> dict[str, Any]:
    """Train a case and its start, and return the verdict beside the truth."""
    began = time.perf_counter()
    of_start, settings = STARTS[case.start]
    start = trained(out, f"start {case.start}", data_file(out, of_start, root), settings)
    more = {"init_from": str(start), "seed": seed, "labels": "auto" if case.labels else "none"}
    file = data_file(out, case.data, root, case.images)
    run = trained(out, f"{case.name} seed {seed}", file, {**case.settings, **more})
    comparison = json.loads((run / "summary.json").read_text())["comparison"]
    if case.images < TRAIN:
        evaluation = evaluate(run, data_file(out, case.data, root), device="cpu", workers=0)
        comparison = evaluation.to_dict()["comparison"]
    kind, value, low, high = truth(start, run, parts(case.data, root))
    return {
        "case": case.name,
        "seed": seed,
        "expected": case.expected,
        "labels": case.labels,
        "verdict": comparison["verdict"],
        "text": comparison["text"],
        "truth": kind,
        "difference": value,
        "low": low,
        "high": high,
        "right": is_right(comparison["verdict"], kind, case.labels),
        "seconds": time.perf_counter() - began,
    }


def results(out: Path) -> list[dict[str, Any]]:
    """Read what was measured so far."""
    file = out / "verdicts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all cases, and how many verdicts are right."""
    lines = [
        "| case | seed | verdict | in words | truth | on other images | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        cells = [row["case"], str(row["seed"]), row["verdict"], row["text"], row["truth"]]
        lines.append(f"| {' | '.join(cells)} | {interval} | {'' if row['right'] else 'wrong'} |")
    for seed in sorted({row["seed"] for row in rows}):
        of = [row for row in rows if row["seed"] == seed]
        right, as_built = (sum(row[key] for row in of) for key in ("right", "as_built"))
        seconds = sum(row["seconds"] for row in of)
        lines.append(
            f"\nSeed {seed}: {right} of {len(of)} verdicts are right; {as_built} of {len(of)} "
            f"trainings did what they were constructed to do; {seconds:.0f} s."
        )
    return "\n".join(lines + _between_seeds(rows))


def _between_seeds(rows: list[dict[str, Any]]) -> list[str]:
    """How often the verdict on one seed is not the truth about another."""
    pairs = [
        (a, b) for a in rows for b in rows if a["case"] == b["case"] and a["seed"] != b["seed"]
    ]
    wrong = sum(not is_right(a["verdict"], b["truth"], a["labels"]) for a, b in pairs)
    if not pairs:
        return []
    return [f"\nOf another seed's training, {wrong} of {len(pairs)} verdicts would be wrong."]


def main() -> None:
    """Measure the cases that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--case", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=480)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ends = time.monotonic() + options.budget
    for case in () if options.table else CASES:
        done = {(row["case"], row["seed"]) for row in results(options.out)}
        missing = case.name in options.case and (case.name, options.seed) not in done
        if missing and time.monotonic() < ends:
            row = measured(case, options.seed, options.out, options.data)
            row["as_built"] = row["truth"] == row["expected"]
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "verdicts.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{case.name}: {row['text']}; truth {row['truth']}", flush=True)
    print(table(results(options.out)))


if __name__ == "__main__":
    main()
