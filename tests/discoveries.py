"""Discoveries of digits as people start them, and what these have left in their folders."""

import csv
import json
from pathlib import Path

import numpy as np
import torch
from nearkin_command import run
from PIL import Image
from scipy.optimize import linear_sum_assignment


def words(text: str) -> list[str]:
    return text.split()


SHORT = words("-q --batch-size 16 --train-layers top")
FEW = [*SHORT, *words("--epochs 2 --classes 2")]
LEAST = [*FEW, *words("--entropy-weight 1")]
LEAST_NCD = [*FEW, *words("--positive-rate 0.5")]


def once(*arguments: object) -> list[str]:
    """What a command is told, of settings that are there twice the last."""
    told, place, words = {}, 0, [str(argument) for argument in arguments]
    while place < len(words):
        word, *after = words[place : place + 2]
        paired = word.startswith("--") and after and not after[0].startswith("-")
        told[word if paired else place] = [word, *after] if paired else [word]
        place += 2 if paired else 1
    return [word for each in told.values() for word in each]


def discover(*arguments: object) -> int:
    """The exit code of `nearkin discover`, to which later settings matter more."""
    return run(*once("discover", *arguments))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, written: list[dict[str, str]]) -> None:
    """Write a table anew, as a user's spreadsheet would."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, written[0])
        writer.writeheader()
        writer.writerows(written)


def table(path: Path, written: object, delimiter: str = ",") -> Path:
    """A table of labels."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("path", "label"), *written])
    return path


def strict_json(path: Path) -> dict:
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def bytes_of(folder: Path, *names: str) -> list[bytes]:
    return [(folder / name).read_bytes() for name in names]


def save(folder: Path, pixels: dict) -> Path:
    """Images as PNG files of these names."""
    for name, image in pixels.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    return folder


def names(out: Path) -> set[str]:
    """The images that a discovery has assigned."""
    return {row["path"] for row in rows(out / "assignments.csv")}


def held_out(out: Path) -> set[str]:
    """The images that a run has held out."""
    from pyarrow import parquet

    table = parquet.read_table(out / "embeddings.parquet").to_pydict()
    sides = zip(table["path"], table["split"], strict=True)
    return {path for path, side in sides if side == "test"}


def close(one: list[dict[str, str]], other: list[dict[str, str]]) -> None:
    """Fail unless two tables say the same of each image, but for rounding."""
    assert [row["path"] for row in one] == [row["path"] for row in other]
    assert [row["cluster"] for row in one] == [row["cluster"] for row in other]
    for name in ("score", "margin", "entropy"):
        a, b = (np.array([float(row[name]) for row in some]) for some in (one, other))
        np.testing.assert_allclose(a, b, atol=2e-4)


def hungarian(true, predicted):
    """Share of images in the class that the best one-to-one match gives their cluster."""
    classes, y = np.unique(true, return_inverse=True)
    names, x = np.unique(predicted, return_inverse=True)
    count = np.zeros((len(classes), len(names)), int)
    np.add.at(count, (y, x), 1)
    return count[linear_sum_assignment(-count)].sum() / len(true)


def unit(x: np.ndarray) -> np.ndarray:
    """Rows of length one."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def build_predictions(features, probability, label, num_known=2, *, by_view=None, num_views=8):
    """Of images 0.png, 1.png and so on; all their views agree, if none are given."""
    from nearkin.classifier.classifier import Predictions  # see nearkin_command.py

    probability = np.asarray(probability, float)
    count, classes = probability.shape
    agreed = np.repeat(probability.argmax(axis=1)[None], num_views, axis=0)
    known = [f"animal {c}" for c in range(num_known)]
    return Predictions(
        paths=tuple(f"{row}.png" for row in range(count)),
        probability=probability,
        by_view=agreed if by_view is None else np.asarray(by_view),
        features=np.asarray(features),
        label=np.asarray(label),
        classes=(*known, *(f"new-{c + 1}" for c in range(classes - num_known))),
        num_known=num_known,
        distance=np.zeros(count),
        outlier=np.zeros(count, bool),
    )


def learned(predictions, rows=None):
    """The reference that a discovery of these images has, or of some of them."""
    from nearkin.classifier.reference import reference_of  # see nearkin_command.py

    rows = np.arange(len(predictions.label)) if rows is None else rows
    labeled = predictions.label >= 0
    own = np.where(labeled, predictions.label, predictions.cluster)
    features = torch.from_numpy(predictions.features[rows])
    return reference_of(features, own[rows], labeled[rows], len(predictions.classes))
