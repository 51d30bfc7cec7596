"""What an encoder stands beside: raw pixels, and the same network before any training."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.views import from_zero_to_one, normalize
from nearkin.encoders.encoder import Encoder, untrained_like
from nearkin.encoders.inference import images_at_once
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, tracked

TITLES: Final = {
    "teacher": "teacher",
    "start": "frozen start",
    "untrained": "untrained encoder",
    "pixels": "raw pixels",
}
"""What the tables beside an encoder are called."""
SIDE: Final = 32  # Raw pixels are those of crops of so many pixels a side
PIXEL_BANK: Final = 50_000  # Training images, at most, whose raw pixels are measured
CALIBRATED: Final = 256  # Training images that the batch norms of an untrained network see
SMALL: Final = 0.5  # Below it, a constant parameter is a LayerScale
PIECE: Final = 1024  # Images whose raw pixels are centered at once


def pixel_features(
    parts: Iterable[Images], workers: int, on_progress: ProgressCallback = ignore_progress
) -> list[Float[Tensor, "n d"]]:
    """Raw pixels as features: unit vectors of what differs from the mean image of the first."""
    features = []
    for part in parts:
        crops = CenterCrops(part, SIDE, workers=workers)
        pixels = torch.cat(list(tracked(crops, len(part), "raw pixels", on_progress)))
        features.append(from_zero_to_one(pixels.flatten(1)))
    mean = torch.from_numpy(features[0].numpy().mean(axis=0, dtype=np.float64)).float()
    for pixels in features:
        for piece in pixels.split(PIECE):  # in place: all once more could be too many
            piece.copy_(unit(piece - mean))
    return features


def untrained(
    encoder: Encoder,
    train: Images,
    *,
    seed: int,
    device: torch.device,
    workers: int,
    network: nn.Module | None = None,
) -> Encoder:
    """Return an encoder of the same architecture and preprocessing with the seed's random weights.

    Its batch norms have the statistics of `CALIBRATED` training images, and each LayerScale is 1:
    at their initial values features hardly depend on the image. `network` is the encoder's, if it
    was given one from Python.
    """
    other = untrained_like(encoder, seed, network)
    with torch.no_grad():
        for parameter in other.backbone.parameters():
            value = float(parameter.flatten()[0])
            # Only those that begin a branch near 0 are one small constant.
            if 0 < abs(value) < SMALL and bool((parameter == value).all()):
                parameter.fill_(1.0)
    norms = [each for each in other.backbone.modules() if isinstance(each, _BatchNorm)]
    if norms:
        size = images_at_once(other.image_size, device)
        crops = CenterCrops(
            train.spread(CALIBRATED), other.preprocessing, batch_size=size, workers=workers
        )
        pixels = torch.cat(list(crops))
        sound = [row for row in range(len(pixels)) if row not in crops.bad]
        batches = (normalize(batch.to(device)) for batch in pixels[sound].split(size))
        _calibrate(other.to(device).backbone, norms, batches)
    return other


def _calibrate(
    network: nn.Module,
    norms: Sequence[_BatchNorm],
    batches: Iterable[Float[Tensor, "batch _ _ _"]],
) -> None:
    """Let batch norms have the mean statistics of these batches."""
    momenta = [each.momentum for each in norms]
    network.eval()
    for each in norms:
        each.reset_running_stats()
        each.momentum = None  # an average over all batches
        each.train()
    with torch.no_grad():
        for number, batch in enumerate(batches):
            if len(batch) > 1 or not number:  # a last one of one image has no deviation
                network(batch)
    for each, momentum in zip(norms, momenta, strict=True):
        each.momentum = momentum
        each.eval()
