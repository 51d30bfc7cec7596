"""From pictures to batches of views: pixels held in memory, or photographs that workers decode.

Both end in the same batched view code, on the device that trains.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader

from nearkin.data.decode import load_small
from nearkin.data.images import Images
from nearkin.data.order import Order
from nearkin.data.photographs import Crops, Photographs
from nearkin.data.views import View, augment, crop, draw, normalize
from nearkin.distributed import share
from nearkin.errors import DataError
from nearkin.types import UNKNOWN, Batch


class Batches:
    """The batches of a training run. A label-free method never meets a label.

    Args:
        images: What to train on; a picture's index is its row here.
        views: How each view is drawn.
        image_size: Side in pixels of the views that do not name their own.
        order: Which pictures each step sees.
        device: Where views are computed.
        workers: Processes that decode photographs; 0 decodes in this one.

    Raises:
        DataError: If the pictures do not fill a batch.
    """

    def __init__(
        self,
        images: Images,
        views: Sequence[View],
        *,
        image_size: int,
        order: Order,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        if order.steps_per_epoch == 0:
            raise DataError(
                f"{len(images)} pictures do not fill a batch of {order.batch_size}; "
                "give a smaller --batch-size or more pictures"
            )
        self.images = images
        self.view_kinds = views
        self.sizes = [view.size or image_size for view in views]
        self.order = order
        self.device = device
        self.workers = workers
        self.photographs = Photographs(images, order, views, self.sizes)
        self.bad: dict[int, str] = {}
        """Rows that turned out unreadable, with the reason; others took their place."""
        self.pixels: Tensor | None = None
        if images.is_small:
            pixels, self.bad = load_small(images, image_size)
            self.pixels = channels_first(torch.from_numpy(pixels)).to(device)

    def between(self, start: int, stop: int) -> Iterator[Batch]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        if self.pixels is not None:
            for step in range(start, stop):
                rows = self.order.rows(step)[share(self.order.batch_size)]
                yield self._batch(self.views(self.order.epoch(step), rows), rows)
            return
        loader = DataLoader(
            self.photographs,
            batch_size=None,
            sampler=range(start, stop),
            num_workers=self.workers,
            generator=torch.Generator(),  # or iterating would draw from the global one
        )
        for loaded in loader:
            yield self._batch(self._augmented(loaded), loaded.rows)

    def views(self, epoch: int, rows: np.ndarray) -> list[Float[Tensor, "batch 3 _ _"]]:
        """The views of these pictures in one epoch, as pictures in [0, 1]."""
        if self.pixels is None:
            return self._augmented(self.photographs.load(epoch, rows))
        shown = self.pixels[torch.from_numpy(rows).to(self.device)]
        side = shown.shape[-1]
        finished = []
        for number, (view, size) in enumerate(zip(self.view_kinds, self.sizes, strict=True)):
            draws = draw(
                view,
                seed=self.order.seed,
                epoch=epoch,
                index=rows,
                number=number,
                width=side,
                height=side,
            )
            finished.append(augment(crop(shown, draws.box, size), draws))
        return finished

    def _augmented(self, loaded: Crops) -> list[Float[Tensor, "batch 3 _ _"]]:
        """What the loader cropped, augmented on the device."""
        self.bad.update(loaded.bad)
        finished = []
        for number, pixels in enumerate(loaded.views):
            draws = self.photographs.draws(loaded.epoch, loaded.rows, number)
            shown = channels_first(pixels.to(self.device, non_blocking=True))
            finished.append(augment(shown / 255, draws))
        return finished

    def _batch(self, views: list[Tensor], rows: np.ndarray) -> Batch:
        index = torch.from_numpy(rows).to(self.device)
        return Batch(tuple(map(normalize, views)), index, torch.full_like(index, UNKNOWN))


def channels_first(
    pixels: UInt8[Tensor, "batch height width channel"],
) -> UInt8[Tensor, "batch channel height width"]:
    """The same pixels as networks take them, without a copy: channels last in memory."""
    return pixels.permute(0, 3, 1, 2)
