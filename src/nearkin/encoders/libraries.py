"""Encoders of timm and torchvision, by name, with the weights that those libraries load."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from nearkin.encoders.checkpoints import read_checkpoint
from nearkin.encoders.downloads import hub_file, need_torch_file, to_stderr
from nearkin.encoders.families import as_authors
from nearkin.encoders.origin import origin
from nearkin.encoders.preprocessing import Preprocessing
from nearkin.errors import CheckpointError, NearkinError, UsageError
from nearkin.networks.backbone import NATIVE, native, timm_names, torchvision_names
from nearkin.networks.branch import size_error
from nearkin.networks.input_size import check_patches
from nearkin.schema import suggestion
from nearkin.text import abridged


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network with its weights, and all that is needed to use it right."""

    body: nn.Module
    backbone: str  # How `untrained` builds it again
    preprocessing: Preprocessing
    details: dict[str, Any]


def nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean x?`, where a name begins like that or is close; else nothing.

    What stands before the colon is not compared: all names of a library have it in common.

    >>> nearest("timm: vit_tiny", ["timm:gcvit_tiny", "timm:vit_tiny_patch16_224"])
    ' Did you mean timm:vit_tiny_patch16_224?'
    """
    library, _, bare = (part.strip().casefold() for part in name.rpartition(":"))
    within = [each for each in known if each.startswith(library)] or known
    own = {each.rpartition(":")[2].casefold(): each for each in reversed(within)}
    longer = sorted((each for each in reversed(own) if each.startswith(bare)), key=len)
    close = longer if len(bare) > 2 and longer else difflib.get_close_matches(bare, own, n=1)
    return f" Did you mean {own[close[0]]}?" if close else ""


# ---------------------------------------------------------------- timm


def timm_match(name: str) -> "re.Match[str]":
    """Take `timm:NAME.TAG?options` apart.

    Raises:
        UsageError: If timm does not have that architecture.
    """
    match, untagged = NATIVE.fullmatch(name), name.partition(".")[0]
    if match is None or match[2].partition(".")[0] not in timm_names():
        names = [f"timm:{each}" for each in timm_names()]
        raise UsageError(
            f"timm has no architecture {untagged.removeprefix('timm:').strip()}."
            f"{nearest(untagged, names)} `nearkin backbones --pretrained` lists what has weights"
        )
    return match


def timm_weights(name: str) -> Any:
    """Return timm's configuration of the weights that a name means.

    Raises:
        UsageError: If there are none.
    """
    import timm

    bare, _, tag = timm_match(name)[2].partition(".")
    tags = timm.list_pretrained(f"{bare}.*")
    known = bool(tags) if not tag else f"{bare}.{tag}" in tags  # timm raises if not
    config = timm.get_pretrained_cfg(f"{bare}.{tag}".rstrip(".")) if known else None
    if config is None or not config.has_weights:
        names = [f"timm:{each}" for each in tags]
        listed = f" It has {', '.join(names[:6])}" if names else ""
        raise UsageError(
            f"timm has no weights {name}.{nearest(name, names)}{listed}; "
            f"`nearkin backbones --pretrained {bare}` lists all"
        )
    return config


def load_timm(
    name: str,
    image_size: int | None,
    *,
    allow_partial: bool,
    crop: float | None = None,
    label: str = "",
) -> Pretrained:
    """Load an encoder of timm.

    Args:
        name: `timm:NAME` or `timm:NAME.TAG`.
        image_size: Side of the images, if not that of the weights.
        allow_partial: Whether weights may be missing or left over.
        crop: Share of the resized image that is cut out, if not that of the weights.
        label: What the user calls it, for messages.
    """
    config = timm_weights(name)
    name, notes = as_authors(name, config)
    size = image_size or config.input_size[-1]
    if image_size:
        check_size(name, size)
    view = timm_view(config.to_dict(), size, crop)
    if config.hf_hub_id:
        where = f"https://huggingface.co/{config.hf_hub_id}"
        file = hub_file(label or name, config.hf_hub_id, config.hf_hub_filename)
        overlay: dict[str, Any] = {"file": str(file), "custom_load": False}
    else:
        where = str(config.url)
        file = need_torch_file(label or name, where)
        overlay = {"file": str(file)}  # or timm would read it without verifying it
    with fitting(name, where):
        body = timm_body(name, size, overlay, config.num_classes, strict=not allow_partial)
    return described(body, name, view, origin(where, config.license, file), notes)


def check_size(name: str, image_size: int) -> None:
    """Refuse a size of images before weights are fetched, read or interpolated to no patch at all.

    Raises:
        UsageError: If the patches of the architecture do not divide it, or its library refuses.
    """
    try:
        with torch.device("meta"):
            body = native(name, image_size)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise size_error(name, image_size, error) from error
    check_patches(body, image_size, name)


def timm_body(
    name: str, size: int, overlay: Mapping[str, Any], num_classes: int, *, strict: bool
) -> nn.Module:
    """Return a network with its weights, by timm's own loading, without its classifier.

    Args:
        name: What `native` takes.
        size: Side of the images in pixels.
        overlay: Where timm takes the weights from: values of its configuration.
        num_classes: Of the classifier in the weights; 0: they have none.
        strict: Whether weights must neither be missing nor left over.

    Raises:
        RuntimeError: If they do not fit.
    """
    # timm is strict if the classifier is that of the weights, which is taken off afterwards, and
    # not strict if it is not. Not all of its architectures take an option for that.
    built = num_classes if strict else 0
    values = {**overlay, "num_classes": num_classes if strict else -1, "label_offset": 0}
    with to_stderr():
        body = native(
            name, size, pretrained=True, pretrained_cfg_overlay=values, num_classes=built
        )
    if built:
        reset: Any = body.reset_classifier
        reset(0)
    return body


def timm_view(config: Mapping[str, Any], size: int, crop: float | None = None) -> Preprocessing:
    """Return the preprocessing that a configuration of timm describes, at a size of images.

    Raises:
        UsageError: If it pads images with a border, which is not supported.
    """
    if config.get("crop_mode") == "border":
        raise UsageError(
            f"the images of {config.get('architecture')} are padded with a border, which nearkin "
            "does not do; choose another encoder"
        )
    return Preprocessing(
        image_size=size,
        crop="squash" if config.get("crop_mode") == "squash" else "center",
        resize_to=math.floor(size / (crop or config["crop_pct"])),
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


# ---------------------------------------------------------------- torchvision


def torchvision_weights(name: str) -> Any:
    """Return torchvision's weights of that name.

    Raises:
        UsageError: If there are none.
    """
    from torchvision.models import get_model_weights

    match = NATIVE.fullmatch(name)
    if match is None or match[2].partition(".")[0] not in torchvision_names():
        names = [f"torchvision:{each}" for each in torchvision_names()]
        bare = name.removeprefix("torchvision:").partition(".")[0].strip()
        raise UsageError(
            f"torchvision has no model {bare}.{nearest(f'torchvision:{bare}', names)}"
        )
    bare, _, tag = match[2].partition(".")
    known = get_model_weights(bare)
    if tag not in ("", *known.__members__):
        listed = ", ".join(known.__members__)
        hint = suggestion(tag, known.__members__)
        raise UsageError(f"torchvision has no weights {tag} of {bare}.{hint} It has {listed}")
    return known[tag] if tag else known.DEFAULT


def load_torchvision(name: str, image_size: int | None, *, allow_partial: bool) -> Pretrained:
    """Load an encoder of torchvision: `torchvision:NAME` or `torchvision:NAME.WEIGHTS`."""
    weights = torchvision_weights(name)
    if image_size:
        check_size(name, image_size)
    view = torchvision_view(weights.transforms(), image_size)
    file = need_torch_file(name, weights.url)
    state = read_checkpoint(file).tensors  # torchvision's own reading unpickles anything
    bare = NATIVE.fullmatch(name)[2].partition(".")[0]  # type: ignore[index]  # matched above
    whole = f"torchvision:{bare}.{weights.name}"
    body = native(whole, view.image_size)
    state = {key: value for key, value in state.items() if not key.startswith(CLASSIFIERS)}
    differing = fill(body, fitted_positions(body, state, view.image_size), whole)
    if differing and not allow_partial:
        raise UsageError(f"the weights of {weights.url} do not fit {whole}: {differing}")
    source = origin(weights.url, TORCHVISION_TERMS, file)
    return described(body, whole, view, source)


TORCHVISION_TERMS: Final = (
    "BSD-3-Clause as torchvision; trained on ImageNet, whose terms are its own"
)
CLASSIFIERS: Final = ("fc.", "classifier.", "head.", "heads.")
"""Parts of torchvision's networks that `native` takes off."""


def fill(body: nn.Module, state: Mapping[str, Any], name: str) -> str:
    """Copy weights into a network, as far as they are its own; return what differs, or ''.

    Raises:
        UsageError: If a tensor has another shape.
    """
    try:
        report = body.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split("\n\t")[1:2]) or str(error)
        raise UsageError(f"the weights do not fit {name}: {reason[:200]}") from error
    return differences(report.missing_keys, report.unexpected_keys)


def differences(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Name the first of what is missing and what is left over, and how many there are."""
    parts = ((missing, "missing"), (unexpected, "left over"))
    return "; ".join(
        f"{len(names)} {what}: {', '.join(abridged(list(names), 4))}"
        for names, what in parts
        if names
    )


def fitted_positions(body: nn.Module, state: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return torchvision's weights with position embeddings for another size of images."""
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    if not isinstance(body, VisionTransformer):
        return dict(state)
    fitted = interpolate_embeddings(size, body.patch_size, {**state})
    return dict(fitted)


def torchvision_view(transforms: Any, image_size: int | None = None) -> Preprocessing:
    """Return the preprocessing that weights of torchvision come with."""
    view = Preprocessing(
        image_size=transforms.crop_size[0],
        crop="center",
        resize_to=transforms.resize_size[0],
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )
    return view.resized(image_size) if image_size else view


# ---------------------------------------------------------------- both


def described(
    body: nn.Module,
    name: str,
    view: Preprocessing,
    source: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Pretrained:
    """Return a network of a library with what is kept of it."""
    details: dict[str, Any] = {"backbone": name, "pooling": pooling(body), "origin": dict(source)}
    return Pretrained(body, name, view, details | ({"notes": list(notes)} if notes else {}))


def pooling(body: nn.Module) -> str:
    """Name how a network makes one vector of an image."""
    kind = getattr(body, "global_pool", None)
    if isinstance(kind, str):
        return {"token": "class token", "avg": "average", "map": "attention"}.get(kind, kind)
    return "class token" if hasattr(body, "class_token") else "average"


@contextmanager
def fitting(name: str, where: str) -> Iterator[None]:
    """Turn what a library says of weights that it cannot use into one line."""
    try:
        yield
    except NearkinError:
        raise
    except Exception as error:  # of many kinds, by the library and its version
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if "state_dict" in reason or "size mismatch" in reason:
            raise UsageError(f"the weights of {where} do not fit {name}: {reason}") from error
        remedy = "get them again from where they came from"
        if "://" in where:
            remedy = f"remove them where they are kept, so that {where} is downloaded again"
        raise CheckpointError(
            f"the weights of {name} cannot be read ({reason}); {remedy}"
        ) from error
