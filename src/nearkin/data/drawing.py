"""What is drawn at random for the images of a run: their views, and who stands in for whom."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from jaxtyping import Int64

from nearkin.data.draws import uniform
from nearkin.data.images import Images
from nearkin.data.views import Draws, View, draw
from nearkin.errors import DataError

SUBSTITUTE: Final = 255
"""The view number whose draws choose a substitute for an image that turns out unreadable."""
SUBSTITUTES: Final = 8
"""How many substitutes are tried for one image."""


class Drawing:
    """Draws views and substitutes: functions of the seed, the epoch and the image alone.

    So they are the same with any number of workers, and in memory as from files.

    Args:
        images: What is shown.
        kinds: How each view is drawn.
        image_size: Side in pixels of whole views, and of small images before they are
            cropped.
        seed: The run's.
    """

    def __init__(
        self, images: Images, kinds: Sequence[View], *, image_size: int, seed: int
    ) -> None:
        self.images = images
        self.kinds = kinds
        self.seed = seed
        self.sides = [max(1, round(kind.side * image_size)) for kind in kinds]
        """Of each view, in pixels."""
        small = np.full((len(images), 2), image_size, np.int32)
        self.cropped = small if images.is_small else images.sizes
        """Width and height in pixels of the images that crops are cut from."""

    def views(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> list[Draws]:
        """What is drawn for each view of these images in one epoch."""
        width, height = self.cropped[rows].T
        return [
            draw(
                kind,
                seed=self.seed,
                epoch=epoch,
                index=rows,
                number=number,
                width=width,
                height=height,
            )
            for number, kind in enumerate(self.kinds)
        ]

    def candidates(self, epoch: int, row: int) -> Iterator[int]:
        """The image itself and then, for as long as none can be read, its substitutes.

        Raises:
            DataError: If more than `SUBSTITUTES` substitutes are asked for.
        """
        yield row
        places = uniform(self.seed, epoch, np.array([row]), SUBSTITUTE, SUBSTITUTES)[0]
        yield from (places * len(self.images)).astype(int).tolist()
        raise DataError(
            f"{self.images.names[row]} and {SUBSTITUTES} images drawn in its place cannot be "
            "read; `nearkin check` lists what is wrong"
        )
