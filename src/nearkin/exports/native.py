"""An encoder in the files of the library that has its network, which reads them without nearkin.

    torchvision    a .pth: the state_dict of the model of that name, without its classifier
    timm           config.json and model.safetensors, for `timm.create_model("local-dir:FOLDER")`
    huggingface    the same, or a model of transformers, for `AutoModel.from_pretrained("FOLDER")`

Each is read back by its library as soon as it is written, so that its features can be compared.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from nearkin.choices import GraphFormat, NativeFormat
from nearkin.data.preprocessing import RESAMPLING, Preprocessing
from nearkin.encoders import folders
from nearkin.encoders.encoder import CUSTOM, Encoder, separate_weights
from nearkin.encoders.libraries import timm_view
from nearkin.encoders.origin import NOT_STATED, to_stderr
from nearkin.errors import UsageError
from nearkin.extensions import names_code
from nearkin.networks.backbone import (
    NATIVE,
    SMALL,
    SMALL_IMAGE,
    native,
    query_options,
    split_options,
    timm_names,
    torchvision_names,
)

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"
Options = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Native:
    """An encoder as a library has read it from the files that were written for it."""

    network: nn.Module
    """From images, normalized by their own mean and deviation, to features."""
    library: str  # Its name and version
    transform: Callable[[Image.Image], Tensor] | None = None
    """The library's own preprocessing by these files, if it has one."""


class Unfit(Exception):  # noqa: N818  (an answer, which `write_native` gives as an error)
    """Why a library does not have a network."""


def write_native(format: NativeFormat, path: Path, encoder: Encoder) -> Native:
    """Write an encoder into an empty folder or, of `torchvision`, a file; read it back from there.

    Raises:
        UsageError: If the library does not have the network, with the reason.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            written = WRITERS[format](path, encoder, *_fitting(encoder, format))
    except Unfit as error:
        others = ", ".join([*holding(encoder), *get_args(GraphFormat)])
        raise UsageError(
            f"{encoder.details['backbone']} is no model for {format}: {error}; give --format, one "
            f"of {others}"
        ) from error
    written.network.eval().requires_grad_(False)
    return written


def holding(encoder: Encoder) -> list[NativeFormat]:
    """Return the formats of libraries that have the network of an encoder."""
    formats: list[NativeFormat] = []
    for format in get_args(NativeFormat):
        with suppress(Unfit), torch.random.fork_rng(devices=[]):
            _fitting(encoder, format)
            formats.append(format)
    return formats


def _fitting(encoder: Encoder, format: NativeFormat) -> tuple[str, Options]:
    """Return the name and the options by which a library builds a network; or `Unfit`."""
    if format != "huggingface":
        return architecture(encoder, format)
    if encoder.preprocessing.low:
        raise Unfit("transformers prepares RGB of 8 bits only")
    body = encoder.backbone.body
    if isinstance(body, folders.TransformersNetwork):
        return body.kind, folders.construction(type(body.model), body.pooling)
    try:
        return architecture(encoder, "timm")
    except Unfit as error:
        raise Unfit(f"transformers takes models of timm and its own, and {error}") from error


# ---------------------------------------------------------------- torchvision, timm


def _write_torchvision(file: Path, encoder: Encoder, bare: str, options: Options) -> Native:
    import torchvision

    torch.save(encoder.backbone.body.state_dict(), file)
    network = _built("torchvision", bare, options)
    network.load_state_dict(torch.load(file, weights_only=True))
    return Native(network, f"torchvision {torchvision.__version__}")


def _write_timm(folder: Path, encoder: Encoder, bare: str, options: Options) -> Native:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    _write_timm_files(folder, encoder, bare, options)
    with to_stderr():
        network = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform = create_transform(**resolve_model_data_config(network), is_training=False)
    return Native(network, f"timm {timm.__version__}", transform)


def _write_timm_files(folder: Path, encoder: Encoder, bare: str, options: Options) -> None:
    from safetensors.torch import save_file

    body = encoder.backbone.body
    pooling = getattr(body, "global_pool", None)
    config = {
        "architecture": bare,
        "num_classes": 0,
        "num_features": encoder.num_features,
        **({"global_pool": pooling} if isinstance(pooling, str) else {}),
        **({"model_args": options} if options else {}),
        "pretrained_cfg": _pretrained_cfg(encoder),
    }
    _write_json(folder / CONFIG, config)
    save_file(separate_weights(body), folder / WEIGHTS, {"format": "pt"})


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _pretrained_cfg(encoder: Encoder) -> dict[str, Any]:
    """Return timm's description of an encoder's weights and of the images they take."""
    view, body = encoder.preprocessing, encoder.backbone.body
    own = getattr(body, "pretrained_cfg", None) or {}
    license_ = encoder.details.get("origin", {}).get("license", NOT_STATED)
    return {
        "input_size": [len(view.mean), view.image_size, view.image_size],
        "fixed_input_size": bool(own.get("fixed_input_size", False)),
        "crop_pct": _crop_share(view),
        "crop_mode": "squash" if view.crop == "squash" else "center",
        "interpolation": view.interpolation,
        "mean": list(view.mean),
        "std": list(view.std),
        "num_classes": 0,
        **{key: own[key] for key in ("first_conv", "classifier") if key in own},
        # Or timm would convert weights of a stem for RGB, which these are not.
        **({} if len(view.mean) == 3 else {"first_conv": None}),
        **({} if license_ == NOT_STATED else {"license": license_}),
    }


def _crop_share(view: Preprocessing) -> float:
    """Return timm's share of the resized image that is cut out.

    timm divides by it and rounds down, which must give back the pixels before the crop.
    """
    size = view.image_size
    if view.crop == "box":
        return 1.0 if size < SMALL_IMAGE else 0.875
    exact = {"crop_pct": size / view.resize_to, "crop_mode": view.crop}
    described = {"interpolation": view.interpolation, "mean": view.mean, "std": view.std}
    back = timm_view({**exact, **described}, size)
    return size / (view.resize_to + (0.0 if back.resize_to == view.resize_to else 0.5))


def architecture(encoder: Encoder, library: Literal["timm", "torchvision"]) -> tuple[str, Options]:
    """Return the name and the options by which a library builds an encoder's network.

    Raises:
        Unfit: If it does not have that very network, with the reason.
    """
    name, body = str(encoder.details["backbone"]), encoder.backbone.body
    own, bare, options = _parsed(name)
    if "in_chans" in options and library == "torchvision":
        raise Unfit("its networks take RGB only")
    _check_name(name, bare)
    names = timm_names() if library == "timm" else torchvision_names()
    if bare not in names or (options.keys() - {"in_chans"} and own != library):
        raise Unfit(f"{library} has no such network")
    if library == "timm":
        options |= _patch_options(body, encoder.image_size, named=own == "timm")
    elif bare.startswith("vit_"):
        options["image_size"] = encoder.image_size
    try:
        _built(library, bare, options).load_state_dict(body.state_dict())
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        raise Unfit(f"{library} builds another one: {reason(error)}") from error
    return bare, options


def _check_name(name: str, bare: str) -> None:
    """Refuse a network that neither timm nor torchvision has a name for."""
    if name.startswith(folders.PREFIX):
        raise Unfit("it is a network of transformers")
    if bare in SMALL:
        raise Unfit("it is a network of nearkin's own")
    if name == CUSTOM or names_code(name):
        raise Unfit("it is a network of your own")


def reason(error: Exception) -> str:
    """Return what an error says in a line: of weights that do not fit, the first that does not."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if not line.endswith(":")), type(error).__name__)
    small = "; below 64 px it is trained with a small stem"
    stem = first.startswith("size mismatch for conv1.weight")
    return first[:250].rstrip(".") + (small if stem else "")


