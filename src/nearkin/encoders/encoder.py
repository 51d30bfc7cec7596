"""An encoder, as a module and as a file that holds no code; `load` takes it from anywhere."""

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from typing_extensions import override

from nearkin.config import AutoImageSize
from nearkin.data.channels import stored_channels
from nearkin.data.decode import BadImage, Pixels, is_deep, rgb_pixels
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.rng import seeded
from nearkin.data.views import input_statistics
from nearkin.distributed.devices import torch_defaults
from nearkin.encoders import folders, sources
from nearkin.encoders.checkpoints import SIZE
from nearkin.encoders.origin import is_folder, origin_lines, weights_among
from nearkin.errors import UsageError
from nearkin.extensions import check_trusted
from nearkin.files import usable, write_whole
from nearkin.networks.backbone import NATIVE, as_current, build_backbone, native
from nearkin.networks.branch import Backbone, as_backbone
from nearkin.networks.input_size import check_patches, resize_input
from nearkin.networks.tokens import TokenFeatures, prefix_tokens
from nearkin.places import user_path
from nearkin.run.data import OBJECT, note_origin, origin_of
from nearkin.run.folder import RunFolder
from nearkin.run.opening import split_source
from nearkin.schema import Auto, check_value
from nearkin.version import __version__, check_format

if TYPE_CHECKING:
    ImageLike = Image.Image | np.ndarray | Tensor

PIECE: Final = 2**24  # Numbers of a tensor that are checked at once
FORMATS: Final = ("1", "2", "3")
"""Formats that are read. 1 had no preprocessing: images were cropped as by
`Preprocessing(image_size)`. 3 is written where images are not RGB of 8 bits, else 2."""
AGAIN = "train it again"
ARCHITECTURE = ("backbone", "config", "pooling")
"""Details that say what network it is; the last two, of networks of transformers."""
CUSTOM = "custom"  # Name of a backbone that was passed from Python
_OBJECTS: Final = WeakValueDictionary[str, "Encoder"]()


