"""A look at the encoder while it trains: is it healthy, and what do its neighbors say."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from nearkin.config import TrainConfig
from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.split import Parts
from nearkin.distributed import whole
from nearkin.evaluation.embeddings import encode, encode_pixels
from nearkin.evaluation.knn import knn, num_neighbors
from nearkin.evaluation.measure import known
from nearkin.method import Method
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.run.reporter import Logger
from nearkin.training.health import Alarm, health
from nearkin.training.signals import Requests

BANK, QUERIES = 5_000, 1_000
"""Images looked at, at most: enough for a curve, little beside an epoch."""
PIECE = 256
"""Images encoded at once."""


class Monitor:
    """Health of the embeddings, and kNN accuracy where there are labels, on fixed images.

    Args:
        parts: Some images that are trained on are the bank; some that are held out are the
            queries. Those with labels are preferred, those that cannot be read are left out.
        config: The resolved settings.
        device: Where the encoder is.
        on_progress: Hears how far a look is.
    """

    def __init__(
        self,
        parts: Parts,
        config: TrainConfig,
        device: torch.device,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        size, workers = int(config.image_size), int(config.workers)
        asked = preferred(parts.test if len(parts.test) else parts.train, QUERIES)
        self.queries, self.query_labels = in_memory(asked, size, workers, on_progress)
        self.device, self.on_progress = device, on_progress
        self.scored = bool(len(parts.test)) and bool(
            known(self.query_labels).any() and known(parts.train.labels).any()
        )
        if self.scored:
            bank = preferred(parts.train, BANK)
            self.bank, self.bank_labels = in_memory(bank, size, workers, on_progress)

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
        pieces = tracked(shown.split(PIECE), len(shown), "a look at the encoder", self.on_progress)
        return encode_pixels(method.backbone, pieces, self.device)


def preferred(images: Images, count: int) -> Images:
    """At most `count` images, evenly spread over those with labels, or over all without any."""
    labeled = np.flatnonzero(known(images.labels))
    return (images.subset(labeled) if len(labeled) else images).spread(count)


def in_memory(
    images: Images, size: int, workers: int, on_progress: ProgressCallback
) -> tuple[UInt8[Tensor, "n 3 {size} {size}"], Int[np.ndarray, " n"]]:
    """The pixels and the labels of those images that can be read."""
    source = CenterCrops(images, size, workers=workers)
    shown = torch.cat(list(tracked(source, len(images), "images to look at", on_progress)))
    rows = np.delete(np.arange(len(images)), sorted(source.bad))
    return (shown[torch.from_numpy(rows)] if source.bad else shown), images.labels[rows]


@runtime_checkable
class Looker(Protocol):
    """Who looks at a method now and then while it trains."""

    def look(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method as it stands, leaving it as it was."""


def look_due(every: int, done: int, per_epoch: int, total: int) -> bool:
    """Whether to look after `done` of `total` steps.

    Args:
        every: Epochs between looks; 0 means only at the end.
        done: Steps that are done.
        per_epoch: Steps in an epoch.
        total: Steps of the training.
    """
    epoch, part = divmod(done, per_epoch)
    return done == total or bool(every and not part and epoch % every == 0)


class Watch:
    """Has somebody look when it is time, and tells of embeddings that stay collapsed.

    Args:
        monitor: Who looks.
        config: When, and whether a collapse is to end the run.
        method: What is looked at. It goes on in training mode.
        trained: What takes the steps: the method, or what `shard` made of it.
        log: Who hears of a collapse.
        asked: Where the end of the run is asked for.
    """

    def __init__(
        self,
        monitor: Looker,
        config: TrainConfig,
        method: Method[Any],
        trained: Method[Any],
        log: Logger,
        asked: Requests,
    ) -> None:
        self.monitor = monitor
        self.every = int(config.evaluate_every)
        self.ends = config.on_collapse == "stop"
        self.method = method
        self.trained = trained
        self.log = log
        self.asked = asked
        self._alarm = Alarm(type(method))

    def after(self, done: int, per_epoch: int, total: int) -> dict[str, float]:
        """What is seen after `done` of `total` steps: nothing, if no look is due."""
        if not look_due(self.every, done, per_epoch, total):
            return {}
        with whole(self.method, self.trained):
            seen = self.monitor.look(self.method)
        verdict = self._alarm.hear(seen, done / total)
        if verdict and self.ends and done < total:
            self.asked.collapse(verdict)
        elif verdict:
            self.log.line(f"warning: {verdict}")
        return seen


def shown(looked: dict[str, float]) -> list[str]:
    """What was seen, for a line."""
    form = {"knn": "kNN {:.1%}", "feature_std": "std {:.2f}", "effective_rank": "rank {:.1f}"}
    return [text.format(looked[name]) for name, text in form.items() if name in looked]