def _parsed(name: str) -> tuple[str, str, dict[str, Any]]:
    """Return the library that a backbone's name states or '', its name there, and options."""
    match = NATIVE.fullmatch(name)
    if match:
        return match[1], match[2].partition(".")[0], query_options(match[3] or "")
    plain, num_channels, _ = split_options(name)
    options = {} if num_channels == 3 else {"in_chans": num_channels}
    return "", plain.rpartition("/")[2], options


def _patch_options(body: Any, image_size: int, *, named: bool) -> dict[str, Any]:
    """Return the options of a network whose patches are made for one size of images."""
    patches: Any = getattr(body, "patch_embed", None)
    if getattr(patches, "img_size", None) is None:
        return {}
    options: dict[str, Any] = {"img_size": image_size}
    if not named:  # below 64 px, nearkin's patches are of 4 px whatever the name says
        options["patch_size"] = int(patches.patch_size[0])
    if getattr(body, "dynamic_img_size", False):
        options["dynamic_img_size"] = True
    return options


def _built(library: str, bare: str, options: Options) -> nn.Module:
    if library == "torchvision":
        return native(f"torchvision:{bare}", **{"image_size": 0, **options})
    import timm

    with to_stderr():
        network: nn.Module = timm.create_model(bare, num_classes=0, **options)
    return network


# ---------------------------------------------------------------- transformers


def _write_huggingface(folder: Path, encoder: Encoder, name: str, options: Options) -> Native:
    folders.require_transformers()
    import transformers
    from transformers import AutoImageProcessor, AutoModel

    body: Any = encoder.backbone.body
    with folders.quiet(), to_stderr():
        if isinstance(body, folders.TransformersNetwork):
            kind, pooling = name, body.pooling
            model: Any = body.model
            model.save_pretrained(folder)
            _write_json(folder / "preprocessor_config.json", _processor(encoder.preprocessing))
            read = AutoModel.from_pretrained(folder, **options)
        else:  # which transformers wraps
            kind, pooling = "timm_wrapper", folders.POOLED
            _write_timm_files(folder, encoder, name, options)
            read = AutoModel.from_pretrained(folder)
        processor: Any = AutoImageProcessor.from_pretrained(folder)

    def transform(image: Image.Image) -> Tensor:
        inputs: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return inputs

    network = folders.TransformersNetwork(folders.aligned(read), kind, pooling)
    return Native(network, f"transformers {transformers.__version__}", transform)


def _processor(view: Preprocessing) -> dict[str, Any]:
    """Return the configuration of an image processor of transformers for a preprocessing."""
    resize_to = view.resize_to
    if view.crop == "box":
        resize_to = round(view.image_size / _crop_share(view))
    squashed = {"height": resize_to, "width": resize_to}
    return {
        "image_processor_type": "CLIPImageProcessor",  # the most general of them
        "do_convert_rgb": True,
        "do_resize": True,
        "size": squashed if view.crop == "squash" else {"shortest_edge": resize_to},
        "resample": RESAMPLING[view.interpolation].value,
        "do_center_crop": True,
        "crop_size": {"height": view.image_size, "width": view.image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(view.mean),
        "image_std": list(view.std),
    }


WRITERS: Final[Mapping[NativeFormat, Callable[[Path, Encoder, str, Options], Native]]] = {
    "timm": _write_timm,
    "torchvision": _write_torchvision,
    "huggingface": _write_huggingface,
}
