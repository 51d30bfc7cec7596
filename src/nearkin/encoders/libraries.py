"""Encoders of timm and torchvision: names, preprocessing, and weights by timm's own loading.

Where timm builds a network otherwise than its authors, it is built as by its authors, and what is
changed is printed: another pooling or activation costs accuracy without any error. DINOv2, MAE,
I-JEPA, AIMv2, ConvNeXt V2, EVA-02 and Perception Encoder need no change, which tests compare.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import torch
from torch import nn

from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.origin import (
    NOT_STATED,
    folder_license,
    hub_file,
    origin,
    to_stderr,
    torch_file,
    weights_file,
)
from nearkin.errors import CheckpointError, NearkinError, UsageError
from nearkin.files import usable
from nearkin.networks.backbone import (
    RESERVED,
    architecture,
    native,
    query_options,
    timm_names,
)
from nearkin.networks.branch import size_error
from nearkin.networks.input_size import check_patches
from nearkin.schema import suggestion
from nearkin.text import abridged

FLATTENED: Final = ("AlexNet", "SqueezeNet", "VGG")
"""Networks of torchvision without a pooling to one position, or with it in their classifier."""

DEVIATIONS: Final = {
    "global_pool": (
        re.compile(r"vit_\w+_dinov3(_qkvb)?"),
        "token",
        "class token, as DINOv3 is evaluated (arXiv:2508.10104, section 6.1); timm averages",
    ),
    "act_layer": (
        re.compile(r"vit_\w+_siglip_\d+"),
        "gelu_tanh",
        "GELU by tanh, as SigLIP was trained (flax.linen.gelu); timm has the exact one",
    ),
}
"""Options of timm that authors set otherwise: of which architectures, to what, and where they say
so, which is printed."""
OWN_STATISTICS: Final = re.compile(r"clip|siglip|eva|_pe_|aimv2|beit")
"""Families of timm whose images are always normalized alike, and mostly not by ImageNet's mean."""
QUICK_GELU: Final = "QuickGELU"
"""In timm's notes on weights that were trained with x sigmoid(1.702 x) in the place of GELU."""
DIFFERENCES: Final = re.compile(
    r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.\s*(?=\s(?:Missing|Unexpected|size)|$)"
)
"""What torch says of names that do not fit."""


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network with its weights, and all that is needed to use it right."""

    body: nn.Module
    preprocessing: Preprocessing
    details: dict[str, Any]
    """What an encoder's file keeps: `backbone`, how to build it again; pooling, origin, notes."""
    differing: str = ""  # Which weights are missing or left over


def described(
    body: nn.Module,
    name: str,
    view: Preprocessing,
    source: Mapping[str, str],
    differing: str,
    **remarks: Any,
) -> Pretrained:
    """Return a network of a library with what is kept of it; empty remarks are left out."""
    details: dict[str, Any] = {"backbone": name, "pooling": pooling(body), "origin": dict(source)}
    details |= {key: text for key, text in remarks.items() if text}
    return Pretrained(body, view, details, differing)


def pooling(body: nn.Module) -> str:
    """Name how a network makes one vector of an image."""
    kind = getattr(body, "global_pool", None)
    if isinstance(kind, str):
        return {"token": "class token", "avg": "average", "map": "attention"}.get(kind, kind)
    if type(body).__module__.startswith("torchvision.") and type(body).__name__ in FLATTENED:
        return "flattened map"
    return "class token" if hasattr(body, "class_token") else "average"


def differences(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Name the first of what is missing and what is left over, and how many there are."""
    parts = ((missing, "missing"), (unexpected, "left over"))
    return "; ".join(
        f"{len(names)} {what}: {', '.join(abridged(list(names), 4))}"
        for names, what in parts
        if names
    )


def check_size(name: str, image_size: int) -> None:
    """Refuse a size of images before weights are fetched, read or interpolated to no patch."""
    try:
        with torch.device("meta"):
            body = native(name, image_size)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise size_error(name, image_size, error) from error
    check_patches(body, image_size, name)


# ---------------------------------------------------------------- timm


def timm_default(name: str) -> Any:
    """Return timm's configuration of an architecture's default weights; None if it has none."""
    import timm

    return timm.get_pretrained_cfg(architecture(name).tagged)


def timm_weights(name: str) -> Any:
    """Return timm's configuration of the weights that a name means; refuse one without any."""
    import timm

    parts = architecture(name)
    tags = timm.list_pretrained(f"{parts.bare}.*")
    known = parts.tagged in tags if parts.tag else bool(tags)  # timm raises if not
    config = timm.get_pretrained_cfg(parts.tagged) if known else None
    if config is None or not config.has_weights:
        names = [f"timm:{each}" for each in tags]
        listed = f" It has {', '.join(names[:6])}" if names else ""
        raise UsageError(
            f"timm has no weights {name}.{suggestion(name, names)}{listed}; "
            f"`nearkin list pretrained {parts.bare}` lists all"
        )
    return config


def timm_view(config: Mapping[str, Any], size: int) -> Preprocessing:
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
        resize_to=math.floor(size / config["crop_pct"]),
        interpolation=config["interpolation"],
        mean=tuple(map(float, config["mean"])),  # a file may have whole numbers
        std=tuple(map(float, config["std"])),
    )


