"""What can be had without learning: the numbers an encoder has to beat."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from nearkin.objectives import unit

SIDE = 32
"""Larger images are shrunk to this many pixels a side."""
PIECE = 1024
"""Images that are converted at once."""


def mean_pixels(images: UInt8[np.ndarray, "n h w 3"]) -> Float[Tensor, " d"]:
    """The mean image of the training images, flattened as in `pixels`."""
    return _flatten(images).mean(dim=0)


def pixels(
    images: UInt8[np.ndarray, "n h w 3"], mean: Float[Tensor, " d"]
) -> Float[Tensor, "n d"]:
    """Raw pixels as features: unit vectors of what differs from the mean training image.

    Args:
        images: RGB. Sides above 32 pixels are shrunk to 32 by averaging areas.
        mean: What `mean_pixels` gives for the training images, whichever images these are.
    """
    return unit(_flatten(images) - mean)


def _flatten(images: UInt8[np.ndarray, "n h w 3"]) -> Float[Tensor, "n d"]:
    size = [min(side, SIDE) for side in images.shape[1:3]]
    # In pieces: as float32, all images at full size could be too many.
    pieces = (images[start : start + PIECE] for start in range(0, len(images), PIECE))
    return torch.cat([_shrink(torch.tensor(piece), size).flatten(1) for piece in pieces])


def _shrink(images: UInt8[Tensor, "n h w 3"], size: list[int]) -> Float[Tensor, "n 3 _ _"]:
    return F.interpolate(images.movedim(3, 1).float() / 255, size=size, mode="area")
