"""Random resized crops: which part of a picture a view shows (Szegedy et al. 2015, section 6)."""

import numpy as np
from jaxtyping import Float, Float64

ATTEMPTS = 10
"""Boxes tried before the largest central one is taken."""


def between(
    u: Float64[np.ndarray, "..."], limits: tuple[float, float]
) -> Float64[np.ndarray, "..."]:
    """Carry uniform numbers from [0, 1) to between the limits."""
    low, high = limits
    return low + (high - low) * u


def random_boxes(
    u: Float64[np.ndarray, "batch draws"],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    width: Float[np.ndarray, " batch"],
    height: Float[np.ndarray, " batch"],
) -> Float64[np.ndarray, "batch 4"]:
    """Boxes of whole pixels with the distribution of torchvision's `RandomResizedCrop`.

    The area is uniform and the logarithm of the aspect ratio too; the first of `ATTEMPTS` boxes
    that fits is put anywhere in the picture, and where none fits, the largest one of an allowed
    ratio is put at the center.

    Args:
        u: Uniform numbers: areas and ratios of the attempts, then the place, left and top.
        scale: Smallest and largest share of the picture's area.
        ratio: Smallest and largest width / height.
        width: The pictures' widths in pixels.
        height: The pictures' heights in pixels.

    Returns:
        Left, top, width and height of each box, in pixels.
    """
    area = between(u[:, :ATTEMPTS], scale) * (width * height)[:, None]
    aspect = np.exp(between(u[:, ATTEMPTS:-2], (np.log(ratio[0]), np.log(ratio[1]))))
    sides = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=2)))
    room = np.stack([width, height], axis=1)
    fits = ((sides > 0) & (sides <= room[:, None])).all(axis=2)
    chosen = sides[np.arange(len(u)), fits.argmax(axis=1)]
    largest = np.rint(np.stack([height * ratio[1], width / ratio[0]], axis=1)).clip(1, room)
    found = fits.any(axis=1, keepdims=True)
    side = np.where(found, chosen, largest)
    corner = np.where(found, np.floor(u[:, -2:] * (room - side + 1)), (room - side) // 2)
    return np.concatenate([corner, side], axis=1)
