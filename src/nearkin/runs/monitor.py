"""A look at the encoder while it trains: is it healthy, and what do its neighbors say."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.config import TrainConfig
from nearkin.data.centered import pixels, to_network
from nearkin.data.images import Images
from nearkin.evaluation.encode import encode
from nearkin.evaluation.knn import knn
from nearkin.method import Method
from nearkin.runs.data import Parts
from nearkin.runs.evaluate import num_neighbors
from nearkin.training.health import health

BANK, QUERIES = 5_000, 1_000
"""Pictures looked at, at most: enough for a curve, little beside an epoch."""


class Monitor:
    """Health of the embeddings, and kNN accuracy where there are labels, on fixed pictures.

    Args:
        parts: Some pictures that are trained on are the bank; some that are held out are the
            queries.
        config: The resolved settings.
        device: Where the encoder is.
    """

    def __init__(self, parts: Parts, config: TrainConfig, device: torch.device) -> None:
        self.bank = spread(parts.train, BANK)
        self.queries = spread(parts.test if len(parts.test) else parts.train, QUERIES)
        self.scored = bool(len(parts.test)) and bool((self.queries.labels >= 0).any())
        self.device = device
        self._shown = {
            part: list(pixels(part, int(config.image_size), workers=int(config.workers)))
            for part in ([self.bank, self.queries] if self.scored else [self.queries])
        }

    def look(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method as it stands, leaving it as it was."""
        features = self._encode(method, self.queries)
        embedding = encode(method.online.projector, features.to(self.device).split(256))
        seen = health(embedding)
        if self.scored:
            bank = self._encode(method, self.bank)
            measure = knn(
                bank,
                self.bank.labels,
                features,
                self.queries.labels,
                k=num_neighbors(len(bank)),
            )
            seen["knn"] = measure.value
        return seen

    def _encode(self, method: Method[Any], images: Images) -> Tensor:
        shown = (to_network(batch.to(self.device)) for batch in self._shown[images])
        return encode(method.backbone, shown)


def spread(images: Images, count: int) -> Images:
    """At most `count` pictures, evenly spread over the data."""
    rows = np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64)
    return images.subset(rows)
