"""Images into features."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nearkin.errors import DataError


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
    with _evaluating(encoder):
        for batch in batches:
            with torch.inference_mode():
                found.append(encoder(batch).flatten(1).float().cpu())
    if not found:
        raise DataError("no image to encode; name a folder or a split that has some")
    return torch.cat(found)  # outside of inference mode, so that a probe can learn from it


@contextmanager
def _evaluating(encoder: nn.Module) -> Iterator[None]:
    """Every part in evaluation mode, then each as it was: some may have been frozen."""
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