class Encoder(nn.Module):
    """A network from images to features, in evaluation mode from the start.

    Args:
        backbone: The network. Its body takes images as `view` normalizes them; from here on, the
            backbone takes those of `nearkin.data.views.normalize`, as trainings do.
        view: Its preprocessing, or the side in pixels of nearkin's own.
        details: Where it comes from: backbone name, method, epochs, origin, version.
    """

    def __init__(
        self, backbone: Backbone, view: Preprocessing | int, details: dict[str, Any]
    ) -> None:
        super().__init__()
        self.preprocessing = Preprocessing(view) if isinstance(view, int) else view
        self.backbone = rescaled(backbone, self.preprocessing)
        self.details = details
        self.run: Path | None = None  # The folder that it was loaded from, if that held images out
        self.eval()

    @property
    def image_size(self) -> int:
        """Side in pixels of the images that it takes."""
        return self.preprocessing.image_size

    @property
    def num_features(self) -> int:
        """Number of features of an image."""
        return self.backbone.feature_dim

    @property
    def num_prefix_tokens(self) -> int:
        """Class and register tokens, which stand before the others in `forward_features`."""
        return prefix_tokens(self.backbone.body)

    @property
    def digest(self) -> str:
        """A SHA-256 of all that features depend on: architecture, preprocessing and weights.

        It is the same for a file of another library and for the copy of it that a run keeps.
        """
        network = [self.details[key] for key in ARCHITECTURE if key in self.details]
        described = [*network, self.preprocessing.to_dict()]
        whole = hashlib.sha256(json.dumps(described).encode())
        for name, tensor in sorted(self.backbone.body.state_dict().items()):
            content = tensor.detach().cpu().contiguous()
            whole.update(f"{name} {content.dtype} {tuple(content.shape)}".encode())
            # As bytes: numpy has no bfloat16, and neither a view of a tensor without dimensions.
            whole.update(content.reshape(-1).view(torch.uint8).numpy().data)
        return whole.hexdigest()

    def lines(self) -> list[str]:
        """Lines of the log: what it is, how images reach it, and whose weights these are."""
        pooling, why = self.details.get("pooling"), self.details.get("assumed")
        pooled = f" ({pooling})" if pooling else ""
        assumed = f"; assumed, {why}" if why else ""
        return [
            f"encoder {self.details['backbone']}, {self.num_features} features{pooled}",
            f"images  {self.preprocessing}{assumed}",
            *(f"note    {line}" for line in self.details.get("notes", ())),
            *(f"weights {line}" for line in self.details.get("weights", ())),
            *origin_lines(self.details.get("origin", {})),
        ]

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        """Return the features of images.

        Args:
            images: As `transform` gives them: normalized by `preprocessing.mean` and `.std`.
        """
        features: Tensor = self.backbone.body(images)
        return features.flatten(1)

    def forward_features(
        self, images: Float[Tensor, "batch _ _ _"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Return what the network computes before it pools: a vector per position of an image.

        Of a transformer, `num_prefix_tokens` class and register tokens come first, then its
        patches, row by row. Of other networks it is each position of the last feature map.

        Args:
            images: As `transform` gives them.

        Raises:
            UsageError: If the network has no such place, as networks of one's own may.
        """
        tokens: Tensor = self.tokens(images)
        return tokens

    @cached_property  # which network it is, is found by running it; no submodule of its own
    def tokens(self) -> TokenFeatures:
        """Return the network up to its pooling, with the same weights; see `forward_features`."""
        return TokenFeatures(Backbone(self.backbone.body, self.num_features), self.image_size)

    def transform(self, images: "ImageLike | Sequence[ImageLike]") -> Float[Tensor, "..."]:
        """Turn images into this encoder's input: cropped, resized and normalized.

        Args:
            images: One image or several: a Pillow image; an array of shape (height, width, 3) or
                (height, width); a tensor of shape (3, height, width); an array of shape
                (n, height, width, 3) or a tensor of shape (n, 3, height, width); or a list of
                such. Arrays and tensors are uint8, or floats from 0 to 1. Images of a list may
                differ in size. An encoder of images that are not RGB of 8 bits takes arrays and
                tensors of their channels, with values as in their files. Pillow images are
                treated as the files it was trained on: upright by their exif orientation,
                transparency over white, 16 bits scaled to 8.

        Returns:
            Of shape (channels, size, size) for one image, (n, channels, size, size) for several.

        Raises:
            UsageError: If the images are of another type, shape or dtype.
        """
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        batch: Any = images if several else [images]
        crops = [self._crop(image) for image in batch]
        if not crops:
            raise UsageError("no images to transform; give one or more")
        pixels = self.preprocessing.to_input(torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2))
        return pixels if several else pixels[0]

    def _crop(self, image: Any) -> Pixels:
        """Return an image as this encoder's preprocessing cuts it, in 8 bits or from 0 to 1."""
        try:
            if self.preprocessing.channels:
                if isinstance(image, Image.Image) and not is_deep(image):
                    raise ValueError("it is of 8 bits, and the encoder takes others")
                stored = self.preprocessing.channels.scaled(stored_channels(image))
                return self.preprocessing.pixels(stored)
            # A JPEG that is opened but not yet decoded is decoded at the smallest scale that
            # suffices, which is several times faster.
            pixels = rgb_pixels(image, self.preprocessing.min_side)
        except (TypeError, ValueError, BadImage) as error:
            raise UsageError(f"cannot transform an image: {error}") from error
        return self.preprocessing.pixels(pixels)


def write_encoder(
    path: Path,
    backbone: Backbone,
    details: dict[str, Any],
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write a backbone's weights as safetensors, whole or not at all.

    `details` are plain values: backbone name, image_size and where the weights come from.
    """
    view = preprocessing or Preprocessing(int(details["image_size"]))
    described = {
        **details,
        "format": FORMATS[-1] if view.low else FORMATS[1],
        "nearkin": __version__,
        "feature_dim": backbone.feature_dim,
        "image_size": view.image_size,
        "preprocessing": view.to_dict(),
    }
    write_tensors(path, backbone.body, "nearkin", described)


def write_tensors(path: Path, network: nn.Module, key: str, noted: Any) -> None:
    """Write what `read_tensors` reads, whole or not at all: weights, and plain values at a key."""
    from safetensors.torch import save

    write_whole(path, save(separate_weights(network), metadata={key: json.dumps(noted)}))


def separate_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a network as safetensors takes them: none shares memory with another.

    A layer that a network uses under two names is written twice.
    """
    state, written = dict[str, Tensor](), set[int]()
    for name, tensor in network.state_dict().items():
        place = tensor.untyped_storage().data_ptr()
        state[name] = (tensor.clone() if place in written else tensor).cpu().contiguous()
        written.add(place)
    return state


def object_name(encoder: Encoder) -> str:
    """Return a name of an encoder, which `load` takes as long as the encoder is in memory.

    Equal weights have equal names, so that a run is resumed with the encoder that it began with.
    """
    backbone = re.sub(r"[^\w.-]+", "-", str(encoder.details["backbone"]))
    name = f"{OBJECT}{backbone}-{encoder.digest[:12]}"
    _OBJECTS[name] = encoder
    note_origin(name, encoder.run)
    return name


def _in_memory(name: str) -> Encoder:
    if name not in _OBJECTS:
        raise UsageError(f"{name} is no longer in memory; pass the encoder itself")
    return _OBJECTS[name]


@torch_defaults()
def load(
    source: str | os.PathLike[str],
    *,
    backbone: nn.Module | None = None,
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
) -> Encoder:
    """Load an encoder: of a run, of another library by name, or from a file.

    Args:
        source: A run, its folder or its encoder.safetensors; or what `nearkin.encoders.sources`
            reads: `dinov2-small`, `timm:NAME`, `torchvision:NAME`, a folder in the layout of
            Hugging Face, or a checkpoint, `ARCHITECTURE@FILE`.
        backbone: The network the run was given from Python, untrained; not needed for networks
            that have a name.
        image_size: Side of the images in pixels; `auto` is that of the encoder.
        allow_partial: Whether some weights of the network may be missing from a checkpoint, and
            some of the checkpoint may be left over.
        trust_remote_code: Whether to run the code that a run's file names as its network.

    Raises:
        UsageError: If there is no encoder there, its weights are not those of `backbone`, or it
            names code that is not trusted.
        CheckpointError: If the file is damaged, or not what it says.
    """
    name = os.fspath(source)
    if name.startswith("~"):
        name = str(user_path(name))
    image_size = check_value("image_size", image_size, AutoImageSize)
    if name.startswith(OBJECT):
        # A copy, as what is done with it must change nothing.
        encoder = copy.deepcopy(_in_memory(name)).to("cpu", torch.float32)
    elif is_own(name):
        encoder = _of_run(name, backbone, trust_remote_code=trust_remote_code)
    else:
        return _of_library(name, image_size, allow_partial=allow_partial)
    fits = image_size in ("auto", encoder.image_size)
    return encoder if fits else resized(encoder, int(image_size))


def _of_library(name: str, image_size: int | Auto, *, allow_partial: bool) -> Encoder:
    size = None if image_size == "auto" else image_size
    found = sources.load(name, image_size=size, allow_partial=allow_partial)
    backbone, view = str(found.details["backbone"]), found.preprocessing
    check_patches(found.body, view.image_size, backbone)
    network = as_backbone(found.body, view.image_size, name=backbone)
    return Encoder(network, view, found.details)


def _of_run(run: str, backbone: nn.Module | None, *, trust_remote_code: bool) -> Encoder:
    """Return the encoder of a run, at its own size."""
    path = _file_of(run)
    if not path.exists():
        if not Path(run).exists():
            raise sources.unknown(run)
        raise UsageError(
            f"{run} is neither a run that is done (there is no encoder.safetensors) nor a "
            "folder of Hugging Face (config.json and weights); give an encoder"
        )
    details, state, view = _read(path)
    name, dim = details["backbone"], details["feature_dim"]
    check_trusted({"backbone": name}, path, trust_remote_code)
    if name.startswith(folders.PREFIX):
        folders.require_transformers()
    if backbone is not None:
        network = as_backbone(copy.deepcopy(backbone), view.image_size, dim)
        try:
            network.body.load_state_dict(as_current(state, network.body))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[1:2] or [str(error)]
            raise UsageError(
                f"{path} holds the weights of {name} for {view.image_size} px, which do not fit "
                f"{network.name} ({reason[0].strip()}); give the same backbone and image size"
            ) from error
    elif name == CUSTOM:
        raise UsageError(f"{path} is of a network of your own; pass it as `backbone`")
    else:
        with usable(path, AGAIN):
            _check_described(details, state, view.image_size)
            network = untrained(details, view.image_size)
            network.body.load_state_dict(as_current(state, network.body))
    encoder = Encoder(network, view, details)
    encoder.run = origin_of(str(path))
    return encoder


def check_named(encoder: Encoder) -> None:
    """Refuse a network that no file can name: a run that starts from it could not be loaded."""
    if encoder.details.get("backbone") == CUSTOM:
        raise UsageError(
            "the encoder is a network of your own, which a run cannot name; train it with "
            "--backbone FILE.py:NAME"
        )


def resized(encoder: Encoder, image_size: int) -> Encoder:
    """Return the same weights for images of another size; position embeddings are interpolated.

    Raises:
        UsageError: If the network cannot take such images.
    """
    name = str(encoder.details["backbone"])
    network = copy.deepcopy(encoder.backbone)
    check_patches(network.body, image_size, name)
    try:
        fresh = network if name == CUSTOM else untrained(encoder.details, image_size)
    except UsageError:
        if NATIVE.fullmatch(name):
            raise
        fresh = None  # the name alone is of one size
    if name == CUSTOM or fresh is None or _shapes(network) != _shapes(fresh):
        resize_input(network.body, image_size, name)
    if fresh is not None and _shapes(network) == _shapes(fresh):
        fresh.load_state_dict(network.state_dict())
        network = fresh  # as its name builds it, tables of the new size included
    elif NATIVE.fullmatch(name):
        raise UsageError(
            f"the weights of {name} are for images of {encoder.image_size} px, and do not fit "
            f"those of {image_size} px; give --image-size {encoder.image_size}"
        )
    else:  # at this size, the name means another stem or patch
        name = f"{name}?built_for={encoder.image_size}"
    plain = as_backbone(network.body, image_size, name=name)  # which tries it
    details = {**encoder.details, "backbone": name, "image_size": image_size}
    changed = Encoder(plain, encoder.preprocessing.resized(image_size), details)
    changed.run = encoder.run
    return changed


def _shapes(network: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def _check_described(
    details: Mapping[str, Any], state: Mapping[str, Tensor], image_size: int
) -> None:
    """Refuse a header that describes another network, maybe one larger than the memory.

    Only where it has options; the networks of plain names are of known sizes.
    """
    name = str(details["backbone"])
    with torch.device("meta"):  # nothing is computed or allocated there
        if name.startswith(folders.PREFIX):
            network = folders.untrained_network(details)
        elif NATIVE.fullmatch(name) and "?" in name:
            network = native(name, image_size)
        else:
            return
    if _shapes(network) != {key: tensor.shape for key, tensor in state.items()}:
        raise ValueError("its weights are not those of the network that it describes")


def is_own(source: str | Path) -> bool:
    """Whether an encoder is that of a run: a run folder, or a file that nearkin has written."""
    path = Path(source)
    if str(source).startswith(OBJECT):
        return False
    if path.is_dir():
        return not is_folder(path)
    if not path.is_file():
        return not sources.is_name(str(source))
    return path.suffix == ".safetensors" and not sources.is_foreign(path)


def untrained(details: Mapping[str, Any], image_size: int) -> Backbone:
    """Build the network that the header of an encoder's file describes, with random weights."""
    name = str(details["backbone"])
    with torch.random.fork_rng(devices=[]):
        if name.startswith(folders.PREFIX):
            return as_backbone(folders.untrained_network(details), image_size, name=name)
        return build_backbone(name, image_size)


def rescaled(network: Backbone, view: Preprocessing) -> Backbone:
    """Let a network of other statistics take images that are normalized by nearkin's."""
    standard = input_statistics(len(view.mean))
    if (view.mean, view.std) != standard:
        statistics = view.mean, view.std, *standard
        mean, std, own_mean, own_std = torch.tensor(statistics, dtype=torch.float64)
        network.rescale_input((own_std / std).float(), ((own_mean - mean) / std).float())
    return network


def untrained_like(encoder: Encoder, seed: int, network: nn.Module | None = None) -> Encoder:
    """Return the same architecture and preprocessing with random weights, a baseline for it.

    `network` is the user's own, for an encoder of a network that has no name. It has the weights
    that it was passed with: nothing says how to draw others.
    """
    with seeded(seed, torch.device("cpu")):
        if network is None:
            backbone = untrained(encoder.details, encoder.image_size)
        else:
            own = copy.deepcopy(network)
            backbone = as_backbone(own, encoder.image_size, encoder.num_features)
    view = encoder.preprocessing
    described = {key: encoder.details[key] for key in ARCHITECTURE if key in encoder.details}
    return Encoder(backbone, view, {**described, "backbone": backbone.name})


def weight_bytes(source: str) -> int:
    """Return the size of an encoder's weights, from its file or its architecture; 0 if unknown.

    `source` is what `load` takes. Nothing of it is read.
    """
    path = Path(split_source(source)[1])
    if path.is_dir() and not is_own(path):
        patterns = weights_among([file.name for file in path.iterdir()])
        return sum(file.stat().st_size for each in patterns for file in path.glob(each))
    if (file := _file_of(path)).is_file():
        return file.stat().st_size
    if source.startswith(OBJECT):
        return sum(weight.nbytes for weight in _in_memory(source).parameters())
    name = sources.DINOV2.get(source, source)
    try:
        with torch.device("meta"):  # no parameters are made
            network = native(name, SIZE)
    except Exception:  # not to be built there, or no such name, which loading says
        return 0
    return sum(parameter.nbytes for parameter in network.parameters())


def _file_of(run: str | Path) -> Path:
    """Return the file of a run's encoder, which may be given itself."""
    return RunFolder(Path(run)).encoder if Path(run).is_dir() else Path(run)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Preprocessing]:
    """Read the file of an encoder: what it says of it, its weights and its preprocessing."""
    with usable(path, AGAIN):
        details, state = read_tensors(path, "nearkin")
        check_format(details["format"], FORMATS)
        view = Preprocessing(int(details["image_size"]))
        if details["format"] != "1":
            view = Preprocessing.from_dict(details["preprocessing"])
        plain = {"backbone": str(details["backbone"]), "feature_dim": int(details["feature_dim"])}
        return {**details, **plain}, state, view


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
        pieces = tensor.flatten().split(PIECE)  # features may be more than fit in memory twice
        if not all(piece.float().isfinite().all() for piece in pieces):  # as networks hold them
            raise ValueError(f"{name} is not finite")
    return noted, state
