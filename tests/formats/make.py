"""Writes small runs by this release, which every later release must load.

    python tests/formats/make.py

They lie in tests/formats/VERSION.tar.xz: `images.npz`; a training, a discovery and a
classification of it, without what only they themselves read again; and `expected.npz`, what comes
out of them. test_formats.py loads those of every release.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import nearkin

HERE = Path(__file__).parent
BACKBONE = "timm:test_efficientnet?channel_multiplier=0.25"
"""With convolutions and batch norms, and of 50 kB: it is kept three times for each release."""
DROPPED = (
    ".nearkin-run", ".nearkin-run.lock", "train.log", "report.html", "start.safetensors",
    "checkpoints", "plots",
)  # fmt: skip
"""What a run is continued from, as all stages but their page; and what is made of the rest."""


def dropped(folder, names):
    """Which of these entries of a folder are not kept."""
    stages = Path(folder).name == "stages"
    return [name for name in names if name in DROPPED or (stages and name != "page.json")]


def images():
    """Eight images of each digit from 0 to 5, and their labels."""
    digits = load_digits()
    rows = np.concatenate([np.flatnonzero(digits.target == digit)[:8] for digit in range(6)])
    gray = (digits.images[rows] * 255 / 16).astype(np.uint8)
    pixels = np.repeat(np.repeat(gray, 2, axis=1), 2, axis=2)[..., None].repeat(3, axis=3)
    return {"x": pixels, "y": digits.target[rows]}


def make(folder):
    """Train, discover and classify, each for an epoch or two; returns what comes out."""
    data = str(folder / "images.npz")
    np.savez_compressed(data, **images())
    small = {"epochs": 1, "device": "cpu", "workers": 0}
    trained = nearkin.train(
        data, output=folder / "train", backbone=BACKBONE, batch_size=16, dim=16, hidden_dim=16,
        **small,
    )  # fmt: skip
    start = str(trained.path)
    nearkin.discover(
        data, output=folder / "discover", encoder=start, known=["0", "1", "2"],
        classes=3, batch_size=16, **small,
    )  # fmt: skip
    nearkin.classify(start, data, output=folder / "classify", device="cpu", workers=0)
    return results(folder)


def results(folder):
    """What a release makes of its runs: features, embeddings, and classes with scores."""
    data = str(folder / "images.npz")
    pixels = torch.from_numpy(np.load(data)["x"])
    encoder = nearkin.load(folder / "train")
    found = {"features": np.stack([features(encoder, image) for image in pixels.numpy()])}
    for name in ("discover", "classify"):
        rows = nearkin.predict(folder / name, data).to_dict()["images"]
        found[f"{name}_classes"] = np.array([row["cluster"] for row in rows])
        found[f"{name}_scores"] = np.array([row["score"] for row in rows])
    return found


def features(encoder, image):
    """The features of an image."""
    with torch.inference_mode():
        return encoder(encoder.transform(image)[None])[0].numpy()


def plain(entry):
    """An entry without what is of this computer and this day."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def pack(folder, path):
    """Write the files of a folder as one, the same for the same files."""
    with tarfile.open(path, "x:xz") as packed:  # an error if it is there: releases stay
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            packed.add(file, name, recursive=False, filter=plain)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made, kept = Path(name) / "made", Path(name) / "kept"
        made.mkdir()
        np.savez_compressed(made / "expected.npz", **make(made))
        shutil.copytree(made, kept, ignore=dropped)
        pack(kept, HERE / f"{nearkin.__version__}.tar.xz")
