"""Pictures as an encoder sees them outside training: whole, centered, one size."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nearkin.data.batches import channels_first
from nearkin.data.decode import MIDDLE_GRAY, center
from nearkin.data.header import BadImage
from nearkin.data.images import Images
from nearkin.data.views import normalize

Seen = tuple[int, np.ndarray, str]
"""A row, its pixels, and why it could not be read, or nothing."""


class Centered(Dataset[Seen]):
    """Each picture's central square, mid-gray if it cannot be read."""

    def __init__(self, images: Images, size: int) -> None:
        self.images = images
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Seen:
        """The picture in a row, uint8 of shape (size, size, 3)."""
        try:
            return row, center(self.images.read(row), self.size), ""
        except BadImage as error:
            gray = np.full((self.size, self.size, 3), MIDDLE_GRAY, np.uint8)
            return row, gray, error.reason


class Pixels:
    """All pictures in order, batch by batch: uint8 of shape (batch, 3, size, size).

    Unreadable ones are mid-gray, so that all others keep their places, and are listed in `bad`:
    whoever computes anything of them must leave those out.

    Args:
        images: Which pictures.
        size: Their side in pixels.
        batch_size: How many at a time.
        workers: Processes that decode photographs; 0 decodes in this one.
    """

    def __init__(
        self, images: Images, size: int, *, batch_size: int = 256, workers: int = 0
    ) -> None:
        self.bad: dict[int, str] = {}
        """Rows that could not be read, with the reason; complete after an iteration."""
        self._loader = DataLoader(
            Centered(images, size),
            batch_size=batch_size,
            num_workers=0 if images.is_small else workers,
            collate_fn=_together,
            generator=torch.Generator(),  # or iterating would draw from the global one
        )

    def __iter__(self) -> Iterator[UInt8[Tensor, "batch 3 size size"]]:
        for shown, bad in self._loader:
            self.bad.update(bad)
            yield channels_first(shown)


def _together(
    seen: Sequence[Seen],
) -> tuple[UInt8[Tensor, "batch size size 3"], dict[int, str]]:
    # At the top of a module, as it must be to reach a worker that is not a fork.
    bad = {row: reason for row, _, reason in seen if reason}
    return torch.from_numpy(np.stack([pixels for _, pixels, _ in seen])), bad


def to_network(shown: UInt8[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch 3 _ _"]:
    """Pixels from 0 to 255 as networks are trained on them."""
    return normalize(shown / 255)
