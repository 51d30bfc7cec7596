"""What can be had without learning: the numbers an encoder has to beat."""

from collections.abc import Iterator

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
    total = torch.stack([piece.double().sum(dim=0) for piece in _pieces(images)]).sum(dim=0)
    return (total / len(images)).float()


def pixels(
    images: UInt8[np.ndarray, "n h w 3"], mean: Float[Tensor, " d"]
) -> Float[Tensor, "n d"]:
    """Raw pixels as features: unit vectors of what differs from the mean training image.

    Args:
        images: RGB. Sides above 32 pixels are shrunk to 32 by averaging areas.
        mean: What `mean_pixels` gives for the training images, whichever images these are.
    """
    features = torch.empty(len(images), len(mean))
    for rows, piece in zip(features.split(PIECE), _pieces(images), strict=True):
        rows.copy_(unit(piece - mean))
    return features


def _pieces(images: UInt8[np.ndarray, "n h w 3"]) -> Iterator[Float[Tensor, "piece d"]]:
    """Flattened images, some at a time: as float32, all at once could be too many."""
    size = [min(side, SIDE) for side in images.shape[1:3]]
    for start in range(0, len(images), PIECE):
        piece = torch.tensor(images[start : start + PIECE]).movedim(3, 1).float() / 255
        yield F.interpolate(piece, size=size, mode="area").flatten(1)
