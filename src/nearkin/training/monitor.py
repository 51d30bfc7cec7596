"""Evaluation during training: health of the embeddings and kNN accuracy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from nearkin.config import TrainConfig
from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.split import Split
from nearkin.distributed import full_weights
from nearkin.evaluation.embeddings import Embeddings, encode, encode_pixels
from nearkin.evaluation.measures import knn, num_neighbors
from nearkin.method import Method
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.run.reporter import Logger
from nearkin.training.health import Alarm, health
from nearkin.training.signals import Interrupts
from nearkin.types import UNKNOWN

# Images that are encoded, at most: enough for a curve, little beside an epoch.
BANK, QUERIES = 5_000, 1_000
PIECE = 256  # Images encoded at once
# Measures a method in training, and leaves it as it was.
Evaluate = Callable[[Method[Any]], dict[str, float]]


class Monitor:
    """Health of the embeddings, and kNN accuracy where there are labels, on fixed images.

    Some images that are trained on are the bank; some that are held out are the queries. Those
    with labels are preferred, those that cannot be read are left out.
    """

    def __init__(
        self,
        split: Split,
        config: TrainConfig,
        device: torch.device,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        size, workers = int(config.image_size), int(config.workers)
        queries = preferred(split.test if len(split.test) else split.train, QUERIES)
        self.queries, self.query_labels = in_memory(queries, size, workers, on_progress)
        self.device, self.on_progress = device, on_progress
        self.scored = bool(len(split.test)) and bool(
            (self.query_labels != UNKNOWN).any() and (split.train.labels != UNKNOWN).any()
        )
        if self.scored:
            bank = preferred(split.train, BANK)
            self.bank, self.bank_labels = in_memory(bank, size, workers, on_progress)

    def evaluate(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method, leaving it as it was."""
        features = self._encode(method, self.queries)
        embedding = encode(method.online.projector, features.to(self.device).split(PIECE))
        measured = health(embedding)
        if self.scored:
            bank = Embeddings(self._encode(method, self.bank).numpy(), self.bank_labels)
            queries = Embeddings(features.numpy(), self.query_labels)
            measured["knn"] = knn(bank, queries, k=num_neighbors(len(bank))).value
        return measured

    def _encode(self, method: Method[Any], pixels: UInt8[Tensor, "n 3 _ _"]) -> Tensor:
        pieces = tracked(pixels.split(PIECE), len(pixels), "evaluation", self.on_progress)
        return encode_pixels(method.backbone, pieces, self.device)


def preferred(images: Images, count: int) -> Images:
    """Return at most `count` images, evenly spread over those with labels, or else over all."""
    labeled = np.flatnonzero(images.labels != UNKNOWN)
    return (images.subset(labeled) if len(labeled) else images).spread(count)


def in_memory(
    images: Images, size: int, workers: int, on_progress: ProgressCallback
) -> tuple[UInt8[Tensor, "n 3 {size} {size}"], Int[np.ndarray, " n"]]:
    """Decode the images that can be read; return their pixels and labels."""
    source = CenterCrops(images, size, workers=workers)
    pixels = torch.cat(list(tracked(source, len(images), "images for evaluation", on_progress)))
    rows = np.delete(np.arange(len(images)), sorted(source.bad))
    return (pixels[torch.from_numpy(rows)] if source.bad else pixels), images.labels[rows]


def evaluation_due(every: int, done: int, per_epoch: int, total: int) -> bool:
    """Return whether to evaluate after `done` of `total` steps: every so many epochs, and last."""
    epoch, part = divmod(done, per_epoch)
    return done == total or bool(every and not part and epoch % every == 0)


@dataclass(eq=False)
class PeriodicEvaluation:
    """Evaluates a method when it is due, and reports embeddings that stay collapsed."""

    evaluate: Evaluate
    config: TrainConfig  # When, and whether a collapse ends the run
    method: Method[Any]  # What is evaluated. It goes on in training mode
    trained: Method[Any]  # What takes the steps: the method, or what `shard` made of it
    log: Logger  # Receives a warning of a collapse
    interrupts: Interrupts  # Through which a collapse stops the run

    def __post_init__(self) -> None:
        self._alarm = Alarm(type(self.method))

    def after(self, done: int, per_epoch: int, total: int) -> dict[str, float]:
        """Return the measures after `done` of `total` steps; none if no evaluation is due."""
        if not evaluation_due(int(self.config.evaluate_every), done, per_epoch, total):
            return {}
        with full_weights(self.method, self.trained):
            measured = self.evaluate(self.method)
        verdict = self._alarm.update(measured, done / total)
        if verdict and self.config.on_collapse == "stop" and done < total:
            self.interrupts.collapse(verdict)
        elif verdict:
            self.log.info(f"warning: {verdict}")
        return measured


def metric_texts(measured: Mapping[str, float]) -> list[str]:
    """Format measures for a log line."""
    form = {"knn": "kNN {:.1%}", "feature_std": "std {:.2f}", "effective_rank": "rank {:.1f}"}
    return [text.format(measured[name]) for name, text in form.items() if name in measured]