def as_authors(name: str, config: Any = None) -> tuple[str, list[str]]:
    """Return the name of an encoder of timm as its authors use it, and what is to be said of it.

    Options in the name are kept. `config` is timm's of the weights; None if they are of a file.
    """
    parts = architecture(name)
    notes = list(getattr(config, "notes", None) or ())
    if any(QUICK_GELU in note for note in notes):
        notes = [note for note in notes if QUICK_GELU not in note]
        variant = parts.bare.replace("_clip_", "_clip_quickgelu_")
        if "quickgelu" not in parts.bare and variant in timm_names():
            notes.append(f"{QUICK_GELU}, as these weights were trained: {variant}")
            parts = parts._replace(bare=variant)
    options, query = query_options(parts.query), parts.query
    for option, (architectures, value, what) in DEVIATIONS.items():
        if architectures.fullmatch(parts.bare) and option not in options:
            query += f"{'&' if query else ''}{option}={value}"
            notes.append(what)
    return str(parts._replace(query=query)), notes


def load_timm(name: str, image_size: int | None, label: str) -> Pretrained:
    """Load `timm:NAME` or `timm:NAME.TAG`; `label` is what the user calls it, for messages."""
    config = timm_weights(name)
    name, notes = as_authors(name, config)
    size = image_size or config.input_size[-1]
    if image_size:
        check_size(name, size)
    view = timm_view(config.to_dict(), size)
    if config.hf_hub_id:
        where = f"https://huggingface.co/{config.hf_hub_id}"
        file = hub_file(label, config.hf_hub_id, config.hf_hub_filename)
    else:
        where = str(config.url)
        file = torch_file(label, where)
    overlay = {"file": str(file), "custom_load": False}  # or timm would not take the verified one
    remedy = f"remove them where they are kept, so that {where} is downloaded again"
    body, differing = timm_body(name, size, overlay, config.num_classes, remedy)
    return described(body, name, view, origin(where, config.license, file), differing, notes=notes)


def load_timm_folder(path: Path, config: Mapping[str, Any], image_size: int | None) -> Pretrained:
    """Load a folder that timm has written, with what its config.json holds."""
    remedy, file = "give a folder that timm has written", weights_file(path)
    with usable(path / "config.json", remedy):
        name, stored = _architecture_of(config), _weights_of(config)
    default = timm_default(name)
    values = {**(default.to_dict() if default else {}), **stored}
    with usable(path / "config.json", remedy):
        size = image_size or int(values["input_size"][-1])
        classes = int(values["num_classes"])
        view = timm_view(values, size)
    overlay = {**stored, "source": "", "file": str(file), "custom_load": False}
    remedy = "get them again from where they came from"
    body, differing = timm_body(name, size, overlay, classes, remedy)
    named = folder_license(path)
    license_ = stored.get("license") if named == NOT_STATED else named
    source = origin(str(path.resolve()), license_, file)
    # What a folder describes may have been trained on in that way, so it is not changed.
    notes = [f"as the folder says; its authors: {note}" for note in as_authors(name)[1]]
    notes += stored.get("notes") or ()
    return described(body, name, view, source, differing, notes=notes)


