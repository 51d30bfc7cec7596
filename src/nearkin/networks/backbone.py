"""Backbones by name: small ones, torchvision's, timm's, and those of extensions."""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.config import MAX_IMAGE_SIZE
from nearkin.errors import UsageError
from nearkin.extensions import is_reference, load_reference
from nearkin.networks.branch import Backbone, as_backbone, first_convolution, size_error
from nearkin.networks.input_size import resize_input
from nearkin.schema import suggestion


def conv_norm(fan_in: int, fan_out: int, size: int) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    conv = nn.Conv2d(fan_in, fan_out, size, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(fan_out))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, figure 2)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.first = conv_norm(fan_in, fan_out, 3)
        self.second = conv_norm(fan_out, fan_out, 3)
        self.shortcut = nn.Identity() if fan_in == fan_out else conv_norm(fan_in, fan_out, 1)
        self.relu = nn.ReLU(inplace=True)
        self.drop_path: nn.Module = nn.Identity()  # see `set_drop_path`

    @override
    def forward(self, x: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _ _ _"]:
        branch = self.drop_path(self.second(self.relu(self.first(x))))
        y: Tensor = self.relu(branch + self.shortcut(x))
        return y


def small_resnet(stem: int, widths: Sequence[int], num_channels: int = 3) -> nn.Sequential:
    """Return a residual network with one block per width, each at half the side of the one before.

    Pixels are averaged before a block, not skipped by strides, and those of the stem before its
    batch norm: on a CPU that takes an eighth less time, and it learns faster (docs/lab.md).
    """
    half = partial(nn.AvgPool2d, 2, ceil_mode=True)  # at an odd edge, of the pixels there are
    conv, norm = conv_norm(num_channels, stem, 3)
    layers: list[nn.Module] = [conv, half(), norm, nn.ReLU(inplace=True)]
    for number, (fan_in, fan_out) in enumerate(pairwise([stem, *widths])):
        layers += [half()] if number else []
        layers.append(Block(fan_in, fan_out))
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


SMALL: dict[str, Callable[..., nn.Module]] = {
    "tiny": partial(small_resnet, 32, (64, 128)),
    "small": partial(small_resnet, 32, (64, 128, 256)),
}
"""`tiny` is for images of up to 16 px, `small` for those below 64 px."""

SMALL_IMAGE: Final = 64
"""Below this size in pixels, residual networks get a stem that does not shrink the image."""


def build_backbone(name: str, image_size: int) -> Backbone:
    """Return the backbone of that name, untrained, for images of `image_size` pixels.

    Args:
        name: One of `SMALL`, a torchvision name (`resnet18`, `torchvision/resnet18`) or a timm
            name (`timm/resnet18`, `vit_tiny_patch16_224`). A bare name that both libraries have
            means torchvision's. Below 64 px, vision transformers are built with patches of 4 px,
            whatever their name says, and residual networks with a small stem. `timm:NAME` and
            `torchvision:NAME` are built as the libraries do at any size; see `native`.
            Or FILE.py:NAME or module:NAME of a function or class that returns the network. A name
            of any kind but the native ones may end in `?built_for=32`: what it is for images of
            32 px, at another size. Before that, it may have `?in_chans=13`, as timm calls it: a
            stem for images of 13 channels, not RGB.
        image_size: Side of the views in pixels.

    Raises:
        UsageError: If no library has the name, or the network cannot take such images.
    """
    try:
        body = native(name, image_size) if NATIVE.fullmatch(name) else _own_form(name, image_size)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise size_error(name, image_size, error) from error
    return as_backbone(body, image_size, name=name)


def _own_form(name: str, image_size: int) -> nn.Module:
    """Return a network in nearkin's form, which depends on whether images are small."""
    bare, num_channels, built_for = split_options(name)
    own_size = built_for or image_size
    if own_size > MAX_IMAGE_SIZE:
        raise ValueError(f"built_for is more than {MAX_IMAGE_SIZE}")
    body = _build(bare, num_channels, own_size)
    if own_size < SMALL_IMAGE and not is_reference(bare):
        small_stem(body)
    if own_size != image_size:
        resize_input(body, image_size, name)
    return body


def _build(name: str, num_channels: int, image_size: int) -> nn.Module:
    library, _, bare = name.rpartition("/")
    if is_reference(name):
        return _imported(load_reference(name, "backbone"), name)
    if name in SMALL:
        return SMALL[name](num_channels=num_channels)
    if library in ("", "torchvision") and bare in torchvision_names():
        return _with_stem(_from_torchvision(bare), num_channels)
    if library in ("", "timm") and bare in timm_names():
        options = {"in_chans": num_channels} if num_channels != 3 else {}
        if bare.startswith(("vit_", "deit")):  # position embeddings are made for one size
            options["img_size"] = image_size
            options |= {"patch_size": 4} if image_size < SMALL_IMAGE else {}
        return _from_timm(bare, **options)
    hint = suggestion(bare, [*SMALL, *torchvision_names(), *timm_names()])
    raise UsageError(f"unknown backbone {name}.{hint} `nearkin list backbones` lists them")


OWN_FORM: Final = re.compile(
    r"(?!timm:|torchvision:)(.+?)(?:\?in_chans=(\d{1,4}))?(?:\?built_for=(\d{1,4}))?"
)


def split_options(name: str) -> tuple[str, int, int]:
    """Return a backbone's name without options, its channels, and the size it is built for, or 0.

    >>> split_options("resnet18?in_chans=13?built_for=32"), split_options("small")
    (('resnet18', 13, 32), ('small', 3, 0))
    """
    match = OWN_FORM.fullmatch(name)
    return (match[1], int(match[2] or 3), int(match[3] or 0)) if match else (name, 3, 0)


def with_channels(name: str, num_channels: int) -> str:
    """Return the name of the same backbone for images of as many channels.

    Names with options, and those of networks from elsewhere, are left alone.
    """
    if num_channels == 3:
        return name  # before timm is imported, which takes seconds
    known = (*SMALL, *torchvision_names(), *timm_names())
    return f"{name}?in_chans={num_channels}" if name.rpartition("/")[2] in known else name


def _with_stem(body: nn.Module, num_channels: int) -> nn.Module:
    """Give a network a first convolution for images of other channels, in place."""
    conv = first_convolution(body)
    if num_channels != 3 and conv is not None:
        conv.in_channels = num_channels
        conv.weight = nn.Parameter(torch.empty(conv.out_channels, num_channels, *conv.kernel_size))
        conv.reset_parameters()
    return body


NATIVE: Final = re.compile(r"(timm|torchvision):(\w[\w.-]*)(?:\?(.*))?")
"""An architecture as its library builds it: `timm:NAME` or `timm:NAME?option=value&...`."""


class Architecture(NamedTuple):
    """A name that `NATIVE` matches, taken apart."""

    library: str
    bare: str
    tag: str  # Of weights, in timm's names and in torchvision's; or ''
    query: str

    @property
    def tagged(self) -> str:
        """The name in its library."""
        return f"{self.bare}.{self.tag}" if self.tag else self.bare

    @override
    def __str__(self) -> str:
        query = f"?{self.query}" if self.query else ""
        return f"{self.library}:{self.tagged}{query}"


def architecture(name: str) -> Architecture:
    """Take apart the name of an architecture as its library builds it.

    Raises:
        UsageError: If the library does not have it.
    """
    match = NATIVE.fullmatch(name)
    library, _, rest = name.partition(":")
    bare, _, tag = (match[2] if match else rest.strip()).partition(".")
    names = timm_names() if library == "timm" else torchvision_names()
    if match is None or bare not in names:
        hint = suggestion(f"{library}:{bare}", [f"{library}:{each}" for each in names])
        raise UsageError(
            f"{library} has no architecture {bare}.{hint} `nearkin list backbones` lists them, "
            "and `nearkin list pretrained` those with weights"
        )
    return Architecture(library, bare, tag, match[3] or "")


RESERVED: Final = (
    "cache_dir", "checkpoint_path", "exportable", "features_only", "kwargs", "pretrained",
    "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "scriptable", "weights",
)  # fmt: skip
"""Arguments that are not the architecture's own: a name, maybe of a file, may not set them."""


def native(name: str, image_size: int, **loading: object) -> nn.Module:
    """Return a network just as its library builds it, without a classifier.

    Options behind the name, which `NATIVE` matches, are those of the library, with values in JSON;
    position embeddings are made for the size in pixels; `loading` is such as `pretrained`.

    Raises:
        UsageError: If the library does not have it.
    """
    parts = architecture(name)
    options = query_options(parts.query)
    if bad := sorted(options.keys() & {*RESERVED}):
        raise UsageError(f"{name} sets {bad[0]}, which is no option of an architecture")
    options |= loading
    if parts.library == "torchvision":
        options |= {"image_size": image_size} if parts.bare.startswith("vit_") else {}
        return _from_torchvision(parts.bare, **options)
    import timm

    config = timm.get_pretrained_cfg(parts.tagged)
    if config and config.fixed_input_size:
        options["img_size"] = image_size
    try:
        return _from_timm(parts.tagged, **options)
    except TypeError as error:
        raise UsageError(
            f"timm cannot build {parts.tagged}: {error}; correct its options"
        ) from error


def query_options(query: str) -> dict[str, object]:
    """Return the options behind the name of an architecture."""
    options: dict[str, object] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


def as_current(state: Mapping[str, Tensor], body: nn.Module) -> Mapping[str, Tensor]:
    """Return weights as those of the version of the network's classes that is installed."""
    versioned: Any = OrderedDict(state)
    versioned._metadata = getattr(body.state_dict(), "_metadata", None)
    current: Mapping[str, Tensor] = versioned
    return current


def _imported(build: Any, name: str) -> nn.Module:
    """What a function or class from outside of the package returns."""
    body = build() if callable(build) and not isinstance(build, nn.Module) else None
    if not isinstance(body, nn.Module):
        raise UsageError(
            f"backbone {name} is no function or class whose call returns a torch.nn.Module"
        )
    return body


HEADS: Final = ("fc", "classifier", "head", "heads")
"""What the networks of torchvision call their classifier."""


def _from_torchvision(name: str, **options: object) -> nn.Module:
    import torchvision

    # These two have classifiers of inner layers, too, and warn that their weights may begin in
    # another way some day, unless it is named.
    without = {"init_weights": True, "aux_logits": False}
    begins = without if name in ("googlenet", "inception_v3") else {}
    given = {"weights": None, **begins, **options}
    body: nn.Module = torchvision.models.get_model(name, **given)
    for head in HEADS:
        if hasattr(body, head):
            setattr(body, head, nn.Identity())
            return body
    raise UsageError(f"backbone {name} has no classifier to take off; use timm/{name}")


def _from_timm(name: str, **options: object) -> nn.Module:
    import timm

    options = {"num_classes": 0, **options}
    if "img_size" in options:
        # Views of several sizes, by position embeddings that are interpolated on the way, where
        # the architecture has that option.
        with suppress(TypeError):
            dynamic: nn.Module = timm.create_model(name, dynamic_img_size=True, **options)
            return dynamic
    body: nn.Module = timm.create_model(name, **options)
    return body


def torchvision_names() -> list[str]:
    """Return the names of torchvision's image classifiers."""
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


def timm_names() -> list[str]:
    """Return the names of timm's models."""
    import timm

    return list(timm.list_models())


def small_stem(body: nn.Module) -> None:
    """Give a residual network a 3x3 stem of stride 1 and no max-pooling, in place.

    As CIFAR recipes do (Chen et al. 2020, B.9). Other networks are left alone.
    """
    conv, pool = getattr(body, "conv1", None), getattr(body, "maxpool", None)
    if isinstance(conv, nn.Conv2d) and conv.stride == (2, 2) and pool is not None:
        channels = conv.in_channels, conv.out_channels
        body.conv1 = nn.Conv2d(*channels, 3, stride=1, padding=1, bias=False)
        body.maxpool = nn.Identity()
