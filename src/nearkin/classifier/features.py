"""Features of images and of augmented views of them, computed once and kept for later runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.classifier.kept import KeptFeatures, Pass, read_shard
from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import Batches, CenterCrops, to_input
from nearkin.data.images import Images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.views import normalize
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import Inference, Precision, encode, inference
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings, embeddings_of, images_per_shard
from nearkin.networks.openvino import is_installed
from nearkin.pace import tracked
from nearkin.run.reporter import Reporter, Silent
from nearkin.schema import Auto

Passes = Float[Tensor, "passes images dim"]


class CachedFeatures(NamedTuple):
    """Features of each image without augmentation (`center`) and of several views of it."""

    center: Float[Tensor, "images _"]
    views: Float[Tensor, "views images _"]

    def subset(self, rows: Int64[np.ndarray, " rows"]) -> "CachedFeatures":
        """Return the features of some images."""
        if len(rows) == len(self.center):  # all: without a copy
            return self
        index = torch.from_numpy(rows)
        return CachedFeatures(self.center[index], self.views[:, index])


@dataclass(frozen=True)
class ViewSettings:
    """How the views whose features are cached are drawn."""

    augment: Augment
    num_views: int
    seed: int


UNTOUCHED = ViewSettings("ncl", num_views=0, seed=0)  # Images as they are, without views


class Extracted(NamedTuple):
    """Features of images; those of unreadable ones mean nothing."""

    features: CachedFeatures
    bad: dict[int, str]  # The rows of unreadable images, with the reason

    def readable(self, images: Images) -> tuple[CachedFeatures, Int64[np.ndarray, " readable"]]:
        """Return the features of the readable images, and their rows, or raise DataError."""
        rows = np.setdiff1d(np.arange(len(images)), list(self.bad))
        if not len(rows):
            raise DataError(f"none of the {len(images)} images can be read; look at the files")
        return self.features.subset(rows), rows

    def embeddings(self, images: Images) -> Embeddings:
        """Return the features of the readable images as they are, without views, as a table."""
        cached, rows = self.readable(images)
        return embeddings_of(
            images.subset(rows), cached.center.numpy(), rows, self.reasons(images)
        )

    def reasons(self, images: Images) -> dict[str, str]:
        """Return the reason by the name of each unreadable image."""
        return {images.names[row]: reason for row, reason in self.bad.items()}


@dataclass(frozen=True, eq=False)
class Extraction:
    """Which features are computed: of images as they are, and of views drawn as in training."""

    encoder: Encoder
    images: Images
    drawn: ViewSettings
    device: torch.device
    workers: int
    log: Reporter = field(default_factory=Silent)
    aside: Path | None = None
    """Where features are kept that cannot be in the user's cache folder; None: nowhere."""
    precision: Precision = "fp32"
    batch_size: int | Auto = "auto"
    compiled: bool = False
    """Whether OpenVINO computes many images, where it is installed.

    A classifier's features are always torch's: those of an image must not depend on their number.
    """

    def compute(self) -> Extracted:
        """Return the features, those that are kept from an earlier run without computing them.

        They are computed and kept some images at a time, so that one that was stopped goes on.
        """
        center, bad = self._passes((None,))
        epochs = tuple(range(self.drawn.num_views))
        views, bad_views = self._passes(epochs) if epochs else (center[:0], {})
        return Extracted(CachedFeatures(center[0], views), dict(sorted((bad | bad_views).items())))

    def _shards(self, folder: Path | None) -> dict[range, Path | None]:
        """Return the rows that are computed at a time, and the file of each in a folder."""
        rows = range(len(self.images))
        size = images_per_shard(len(rows), self.device)
        return {
            rows[first : first + size]: folder and folder / f"{first:09d}.safetensors"
            for first in rows[::size]
        }

    def _kept(self, passes: Sequence[Pass]) -> KeptFeatures:
        views = self.drawn.augment, self.drawn.seed
        program = "openvino" if self.compiled and is_installed() else "torch"
        how = self.device.type, self.precision, program
        return KeptFeatures.of(self.encoder, self.images, passes, *views, how, self.aside)

    def _passes(self, passes: Sequence[Pass]) -> tuple[Passes, dict[int, str]]:
        """Return the features of some passes over all images, and the unreadable ones."""
        kept = self._kept(passes)
        shards = self._shards(kept.folder)
        shape = len(passes), self.encoder.num_features
        found = {shard: read_shard(path, shape, len(shard)) for shard, path in shards.items()}
        missing = [shard for shard, features in found.items() if features is None]
        if len(missing) < len(shards):
            views = "" if passes == (None,) else "views of "
            count = len(self.images) - sum(map(len, missing))
            self.log.info(
                f"           features of {views}{count} images were kept in {kept.folder}"
            )
        for shard, computed in zip(missing, self._compute(missing, passes), strict=True):
            kept.write(shards[shard], *computed)
            found[shard] = computed
        if kept.problem:
            self.log.info(f"           features are not kept: {kept.problem}")
        kept.trim()
        each = [(shard, made) for shard, made in found.items() if made is not None]
        bad = {shard[row]: why for shard, (_, own) in each for row, why in own.items()}
        return torch.cat([features for _, (features, _) in each], dim=1), bad

    def _compute(
        self, shards: Sequence[range], passes: Sequence[Pass]
    ) -> Iterator[tuple[Passes, dict[int, str]]]:
        """Compute the features of some of the images at a time, each shard's rows from 0."""
        if not shards:
            return
        encoder, drawn = self.encoder, self.drawn
        total = len(passes) * sum(map(len, shards))
        by = self._prepared(total)
        augmented = Batches.of(
            encoder.preprocessing.applied(self.images),
            views_of(drawn.augment, ("strong",)),
            image_size=encoder.image_size,
            sampler=RandomBatchSampler(len(self.images), 1, drawn.seed),
            device=self.device,
            workers=self.workers,
            by_content=True,
        )
        crops = {shard: self._crops(shard, by.batch_size) for shard in shards}

        def inputs() -> Iterator[Tensor]:
            for shard in shards:
                for epoch in passes:
                    if epoch is None:
                        yield from (to_input(batch.to(self.device)) for batch in crops[shard])
                        continue
                    # View e is the view that epoch e of a training would draw, but by the content
                    # of the image: it is the same whichever other images there are.
                    for first in range(0, len(shard), by.batch_size):
                        rows = np.asarray(shard[first : first + by.batch_size])
                        yield normalize(augmented.views(epoch, rows)[0])

        text = "features" if passes == (None,) else "features of views"
        batches = tracked(inputs(), total, text, self.log.progress)
        for shard in shards:
            number = math.ceil(len(shard) / by.batch_size)
            encoded = torch.stack([encode(by.network, islice(batches, number)) for _ in passes])
            bad = {shard.index(row): why for row, why in augmented.bad.items() if row in shard}
            yield encoded, {**crops[shard].bad, **bad}
        next(batches, None)  # so that the last one is counted

    def _prepared(self, count: int) -> Inference:
        how, many = (self.precision, self.batch_size), count if self.compiled else 0
        by = inference(self.encoder, self.device, *how, count=many)
        for line in by.lines:
            self.log.info(line)
        return by

    def _crops(self, shard: range, size: int) -> CenterCrops:
        images, view = self.images.subset(np.asarray(shard)), self.encoder.preprocessing
        return CenterCrops(images, view, batch_size=size, workers=self.workers)