def _architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json of timm describes: `timm:NAME?option=value`."""
    options = dict(config.get("model_args") or {})
    bad = sorted(set(options) & set(RESERVED))
    if bad or options.pop("in_chans", 3) != 3:
        raise ValueError(f"its model_args set {', '.join(bad) or 'in_chans'}")
    options.pop("num_classes", None)
    query = urlencode({key: json.dumps(value) for key, value in sorted(options.items())})
    return f"timm:{config['architecture']}" + (f"?{query}" if query else "")


def _weights_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's configuration of weights in a config.json, which old ones do not nest.

    The classes of the weights' classifier (0: they have none) are those at the top of the file,
    as timm reads it: what is nested may still be of the weights that a training started from.
    """
    from timm.models import PretrainedCfg

    nested = config.get("pretrained_cfg")
    stored = dict(nested if isinstance(nested, Mapping) else config)
    for place in (config.get("model_args") or {}, config):
        if place.get("num_classes") is not None:
            stored["num_classes"] = place["num_classes"]
    known = {each.name for each in fields(PretrainedCfg)}
    return {key: value for key, value in stored.items() if key in known}


def timm_body(
    name: str, size: int, overlay: Mapping[str, Any], num_classes: int = 0, remedy: str = ""
) -> tuple[nn.Module, str]:
    """Return a network with weights, by timm's own loading, and which are missing or left over.

    timm converts other names, and position embeddings of other sizes. `overlay` holds values of
    its configuration: where it takes the weights from, or the weights as `state_dict`;
    `num_classes` is of the classifier in them, 0 if they have none, which is taken off.

    Raises:
        UsageError: If they are of another architecture.
        CheckpointError: If they cannot be read; `remedy` says what to do then.
    """

    def build(classes: int, of_weights: int) -> Any:
        values = {**overlay, "num_classes": of_weights, "label_offset": 0}
        with to_stderr():
            body: Any = native(
                name, size, pretrained=True, pretrained_cfg_overlay=values, num_classes=classes
            )
        body.pretrained_cfg.pop("state_dict", None)  # or it would keep its weights twice
        if classes:
            body.reset_classifier(0)
        return body

    try:
        try:
            # timm is strict if the classifier is that of the weights, and not strict if it is not.
            # Not all of its architectures take an option for that.
            return build(num_classes, num_classes), ""
        except Exception as error:
            if not (differing := _differing(error)):
                raise
        # Those of a classifier of another width are left over.
        return build(0, -1), differing
    except NearkinError:
        raise
    except Exception as error:  # of many kinds, by timm's version
        raise _refused(error, name, "state_dict" in overlay, remedy) from error


def _differing(error: Exception) -> str:
    """What a strict loading says is missing, left over or of another size; '' for none."""
    text = " ".join(str(error).split())
    names = {kind: re.findall(r'"([^"]+)"', listed) for kind, listed in DIFFERENCES.findall(text)}
    of_other_size = re.findall(r"size mismatch for ([^\s:]+):", text)
    return differences(names.get("Missing", []), [*names.get("Unexpected", []), *of_other_size])


def _refused(error: Exception, name: str, given: bool, remedy: str) -> NearkinError:
    """One line on weights that timm cannot use, which may be given ones."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if given or "state_dict" in text or "size mismatch" in text:
        return UsageError(f"the weights do not fit {name}: {text}")
    return CheckpointError(f"the weights of {name} cannot be read ({text}); {remedy}")


# ---------------------------------------------------------------- torchvision


TORCHVISION_TERMS: Final = (
    "BSD-3-Clause as torchvision; trained on ImageNet, whose terms are its own"
)


def torchvision_weights(name: str) -> Any:
    """Return torchvision's weights of `torchvision:NAME[.WEIGHTS]`; refuse unknown ones."""
    from torchvision.models import get_model_weights

    _, bare, tag, _ = architecture(name)
    known = get_model_weights(bare)
    if tag not in ("", *known.__members__):
        hint = suggestion(tag, known.__members__)
        listed = ", ".join(known.__members__)
        raise UsageError(f"torchvision has no weights {tag} of {bare}.{hint} It has {listed}")
    return known[tag] if tag else known.DEFAULT


def prepared(name: str, image_size: int | None) -> tuple[Preprocessing, str | None]:
    """Return how images are prepared for the weights that a name means, and their license."""
    if name.startswith("timm:"):
        config = timm_weights(name)
        return timm_view(config.to_dict(), image_size or config.input_size[-1]), config.license
    transforms = torchvision_weights(name).transforms()
    view = Preprocessing(
        image_size=transforms.crop_size[0],
        crop="center",
        resize_to=transforms.resize_size[0],
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )
    sized = view.resized(image_size) if image_size else view
    return sized, TORCHVISION_TERMS
