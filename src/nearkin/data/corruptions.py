"""Common corruptions of images, by which encoders are tested: noise, blur, weather, digital.

Thirteen of the fifteen of Hendrycks & Dietterich, Benchmarking neural network robustness to
common corruptions and perturbations, ICLR 2019 (arXiv:1903.12261), with the strengths of their
ImageNet-C and, below 64 pixels, of CIFAR-10-C. Not among them: glass blur, which moves pixels one
after the other, and frost, which needs photographs of ice. Lengths scale with the image, and fog
is value noise, so the numbers compare encoders here, not with published ones.
"""

import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from nearkin.data.decode import as_image
from nearkin.data.images import Source, read

Pixels = Float[np.ndarray, "height width 3"]  # from 0 to 1
Generator = np.random.Generator
Strength = tuple[float | int, ...]

SEVERITIES: Final = (1, 2, 3, 4, 5)
SMALL_SIDE: Final = 64  # Shorter side from which on strengths are those of ImageNet-C
REFERENCE: Final = {False: 224, True: 32}  # Side of the images that the strengths were set for
LARGEST_SIDE: Final = 256  # Larger images are reduced to this shorter side before


@dataclass(frozen=True)
class Corruption:
    """A family of corruptions and its strengths for the severities 1 to 5."""

    apply: Callable[[Pixels, Strength, float, Generator], Pixels]
    """Takes pixels, strength, the factor of all lengths, and what is drawn from."""
    large: tuple[Strength, ...]
    small: tuple[Strength, ...]


def corrupt(
    image: UInt8[np.ndarray, "height width 3"], name: str, severity: int, *, seed: int = 0
) -> UInt8[np.ndarray, "height width 3"]:
    """Corrupt an image; a pure function of its pixels and the other arguments.

    What is drawn is the same at all severities of one image, and does not depend on other images.

    Args:
        image: Of any size.
        name: One of `CORRUPTIONS`.
        severity: From 1, mild, to 5.
        seed: Decides what is drawn.
    """
    corruption, side = CORRUPTIONS[name], min(image.shape[:2])
    is_small = side < SMALL_SIDE
    strength = (corruption.small if is_small else corruption.large)[severity - 1]
    # The content is part of the key, not the place: the same image is corrupted alike anywhere.
    key = (seed, zlib.crc32(name.encode()), zlib.crc32(image.tobytes()))
    pixels = image.astype(np.float32) / 255
    scale = side / REFERENCE[is_small]
    result = corruption.apply(pixels, strength, scale, np.random.default_rng(key))
    return np.asarray(np.rint(255 * result.clip(0, 1)), np.uint8)


@dataclass(frozen=True)
class CorruptedSource:
    """Reads the images of another source, at most `LARGEST_SIDE` large, corrupted.

    They are corrupted before the preprocessing of a network, so that all networks get the same.
    """

    source: Source
    name: str  # A corruption, or '' for none
    severity: int
    seed: int

    def read(self, place: int, limit: int | None = None) -> np.ndarray:
        """An image's corrupted pixels; `BadImage` where it cannot be read."""
        del limit
        image = as_image(read(self.source, place), min_side=LARGEST_SIDE)
        short = min(image.size)
        if short > LARGEST_SIDE:
            width, height = (max(1, round(edge * LARGEST_SIDE / short)) for edge in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image)
        return corrupt(pixels, self.name, self.severity, seed=self.seed) if self.name else pixels


# Noise


def _gaussian_noise(x: Pixels, strength: Strength, _scale: float, rng: Generator) -> Pixels:
    noise: np.ndarray = rng.standard_normal(x.shape, np.float32)
    return x + np.float32(strength[0]) * noise


def _shot_noise(x: Pixels, strength: Strength, _scale: float, rng: Generator) -> Pixels:
    """Count photons: `strength` of them in a white pixel."""
    return np.asarray(rng.poisson(x * strength[0]) / strength[0], np.float32)


def _impulse_noise(x: Pixels, strength: Strength, _scale: float, rng: Generator) -> Pixels:
    """Set a share of all values to black or white."""
    chance, value = rng.random(x.shape, np.float32), rng.random(x.shape, np.float32)
    return np.where(chance < strength[0], (value < 0.5).astype(np.float32), x)


# Blur


def _defocus_blur(x: Pixels, strength: Strength, scale: float, _rng: Generator) -> Pixels:
    """Average over a disk whose rim is softened by a Gaussian."""
    radius, softness = (length * scale for length in strength)
    reach = int(np.ceil(radius + 3 * softness))
    away = np.hypot(*np.mgrid[-reach : reach + 1, -reach : reach + 1])
    # The share of a pixel inside the disk, and that of a Gaussian rim.
    inside = (radius + 0.5 - away).clip(0, 1)
    rim = np.exp(-0.5 * ((away - radius).clip(min=0) / max(softness, 1e-6)) ** 2)
    return _convolve(x, np.maximum(inside, rim))


