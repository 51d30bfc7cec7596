"""The encoder below the heads: frozen, with cached features of every image, or finetuned."""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from nearkin.classifier.features import CachedFeatures, Extraction, ViewSettings
from nearkin.classifier.layers import trainable_copy, trained_parts
from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, BatchLoader
from nearkin.data.images import Images
from nearkin.data.rng import uniform
from nearkin.data.samplers import BatchSampler
from nearkin.distributed import to_device
from nearkin.encoders.encoder import Encoder
from nearkin.method import Method
from nearkin.metrics.kmeans import SAMPLE
from nearkin.networks.branch import Backbone, frozen_copy
from nearkin.networks.heads import linear_layer
from nearkin.types import Batch

CHOICE: Final = 254  # The view number whose draws choose among the cached views
NUM_VIEWS: Final = 8  # Views of each image whose features are kept
SAME: Final = 1e-6  # Deviation, relative to their size, below which features are all the same
LAYER_DIM: Final = 256  # Output dimension of the layer trained on top of an encoder
TOP: Final = ",top"  # Behind the part of a network that learns, where such a layer does too


@dataclass(frozen=True, eq=False)
class CachedViews:
    """Batches of cached features: each step draws some of each image's cached views, none twice.

    Features have the shape of images of one pixel, so that methods take them as they are.
    """

    views: Float[Tensor, "cached images dim"]
    sampler: BatchSampler
    num_views: int
    labels: Int64[Tensor, " images"]

    def load(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Yield the batches of the steps from `start` to before `stop`."""
        for step in range(start, stop):
            epoch, rows = self.sampler.epoch(step), self.sampler.rows(step)
            # Draws are a hash of seed, epoch and image, so a resumed run draws the same views.
            draws = uniform(self.sampler.seed, epoch, rows, CHOICE, len(self.views))
            drawn = torch.from_numpy(draws.argsort(axis=1)[:, : self.num_views]).T
            own = torch.from_numpy(rows)
            view, index = (to_device(x, self.views.device) for x in (drawn, own))
            views = self.views[view, index][..., None, None]
            yield Batch(tuple(views), index, self.labels[index])


@dataclass(frozen=True, eq=False)
class FrozenEncoder:
    """An encoder that is not trained: a layer on top of its cached features is."""

    cached: CachedFeatures
    device: torch.device
    has_layer: ClassVar[bool] = True  # Whether a layer on top of the network learns

    def backbone(self, layer: Backbone | None) -> Backbone:
        """Return what is trained below the heads: the layer."""
        assert layer is not None
        return layer

    def feed(
        self, sampler: BatchSampler, kind: type[Method[Any]], label: np.ndarray
    ) -> BatchLoader:
        """Return batches of cached features."""
        views, labels = self.cached.views.to(self.device), torch.from_numpy(label).to(self.device)
        return CachedViews(views, sampler, len(kind.views), labels)

    def features(
        self, method: Method[Any], *, with_views: bool
    ) -> tuple[CachedFeatures, nn.Module]:
        """Return the cached features, and the layer that `method` trained on them."""
        del with_views  # they are there
        return self.cached, method.backbone


@dataclass(frozen=True, eq=False)
class FinetunedEncoder:
    """An encoder whose last blocks, or all of it, are trained, on new views at every step.

    With `top` among `--train-layers`, they come below a layer like that on a frozen encoder.
    """

    pretrained: Encoder
    cached: CachedFeatures  # Of the pretrained encoder
    images: Images
    layers: str  # What learns, as `--train-layers` has it
    base: TrainConfig  # Resolved settings of all stages
    device: torch.device
    aside: Path | None = None  # See `Extraction`

    @property
    def has_layer(self) -> bool:
        """Whether a layer on top of the network learns."""
        return self.layers.endswith(TOP)

    def backbone(self, layer: Backbone | None) -> Backbone:
        """Return a copy of the pretrained network, of which the named part learns, and a layer."""
        network = trainable_copy(self.pretrained.backbone, self.layers.removesuffix(TOP))
        if layer is None:
            return network
        return Backbone(nn.Sequential(network, layer.body), layer.feature_dim)

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
        encoder = self.trained(method)
        num_views = NUM_VIEWS if with_views else 0
        drawn = ViewSettings(self.base.augment, num_views, self.base.seed)
        workers = int(self.base.workers)
        every = Extraction(encoder, self.images, drawn, self.device, workers, aside=self.aside)
        return every.compute().features, self._parts(method)[1]

    def trained(self, method: Method[Any]) -> Encoder:
        """Return the encoder whose network a method has trained, without a layer on top."""
        network, _ = self._parts(method)
        details = {**self.pretrained.details, "fine_tuned": self.layers}
        return Encoder(network, self.pretrained.preprocessing, details)

    def _parts(self, method: Method[Any]) -> tuple[Backbone, nn.Module]:
        """Return a method's network, and the layer on top of it that its heads take."""
        if not self.has_layer:
            return method.backbone, nn.Identity()
        network, layer = method.backbone.body.children()
        assert isinstance(network, Backbone)
        return network, Backbone(layer, method.backbone.feature_dim)


DiscoveryEncoder = FrozenEncoder | FinetunedEncoder


def check_layers(layers: str, backbone: Backbone) -> None:
    """Refuse a `--train-layers` that a backbone does not have."""
    if layers != "top":
        trained_parts(backbone, layers.removesuffix(TOP))


def principal_layer(encoder: DiscoveryEncoder, rows: Int64[np.ndarray, " n"]) -> Backbone:
    """Return a layer that turns an encoder's features to the principal components of some images.

    It centers them, and scales all by one number, after which a component has a mean square of 1:
    what is near each other stays so. There are `LAYER_DIM` components, or fewer where features or
    images are.
    """
    x = encoder.cached.center[torch.from_numpy(rows[:: -(-len(rows) // SAMPLE)])].double()
    mean, size = x.mean(dim=0), x.square().mean().sqrt()
    x = x - mean
    squares, directions = (each.flip(-1) for each in torch.linalg.eigh(x.T @ x / len(x)))
    count = min(LAYER_DIM, *x.shape)
    std = squares[:count].mean().clamp(min=0).sqrt()
    weight = directions[:, :count].T / (std if std > SAME * size else 1.0)
    layer = linear_layer(x.shape[1], count)
    values = {"body.1.weight": weight, "body.1.bias": -(weight @ mean)}
    layer.load_state_dict({name: value.float() for name, value in values.items()})
    return layer


@torch.no_grad()
def top_features(
    encoder: DiscoveryEncoder, method: Method[Any], rows: Int64[np.ndarray, " n"] | None = None
) -> Float[Tensor, "n dim"]:
    """Return the features of images, by default of all, that a method's heads take."""
    cached, layer = encoder.features(method, with_views=False)
    center = cached.center if rows is None else cached.center[torch.from_numpy(rows)]
    features: Tensor = for_inference(layer)(center)
    return features


def for_inference(module: nn.Module) -> nn.Module:
    """Return a copy of what a method has trained, on the CPU and in evaluation mode."""
    return frozen_copy(module).cpu().eval()
