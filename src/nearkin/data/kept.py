"""Views that a frozen network has already seen: each picture's are few, and kept as features."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.data.draws import uniform
from nearkin.data.order import Ordered
from nearkin.distributed import sent, share
from nearkin.types import Batch

CHOICE = 254
"""The view number whose draws choose among the kept views."""


class KeptViews:
    """Batches of features: every step sees some of each picture's kept views, drawn anew.

    Features have the shape of pictures of one pixel, so that methods take them as they are.

    Args:
        views: Features of several views of every picture.
        order: Which pictures each step sees.
        num_views: How many views of a picture a step sees; no view twice.
        labels: Known classes, `UNKNOWN` for all other pictures.
    """

    def __init__(
        self,
        views: Float[Tensor, "kept images dim"],
        *,
        order: Ordered,
        num_views: int,
        labels: Int64[np.ndarray, " images"],
    ) -> None:
        self.views = views
        self.order = order
        self.num_views = num_views
        self.labels = torch.from_numpy(labels).to(views.device)

    def between(self, start: int, stop: int) -> Iterator[Batch]:
        """This process's part of the batches of the steps from `start` to before `stop`."""
        for step in range(start, stop):
            rows = self.order.rows(step)[share(self.order.batch_size)]
            yield self._batch(self.order.epoch(step), rows)

    def _batch(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> Batch:
        chance = uniform(self.order.seed, epoch, rows, CHOICE, len(self.views))
        chosen = torch.from_numpy(chance.argsort(axis=1)[:, : self.num_views])
        shown, index = (sent(x, self.views.device) for x in (chosen.T, torch.from_numpy(rows)))
        views = self.views[shown, index][..., None, None]
        return Batch(tuple(views), index, self.labels[index])
