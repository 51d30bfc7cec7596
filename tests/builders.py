"""Images, tables and folders that tests are about: drawn, or taken from scikit-learn."""

import io
import os
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images


def noise(seed: int = 0, size: tuple[int, int] = (20, 10)) -> np.ndarray:
    """Random RGB pixels of an image of this width and height."""
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def pixels(count: int, side: int = 16, seed: int = 0) -> np.ndarray:
    """Square RGB images of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Features drawn from a normal law."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def soft(seed: int, size: tuple[int, int]) -> Image.Image:
    """An image of large blurred spots, which survives resampling and compression."""
    return Image.fromarray(noise(seed, (11, 9))).resize(size, Image.Resampling.BICUBIC)


def as_bytes(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """An image as a file of that format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def encoded(
    seed: int = 0, size: tuple[int, int] = (20, 10), kind: str = "PNG", **options: object
) -> bytes:
    """A file of noise; another seed gives another image."""
    return as_bytes(Image.fromarray(noise(seed, size)), kind, **options)


def pixels_of(path: Path) -> np.ndarray:
    """The pixels of a PNG, as numbers that can be subtracted."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files by their names below a folder, with the folders between."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths in it."""
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def cut_short(*paths: Path) -> None:
    """Leave the first half of files: of an image, a damage that only decoding finds."""
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def exchange(path: Path, content: bytes = b"") -> None:
    """Put other bytes behind the same name, size and time: only who reads them can notice."""
    state = path.stat()
    path.write_bytes(content or b"x" * state.st_size)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def fill(root: Path, *names: str, seed: int = 0, size: tuple[int, int] = (20, 10)) -> Path:
    """Write a small image, each another one, under each of these names."""
    return write_files(root, {n: encoded(seed + k, size) for k, n in enumerate(names)})


def tar(members: Iterable[tuple[str, bytes]], mode: str = "w") -> bytes:
    """A .tar, or a .tar.gz by "w:gz", of files by their names."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as packed:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return file.getvalue()


def pack(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write an archive of files by their names; half of those in a .zip are compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".zip":
        path.write_bytes(tar(members, "w:gz" if path.name.endswith("gz") else "w"))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for row, (name, content) in enumerate(members):
            kind = zipfile.ZIP_STORED if row % 2 else zipfile.ZIP_DEFLATED
            archive.writestr(name, content, compress_type=kind)
    return path


def photographs(count: int, side: int = 64) -> list[Image.Image]:
    """Square crops of the two photographs that scikit-learn ships, which do not overlap.

    There are 120 of 64 pixels, 48 of 96, and 12 of 160.
    """
    crops = [
        Image.fromarray(pixels[top : top + side, left : left + side])
        for pixels in _sample_images()
        for top in range(0, pixels.shape[0] - side + 1, side)
        for left in range(0, pixels.shape[1] - side + 1, side)
    ]
    assert count <= len(crops)
    return [crops[k] for k in np.random.default_rng(0).permutation(len(crops))[:count]]


@cache
def _sample_images() -> list[np.ndarray]:
    return load_sample_images().images


def digits(each: int, classes: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The first digits of each class, 8 by 8 pixels, mixed; and their classes."""
    dataset = load_digits()
    rows = [np.flatnonzero(dataset.target == number)[:each] for number in range(classes)]
    rows = np.random.default_rng(seed).permutation(np.concatenate(rows))
    return digit_pixels(dataset.images[rows]), dataset.target[rows]


def digit_pixels(images: np.ndarray) -> np.ndarray:
    """Scikit-learn's digits, of 0 to 16, as bytes."""
    return np.rint(images * (255 / 16)).astype(np.uint8)


def write_network(
    path: Path, name: str = "tiny", seed: int = 0, size: int = 16, **details: object
) -> Path:
    """Write an encoder that has learned nothing, and the folder that it is in."""
    from nearkin.encoders.encoder import write_encoder  # see nearkin_command.py
    from nearkin.networks.backbone import build_backbone

    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        header = {"backbone": name, "image_size": size, **details}
        write_encoder(path, build_backbone(name, size), header)
    return path


def save_digits(path: Path, train: int, test: int = 0) -> Path:
    """Write the first digits of scikit-learn as an .npz, with a part for tests if there is one."""
    dataset = load_digits()
    x, y = digit_pixels(dataset.images[: train + test]), dataset.target[: train + test]
    if test:
        np.savez(path, x_train=x[:train], y_train=y[:train], x_test=x[train:], y_test=y[train:])
    else:
        np.savez(path, x=x, y=y)
    return path


def confusion_of(counts, true=None, predicted=None):
    """A confusion matrix, whose classes are called by their numbers."""
    from nearkin.report.page.blocks import Confusion

    counts = np.array(counts)
    names = [tuple(map(str, range(number))) for number in counts.shape]
    pairs = np.repeat(np.argwhere(counts >= 0), counts.ravel(), axis=0)
    return Confusion.of(true or names[0], predicted or names[1], min(counts.shape), pairs)


def blobs(per=30, groups=4, dim=16, spread=0.15, seed=0):
    """Groups of directions, and which group each belongs to."""
    rng = np.random.default_rng(seed)
    means = np.linalg.qr(rng.normal(size=(dim, groups)))[0].T
    group = np.repeat(np.arange(groups), per)
    vectors = means[group] + spread * rng.normal(size=(len(group), dim))
    return vectors.astype(np.float32), group
