"""Features of images and of augmented views of them, computed once and kept for later runs."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.classifier.kept import Found, KeptFeatures
from nearkin.data.augmentations import Augment, measured_view
from nearkin.data.batches import Batches, CenterCrops
from nearkin.data.decode import BadImage
from nearkin.data.images import SMALL_SIDE, Images
from nearkin.data.notes import lines
from nearkin.data.samplers import Planned, RandomBatchSampler
from nearkin.data.views import normalize
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import Precision, encode, has_openvino, inference
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings, embeddings_of, images_per_shard
from nearkin.pace import tracked
from nearkin.run.reporter import Reporter, Silent
from nearkin.schema import Auto


class CachedFeatures(NamedTuple):
    """Features of each image without augmentation (`center`) and of several views of it."""

    center: Float[Tensor, "images _"]
    views: Float[Tensor, "views images _"]


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
        if not self.bad:  # without a copy
            return self.features, rows
        center, views = (x[..., torch.from_numpy(rows), :] for x in self.features)
        return CachedFeatures(center, views), rows

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
class _AugmentedViews:
    """Views of images, as a training with that seed draws them in an epoch, but by their content.

    The view of an image is the same whichever others there are: small squares are always held in
    memory, and all other images are cropped from their files.
    """

    parts: Sequence[tuple[Batches, Int64[np.ndarray, " images"]]]
    """Batches for squares and for others, with the row of each image in its own; -1 in others."""

    def bad_of(self, rows: range) -> dict[int, str]:
        """Return which of these turned out unreadable, by position; their views mean nothing."""
        return {
            number: batches.bad[own]
            for batches, place in self.parts
            for number, own in enumerate(place[rows].tolist())
            if own in batches.bad
        }

    def views(
        self, plan: Sequence[Planned], known: Collection[int]
    ) -> Iterator[Float[Tensor, "rows _ _ _"]]:
        """Yield the views of each step, from 0 to 1; gray of images that are known as unreadable.

        Workers load those of the steps to come.
        """
        first = self.parts[0][0]
        shape = first.images.num_channels, first.sizes[0], first.sizes[0]
        places = [place.copy() for _, place in self.parts]
        for place in places:
            place[[*known]] = -1
        streams = []
        for (batches, _), place in zip(self.parts, places, strict=True):
            own = ((epoch, own[own >= 0]) for epoch, rows in plan for own in [place[rows]])
            streams.append(batches.planned([each for each in own if len(each[1])]))
        for _, rows in plan:
            made = torch.full((len(rows), *shape), 0.5, device=first.device)
            made = made.contiguous(memory_format=torch.channels_last)  # as views and networks are
            for stream, place in zip(streams, places, strict=True):
                inside = np.flatnonzero(place[rows] >= 0)
                if len(inside):
                    made[torch.from_numpy(inside)] = next(stream)[0][0]
            yield made


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
        for line in lines(self.encoder.preprocessing.notes(self.images)):
            self.log.info(line)
        center, bad = self._features(0)
        views, bad_views = center[:0], dict[int, str]()
        if self.drawn.num_views:
            views, bad_views = self._features(self.drawn.num_views, bad)
        return Extracted(CachedFeatures(center[0], views), dict(sorted((bad | bad_views).items())))

    def _features(self, num_views: int, known: Mapping[int, str] | None = None) -> Found:
        """Return the features of all images as they are, or of so many views of each.

        Images that are `known` as unreadable are not tried again.
        """
        drawn: list[dict[str, Any] | int] = []  # of images as they are
        if num_views:  # by its numbers: what a name or a file stands for may change
            view = measured_view(self.drawn.augment).to_dict()
            drawn = [view, self.drawn.seed, num_views]
        program = "openvino" if self.compiled and has_openvino() else "torch"
        how = self.device.type, self.precision, program
        kept = KeptFeatures.of(self.encoder, self.images, drawn, how, self.aside)
        rows = range(len(self.images))
        size = images_per_shard(len(rows), self.device)
        shards = [rows[first : first + size] for first in rows[::size]]
        stored = ((shard, self._stored(kept, shard, num_views)) for shard in shards)
        found = {shard: made for shard, made in stored if made is not None}
        if found:
            views = "views of " if num_views else ""
            self.log.info(
                f"           features of {views}{sum(map(len, found))} images were kept in "
                f"{kept.folder}"
            )
        missing = [shard for shard in shards if shard not in found]
        for shard, computed in zip(
            missing, self._compute(missing, num_views, known or {}), strict=True
        ):
            kept.write(shard, *computed)
            found[shard] = computed
        if kept.problem:
            self.log.info(f"           features are not kept: {kept.problem}")
        kept.trim()
        bad = {shard[row]: why for shard, (_, own) in found.items() for row, why in own.items()}
        return torch.cat([found[shard][0] for shard in shards], dim=1), bad

    def _stored(self, kept: KeptFeatures, shard: range, num_views: int) -> Found | None:
        """Return what is kept of some images; None if nothing is, or a bad one can be read now."""
        view = self.encoder.preprocessing
        found = kept.read(shard, max(1, num_views), self.encoder.num_features)
        for row in found[1] if found else ():
            with suppress(BadImage):
                view.pixels(view.applied(self.images).read(shard[row]))
                return None
        return found

    def _compute(
        self, shards: Sequence[range], num_views: int, known: Mapping[int, str]
    ) -> Iterator[Found]:
        """Compute the features of some of the images at a time."""
        if not shards:
            return
        passes = max(1, num_views)
        total = passes * sum(map(len, shards))
        view, many = self.encoder.preprocessing, total if self.compiled else 0
        by = inference(self.encoder, self.device, self.precision, self.batch_size, count=many)
        for line in by.lines:
            self.log.info(line)
        how = {"batch_size": by.batch_size, "workers": self.workers}
        parts = (self.images.subset(np.asarray(shard)) for shard in shards)
        crops = [CenterCrops(images, view, **how) for images in parts]
        plan = [
            (epoch, np.asarray(shard[first : first + by.batch_size]))
            for shard in shards
            for epoch in range(num_views)
            for first in range(0, len(shard), by.batch_size)
        ]

        as_they_are = (batch.to(self.device) for cropped in crops for batch in cropped)
        pixels = self._augmented.views(plan, known) if num_views else as_they_are
        text = "features of views" if num_views else "features"
        batches = tracked(map(normalize, pixels), total, text, self.log.progress)
        for shard, cropped in zip(shards, crops, strict=True):
            number = math.ceil(len(shard) / by.batch_size)
            encoded = [encode(by.network, islice(batches, number)) for _ in range(passes)]
            bad = self._augmented.bad_of(shard) if num_views else cropped.bad
            own = {row - shard.start: why for row, why in known.items() if row in shard}
            yield torch.stack(encoded), {**bad, **own}
        next(batches, None)  # so that the last one is counted

    @cached_property
    def _augmented(self) -> _AugmentedViews:
        images, size = self.encoder.preprocessing.applied(self.images), self.encoder.image_size

        def batches(images: Images) -> Batches:
            return Batches.of(
                images,
                (measured_view(self.drawn.augment),),
                image_size=size,
                sampler=RandomBatchSampler(len(images), 1, self.drawn.seed),
                device=self.device,
                workers=self.workers,
                by_content=True,
            )

        width, height = images.sizes.T
        small = (width == height) & (width <= SMALL_SIDE) & (size <= SMALL_SIDE)
        parts = []
        if small.any():
            squares = images.subset(np.flatnonzero(small))
            parts.append((batches(squares), np.where(small, small.cumsum() - 1, -1)))
        if not small.all():  # any image may take the place of one that turns out unreadable
            parts.append((batches(images), np.where(small, -1, np.arange(len(images)))))
        return _AugmentedViews(parts)
