"""Backbones by name: timm's, torchvision's, and small residual networks for small pictures."""

import difflib
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.errors import UsageError
from nearkin.networks.small import SMALL

SMALL_IMAGE = 64
"""Below this size in pixels, residual networks get a stem that does not shrink the picture."""


class Backbone(nn.Module):
    """A network from images to features, and the number of features it gives."""

    def __init__(self, body: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.body = body
        self.feature_dim = feature_dim

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        features: Tensor = self.body(images)
        return features.flatten(1)


def build_backbone(name: str, image_size: int) -> Backbone:
    """The backbone of that name, untrained, for RGB images of `image_size` pixels.

    Args:
        name: One of `small_names()`, a torchvision name (`resnet18`, `torchvision/resnet18`) or
            a timm name (`timm/resnet18`, `vit_tiny_patch16_224`). A bare name that both
            libraries have means torchvision's.
        image_size: Side of the views in pixels.

    Raises:
        UsageError: If no library has the name, or the network cannot take such images.
    """
    body = _build(name, image_size)
    if image_size < SMALL_IMAGE:
        small_stem(body)
    try:
        return adopt(body, image_size)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"backbone {name} cannot take images of {image_size} px ({reason}); "
            "choose a larger --image-size or another --backbone"
        ) from error


def adopt(body: nn.Module, image_size: int, feature_dim: int | None = None) -> Backbone:
    """Any network as a backbone; its number of features is found by running it once."""
    if feature_dim is None:
        training = body.training
        with torch.no_grad():
            feature_dim = (
                body.eval()(torch.zeros(1, 3, image_size, image_size)).flatten(1).shape[1]
            )
        body.train(training)
    return Backbone(body, feature_dim)


def _build(name: str, image_size: int) -> nn.Module:
    library, _, bare = name.rpartition("/")
    if name in SMALL:
        return SMALL[name]()
    if library in ("", "torchvision") and bare in torchvision_names():
        return _from_torchvision(bare)
    if library in ("", "timm") and bare in timm_names():
        return _from_timm(bare, image_size)
    known = [*SMALL, *torchvision_names(), *timm_names()]
    hint = difflib.get_close_matches(bare, known, n=1)
    suggestion = f" Did you mean {hint[0]}?" if hint else ""
    raise UsageError(f"unknown backbone {name}.{suggestion} `nearkin backbones` lists them")


def _from_torchvision(name: str) -> nn.Module:
    import torchvision

    body: nn.Module = torchvision.models.get_model(name, weights=None)
    for head in ("fc", "classifier", "head", "heads"):
        if hasattr(body, head):
            setattr(body, head, nn.Identity())
            return body
    raise UsageError(f"backbone {name} has no classifier to take off; use timm/{name}")


def _from_timm(name: str, image_size: int) -> nn.Module:
    import timm

    options: dict[str, object] = {"num_classes": 0}
    if name.startswith(("vit_", "deit")):  # position embeddings are made for one size
        options["img_size"] = image_size
        options |= {"patch_size": 4} if image_size < SMALL_IMAGE else {}
    body: nn.Module = timm.create_model(name, pretrained=False, **options)
    return body


def small_names() -> list[str]:
    """Names of our own networks for small pictures."""
    return list(SMALL)


def torchvision_names() -> list[str]:
    """Names of torchvision's image classifiers."""
    import torchvision

    names: Callable[..., list[str]] = torchvision.models.list_models
    return names(module=torchvision.models)


def timm_names() -> list[str]:
    """Names of timm's models."""
    import timm

    names: Callable[[], list[str]] = timm.list_models
    return names()


def small_stem(body: nn.Module) -> None:
    """Give a residual network a 3x3 stem of stride 1 and no max-pooling, in place.

    What every CIFAR recipe does (Chen et al. 2020, B.9). Other networks are left alone.
    """
    conv, pool = getattr(body, "conv1", None), getattr(body, "maxpool", None)
    if isinstance(conv, nn.Conv2d) and conv.stride == (2, 2) and pool is not None:
        body.conv1 = nn.Conv2d(3, conv.out_channels, 3, stride=1, padding=1, bias=False)
        body.maxpool = nn.Identity()
