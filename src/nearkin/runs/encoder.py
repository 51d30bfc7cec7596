"""The trained encoder as a file that holds no code, and as a module to use."""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin import __version__
from nearkin.errors import CheckpointError, UsageError
from nearkin.networks.backbone import Backbone, adopt, build_backbone
from nearkin.runs.folder import RunFolder

if TYPE_CHECKING:
    from PIL import Image

FORMAT = "1"


class Encoder(nn.Module):
    """From images to features, as trained. In evaluation mode from the start.

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
        """Numbers in a feature vector."""
        return self.backbone.feature_dim

    @override
    def forward(self, images: Float[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch features"]:
        features: Tensor = self.backbone(images)
        return features

    def transform(self, picture: "Image.Image") -> Float[Tensor, "3 size size"]:
        """A Pillow picture as this encoder takes it: central square, normalized."""
        import numpy as np

        from nearkin.data.centered import to_network
        from nearkin.data.decode import center

        pixels = center(np.asarray(picture.convert("RGB")), self.image_size)
        return to_network(torch.from_numpy(pixels).permute(2, 0, 1)[None])[0]


def write_encoder(path: Path, backbone: Backbone, details: dict[str, Any]) -> None:
    """Write a backbone's weights as safetensors, with what is needed to build it again.

    Args:
        path: The file; written whole or not at all.
        backbone: The trained network.
        details: Plain values: backbone name, image_size and where the weights come from.
    """
    from safetensors.torch import save

    from nearkin.data.views import MEAN, STD

    described = {
        "format": FORMAT,
        "nearkin": __version__,
        "feature_dim": backbone.feature_dim,
        "mean": MEAN,
        "std": STD,
        **details,
    }
    state = {name: tensor.contiguous() for name, tensor in backbone.body.state_dict().items()}
    partial = path.with_suffix(".tmp")
    partial.write_bytes(save(state, metadata={"nearkin": json.dumps(described)}))
    partial.replace(path)


def load(run: str | Path, *, backbone: nn.Module | None = None) -> Encoder:
    """The encoder of a run, ready to use.

    Args:
        run: A run folder, or its encoder.safetensors.
        backbone: The network the run was given from Python, untrained; not needed for networks
            that have a name.

    Raises:
        UsageError: If there is no encoder there.
        CheckpointError: If the file is damaged or does not fit the network it names.
    """
    from safetensors import SafetensorError, safe_open

    path = RunFolder(Path(run)).encoder if Path(run).is_dir() else Path(run)
    if not path.exists():
        raise UsageError(f"{path} does not exist; `nearkin train` makes it when it is done")
    try:
        with safe_open(path, framework="pt") as file:
            details = json.loads((file.metadata() or {})["nearkin"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        size = int(details["image_size"])
        network = _network(details, size, backbone)
        network.body.load_state_dict(state)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} holds no encoder that can be used ({reason}); train it again"
        ) from error
    return Encoder(network, size, details)


def _network(details: dict[str, Any], size: int, given: nn.Module | None) -> Backbone:
    if given is not None:
        return adopt(copy.deepcopy(given), size, int(details["feature_dim"]))
    if not details["backbone"]:
        raise UsageError("this encoder's network has no name; pass it as `backbone`")
    return build_backbone(str(details["backbone"]), size)