def _motion_blur(x: Pixels, strength: Strength, scale: float, rng: Generator) -> Pixels:
    return _streak(x, strength[0] * scale, strength[1] * scale, rng.uniform(-45, 45))


def _streak(
    x: Float[np.ndarray, "height width _"], radius: float, sigma: float, degrees: float
) -> Float[np.ndarray, "height width _"]:
    """Average along a line, to one side, with the weights of half a Gaussian."""
    steps = np.arange(0, 2 * radius + 1, 0.5)
    weights = np.exp(-0.5 * (steps / max(sigma, 1e-6)) ** 2)
    reach = int(np.ceil(steps[-1])) + 1
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    angle = np.deg2rad(degrees)
    down, right = steps * np.sin(angle) + reach, steps * np.cos(angle) + reach
    row, column = np.floor(down).astype(int), np.floor(right).astype(int)
    for below in (0, 1):  # each point is shared by the four pixels around it
        for beside in (0, 1):
            share = (1 - np.abs(down - row - below)) * (1 - np.abs(right - column - beside))
            np.add.at(kernel, (row + below, column + beside), weights * share)
    return _convolve(x, kernel)


def _zoom_blur(x: Pixels, strength: Strength, _scale: float, _rng: Generator) -> Pixels:
    """Average over enlargements from 1 to the strongest, in steps."""
    largest, step = strength
    zooms = np.arange(1, largest + step / 2, step)
    total = x + sum(_zoomed(x, float(zoom)) for zoom in zooms)
    return np.asarray(total / (len(zooms) + 1))


def _zoomed(
    x: Float[np.ndarray, "height width _"], factor: float
) -> Float[np.ndarray, "height width _"]:
    """Enlarge the center to the whole image."""
    height, width, _ = x.shape
    left, top = (width - width / factor) / 2, (height - height / factor) / 2
    box = (left, top, width - left, height - top)
    channels = (Image.fromarray(np.ascontiguousarray(x[..., c])) for c in range(x.shape[2]))
    resized = [c.resize((width, height), Image.Resampling.BILINEAR, box=box) for c in channels]
    return np.stack([np.asarray(channel) for channel in resized], axis=2)


