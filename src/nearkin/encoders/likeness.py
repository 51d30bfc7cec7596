"""Where in two images their likeness lies."""

import math
import os
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from nearkin.data.channels import read_channels
from nearkin.data.decode import BadImage, decode
from nearkin.encoders.encoder import Encoder
from nearkin.errors import DataError, UsageError
from nearkin.objectives import unit

ImageOrFile = Image.Image | np.ndarray | Tensor | str | os.PathLike[str]


def likeness(
    encoder: Encoder, image: ImageOrFile, other: ImageOrFile
) -> Float[Tensor, "2 side side"]:
    """Map how alike each place of either image is to the other image as a whole.

    A place's value is the cosine of its vector, before the network pools, and the mean of the
    other image's vectors: of a network that averages, these products, weighted by the vectors'
    lengths, add up to the cosine of the two images' features (Stylianou et al. 2019, "Visualizing
    deep similarity networks", arXiv:1901.00536).

    Args:
        encoder: Of `nearkin.load`.
        image: The first image: a file, or what `encoder.transform` takes.
        other: The second one.

    Returns:
        The map of `image`, then that of `other`: from -1 to 1, each over the square that
        `encoder.transform` cuts, one value per patch or position of the last feature map.

    Raises:
        UsageError: If the network has no vectors before its pooling, or these form no square.
        DataError: If a file cannot be read.
    """
    pair = [_opened(each, encoder) for each in (image, other)]
    return likeness_of(encoder, encoder.transform(pair))


@torch.inference_mode()
def likeness_of(encoder: Encoder, pair: Float[Tensor, "2 _ _ _"]) -> Float[Tensor, "2 side side"]:
    """Map two images, as `encoder.transform` gives them, as `likeness` does; on the CPU."""
    device = next(encoder.parameters(), pair).device
    tokens = encoder.forward_features(pair.to(device))[:, encoder.num_prefix_tokens :]
    side = math.isqrt(tokens.shape[1])
    if side * side != tokens.shape[1]:
        raise UsageError(
            f"{tokens.shape[1]} vectors of an image are no square; give another encoder"
        )
    whole = unit(tokens.mean(dim=1)).flip(0)  # each beside the other image's
    return torch.einsum("ind,id->in", unit(tokens), whole).reshape(2, side, side).cpu()


def _opened(image: ImageOrFile, encoder: Encoder) -> Image.Image | np.ndarray | Tensor:
    """An image that is given, or the one in a file as the encoder takes it."""
    if not isinstance(image, str | os.PathLike):
        return image
    try:
        content = Path(image).read_bytes()
        return read_channels(content) if encoder.preprocessing.channels else decode(content)
    except (OSError, BadImage) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", error)
        raise DataError(
            f"{os.fspath(image)!r} cannot be read ({reason}); give an image"
        ) from error
