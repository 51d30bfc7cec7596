"""Images into features."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nearkin.errors import DataError
from nearkin.networks.backbone import evaluating


def encode(encoder: nn.Module, batches: Iterable[Float[Tensor, "_ ..."]]) -> Float[Tensor, "n d"]:
    """Features of all images, in float32 on the CPU.

    Batch norm uses its running statistics, so no image's features depend on another image.

    Args:
        encoder: A network from images to features. It is left as it was found.
        batches: Images on the encoder's device.

    Raises:
        DataError: If there are no images.
    """
    found = []
    with evaluating(encoder):
        for batch in batches:
            with torch.inference_mode():
                found.append(encoder(batch).flatten(1).float().cpu())
    if not found:
        raise DataError("no image to encode; name a folder or a split that has some")
    return torch.cat(found)  # outside of inference mode, so that a probe can learn from it
