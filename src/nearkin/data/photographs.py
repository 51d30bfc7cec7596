"""Photographs stay encoded until a step needs them; workers decode just what a crop needs."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

from nearkin.data.cache import Cache
from nearkin.data.decode import crops
from nearkin.data.drawing import Drawing
from nearkin.data.header import BadImage
from nearkin.data.order import Ordered
from nearkin.distributed import share


@dataclass(frozen=True, slots=True)
class Crops:
    """The views of some photographs in one epoch, cropped and not yet augmented."""

    views: tuple[UInt8[Tensor, "batch _ _ channel"], ...]
    epoch: int
    rows: np.ndarray
    """The pictures that are shown, substitutes included."""
    bad: dict[int, str]
    """Pictures that could not be read, with the reason."""


class Photographs(Dataset[Crops]):
    """The crops of each step, for the workers of a `DataLoader`; its items are steps.

    Args:
        drawing: How they are drawn.
        order: Which pictures each step sees.
        cache: What holds the pictures; without it, each crop is decoded as it is needed.
    """

    def __init__(self, drawing: Drawing, order: Ordered, cache: Cache | None = None) -> None:
        self.drawing = drawing
        self.order = order
        self.source = cache or drawing.images
        self.share = share(order.batch_size)

    def __getitem__(self, step: int) -> Crops:
        """This process's part of a step."""
        return self.load(self.order.epoch(step), self.order.rows(step)[self.share])

    def load(self, epoch: int, rows: np.ndarray) -> Crops:
        """The crops of these photographs, or of their substitutes, in one epoch."""
        bad: dict[int, str] = {}
        shown, pictures = [], []
        for row in rows.tolist():
            attempts = (
                (candidate, self._crops(epoch, candidate, bad))
                for candidate in self.drawing.candidates(epoch, row)
            )
            good, views = next(attempt for attempt in attempts if attempt[1])
            shown.append(good)
            pictures.append(views)
        stacked = (torch.from_numpy(np.stack(view)) for view in zip(*pictures, strict=True))
        return Crops(tuple(stacked), epoch, np.array(shown), bad)

    def _crops(self, epoch: int, row: int, bad: dict[int, str]) -> list[np.ndarray]:
        """The crops of a picture, or none and a note in `bad`."""
        boxes = [draws.box[0] for draws in self.drawing.views(epoch, np.array([row]))]
        try:
            return crops(self.source.read(row), np.stack(boxes), self.drawing.sides)
        except BadImage as error:
            bad[row] = error.reason
            return []
