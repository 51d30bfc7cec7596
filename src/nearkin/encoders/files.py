"""Encoders of checkpoint files, `ARCHITECTURE@FILE`: the weights in the network that they are of.

How their images are prepared is in no checkpoint. With a tag of timm or torchvision in the
architecture (`timm:vit_base_patch16_224.mae@FILE`) it is as with those weights. Of weights that
timm itself has saved (`timm:NAME@FILE`, names under no prefix) it is as with timm's own of that
architecture; else as in the evaluations of DINO, MoCo, SwAV and most others: ImageNet's
statistics, 224 of 256 px.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from nearkin.encoders import checkpoints, libraries
from nearkin.encoders.checkpoints import Checkpoint, Match
from nearkin.encoders.libraries import Pretrained, described, differences
from nearkin.encoders.origin import origin
from nearkin.encoders.preprocessing import Preprocessing
from nearkin.errors import CheckpointError, UsageError
from nearkin.extensions import is_reference, names_code
from nearkin.networks import backbone
from nearkin.networks.backbone import NATIVE, SMALL, SMALL_IMAGE, timm_names, torchvision_names
from nearkin.schema import suggestion
from nearkin.text import abridged

SIZE: Final = 224
RESIZE: Final = 256
MOCO_V3_SMALL: Final = "?num_heads=12"
"""MoCo v3's ViT-S has twice the heads of others, which the shapes of weights do not show."""
SMALL_SIZE: Final = 32  # of images that networks with a 3x3 stem were trained on
SHORT: Final = ("vit_tiny", "vit_small", "vit_base", "vit_large")
"""What trainings call vision transformers whose patches are of a size that they do not say."""
USUAL: Final = (
    *(f"torchvision:resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"timm:vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")),
    *(f"timm:vit_{size}_patch8_224" for size in ("small", "base")),
    *(f"timm:vit_{size}_patch14_dinov2" for size in ("small", "base", "large", "giant")),
)
"""Architectures that are tried on a checkpoint whose own is not known."""
OTHER_RANGE: Final = re.compile(r"torchvision:(googlenet|inception_v3)\.\w+")
"""Weights for another normalization, which torchvision makes up for in the network."""
RESIZED: Final = re.compile(r"pos_emb|rel_pos|relative_|attn_mask|rope|freqs")
"""Weights that belong to a size of images, which the libraries interpolate."""
DIFFERENCES: Final = re.compile(
    r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.\s*(?=\s(?:Missing|Unexpected|size)|$)"
)
"""What torch says of names that do not fit."""


def load_file(
    architecture: str, path: Path, image_size: int | None, *, allow_partial: bool
) -> Pretrained:
    """Load the encoder of a checkpoint.

    The architecture is `timm:NAME`, `torchvision:NAME`, or a backbone's name as in `--backbone`;
    empty if the file says it.

    Raises:
        UsageError: If there is no such architecture or file, or one is not that of the other.
        CheckpointError: If the file is damaged, or holds more than tensors.
    """
    if image_size and NATIVE.fullmatch(architecture):
        libraries.check_size(architecture, image_size)
    checkpoint = checkpoints.read_checkpoint(path)
    small = checkpoints.has_small_stem(checkpoint.tensors)
    size = image_size or (SMALL_SIZE if small else None)
    # What the file says of itself may be any name of a library, and no code.
    said = "" if names_code(checkpoint.architecture) else checkpoint.architecture
    name = _resolved(architecture or said, size, checkpoint)
    is_moco_v3 = any("base_encoder." in key for key in checkpoint.tensors)
    if name.startswith("timm:vit_small") and "?" not in name and is_moco_v3:
        name += MOCO_V3_SMALL
    name, notes = _as_authors(name)
    view, license_, assumed = _prepared(name, size)
    body = _network(name, view.image_size)
    match = _matching(checkpoint, body, name)
    # Under a prefix, weights are of another training than timm's.
    saved_by_timm = not match.prefix or libraries.OWN_STATISTICS.search(name)
    if assumed and architecture.startswith("timm:") and not small and saved_by_timm:
        view, license_, assumed = _prepared(name, size, as_timms=True)
    body, differing = _filled(body, match, name, view.image_size)
    if differing and not allow_partial:
        raise UsageError(
            f"{path} does not fit {name}: {differing}; give the right ARCHITECTURE@FILE, or "
            f"--allow-partial.{_hint(checkpoint, name)}"
        )
    if not all(tensor.isfinite().all() for tensor in body.state_dict().values()):
        raise CheckpointError(f"{path} has weights that are not finite; get another")
    source = origin(str(path.resolve()), license_, path)
    weights = [*checkpoints.taken(match), *filter(None, [differing])]
    return described(body, name, view, source, weights=weights, notes=notes, assumed=assumed)


def _as_authors(name: str) -> tuple[str, list[str]]:
    """Return a name as the authors of its weights use them, and what differs from timm."""
    if OTHER_RANGE.fullmatch(name):
        return f"{name}?transform_input=true", []
    if not name.startswith("timm:"):
        return name, []
    return libraries.as_authors(name, libraries.timm_weights(name) if _tag(name) else None)


def _tag(name: str) -> str:
    """Return the tag of weights in the name of an architecture; '' if it has none."""
    return backbone.architecture(name).tag if NATIVE.fullmatch(name) else ""


def _resolved(architecture: str, size: int | None, checkpoint: Checkpoint) -> str:
    """Return the full name of an architecture: as its library builds it, from 64 px on."""
    if architecture in SHORT:  # as MoCo v3 calls them
        architecture = looks_like(checkpoint)
    if not architecture:
        likely = looks_like(checkpoint)
        hint = f"it looks like {likely}@{checkpoint.path}" if likely else "such as resnet50@FILE"
        raise UsageError(
            f"{checkpoint.path} does not say of which architecture it is; give ARCHITECTURE@FILE, "
            f"{hint}"
        )
    own = architecture in SMALL or is_reference(architecture)
    if NATIVE.fullmatch(architecture) or own or (size and size < SMALL_IMAGE):
        return architecture
    library, _, bare = architecture.rpartition("/")
    for each, names in (("torchvision", torchvision_names()), ("timm", timm_names())):
        if library in ("", each) and bare.partition(".")[0] in names:
            return f"{each}:{bare}"
    known = [*torchvision_names(), *timm_names()]
    raise UsageError(
        f"unknown architecture {architecture}.{suggestion(bare, known)} `nearkin list backbones` "
        "lists them"
    )


def _prepared(
    name: str, size: int | None, *, as_timms: bool = False
) -> tuple[Preprocessing, str | None, str]:
    """Return how images are prepared, the license, and why the former is assumed, if it is.

    `as_timms` prepares them as for timm's own weights of the architecture, if it has any.
    """
    if _tag(name):
        return *libraries.prepared(name, size), ""
    config = libraries.timm_default(name) if name.startswith("timm:") else None
    # DINOv2's were trained at 518 px in the end, and evaluated at 224 px.
    is_fixed = config is not None and config.fixed_input_size
    usual = config.input_size[-1] if is_fixed and "dinov2" not in name else SIZE
    if config is not None and as_timms:
        side = size or (usual if is_fixed else config.input_size[-1])
        view = libraries.timm_view(config.to_dict(), side)
        return view, None, "as timm's own of this architecture"
    side, is_transformer = size or usual, re.search(r"vit|deit|beit|eva|swin|cait", name)
    view = Preprocessing(
        image_size=side,
        crop="center",
        resize_to=side if side < SMALL_IMAGE else round(side * RESIZE / SIZE),
        interpolation="bicubic" if is_transformer else "bilinear",
    )
    return view, None, "the file does not say"


def _network(name: str, size: int) -> nn.Module:
    if NATIVE.fullmatch(name):
        return backbone.native(name, size)
    return backbone.build_backbone(name, size).body


@cache
def _without_weights(name: str) -> nn.Module:
    with torch.device("meta"):
        return backbone.native(name, SIZE)  # once for all files: to build it takes a while


def looks_like(checkpoint: Checkpoint) -> str:
    """Return the usual architecture whose weights a checkpoint holds, by its bare name; or ''."""
    for name in USUAL:
        body = _without_weights(name)
        match = checkpoints.find_encoder(checkpoint.tensors, body)
        names = match.state.keys() - {"mask_token"} if match else set()
        if match and names == body.state_dict().keys() and not _other_shape(match, body):
            return name.partition(":")[2]
    return ""


def _hint(checkpoint: Checkpoint, name: str) -> str:
    """Return what to give instead of a wrong architecture."""
    likely = looks_like(checkpoint)
    if likely and likely not in name:
        return f" It looks like {likely}: give {likely}@{checkpoint.path}"
    return f" Its weights are {', '.join(abridged(list(checkpoint.tensors), 3))}"


def _matching(checkpoint: Checkpoint, body: nn.Module, name: str) -> Match:
    """Return the weights of a network in a checkpoint; refuse those of another one."""
    match = checkpoints.find_encoder(checkpoint.tensors, body)
    if match is None:
        raise UsageError(f"{checkpoint.path} holds no {name}.{_hint(checkpoint, name)}")
    if differing := _other_shape(match, body):
        raise UsageError(
            f"{checkpoint.path} is of another architecture than {name}: {differing}."
            f"{_hint(checkpoint, name)}"
        )
    return match


def _other_shape(match: Match, body: nn.Module) -> str:
    """Name the first weight of another shape, which libraries would interpolate; or ''."""
    own = body.state_dict()
    for key, tensor in match.state.items():
        shapes = tensor.shape, own.get(key, tensor).shape
        if shapes[0] != shapes[1] and tensor.ndim == len(shapes[1]) and not RESIZED.search(key):
            theirs, ours = ("x".join(map(str, shape)) for shape in shapes)
            return f"its {key} is {theirs}, not {ours}"
    return ""


def _filled(body: nn.Module, match: Match, name: str, size: int) -> tuple[nn.Module, str]:
    """Return the network with its weights, and what is missing or left over."""
    own, state = body.state_dict(), match.state
    if own.keys() <= state.keys() and "register_tokens" not in state:
        state.pop("mask_token", None)  # for images that are masked while training
    fits = state.keys() == own.keys() and all(state[k].shape == own[k].shape for k in own)
    if fits or not name.startswith("timm:"):
        return body, _copied(state, body, name, size)
    return _converted(state, name, size)


def _copied(state: Mapping[str, Tensor], body: nn.Module, name: str, size: int) -> str:
    """Copy weights into a network, as far as they are its own; return what differs, or ''."""
    from torchvision.models import MNASNet
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    if isinstance(body, MNASNet):  # others read files of older versions, which do not say so
        state = backbone.as_current(state, body)
    if isinstance(body, VisionTransformer):
        state = interpolate_embeddings(size, body.patch_size, OrderedDict(state))
    try:
        report = body.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n\t")[1:2]) or str(error)
        raise UsageError(f"the weights do not fit {name}: {reason[:200]}") from error
    return differences(report.missing_keys, report.unexpected_keys)


def _converted(state: dict[str, Tensor], name: str, size: int) -> tuple[nn.Module, str]:
    """Return a network of timm with weights as their authors published them, and what differs.

    timm converts what it offers itself: position embeddings of other sizes, other names.
    """
    overlay = {"state_dict": state}
    try:
        return libraries.timm_body(name, size, overlay, 0, strict=True), ""
    except (RuntimeError, KeyError, ValueError, AssertionError, AttributeError) as error:
        text = " ".join(str(error).split())
        names_by_kind = {
            kind: re.findall(r'"([^"]+)"', names) for kind, names in DIFFERENCES.findall(text)
        }
        if not names_by_kind or "size mismatch" in text:
            raise UsageError(f"the weights do not fit {name}: {text[:200]}") from error
    differing = differences(names_by_kind.get("Missing", []), names_by_kind.get("Unexpected", []))
    return libraries.timm_body(name, size, overlay, 0, strict=False), differing
