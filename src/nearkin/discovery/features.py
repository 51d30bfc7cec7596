"""The encoder under the heads: frozen, with cached features, or finetuned."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import Batches, CenterCrops, Feed, to_input
from nearkin.data.images import Images
from nearkin.data.order import BatchOrder, Order
from nearkin.data.rng import seeded, uniform
from nearkin.data.views import normalize
from nearkin.distributed import sent, share
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import encode
from nearkin.evaluation.encoder import Encoder, read_tensors
from nearkin.method import Method
from nearkin.networks.backbone import Backbone
from nearkin.networks.heads import top
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.run.settings.build import views_for
from nearkin.tables import usable, write_whole
from nearkin.types import Batch

CHOICE = 254
"""The view number whose draws choose among the kept views."""


class CachedViews:
    """Batches of features: every step sees some of each image's kept views, drawn anew.

    Features have the shape of images of one pixel, so that methods take them as they are.

    Args:
        views: Features of several views of every image.
        order: Which images each step sees.
        num_views: How many views of an image a step sees; no view twice.
        labels: Known classes, `UNKNOWN` for all other images.
    """

    def __init__(
        self,
        views: Float[Tensor, "kept images dim"],
        *,
        order: BatchOrder,
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


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Each image as it is, and in several augmented views: as features or as anything else."""

    center: Float[Tensor, "images _"]
    views: Float[Tensor, "views images _"]


def write_looks(path: Path, looks: CachedFeatures, bad: dict[int, str]) -> None:
    """Write features and the rows of unreadable images, whole or not at all."""
    from safetensors.torch import save

    state = {"center": looks.center.contiguous(), "views": looks.views.contiguous()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(state, metadata={"bad": json.dumps(bad)}))


def read_looks(path: Path, count: int) -> tuple[CachedFeatures, dict[int, str]]:
    """What `write_looks` wrote.

    Args:
        path: The file.
        count: How many images it must be of.

    Raises:
        CheckpointError: If the file is damaged, or of other images.
    """
    with usable(path, "remove it, it will be made again"):
        noted, state = read_tensors(path, "bad")
        center, views = state["center"], state["views"]
        rows, _ = center.shape
        if views.ndim != 3 or views.shape[1:] != center.shape or rows != count:
            raise ValueError(f"features {list(center.shape)}, of views {list(views.shape)}")
        bad = {int(row): str(reason) for row, reason in noted.items()}
        if not bad.keys() <= set(range(rows)):
            raise ValueError(f"unreadable images beyond {rows}")
    return CachedFeatures(center, views), bad


def rows_of(looks: CachedFeatures, keep: np.ndarray) -> CachedFeatures:
    """The looks at some images."""
    rows = torch.from_numpy(keep)
    return CachedFeatures(looks.center[rows], looks.views[:, rows])


TOP_DIM = 256
"""Features of the layer that learns on top of a frozen encoder."""
PIECE = 256
"""Images encoded at once."""


@runtime_checkable
class Trunk(Protocol):
    """What the last stages of a discovery stand on."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def backbone(self, seed: int) -> Backbone:
        """A network that learns, as it is before anything is learned."""

    def feed(self, order: BatchOrder, kind: type[Method[Any]], label: np.ndarray) -> Feed:
        """Batches of what that network takes."""

    def seen(self, method: Method[Any]) -> tuple[CachedFeatures, nn.Module]:
        """All images as a finished encoder sees them, and what has been learned on top of it."""


@dataclass(frozen=True, eq=False)
class FrozenEncoder:
    """An encoder that stays as it is: its features of a few views of every image are kept."""

    kept: CachedFeatures
    device: torch.device

    def backbone(self, seed: int) -> Backbone:
        """A layer on top of the encoder."""
        with seeded(seed, torch.device("cpu")):
            return top(self.kept.center.shape[1], TOP_DIM)

    def feed(self, order: BatchOrder, kind: type[Method[Any]], label: np.ndarray) -> Feed:
        """Batches of kept features."""
        views = self.kept.views.to(self.device)
        return CachedViews(views, order=order, num_views=len(kind.views), labels=label)

    def seen(self, method: Method[Any]) -> tuple[CachedFeatures, nn.Module]:
        """What is kept, and the method's layer."""
        return self.kept, method.backbone


