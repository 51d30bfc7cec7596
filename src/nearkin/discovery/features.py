"""The encoder below the heads: frozen, with cached features of every image, or finetuned."""

import copy
import json
import math
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import Batches, BatchLoader, CenterCrops, to_input
from nearkin.data.images import Images
from nearkin.data.rng import seeded, uniform
from nearkin.data.samplers import BatchSampler, RandomBatchSampler
from nearkin.data.views import normalize
from nearkin.distributed import rows_of_rank, to_device
from nearkin.encoders.encoder import Encoder, read_tensors
from nearkin.encoders.inference import encode, for_inference, images_at_once
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import images_per_part
from nearkin.files import usable, whole
from nearkin.method import Method
from nearkin.networks.branch import Backbone
from nearkin.networks.heads import trainable_layer
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.run.data import write_bad_files
from nearkin.run.folder import RunFolder
from nearkin.types import Batch

CHOICE: Final = 254  # The view number whose draws choose among the cached views
LAYER_DIM: Final = 256  # Output dimension of the layer trained on top of an encoder


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Features of each image without augmentation (`center`) and of several views of it."""

    center: Float[Tensor, "images _"]
    views: Float[Tensor, "views images _"]

    def subset(self, rows: Int64[np.ndarray, " rows"]) -> "CachedFeatures":
        """Return the features of some images."""
        if len(rows) == len(self.center):  # all of them stay in the file that they are mapped from
            return self
        index = torch.from_numpy(rows)
        return CachedFeatures(self.center[index], self.views[:, index])

    def write(self, path: Path, bad_files: dict[int, str]) -> None:
        """Write the features, and the rows of unreadable images, atomically."""
        from safetensors.torch import save_file

        tensors = {"center": self.center.contiguous(), "views": self.views.contiguous()}
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            save_file(tensors, partial, metadata={"bad": json.dumps(bad_files)})

    @classmethod
    def read(cls, path: Path, num_images: int) -> tuple["CachedFeatures", dict[int, str]]:
        """Return what `write` wrote, of exactly `num_images` images."""
        with usable(path, "remove it, it will be made again"):
            metadata, tensors = read_tensors(path, "bad")
            center, views = tensors["center"], tensors["views"]
            rows, _ = center.shape
            if views.ndim != 3 or views.shape[1:] != center.shape or rows != num_images:
                raise ValueError(f"features {list(center.shape)}, of views {list(views.shape)}")
            bad_files = {int(row): str(reason) for row, reason in metadata.items()}
            if not bad_files.keys() <= set(range(rows)):
                raise ValueError(f"unreadable images beyond {rows}")
        return cls(center, views), bad_files


@dataclass(frozen=True)
class ViewSettings:
    """How the views whose features are cached are drawn."""

    augment: Augment
    num_views: int
    seed: int


Extracted = tuple[CachedFeatures, dict[int, str]]
"""Features of images, and the rows of unreadable ones, whose features mean nothing, with the
reason."""


@dataclass(frozen=True, eq=False)
class Extraction:
    """Which features are computed: of images as they are, and of views drawn as in training."""

    encoder: Encoder
    images: Images
    drawn: ViewSettings
    device: torch.device
    workers: int
    on_progress: ProgressCallback = ignore_progress

    def compute(self) -> Extracted:
        """Compute all of them."""
        [extracted] = self._parts([range(len(self.images))])
        return extracted

    def compute_in(self, folder: Path) -> Extracted:
        """Compute all of them, some images at a time, whose features are kept in a folder.

        What is there is not computed again, so that an extraction that was stopped goes on.
        """
        rows = range(len(self.images))
        size = images_per_part(len(rows))
        parts = {
            folder / f"{first:09d}.safetensors": rows[first : first + size]
            for first in rows[::size]
        }
        missing = {path: part for path, part in parts.items() if not path.exists()}
        made = self._parts(list(missing.values())) if missing else ()
        for path, (features, bad_of_part) in zip(missing, made, strict=True):
            features.write(path, bad_of_part)
        center, views, bad = list[Tensor](), list[Tensor](), dict[int, str]()
        for path, part in parts.items():
            features, bad_of_part = CachedFeatures.read(path, len(part))
            center.append(features.center)
            views.append(features.views)
            bad |= {part[row]: reason for row, reason in bad_of_part.items()}
        return CachedFeatures(torch.cat(center), torch.cat(views, dim=1)), bad

    def _parts(self, parts: Sequence[range]) -> Iterator[Extracted]:
        """Compute the features of some of the images at a time, each part's rows from 0."""
        encoder, drawn = self.encoder, self.drawn
        network = for_inference(encoder, self.device)
        size = images_at_once(encoder.image_size, self.device)
        augmented = Batches.of(
            encoder.preprocessing.applied(self.images),
            views_of(drawn.augment, ("strong",)),
            image_size=encoder.image_size,
            sampler=RandomBatchSampler(len(self.images), 1, drawn.seed),
            device=self.device,
            workers=self.workers,
        )
        crops = {part: self._crops(part, size) for part in parts}

        def inputs() -> Iterator[Tensor]:
            for part in parts:
                yield from (to_input(batch.to(self.device)) for batch in crops[part])
                for epoch in range(drawn.num_views):
                    # View e is the view that epoch e of a training would draw, so it depends on
                    # the seed and on the image alone: not on which other images there are.
                    for first in range(0, len(part), size):
                        rows = np.asarray(part[first : first + size])
                        yield normalize(augmented.views(epoch, rows)[0])

        passes = 1 + drawn.num_views
        total = passes * sum(map(len, parts))
        batches = tracked(inputs(), total, "features", self.on_progress)
        for part in parts:
            batches_of_pass = math.ceil(len(part) / size)
            center, *views = (
                encode(network, islice(batches, batches_of_pass)) for _ in range(passes)
            )
            stacked = torch.stack(views) if views else center.new_empty((0, *center.shape))
            bad = {part.index(row): why for row, why in augmented.bad.items() if row in part}
            yield CachedFeatures(center, stacked), {**crops[part].bad, **bad}
        next(batches, None)  # so that the last one is counted

    def _crops(self, part: range, size: int) -> CenterCrops:
        images, view = self.images.subset(np.asarray(part)), self.encoder.preprocessing
        return CenterCrops(images, view, batch_size=size, workers=self.workers)


