"""An encoder as it is run where only its features are wanted: as fast as a device computes them.

On a CPU batch norms are folded into convolutions; many images are computed by OpenVINO, if it is
installed. A lower precision is taken where the user asks for it, or where it hardly changes which
images are neighbors, which is measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from typing_extensions import override

from nearkin.data.batches import CenterCrops, to_input
from nearkin.data.images import Images
from nearkin.distributed.allocation import keep_freed_memory
from nearkin.distributed.devices import native_precision
from nearkin.encoders.acceleration import (
    OpenVINONetwork,
    by_openvino,
    fold_batch_norms,
    has_openvino,
)
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.preprocessing import Preprocessing
from nearkin.errors import DataError
from nearkin.networks.backbone import SMALL_IMAGE
from nearkin.networks.branch import eval_mode
from nearkin.objectives import unit
from nearkin.schema import Auto

Precision = Literal["fp32", "bf16"]
SAMPLE: Final = 512
"""Images whose neighbors are compared in two precisions."""
KEPT: Final = 0.999
"""Share of them whose nearest neighbor must stay, for bfloat16 to be taken unasked."""
MANY: Final = 10 * SAMPLE
"""Images from which on the comparison takes less than is gained."""
WORTH: Final = 1024 * 224**2
"""Pixels from which on a network is compiled, which takes about as long as it then saves."""
TIE: Final = 1e-6  # Between similarities of equal images, by the order of summation


class Bfloat16(nn.Module):
    """A network whose products are computed in bfloat16, and whose weights stay float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        with torch.autocast(images.device.type, torch.bfloat16):
            features: Tensor = self.network(images)
        return features


@dataclass(frozen=True, eq=False)
class Inference:
    """An encoder as it is run on a device."""

    network: nn.Module
    preprocessing: Preprocessing
    device: torch.device
    batch_size: int  # Images per pass

    @property
    def lines(self) -> list[str]:
        """Lines of the log, where the program that computes is not torch."""
        compiled = isinstance(self.network, OpenVINONetwork)
        return ["features are computed by OpenVINO"] if compiled else []


def inference(
    encoder: Encoder,
    device: torch.device,
    precision: Precision | Auto = "fp32",
    batch_size: int | Auto = "auto",
    *,
    count: int = 0,
) -> Inference:
    """Prepare an encoder to compute features; it moves to the device.

    On a CPU its batch norms are folded: features differ by rounding, 2e-6 of the largest.

    Args:
        encoder: Its preprocessing is that of the images.
        device: Where to compute.
        precision: Of the products; features are float32. `auto` is that, too, for which
            `choose_precision` has not been asked.
        batch_size: Images per pass; `auto`: see `images_at_once`.
        count: How many images there will be. If they have `WORTH` pixels, a CPU computes their
            features by OpenVINO, where it is installed and they equal torch's.
    """
    size = images_at_once(encoder.image_size, device) if batch_size == "auto" else batch_size
    is_cpu = device.type == "cpu"
    network: nn.Module | None = None
    many = count * encoder.image_size**2 >= WORTH
    encoder.to(device)
    if is_cpu and precision != "bf16" and many and has_openvino():
        network = by_openvino(encoder.backbone, _noise(encoder, 3))
    if network is None:
        network = encoder.to(memory_format=torch.channels_last).backbone
        if is_cpu:
            images = _noise(encoder, 1).contiguous(memory_format=torch.channels_last)
            network = fold_batch_norms(network, images)
    if precision == "bf16":
        network = Bfloat16(network)
    return Inference(network, encoder.preprocessing, device, size)


def choose_precision(
    asked: Precision | Auto,
    encoder: Encoder,
    images: Images,
    device: torch.device,
    workers: int,
) -> tuple[Precision, list[str]]:
    """Choose the precision in which the features of images are computed.

    Args:
        asked: `auto` is bf16 on a CPU that computes it natively, for `MANY` images or more, if
            at least `KEPT` of a sample of them keep their nearest neighbor; else fp32.
        encoder: It moves to the device.
        images: What the sample is taken of.
        device: Where to compute.
        workers: Processes that decode images.

    Returns:
        The precision, and lines of the log on what a lower one changes.
    """
    native = native_precision(device) == torch.bfloat16
    worth = device.type == "cpu" and native and len(images) >= MANY
    if asked == "fp32" or (asked == "auto" and not worth):
        return "fp32", []
    share, number = neighbors_kept(encoder, images, device, workers)
    line = f"bf16    {100 * share:.1f} % of {number} images keep their nearest neighbor of fp32"
    if asked == "auto" and share < KEPT:
        return "fp32", [f"{line}; fp32 is used"]
    slow = "" if native else f"; it is slower, as this {device.type} has no such arithmetic"
    return "bf16", [line + slow]


def neighbors_kept(
    encoder: Encoder, images: Images, device: torch.device, workers: int
) -> tuple[float, int]:
    """Return the share of images that keep their nearest neighbor in bfloat16, and of how many.

    Neighbors are sought among at most `SAMPLE` images, evenly spread over all of them. One of
    equally similar images is as good as another.
    """
    sample, similar = images.spread(SAMPLE), list[Tensor]()
    exact = inference(encoder, device)
    for network in (exact.network, Bfloat16(exact.network)):
        crops = CenterCrops(
            sample, encoder.preprocessing, batch_size=exact.batch_size, workers=workers
        )
        features = encode_pixels(network, crops, device)
        readable = np.delete(np.arange(len(sample)), sorted(crops.bad))
        vectors = unit(features[torch.from_numpy(readable)])
        similar.append((vectors @ vectors.T).fill_diagonal_(-torch.inf))
    if len(readable) < 2:  # there are no neighbors
        return 1.0, 0
    found = similar[1].argmax(dim=1, keepdim=True)
    kept = similar[0].gather(1, found).squeeze(1) >= similar[0].amax(dim=1) - TIE
    return kept.double().mean().item(), len(kept)


def _noise(encoder: Encoder, count: int) -> Tensor:
    """Return images of noise, the same at each call."""
    side = encoder.image_size
    shape = count, encoder.backbone.num_channels, side, side
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def images_at_once(image_size: int, device: torch.device) -> int:
    """Return how many images one pass of an encoder takes: 256, or of larger ones fewer on a CPU.

    There, activations that stay in its cache are worth more than large products: of a ViT-S/14 at
    224 px, 16 images take an eighth less time per image than 64, and a fifth of their memory.
    """
    fitting = 256 * SMALL_IMAGE**2 // image_size**2 if device.type == "cpu" else 256
    return min(256, 1 << max(2, fitting.bit_length() - 1))


def encode(encoder: nn.Module, batches: Iterable[Float[Tensor, "_ ..."]]) -> Float[Tensor, "n d"]:
    """Compute the features of all images, in float32 on the CPU; the encoder's state stays.

    Batch norm uses its running statistics, so no image's features depend on another image.
    """
    features = []
    with keep_freed_memory(), eval_mode(encoder):
        for batch in batches:
            with torch.inference_mode():
                # A copy: a class token is a view, and would keep all tokens of its batch.
                features.append(encoder(batch).flatten(1).to("cpu", torch.float32, copy=True))
    if not features:
        raise DataError("no image to encode; name a folder or a split that has some")
    return torch.cat(features)  # outside of inference mode, so that a probe can learn from it


def encode_pixels(
    network: nn.Module, batches: Iterable[Shaped[Tensor, "_ _ _ _"]], device: torch.device
) -> Float[Tensor, "n d"]:
    """Compute the features of decoded images, by a network on that device."""
    return encode(network, (to_input(batch.to(device)) for batch in batches))
