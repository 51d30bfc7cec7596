"""The trained encoder, as a module and as a file that holds no code."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from typing_extensions import override

from nearkin.config import MAX_IMAGE_SIZE
from nearkin.data.batches import to_input
from nearkin.data.decode import CENTER, center, rgb_pixels
from nearkin.data.views import MEAN, STD
from nearkin.errors import UsageError
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Backbone, as_backbone
from nearkin.run.folder import RunFolder
from nearkin.tables import usable, write_whole
from nearkin.version import __version__

if TYPE_CHECKING:
    from PIL import Image

    ImageLike = Image.Image | np.ndarray | Tensor

FORMAT = "1"
AGAIN = "train it again"
CUSTOM = "custom"  # Name of a backbone that was passed from Python


class Encoder(nn.Module):
    """A trained network from images to features, in evaluation mode from the start.

    Args:
        backbone: The trained network.
        image_size: Side in pixels of the images it was trained on.
        details: Where it comes from: method, backbone name, epochs, version.
    """

    def __init__(self, backbone: Backbone, image_size: int, details: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = backbone
        self.image_size = image_size
        self.details = details
        self.eval()

    @property
    def dim(self) -> int:
        """Feature dimension."""
        return self.backbone.feature_dim

    @override
    def forward(self, images: Float[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch features"]:
        features: Tensor = self.backbone(images)
        return features

    def transform(self, images: "ImageLike | Sequence[ImageLike]") -> Float[Tensor, "..."]:
        """Turn images into this encoder's input: the central square, resized and normalized.

        Args:
            images: One image or several: a Pillow image; an array of shape (height, width, 3) or
                (height, width); a tensor of shape (3, height, width); an array of shape
                (n, height, width, 3) or a tensor of shape (n, 3, height, width); or a list of
                such. Arrays and tensors are uint8, or floats from 0 to 1. Images of a list may
                differ in size. Pillow images are treated as the files it was trained on: upright
                by their exif orientation, transparency over white, 16 bits scaled to 8.

        Returns:
            Of shape (3, size, size) for one image, (n, 3, size, size) for several.

        Raises:
            UsageError: If the images are of another type, shape or dtype.
        """
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        batch: Any = images if several else [images]
        crops = [self._crop(image) for image in batch]
        if not crops:
            raise UsageError("no images to transform; give one or more")
        pixels = to_input(torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2))
        return pixels if several else pixels[0]

    def _crop(self, image: Any) -> UInt8[np.ndarray, "size size 3"]:
        """Return the central square of an image, in this encoder's size."""
        try:
            # A JPEG that is opened but not yet decoded is decoded at the smallest scale that
            # suffices, which is several times faster.
            pixels = rgb_pixels(image, math.ceil(self.image_size / CENTER))
        except (TypeError, ValueError) as error:
            raise UsageError(f"cannot transform an image: {error}") from error
        return center(pixels, self.image_size)


def write_encoder(path: Path, backbone: Backbone, details: dict[str, Any]) -> None:
    """Write a backbone's weights as safetensors, whole or not at all.

    `details` are plain values: backbone name, image_size and where the weights come from.
    """
    from safetensors.torch import save

    described = {
        "format": FORMAT,
        "nearkin": __version__,
        "feature_dim": backbone.feature_dim,
        "mean": MEAN,
        "std": STD,
        **details,
    }
    state = {name: tensor.contiguous() for name, tensor in backbone.body.state_dict().items()}
    write_whole(path, save(state, metadata={"nearkin": json.dumps(described)}))


def load(run: str | Path, *, backbone: nn.Module | None = None) -> Encoder:
    """Load the encoder of a run.

    Args:
        run: A run folder, or its encoder.safetensors.
        backbone: The network the run was given from Python, untrained; not needed for networks
            that have a name.

    Raises:
        UsageError: If there is no encoder there, or its weights are not those of `backbone`.
        CheckpointError: If the file is damaged, or not what it says.
    """
    stored = _read(run)
    if backbone is not None:
        network = as_backbone(copy.deepcopy(backbone), stored.image_size, stored.feature_dim)
        stored.fill(network)
    elif stored.backbone == CUSTOM:
        raise UsageError(f"{stored.path} is of a network of your own; pass it as `backbone`")
    else:
        # The random weights of the new network are replaced.
        with usable(stored.path, AGAIN), torch.random.fork_rng(devices=[]):
            network = build_backbone(stored.backbone, stored.image_size)
            network.body.load_state_dict(stored.state)
    return Encoder(network, stored.image_size, stored.details)


def initialize(backbone: Backbone, run: str | Path) -> None:
    """Give a backbone of the same architecture the weights of a run's encoder, in place."""
    _read(run).fill(backbone)


@dataclass(frozen=True, eq=False)
class _Stored:
    """The content of an encoder's file."""

    path: Path
    backbone: str
    image_size: int
    feature_dim: int
    details: dict[str, Any]
    state: dict[str, Tensor]

    def fill(self, network: Backbone) -> None:
        """Copy the weights into a network that the user chose."""
        try:
            network.body.load_state_dict(self.state)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[1:2] or [str(error)]
            raise UsageError(
                f"{self.path} holds the weights of {self.backbone} for "
                f"{self.image_size} px, which do not fit {network.name} "
                f"({reason[0].strip()}); give the same backbone and image size"
            ) from error


def encoder_file(run: str | Path) -> Path:
    """Return the file of a run's encoder, which may be given itself."""
    return RunFolder(Path(run)).encoder if Path(run).is_dir() else Path(run)


def _read(run: str | Path) -> _Stored:
    path = encoder_file(run)
    if not path.exists():
        raise UsageError(f"{path} does not exist; `nearkin train` makes it when it is done")
    with usable(path, AGAIN):
        details, state = read_tensors(path, "nearkin")
        if details["format"] != FORMAT:
            raise ValueError(f"it is of format {details['format']}, not {FORMAT}")
        size, dim = int(details["image_size"]), int(details["feature_dim"])
        if not 1 <= size <= MAX_IMAGE_SIZE:
            raise ValueError(f"its images of {size} px are not from 1 to {MAX_IMAGE_SIZE} px")
        return _Stored(path, str(details["backbone"]), size, dim, details, state)


def read_tensors(path: Path, key: str) -> tuple[Any, dict[str, Tensor]]:
    """Read a safetensors file: the JSON stored under a key of its header, and all tensors.

    Raises:
        Exception: Of many kinds if the file is damaged; to be called inside `usable`.
        ValueError: If a tensor has numbers that are not finite.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        noted = json.loads((file.metadata() or {})[key])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in state.items():
        if not tensor.float().isfinite().all():  # as networks hold them
            raise ValueError(f"{name} is not finite")
    return noted, state
