"""A look at the encoder while it trains: is it healthy, and what do its neighbors say."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from nearkin.commands.embed import encode_pixels
from nearkin.config import TrainConfig
from nearkin.data.centered import Pixels
from nearkin.data.images import Images
from nearkin.data.parts import Parts
from nearkin.evaluation.encode import encode
from nearkin.evaluation.features import known
from nearkin.evaluation.knn import knn, num_neighbors
from nearkin.method import Method
from nearkin.pace import Tell, nobody, tracked
from nearkin.training.health import health

BANK, QUERIES = 5_000, 1_000
"""Pictures looked at, at most: enough for a curve, little beside an epoch."""
PIECE = 256
"""Pictures encoded at once."""


class Monitor:
    """Health of the embeddings, and kNN accuracy where there are labels, on fixed pictures.

    Args:
        parts: Some pictures that are trained on are the bank; some that are held out are the
            queries. Those with labels are preferred, those that cannot be read are left out.
        config: The resolved settings.
        device: Where the encoder is.
        tell: Hears how far a look is.
    """

    def __init__(
        self, parts: Parts, config: TrainConfig, device: torch.device, tell: Tell = nobody
    ) -> None:
        size, workers = int(config.image_size), int(config.workers)
        asked = preferred(parts.test if len(parts.test) else parts.train, QUERIES)
        self.queries, self.query_labels = in_memory(asked, size, workers, tell)
        self.device, self.tell = device, tell
        self.scored = bool(len(parts.test)) and bool(
            known(self.query_labels).any() and known(parts.train.labels).any()
        )
        if self.scored:
            bank = preferred(parts.train, BANK)
            self.bank, self.bank_labels = in_memory(bank, size, workers, tell)

    def look(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method as it stands, leaving it as it was."""
        features = self._encode(method, self.queries)
        embedding = encode(method.online.projector, features.to(self.device).split(PIECE))
        seen = health(embedding)
        if self.scored:
            bank = self._encode(method, self.bank)
            k = num_neighbors(len(bank))
            measure = knn(bank, self.bank_labels, features, self.query_labels, k=k)
            seen["knn"] = measure.value
        return seen

    def _encode(self, method: Method[Any], shown: UInt8[Tensor, "n 3 _ _"]) -> Tensor:
        pieces = tracked(shown.split(PIECE), len(shown), "a look at the encoder", self.tell)
        return encode_pixels(method.backbone, pieces, self.device)


def preferred(images: Images, count: int) -> Images:
    """At most `count` pictures, evenly spread over those with labels, or over all without any."""
    labeled = np.flatnonzero(known(images.labels))
    return (images.subset(labeled) if len(labeled) else images).spread(count)


def in_memory(
    images: Images, size: int, workers: int, tell: Tell
) -> tuple[UInt8[Tensor, "n 3 {size} {size}"], Int[np.ndarray, " n"]]:
    """The pixels and the labels of those pictures that can be read."""
    source = Pixels(images, size, workers=workers)
    shown = torch.cat(list(tracked(source, len(images), "pictures to look at", tell)))
    rows = np.delete(np.arange(len(images)), sorted(source.bad))
    return (shown[torch.from_numpy(rows)] if source.bad else shown), images.labels[rows]