def readable_features(
    folder: RunFolder,
    images: Images,
    extract: Callable[[], Extracted],
) -> tuple[CachedFeatures, set[int]]:
    """Return the features of readable images, extracted once, and the rows of the others.

    `extract` may keep parts of them in the folder. What cannot be read is listed in bad_files.csv.
    """
    path = folder.cached_features
    if not path.exists():
        extracted, unreadable = extract()
        extracted.write(path, unreadable)
    shutil.rmtree(folder.feature_parts, ignore_errors=True)  # they are in one file by now
    cached, bad = CachedFeatures.read(path, len(images))
    reasons = {images.names[row]: reason for row, reason in bad.items()}
    write_bad_files(folder.bad_files, images, reasons)
    return cached.subset(readable_rows(images, bad)), set(bad)


def readable_rows(images: Images, bad: Collection[int]) -> Int64[np.ndarray, " readable"]:
    """Return the rows of all images but the `bad` ones, or raise DataError if there are none."""
    rows = np.setdiff1d(np.arange(len(images)), list(bad))
    if not len(rows):
        raise DataError(f"none of the {len(images)} images can be read; look at the files")
    return rows


class CachedViews:
    """Batches of cached features: each step draws some of each image's cached views, none twice.

    Features have the shape of images of one pixel, so that methods take them as they are.
    """

    def __init__(
        self,
        views: Float[Tensor, "cached images dim"],
        *,
        sampler: BatchSampler,
        num_views: int,
        labels: Int64[np.ndarray, " images"],
    ) -> None:
        self.views = views
        self.sampler = sampler
        self.num_views = num_views
        self.labels = torch.from_numpy(labels).to(views.device)

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Yield this process's part of the batches of the steps from `start` to before `stop`."""
        for step in range(start, stop):
            rows = self.sampler.rows(step)[rows_of_rank(self.sampler.batch_size)]
            yield self._batch(self.sampler.epoch(step), rows)

    def _batch(self, epoch: int, rows: Int64[np.ndarray, " batch"]) -> Batch:
        # Draws are a hash of seed, epoch and image, so a resumed run draws the same views.
        draws = uniform(self.sampler.seed, epoch, rows, CHOICE, len(self.views))
        chosen = torch.from_numpy(draws.argsort(axis=1)[:, : self.num_views])
        view, index = (to_device(x, self.views.device) for x in (chosen.T, torch.from_numpy(rows)))
        views = self.views[view, index][..., None, None]
        return Batch(tuple(views), index, self.labels[index])


@dataclass(frozen=True, eq=False)
class FrozenEncoder:
    """An encoder that is not trained: a layer on top of its cached features is."""

    cached: CachedFeatures
    device: torch.device

    def backbone(self, seed: int) -> Backbone:
        """Return an untrained layer on top of the encoder."""
        return top_layer(self.cached.center.shape[1], seed)

    def feed(
        self, sampler: BatchSampler, kind: type[Method[Any]], label: np.ndarray
    ) -> BatchLoader:
        """Return batches of cached features."""
        views = self.cached.views.to(self.device)
        return CachedViews(views, sampler=sampler, num_views=len(kind.views), labels=label)

    def features(
        self, method: Method[Any], *, with_views: bool
    ) -> tuple[CachedFeatures, nn.Module]:
        """Return the cached features, and the layer that `method` trained on them."""
        del with_views  # they are there
        return self.cached, method.backbone