def _convolve(
    x: Float[np.ndarray, "height width _"], kernel: Float[np.ndarray, "rows columns"]
) -> Float[np.ndarray, "height width _"]:
    """Convolve with a kernel of odd size, scaled to sum 1; the image is mirrored at its edges."""
    from scipy.signal import fftconvolve

    rows, columns = (size // 2 for size in kernel.shape)
    padded = np.pad(x, ((rows, rows), (columns, columns), (0, 0)), mode="symmetric")
    kernel = (kernel / kernel.sum()).astype(np.float32)[..., None]
    blurred: np.ndarray = fftconvolve(padded, kernel, mode="valid", axes=(0, 1))
    return blurred.astype(np.float32)


# Weather


def _fog(x: Pixels, strength: Strength, _scale: float, rng: Generator) -> Pixels:
    thickness, decay = strength
    whitest = x.max()
    fog = _clouds(x.shape[:2], float(decay), rng)[..., None]
    foggy: np.ndarray = (x + thickness * fog) * whitest / (whitest + thickness)
    return foggy


def _clouds(
    shape: tuple[int, ...], decay: float, rng: Generator
) -> Float[np.ndarray, "height width"]:
    """Value noise from 0 to 1: each octave has `1 / decay` times the height of the one before."""
    size, side, height = 2, max(shape), 1.0
    total = np.zeros((side, side), np.float32)
    while size < 2 * side:
        grid = Image.fromarray(rng.random((size, size), np.float32))
        total += height * np.asarray(grid.resize((side, side), Image.Resampling.BICUBIC))
        size, height = 2 * size, height / decay
    total = total[: shape[0], : shape[1]]
    return np.asarray((total - total.min()) / max(np.ptp(total), 1e-6))


def _snow(x: Pixels, strength: Strength, scale: float, rng: Generator) -> Pixels:
    """Streaks of enlarged noise, over an image that is paler than it was."""
    mean, deviation, zoom, threshold, radius, sigma, share = strength
    flakes = mean + deviation * rng.standard_normal((*x.shape[:2], 1), np.float32)
    flakes = _zoomed(flakes, float(zoom))
    flakes = np.where(flakes < threshold, 0, flakes).clip(0, 1)
    flakes = _streak(flakes, radius * scale, sigma * scale, rng.uniform(-135, -45)).clip(0, 1)
    gray = (x @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    paler = share * x + (1 - share) * np.maximum(x, 1.5 * gray + 0.5)
    snowy: np.ndarray = paler + flakes + flakes[::-1, ::-1]
    return snowy


def _brightness(x: Pixels, strength: Strength, _scale: float, _rng: Generator) -> Pixels:
    """Raise the value of each pixel, of hue, saturation and value."""
    value = x.max(axis=2, keepdims=True)
    raised = (value + strength[0]).clip(max=1)
    brighter: np.ndarray = np.where(value > 0, x * (raised / np.maximum(value, 1e-6)), raised)
    return brighter


# Digital


def _contrast(x: Pixels, strength: Strength, _scale: float, _rng: Generator) -> Pixels:
    mean = x.mean(axis=(0, 1), keepdims=True)
    flatter: np.ndarray = (x - mean) * strength[0] + mean
    return flatter


def _elastic(x: Pixels, strength: Strength, _scale: float, rng: Generator) -> Pixels:
    """Move three points at random, all others with them, and each a little by itself."""
    from scipy.ndimage import fourier_gaussian, map_coordinates

    height, width, channels = x.shape
    distance, smoothness, affine = (share * min(height, width) for share in strength)
    third = max(1, min(height, width) // 3)
    middle = np.array([height // 2, width // 2], np.float64)
    corners = middle + third * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + rng.uniform(-affine, affine, (3, 2))
    places = np.mgrid[:height, :width].reshape(2, -1)
    matrix = np.linalg.lstsq(_with_one(moved), corners, rcond=None)[0]
    target = (_with_one(places.T.astype(np.float64)) @ matrix).T
    for axis in (0, 1):
        noise = rng.uniform(-1, 1, (height, width))
        smooth = np.fft.ifft2(fourier_gaussian(np.fft.fft2(noise), smoothness)).real
        target[axis] += distance * smooth.ravel()
    warped = [
        map_coordinates(x[..., channel], target, order=1, mode="reflect")
        for channel in range(channels)
    ]
    return np.stack(warped, axis=1).reshape(x.shape)


def _with_one(points: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 3"]:
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def _pixelate(x: Pixels, strength: Strength, _scale: float, _rng: Generator) -> Pixels:
    image, box = _as_image(x), Image.Resampling.BOX
    width, height = (max(1, int(edge * strength[0])) for edge in image.size)
    return _as_pixels(image.resize((width, height), box).resize(image.size, box))


def _jpeg(x: Pixels, strength: Strength, _scale: float, _rng: Generator) -> Pixels:
    file = io.BytesIO()
    _as_image(x).save(file, "JPEG", quality=int(strength[0]))
    return _as_pixels(Image.open(file))


def _as_image(x: Pixels) -> Image.Image:
    return Image.fromarray(np.rint(255 * x).astype(np.uint8))


def _as_pixels(image: Image.Image) -> Pixels:
    return np.asarray(image, np.float32) / 255


def _each(*strengths: Any) -> tuple[Strength, ...]:
    return tuple(s if isinstance(s, tuple) else (s,) for s in strengths)


CORRUPTIONS: Final[Mapping[str, Corruption]] = {
    "gaussian noise": Corruption(
        _gaussian_noise, _each(0.08, 0.12, 0.18, 0.26, 0.38), _each(0.04, 0.06, 0.08, 0.09, 0.1)
    ),
    "shot noise": Corruption(_shot_noise, _each(60, 25, 12, 5, 3), _each(500, 250, 100, 75, 50)),
    "impulse noise": Corruption(
        _impulse_noise, _each(0.03, 0.06, 0.09, 0.17, 0.27), _each(0.01, 0.02, 0.03, 0.05, 0.07)
    ),
    # Radius of the disk, deviation of its rim.
    "defocus blur": Corruption(
        _defocus_blur,
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    ),
    # Half the length of the line, deviation of its weights.
    "motion blur": Corruption(
        _motion_blur,
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    ),
    # The strongest enlargement, and the step.
    "zoom blur": Corruption(
        _zoom_blur,
        ((1.1, 0.01), (1.15, 0.01), (1.2, 0.02), (1.24, 0.02), (1.3, 0.03)),
        ((1.05, 0.01), (1.1, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01)),
    ),
    # Mean, deviation, enlargement and threshold of the flakes; their streaks; how much is kept.
    "snow": Corruption(
        _snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    # Thickness, and how fast octaves become lower.
    "fog": Corruption(
        _fog,
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    ),
    "brightness": Corruption(
        _brightness, _each(0.1, 0.2, 0.3, 0.4, 0.5), _each(0.05, 0.1, 0.15, 0.2, 0.3)
    ),
    "contrast": Corruption(
        _contrast, _each(0.4, 0.3, 0.2, 0.1, 0.05), _each(0.75, 0.5, 0.4, 0.3, 0.15)
    ),
    # Height and smoothness of displacements, and that of the three points, as shares of a side.
    "elastic": Corruption(
        _elastic,
        (
            (2, 0.7, 0.1),
            (2, 0.08, 0.2),
            (0.05, 0.01, 0.02),
            (0.07, 0.01, 0.02),
            (0.12, 0.01, 0.02),
        ),
        (
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        ),
    ),
    "pixelate": Corruption(
        _pixelate, _each(0.6, 0.5, 0.4, 0.3, 0.25), _each(0.95, 0.9, 0.85, 0.75, 0.65)
    ),
    "jpeg": Corruption(_jpeg, _each(25, 18, 15, 10, 7), _each(80, 65, 58, 50, 40)),
}
