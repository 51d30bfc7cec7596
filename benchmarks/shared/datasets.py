"""Images to measure on: the data sets of a folder, or what is made up."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images


def pixels(data: str, count: int, side: int) -> np.ndarray:
    """Return the training images of cifar10.npz in a folder, or random ones if none is named."""
    if data:
        found: np.ndarray = np.load(Path(data) / "cifar10.npz")["x_train"]
        return found
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)


@contextmanager
def photographs(data: str, count: int) -> Iterator[Path]:
    """Yield a folder of JPEG files: that of the user, or one of crops of two photographs."""
    if data:
        yield Path(data)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_photographs(Path(folder), count)
        yield Path(folder)


def save_photographs(folder: Path, count: int) -> None:
    """Save crops of scikit-learn's two photographs, of 320 x 240 pixels."""
    sources = [Image.fromarray(image) for image in load_sample_images().images]
    rng = np.random.default_rng(0)
    width, height = 320, 240
    for number in range(count):
        source = sources[number % len(sources)]
        scale = rng.uniform(0.4, 0.9) * min(source.width / width, source.height / height)
        w, h = scale * width, scale * height
        left, top = rng.uniform(0, source.width - w), rng.uniform(0, source.height - h)
        box = (left, top, left + w, top + h)
        crop = source.resize((width, height), Image.Resampling.BICUBIC, box)
        crop.save(folder / f"{number:08}.jpg", quality=90)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    """Return an image as a JPEG of this quality shows it."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")
