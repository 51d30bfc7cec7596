"""Features of an augmented view of images, and the images that an encoder is measured on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.config import Augment
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.images import Images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.views import normalize
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import encode, images_at_once
from nearkin.evaluation.embeddings import Embeddings, embeddings_of
from nearkin.evaluation.metrics import geometry_rows
from nearkin.pace import ProgressCallback, ignore_progress


@dataclass(frozen=True, eq=False)
class ImageViews:
    """An encoder with the images that it is measured on, for metrics that need tokens."""

    encoder: Encoder
    train: Images  # Readable ones, in the order of their embeddings
    test: Images
    workers: int
    device: torch.device
    on_progress: ProgressCallback = ignore_progress


def second_view(
    encoder: Encoder, images: Images, *, seed: int, augment: Augment, device: torch.device
) -> Embeddings:
    """Embeddings of some images, augmented as in training: they should hardly differ."""
    chosen = geometry_rows(len(images))
    some, encoder = images.subset(chosen), encoder.to(device)
    batches = Batches.of(
        encoder.preprocessing.applied(some),
        views_of(augment, ("strong",)),
        image_size=encoder.image_size,
        sampler=RandomBatchSampler(len(some), 1, seed),
        device=device,
    )

    def inputs() -> Iterator[Float[Tensor, "batch _ _ _"]]:
        size = images_at_once(encoder.image_size, device)
        for piece in np.array_split(np.arange(len(some)), range(size, len(some), size)):
            yield normalize(batches.views(0, piece)[0])

    features = encode(encoder, inputs())
    own = np.setdiff1d(np.arange(len(some)), list(batches.bad))  # bad ones show another's view
    return embeddings_of(some.subset(own), features.numpy()[own], chosen[own])