@dataclass(frozen=True, eq=False)
class FinetunedEncoder:
    """An encoder of which all or some layers are trained, on new views at every step.

    With `top` among `--train-layers`, they come below a layer like that on a frozen encoder.
    """

    pretrained: Encoder
    images: Images
    config: DiscoverConfig
    base: TrainConfig  # Resolved settings of all stages
    device: torch.device
    folder: Path | None = None
    """Where features by each trained network are kept, for a run that is stopped and resumed."""

    def __post_init__(self) -> None:
        check_train_layers(self.pretrained, self.config.train_layers)

    def backbone(self, seed: int) -> Backbone:
        """Return a copy of the pretrained network, with all but the named layers fixed."""
        network = copy.deepcopy(self.pretrained.backbone)
        part, has_top = split_layers(self.config.train_layers)
        if part != "all":
            freeze(network, part)
        if not has_top:
            return network
        layer = top_layer(network.feature_dim, seed)
        return Backbone(nn.Sequential(network, layer.body), layer.feature_dim)

    def parts(self, method: Method[Any]) -> tuple[Backbone, nn.Module]:
        """Return a method's network, and the layer on top of it that its heads take."""
        if not split_layers(self.config.train_layers)[1]:
            return method.backbone, nn.Identity()
        network, layer = method.backbone.body.children()
        assert isinstance(network, Backbone)
        return network, Backbone(layer, method.backbone.feature_dim)

    def feed(
        self, sampler: BatchSampler, kind: type[Method[Any]], label: np.ndarray
    ) -> BatchLoader:
        """Return batches of augmented images, in views of the size that images are encoded at.

        At the smaller size of views in `nearkin train`, what heads learn holds less at that size.
        """
        return Batches.of(
            self.pretrained.preprocessing.applied(self.images),
            views_of(self.base.augment, kind.views, more=kind.more_views),
            image_size=self.pretrained.image_size,
            sampler=sampler,
            device=self.device,
            workers=int(self.base.workers),
            cache=self.base.cache,
            labels=label,
        )

    def features(
        self, method: Method[Any], *, with_views: bool
    ) -> tuple[CachedFeatures, nn.Module]:
        """Return features by the method's network, and the layer on top of it."""
        network, layer = self.parts(method)
        encoder = Encoder(network, self.pretrained.preprocessing, {})
        num_views = self.config.num_views if with_views else 0
        drawn = ViewSettings(self.base.augment, num_views, self.base.seed)
        workers = int(self.base.workers)
        every = Extraction(encoder, self.images, drawn, self.device, workers)
        if self.folder is None:
            features, _ = every.compute()
        else:
            features, _ = every.compute_in(self.folder / f"{encoder.digest}-{num_views}")
        return features, layer


DiscoveryEncoder = FrozenEncoder | FinetunedEncoder


def top_layer(features: int, seed: int) -> Backbone:
    """Return the layer that is trained on top of an encoder, as a seed draws it."""
    with seeded(seed, torch.device("cpu")):
        return trainable_layer(features, LAYER_DIM)


def split_layers(layers: str) -> tuple[str, bool]:
    """Return the part of the network that learns, and whether a layer on top of it does.

    >>> split_layers("layer4,top"), split_layers("layer4")
    (('layer4', True), ('layer4', False))
    """
    part = layers.removesuffix(",top")
    return part, part != layers


def check_train_layers(encoder: Encoder, layers: str) -> None:
    """Refuse layers that a network does not have, before anything is trained."""
    part, _ = split_layers(layers)
    if layers not in ("auto", "top") and part != "all":
        freeze(copy.deepcopy(encoder.backbone), part)


def freeze(network: Backbone, layers: str) -> None:
    """Fix all parameters but those of the part called `layers`; without any, refuse."""

    def learns(name: str) -> bool:
        return f"{name}.".startswith(f"{layers}.")  # block 1 is not block 10

    names = [name for name, _ in network.body.named_parameters()]
    if not any(map(learns, names)):
        parts = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
        raise UsageError(
            f"--train-layers {layers} is auto, top, all or a part of the network: {parts}; "
            f"with a layer on top of it: {parts.split(', ')[-1]},top"
        )
    for name, parameter in network.body.named_parameters():
        parameter.requires_grad_(learns(name))
