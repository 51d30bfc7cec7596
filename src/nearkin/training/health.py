"""Evaluation during training: kNN accuracy, and whether the embeddings of images still differ.

The loss does not show that: a collapsed encoder often has the lower one. Bounds differ by method,
since healthy embeddings of some look like collapsed ones of others; docs/lab.md describes how
they were measured.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from nearkin.config import TrainConfig
from nearkin.data.batches import BatchLoader, CenterCrops
from nearkin.data.images import Images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.split import Split
from nearkin.encoders.inference import encode, encode_pixels, images_at_once
from nearkin.errors import DivergedError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn
from nearkin.method import Method
from nearkin.metrics.geometry import effective_rank, feature_std, mean_cosine
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.types import UNLABELED

PATIENCE: Final = 3  # Evaluations in a row that must show a collapse before it is reported
SETTLED: Final = 0.25  # Share of a training before which embeddings may still be alike
RECOVERY: Final = 0.1  # Share of the way back to its bound that counts as recovering

# Images that are encoded, at most: enough for a curve, little beside an epoch.
BANK, QUERIES = 5_000, 1_000
MIN_QUERIES: Final = 2  # Of a single image nothing says whether it differs from others

Evaluate = Callable[[Method[Any]], dict[str, float]]
"""Measures a method in training, and leaves it as it was."""


@torch.no_grad()
def health(embeddings: Float[Tensor, "n d"]) -> dict[str, float]:
    """Measure how much the embeddings of `n` different images differ, by their directions.

    Returns:
        `effective_rank`, up to `directions`; `directions`, the most that `n` vectors of
        `d` numbers can use; `feature_std`, 1 where they are spread evenly over the sphere and 0
        where they are alike; `mean_cosine`, between -1 and 1, 0 where they are spread evenly.

    Raises:
        DivergedError: If the embeddings are not finite.
    """
    if not embeddings.isfinite().all():
        raise DivergedError("the embeddings are no longer finite; try a lower learning rate")
    z = unit(embeddings.float())
    return {
        "effective_rank": float(effective_rank(z)),
        "directions": float(min(z.shape)),
        "feature_std": float(feature_std(z)),
        "mean_cosine": float(mean_cosine(z)),
    }


def violations(health: Mapping[str, float], method: type[Method[Any]]) -> dict[str, float]:
    """Return how far each measure that is out of the method's bounds is away from its bound.

    Empty for healthy embeddings. The keys say what is wrong, in words.
    """
    bounds = method.health_bounds
    min_rank = bounds.min_rank * health["directions"]
    distances = {
        f"effective rank below {min_rank:.0f}": min_rank - health["effective_rank"],
        f"spread below {bounds.min_std:.2f}": bounds.min_std - health["feature_std"],
        f"mean cosine above {bounds.max_cosine:.2f}": health["mean_cosine"] - bounds.max_cosine,
    }
    return {name: far for name, far in distances.items() if not far <= 0}  # NaN is a violation


def verdict(health: Mapping[str, float], method: type[Method[Any]]) -> str:
    """Say in one sentence how the embeddings are, and what to do if they have collapsed."""
    wrong = violations(health, method)
    text = (
        f"{'collapsed' if wrong else 'healthy'}: the embeddings use "
        f"{health['effective_rank']:.0f} of {health['directions']:.0f} directions "
        f"(spread {health['feature_std']:.2f}, mean cosine {health['mean_cosine']:.2f})"
    )
    advice = "try a lower learning rate, stronger augmentations or a longer training"
    return f"{text}, {' and '.join(wrong)}; {advice}" if wrong else text


class Alarm:
    """Detects embeddings that have collapsed and stay so.

    Embeddings may start out of bounds and still be on their way: a measure that has gone a tenth
    of the way back to its bound since the evaluation before is recovering, and no sign of a
    collapse. Fluctuations of collapsed embeddings are much smaller than that.
    """

    def __init__(self, method: type[Method[Any]]) -> None:
        self.method = method
        self._before: dict[str, float] = {}
        self.in_a_row = 0  # Evaluations that have shown a collapse

    def update(self, health: Mapping[str, float], progress: float) -> str:
        """Return the verdict from the third evaluation in a row that shows a collapse, else ''."""
        now = violations(health, self.method)
        stuck = any(
            not far <= (1 - RECOVERY) * self._before.get(name, 0.0) for name, far in now.items()
        )
        self._before = now
        self.in_a_row = self.in_a_row + 1 if stuck and progress >= SETTLED else 0
        return verdict(health, self.method) if self.in_a_row >= PATIENCE else ""


class Monitor:
    """Health of the embeddings, and kNN accuracy where there are labels, on fixed images.

    Some images that are trained on are the bank; some that are held out are the queries, or, where
    fewer than two of these can be read, others that are trained on, without a score.
    """

    def __init__(
        self,
        split: Split,
        config: TrainConfig,
        device: torch.device,
        on_progress: ProgressCallback = ignore_progress,
        view: Preprocessing | None = None,
    ) -> None:
        self.view = view or Preprocessing(int(config.image_size))
        how = self.view, int(config.workers), on_progress
        before = time.perf_counter()
        for part in filter(len, (split.test, split.train)):
            self.queries, self.query_labels = in_memory(part, QUERIES, *how)
            if len(self.queries) >= MIN_QUERIES:
                break
        self.device, self.on_progress = device, on_progress
        self.latest: dict[str, float] = {}  # What was measured last
        self.scored = part is split.test and bool(
            (self.query_labels != UNLABELED).any() and (split.train.labels != UNLABELED).any()
        )
        if self.scored:
            self.bank, self.bank_labels = in_memory(split.train, BANK, *how)
        self.decoding = time.perf_counter() - before

    @property
    def num_images(self) -> int:
        """Images that an evaluation encodes."""
        return len(self.queries) + (len(self.bank) if self.scored else 0)

    def seconds_per_image(self, method: Method[Any]) -> float:
        """Time how long it takes to decode and to encode an image."""
        before = time.perf_counter()
        self._encode(method, self.queries)
        encoding = time.perf_counter() - before
        return self.decoding / self.num_images + encoding / len(self.queries)

    def evaluate(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method, leaving it as it was.

        Compiled networks run uncompiled: other graphs for other sizes would cost more than they
        save.
        """
        with torch.compiler.set_stance("force_eager"):
            features = self._encode(method, self.queries)
            embedding = encode(method.online.projector, [features.to(self.device)])
            measured = health(embedding)
            if self.scored:
                bank = Embeddings(self._encode(method, self.bank).numpy(), self.bank_labels)
                queries = Embeddings(features.numpy(), self.query_labels)
                measured["knn"] = knn(bank, queries, device=self.device)[0].value
        self.latest = measured
        return measured

    def _encode(self, method: Method[Any], pixels: Shaped[Tensor, "n _ _ _"]) -> Tensor:
        size = images_at_once(self.view.image_size, self.device)
        pieces = tracked(pixels.split(size), len(pixels), "evaluation", self.on_progress)
        return encode_pixels(method.backbone, pieces, self.device)


def feature_health(batches: BatchLoader) -> Evaluate:
    """Return what measures whether a method's features of some images still differ."""
    sampler = batches.sampler
    steps = min(sampler.steps_per_epoch, math.ceil(QUERIES / sampler.batch_size))
    views = torch.cat([batch.views[0] for batch in batches.load(0, steps)])
    return lambda method: health(encode(method.backbone, [views]))


def in_memory(
    images: Images,
    count: int,
    view: Preprocessing,
    workers: int,
    on_progress: ProgressCallback,
) -> tuple[Shaped[Tensor, "n _ {view.image_size} {view.image_size}"], Int[np.ndarray, " n"]]:
    """Decode some images, of those with labels if there are any; return pixels and labels.

    At most `count` are spread evenly; those that cannot be read are left out.
    """
    labeled = np.flatnonzero(images.labels != UNLABELED)
    images = (images.subset(labeled) if len(labeled) else images).spread(count)
    source = CenterCrops(images, view, workers=workers)
    pixels = torch.cat(list(tracked(source, len(images), "images for evaluation", on_progress)))
    rows = np.delete(np.arange(len(images)), sorted(source.bad))
    return (pixels[torch.from_numpy(rows)] if source.bad else pixels), images.labels[rows]
