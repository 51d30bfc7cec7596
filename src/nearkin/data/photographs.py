"""Photographs stay encoded until a step needs them; workers decode just what a crop needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

from nearkin.data.decode import BadImage, crops
from nearkin.data.draws import uniform
from nearkin.data.images import Images
from nearkin.data.order import Order
from nearkin.data.views import Draws, View, draw
from nearkin.distributed import share
from nearkin.errors import DataError

SUBSTITUTE = 255
"""The view number whose draws choose a substitute for a picture that turns out unreadable."""
ATTEMPTS = 8
"""How many substitutes are tried for one picture."""


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
    """The crops of each step, for the workers of a `DataLoader`; its items are steps."""

    def __init__(
        self, images: Images, order: Order, views: Sequence[View], sizes: Sequence[int]
    ) -> None:
        self.images = images
        self.order = order
        self.views = views
        self.sizes = sizes
        self.share = share(order.batch_size)

    def __getitem__(self, step: int) -> Crops:
        """This process's part of a step."""
        return self.load(self.order.epoch(step), self.order.rows(step)[self.share])

    def load(self, epoch: int, rows: np.ndarray) -> Crops:
        """The crops of these photographs in one epoch."""
        shown, pictures, bad = [], [], dict[int, str]()
        for row in rows.tolist():
            good, views = self._readable(epoch, row, bad)
            shown.append(good)
            pictures.append(views)
        stacked = (torch.from_numpy(np.stack(view)) for view in zip(*pictures, strict=True))
        return Crops(tuple(stacked), epoch, np.array(shown), bad)

    def draws(self, epoch: int, rows: np.ndarray, number: int) -> Draws:
        """How view `number` of these photographs is drawn in one epoch."""
        width, height = self.images.sizes[rows].T
        return draw(
            self.views[number],
            seed=self.order.seed,
            epoch=epoch,
            index=rows,
            number=number,
            width=width,
            height=height,
        )

    def _readable(self, epoch: int, row: int, bad: dict[int, str]) -> tuple[int, list[np.ndarray]]:
        """The crops of a picture, or of the one that takes its place if it cannot be read.

        The substitute depends on the seed, the epoch and the picture alone, so it is the same
        with any number of workers.
        """
        places = uniform(self.order.seed, epoch, np.array([row]), SUBSTITUTE, ATTEMPTS)[0]
        for candidate in [row, *(places * len(self.images)).astype(int).tolist()]:
            try:
                return candidate, self._crops(epoch, candidate)
            except BadImage as error:
                bad[candidate] = error.reason
        raise DataError(
            f"{self.images.names[row]} and {ATTEMPTS} pictures drawn in its place cannot be "
            "read; `nearkin check` lists what is wrong"
        )

    def _crops(self, epoch: int, row: int) -> list[np.ndarray]:
        encoded = self.images.read(row)
        assert isinstance(encoded, bytes)
        places = [
            self.draws(epoch, np.array([row]), number).box[0] for number in range(len(self.views))
        ]
        return crops(encoded, np.stack(places), self.sizes)