@dataclass(frozen=True, eq=False)
class FinetunedEncoder:
    """An encoder of which all or some parts go on learning, from new views at every step.

    Args:
        encoder: Where to start.
        images: All images.
        augment: How views are drawn.
        num_views: Views that predictions are compared over.
        trained: `all`, or how the names of the parts that learn begin.
        seed: Of the views that predictions are compared over.
        device: Where to compute.
        workers: Processes that decode photographs.
        cache: Where those that are learned from are kept once they are decoded; see `Batches`.
    """

    encoder: Encoder
    images: Images
    augment: Augment
    num_views: int
    trained: str
    seed: int
    device: torch.device
    workers: int
    cache: str = "off"

    def __post_init__(self) -> None:
        check_trained(self.encoder, self.trained)

    def backbone(self, seed: int) -> Backbone:
        """A copy of the encoder; the parts that are not to learn are fixed."""
        del seed
        network = copy.deepcopy(self.encoder.backbone)
        if self.trained != "all":
            freeze(network, self.trained)
        return network

    def feed(self, order: BatchOrder, kind: type[Method[Any]], label: np.ndarray) -> Feed:
        """Batches of images."""
        return Batches(
            self.images,
            views_for(kind, self.augment),
            image_size=self.encoder.image_size,
            order=order,
            device=self.device,
            workers=self.workers,
            cache=self.cache,
            labels=label,
        )

    def seen(self, method: Method[Any]) -> tuple[CachedFeatures, nn.Module]:
        """All images as the method's network sees them."""
        now = Encoder(method.backbone, self.encoder.image_size, {})
        found, _ = look(
            now, self.images, self.augment, self.num_views, self.seed, self.device, self.workers
        )
        return found, nn.Identity()


def finetuned_encoder(
    encoder: Encoder,
    images: Images,
    config: DiscoverConfig,
    base: TrainConfig,
    device: torch.device,
) -> FinetunedEncoder:
    """What settings, of the discovery and of all its stages, say of a network that learns."""
    return FinetunedEncoder(
        encoder,
        images,
        base.augment,
        config.num_views,
        config.train_layers,
        base.seed,
        device,
        int(base.workers),
        base.cache,
    )


def check_trained(encoder: Encoder, trained: str) -> None:
    """Refuse parts that a network does not have, before anything is learned.

    Raises:
        UsageError: Naming those it has.
    """
    if trained not in ("top", "all"):
        freeze(copy.deepcopy(encoder.backbone), trained)


def freeze(network: Backbone, trained: str) -> None:
    """Fix all parameters but those of parts whose names begin so.

    Raises:
        UsageError: If no part is called so.
    """
    wanted = [name for name, _ in network.body.named_parameters() if name.startswith(trained)]
    if not wanted:
        parts = ", ".join(
            dict.fromkeys(n.split(".")[0] for n, _ in network.body.named_parameters())
        )
        raise UsageError(f"--train-layers {trained} is top, all or a part of the network: {parts}")
    for name, parameter in network.body.named_parameters():
        parameter.requires_grad_(name.startswith(trained))


def look(
    encoder: Encoder,
    images: Images,
    augment: Augment,
    num_views: int,
    seed: int,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[CachedFeatures, dict[int, str]]:
    """Features of images as they are, and of several views of each, drawn as in training.

    `on_progress` hears how far this is.

    Returns:
        The features, and the rows of images that cannot be read, with the reason. The features
        of those mean nothing.
    """
    network = encoder.backbone.to(device).to(memory_format=torch.channels_last)
    shown = CenterCrops(images, encoder.image_size, workers=workers)
    count = len(images)
    read = tracked(shown, count, "features", on_progress)
    center = encode(network, (to_input(batch.to(device)) for batch in read))
    drawn = Batches(
        images,
        views_of(augment, ("strong",)),
        image_size=encoder.image_size,
        order=Order(len(images), 1, seed),
        device=device,
        workers=workers,
    )
    views = []
    for epoch in range(num_views):
        what = f"features of view {epoch + 1}/{num_views}"
        views.append(encode(network, tracked(_views(drawn, epoch), count, what, on_progress)))
    return CachedFeatures(center, torch.stack(views)), {**shown.bad, **drawn.bad}


def _views(drawn: Batches, epoch: int) -> Iterator[Tensor]:
    """One view of every image, in order."""
    count = len(drawn.images)
    for piece in np.array_split(np.arange(count), range(PIECE, count, PIECE)):
        yield normalize(drawn.views(epoch, piece)[0])
