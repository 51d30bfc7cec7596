"""Images to measure on: the data sets of a folder, or what is made up."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

PHOTOS = (".jpg", ".jpeg")


def pixels(data: str, count: int, side: int) -> np.ndarray:
    """Return the training images of cifar10.npz in a folder, or random ones if none is named."""
    if data:
        found: np.ndarray = np.load(Path(data) / "cifar10.npz")["x_train"]
        return found
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)


@contextmanager
def photographs(
    data: str, count: int, size: tuple[int, int] = (320, 240), prefix: str = ""
) -> Iterator[Path]:
    """Yield a folder of JPEG files: that of the user, or one of crops of two photographs."""
    if data:
        yield Path(data)
        return
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        save_photographs(Path(folder), count, size)
        yield Path(folder)


def save_photographs(folder: Path, count: int, size: tuple[int, int] = (320, 240)) -> list[Path]:
    """Save crops of scikit-learn's two photographs, scaled to a size in pixels."""
    sources = [Image.fromarray(image) for image in load_sample_images().images]
    rng = np.random.default_rng(0)
    width, height = size
    paths = []
    for number in range(count):
        source = sources[number % len(sources)]
        scale = rng.uniform(0.4, 0.9) * min(source.width / width, source.height / height)
        w, h = scale * width, scale * height
        left, top = rng.uniform(0, source.width - w), rng.uniform(0, source.height - h)
        crop = source.resize(size, Image.Resampling.BICUBIC, (left, top, left + w, top + h))
        paths.append(folder / f"{number:08}.jpg")
        crop.save(paths[-1], quality=90)
    return paths


def jpegs_below(folder: Path) -> list[Path]:
    """Return the JPEG files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in PHOTOS)


def decoded(path: Path) -> Image.Image:
    """Decode a whole file, as one does by hand."""
    with Image.open(io.BytesIO(path.read_bytes())) as opened:
        return opened.convert("RGB")
