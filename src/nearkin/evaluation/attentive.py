"""Attentive probe: how much of the classes is in the tokens that the pooling averages away."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images, spread_rows
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import encode_pixels, images_at_once
from nearkin.encoders.projector import Projected
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import sizes
from nearkin.metrics.attentive import HEADS, train_attentive_probe
from nearkin.metrics.metric import Metric, Protocol, share
from nearkin.metrics.probe import train_probe
from nearkin.networks.tokens import TokenFeatures
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.types import UNLABELED

HELD: Final = 2**26  # Numbers of the training images' tokens that are held, 256 MiB in float32
TRAINED: Final = 5_000  # Training images at the most, and test images
PIECE: Final = 256  # Test images whose tokens are held at once


@dataclass(frozen=True, eq=False)
class ImageViews:
    """An encoder with the images that it is measured on, for metrics that need tokens."""

    encoder: Encoder
    train: Images  # Readable ones, in the order of their embeddings
    test: Images
    workers: int
    device: torch.device
    on_progress: ProgressCallback = ignore_progress


def attentive_probe(
    views: ImageViews | None, train: Embeddings, test: Embeddings, *, seed: int
) -> list[Metric]:
    """Measure an attentive probe on tokens, and a linear one on features of the same images.

    Tokens take hundreds of times the memory of features, so that few training images fit. Raw
    pixels and embeddings have no tokens and are not measured.
    """
    if views is None:
        raise DataError("it needs tokens, and these are features alone")
    if isinstance(views.encoder.backbone.body, Projected):
        return []
    try:
        network = TokenFeatures(views.encoder.backbone, views.encoder.image_size).eval()
    except UsageError as error:
        raise DataError(str(error)) from error
    most = max(1, min(TRAINED, HELD // (network.num_tokens * network.dim)))
    rows, scored = (np.flatnonzero(of.labels != UNLABELED) for of in (train, test))
    rows, scored = rows[spread_rows(len(rows), most)], scored[spread_rows(len(scored), TRAINED)]
    few, test = train.subset(rows), test.subset(scored)
    if len(np.unique(few.labels)) < 2 or not len(scored):
        raise DataError("the attentive probe needs labeled images of two classes or more")
    where: Any = {"device": views.device, "workers": views.workers}
    train_images, test_images = views.train.subset(rows), views.test.subset(scored)
    tokens = tokens_of(
        network, views.encoder, train_images, **where, on_progress=views.on_progress
    ).to(views.device)
    probe, validated = train_attentive_probe(tokens, few.labels, seed=seed, groups=few.groups)
    predicted = []
    for piece in np.array_split(np.arange(len(test)), range(PIECE, len(test), PIECE)):
        tokens = tokens_of(network, views.encoder, test_images.subset(piece), **where)
        predicted.append(probe.predict(tokens.to(views.device)))
        views.on_progress(int(piece[-1]) + 1, len(test), "tokens of test images")
    linear = train_probe(few.tensor, few.labels, seed=seed, groups=few.groups)
    of: Protocol = sizes(few, test)
    attention: Protocol = {"method": "attentive pooling and logistic regression", "heads": HEADS}
    return [
        share(
            "attentive probe",
            np.concatenate(predicted) == test.labels,
            {**attention, "tokens": network.num_tokens, **of},
            groups=test.groups,
            rows=scored,
            chosen=validated.choice.described(),
            meaning="Accuracy of a classifier that learns where to look: it weights the tokens "
            "before the pooling. Compare it with the linear probe on the same few images.",
        ),
        share(
            "linear probe, same images",
            linear.predict(test.tensor) == test.labels,
            {"method": "logistic regression on standardized features", **of},
            groups=test.groups,
            rows=scored,
            chosen=linear.choice.described(),
            meaning="The linear probe to compare the attentive one with.",
        ),
    ]


def tokens_of(
    network: TokenFeatures,
    encoder: Encoder,
    images: Images,
    *,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback = ignore_progress,
) -> Float[Tensor, "n tokens dim"]:
    """Compute the tokens of images, by `network` on the device, on the CPU."""
    size = images_at_once(encoder.image_size, device)
    crops = CenterCrops(images, encoder.preprocessing, batch_size=size, workers=workers)
    pieces = tracked(crops, len(images), "tokens", on_progress)
    return encode_pixels(network, pieces, device).reshape(-1, network.num_tokens, network.dim)
