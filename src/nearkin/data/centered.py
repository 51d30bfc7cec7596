"""Images as an encoder sees them outside training: whole, centered, one size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from nearkin.data.batches import channels_first
from nearkin.data.decode import MIDDLE_GRAY, center
from nearkin.data.header import BadImage
from nearkin.data.images import Images
from nearkin.data.loading import loaded_ahead
from nearkin.data.views import normalize


@dataclass(frozen=True, slots=True)
class Middles:
    """The middles of some images."""

    pixels: UInt8[Tensor, "batch size size 3"]
    bad: dict[int, str]
    """Rows that could not be read, with the reason; those are gray."""


class Centered(Dataset[Middles]):
    """Images batch by batch: each one's central square, mid-gray if it cannot be read."""

    def __init__(self, images: Images, size: int, batch_size: int) -> None:
        self.images = images
        self.size = size
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __getitem__(self, number: int) -> Middles:
        """One batch."""
        rows = range(len(self.images))[number * self.batch_size :][: self.batch_size]
        pixels = np.full((len(rows), self.size, self.size, 3), MIDDLE_GRAY, np.uint8)
        bad: dict[int, str] = {}
        for place, row in enumerate(rows):
            try:
                pixels[place] = center(self.images.read(row), self.size)
            except BadImage as error:
                bad[row] = error.reason
        return Middles(torch.from_numpy(pixels), bad)


class Pixels:
    """All images in order, batch by batch: uint8 of shape (batch, 3, size, size).

    Unreadable ones are mid-gray, so that all others keep their places, and are listed in `bad`:
    whoever computes anything of them must leave those out.

    Args:
        images: Which images.
        size: Their side in pixels.
        batch_size: How many at a time.
        workers: Processes that decode photographs; 0 decodes in this one.
    """

    def __init__(
        self, images: Images, size: int, *, batch_size: int = 256, workers: int = 0
    ) -> None:
        self.bad: dict[int, str] = {}
        """Rows that could not be read, with the reason; complete after an iteration."""
        self.centered = Centered(images, size, batch_size)
        self.workers = 0 if images.is_small else workers

    def __iter__(self) -> Iterator[UInt8[Tensor, "batch 3 size size"]]:
        """The batches; see `loaded_ahead` for what happens if workers are lost."""
        data, size = self.centered, self.centered.batch_size
        for shown in loaded_ahead(data, 0, len(data), self.workers, images=size):
            self.bad.update(shown.bad)
            yield channels_first(shown.pixels)


def to_network(shown: UInt8[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch 3 _ _"]:
    """Pixels from 0 to 255 as networks are trained on them."""
    return normalize(shown / 255)
