"""Pictures as an encoder sees them outside training: whole, centered, one size."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nearkin.data.batches import channels_first
from nearkin.data.decode import BadImage, center
from nearkin.data.images import Images
from nearkin.data.views import normalize


class Centered(Dataset[tuple[np.ndarray, str]]):
    """Each picture's central square, and why it could not be read (then mid-gray) or nothing."""

    def __init__(self, images: Images, size: int) -> None:
        self.images = images
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[np.ndarray, str]:
        """The picture in a row, uint8 of shape (size, size, 3)."""
        try:
            return center(self.images.read(row), self.size), ""
        except BadImage as error:
            return np.full((self.size, self.size, 3), 128, np.uint8), error.reason


def pixels(
    images: Images, size: int, *, batch_size: int = 256, workers: int = 0
) -> Iterator[UInt8[Tensor, "batch 3 size size"]]:
    """All pictures in order, batch by batch; unreadable ones are mid-gray."""
    loader = DataLoader(
        Centered(images, size),
        batch_size=batch_size,
        num_workers=0 if images.is_small else workers,
        collate_fn=lambda items: torch.from_numpy(np.stack([item[0] for item in items])),
        generator=torch.Generator(),  # or iterating would draw from the global one
    )
    yield from map(channels_first, loader)


def to_network(shown: UInt8[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch 3 _ _"]:
    """Pixels from 0 to 255 as networks are trained on them."""
    return normalize(shown / 255)
