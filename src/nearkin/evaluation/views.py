"""Features of further views of the images of an evaluation: augmented, as tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.config import Augment
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, CenterCrops
from nearkin.data.images import Images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.views import normalize
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.preprocessing import Preprocessing
from nearkin.evaluation.embeddings import (
    Embeddings,
    embeddings_of,
    encode,
    images_at_once,
)
from nearkin.networks.branch import as_backbone
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress


@dataclass(frozen=True, eq=False)
class ImageViews:
    """An encoder with the images that it is measured on, for measures that take further views."""

    encoder: Encoder
    train: Images  # Readable ones, in the order of their embeddings
    test: Images
    seed: int
    workers: int
    augment: Augment
    device: torch.device
    on_progress: ProgressCallback = ignore_progress

    def augmented(self, most: int, count: int) -> Float[Tensor, "images views dim"]:
        """Features of `count` augmented views of at most `most` test images, evenly spread."""
        views = AugmentedViews(
            self.encoder, self.test.spread(most), self.seed, self.augment, self.device
        )
        features = []
        for epoch in range(count):
            self.on_progress(epoch, count, "augmented views")
            features.append(views.features(epoch))
        own = torch.from_numpy(views.readable)
        return torch.stack(features, dim=1)[own]


class AugmentedViews:
    """Augmented views of some images; the epoch decides what is drawn for each of them."""

    def __init__(
        self, encoder: Encoder, images: Images, seed: int, augment: Augment, device: torch.device
    ) -> None:
        self.encoder, self.images = encoder.to(device), images
        self.batches = Batches.of(
            encoder.preprocessing.applied(images),
            views_of(augment, ("strong",)),
            image_size=encoder.image_size,
            sampler=RandomBatchSampler(len(images), 1, seed),
            device=device,
        )

    def features(self, epoch: int) -> Float[Tensor, "images dim"]:
        """Features of a view of each image; see `readable`."""
        return encode(self.encoder, self._inputs(epoch))

    def _inputs(self, epoch: int) -> Iterator[Float[Tensor, "batch _ _ _"]]:
        rows = np.arange(len(self.images))
        size = images_at_once(self.encoder.image_size, self.batches.device)
        for piece in np.array_split(rows, range(size, len(rows), size)):
            yield normalize(self.batches.views(epoch, piece)[0])

    @property
    def readable(self) -> np.ndarray:
        """Rows of the images that could be read so far; others show another image's view."""
        return np.setdiff1d(np.arange(len(self.images)), list(self.batches.bad))


def second_view(
    encoder: Encoder,
    images: Images,
    chosen: np.ndarray,
    *,
    seed: int,
    augment: Augment,
    device: torch.device,
) -> Embeddings:
    """Embeddings of the chosen images, augmented as in training: they should hardly differ."""
    some = images.subset(chosen)
    views = AugmentedViews(encoder, some, seed, augment, device)
    features, own = views.features(0), views.readable
    return embeddings_of(some.subset(own), features.numpy()[own], chosen[own])


class RawPixels(nn.Module):
    """Raw pixels as features: unit vectors of what differs from the mean training image."""

    mean_image: Tensor
    center: Tensor
    deviation: Tensor

    def __init__(self, mean_image: Float[Tensor, " dim"], view: Preprocessing) -> None:
        super().__init__()
        self.register_buffer("mean_image", mean_image)
        mean, std = torch.tensor([view.mean, view.std])[..., None, None]
        self.register_buffer("center", mean)
        self.register_buffer("deviation", std)

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch dim"]:
        pixels = images * self.deviation + self.center
        return unit(pixels.flatten(1) - self.mean_image)


def pixel_encoder(train: Images, side: int, workers: int) -> Encoder:
    """Return raw pixels as an encoder of images of that side; the mean is of these images."""
    dim, count = train.num_channels * side * side, 0
    total = torch.zeros(dim, dtype=torch.float64)
    for pixels in CenterCrops(train, side, workers=workers):
        total += pixels.flatten(1).sum(dim=0, dtype=torch.float64)
        count += len(pixels)
    white = 1 if train.channels else 255
    view = Preprocessing.of(side, train.channels)
    network = RawPixels((total / (white * count)).float(), view)
    return Encoder(as_backbone(network, side, dim, "raw pixels"), view, {})
