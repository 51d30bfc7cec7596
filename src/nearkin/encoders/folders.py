"""Encoders in folders of transformers: config.json, preprocessor_config.json and weights.

The folder is read as it lies there: no code of it is run, nothing is downloaded, and no file
outside of it is opened.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.data.preprocessing import RESAMPLING, Crop, Preprocessing
from nearkin.encoders.libraries import Pretrained, described, differences
from nearkin.encoders.origin import folder_license, origin, read_json, weights_file
from nearkin.errors import UsageError
from nearkin.files import usable
from nearkin.schema import suggestion

PREFIX: Final = "transformers:"
CLASS_TOKEN, POOLED, AVERAGE = "class token", "pooled", "average"
"""Poolings: the first token after the last norm; the output of the network's own trained or
parameter-free pooling; the average of all tokens."""

POOLING: Final = {
    "aimv2_vision_model": POOLED,
    "clip_vision_model": POOLED,
    "convnextv2": POOLED,
    "dinov2": CLASS_TOKEN,
    "dinov2_with_registers": CLASS_TOKEN,
    "dinov3_convnext": POOLED,
    "dinov3_vit": CLASS_TOKEN,
    "ijepa": AVERAGE,
    "siglip_vision_model": POOLED,
    "swin": POOLED,
    "vit": CLASS_TOKEN,
    "vit_mae": CLASS_TOKEN,
}
"""What makes one vector of an image, by the model type of transformers; as the authors evaluate.

The pooling layer of `vit` is trained for classification only, and is left away.
"""
TOWERS: Final = {kind: f"{kind}_vision_model" for kind in ("aimv2", "clip", "siglip")}
"""Models of images and text, and the model type of the part that sees images."""
UNUSED: Final = (
    "classifier", "cls_classifier", "decoder", "head", "lm_head", "logit_bias", "logit_scale",
    "pooler", "text_model", "text_projection", "visual_projection", "vit.pooler",
    "embeddings.mask_token",
)  # fmt: skip
"""What other parts of a model are called: heads, text, what is for masked images."""
FORBIDDEN: Final = (
    "attn_implementation", "auto_map", "dtype", "experts_implementation", "quantization_config",
    "torch_dtype", "transformers_version",
)  # fmt: skip
"""Keys of a configuration that would choose code from elsewhere, or a precision."""


class TransformersNetwork(nn.Module):
    """A network of transformers, by its model type (`kind`), as one from images to features."""

    def __init__(self, model: nn.Module, kind: str, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.pooling = pooling
        config: Any = model.config
        # Side of patches in pixels; a ConvNeXt calls the stride of its stem so.
        self.patch_size = 1 if kind == "convnextv2" else getattr(config, "patch_size", 1)
        # Without effect at the size of the weights; needed at all others.
        interpolates = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        self.options: dict[str, Any] = {"interpolate_pos_encoding": True} if interpolates else {}

    @override
    def forward(self, images: Float[Tensor, "batch 3 _ _"]) -> Float[Tensor, "batch features"]:
        options = self.options
        if self.kind == "vit_mae":
            # The order of noise is the order of the patches: none is masked or moved.
            rows, columns = (side // self.patch_size for side in images.shape[-2:])
            noise = torch.arange(rows * columns, device=images.device, dtype=torch.float32)
            options = {**options, "noise": noise.expand(len(images), -1)}
        output = self.model(pixel_values=images, **options)
        if self.pooling == POOLED:
            pooled: Tensor = output.pooler_output
            return pooled.flatten(1)
        tokens: Tensor = output.last_hidden_state
        return tokens.mean(1) if self.pooling == AVERAGE else tokens[:, 0]


def require_transformers() -> None:
    """Refuse, in one line, if transformers is not installed."""
    if find_spec("transformers") is None:
        raise UsageError(
            "networks of transformers need that library; pip install 'nearkin[transformers]'"
        )


def untrained_network(details: Mapping[str, Any]) -> nn.Module:
    """Build a network of transformers from what its details say, with random weights."""
    require_transformers()
    kind = str(details["backbone"]).removeprefix(PREFIX)
    model_class, config = _described(kind, details["config"])
    with quiet():
        model = model_class(config, **construction(model_class, details["pooling"]))
    return TransformersNetwork(model, kind, str(details["pooling"]))


def load_transformers(
    folder: Path, config: Mapping[str, Any], image_size: int | None
) -> Pretrained:
    """Load the part of a folder of transformers that sees images, by what its config.json holds.

    Raises:
        UsageError: If transformers is not installed, or has no such model.
        CheckpointError: If a file is damaged.
    """
    require_transformers()
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder} holds an adapter; merge it into its model and save that")
    kind = str(config["model_type"])
    tower = TOWERS.get(kind, kind)
    if tower not in POOLING:
        known = sorted([*POOLING, *TOWERS])
        raise UsageError(
            f"{folder} is a {kind} of transformers, which nearkin does not read."
            f"{suggestion(kind, known)} It reads {', '.join(known)}. timm may have the same "
            f"weights; `nearkin list pretrained {kind.replace('_', '')}` lists them"
        )
    file = weights_file(folder)
    with usable(folder, "download it again, or save it with save_pretrained"):
        settings = _clean(config.get("vision_config", {}) if kind in TOWERS else config)
        if tower == "vit_mae":
            settings["mask_ratio"] = 0.0  # features are of whole images
        view = _view(folder, kind, image_size)
        body, differing = _with_weights(folder, tower, settings)
    source, name = origin(str(folder.resolve()), folder_license(folder), file), f"{PREFIX}{tower}"
    return described(body, name, view, source, differing, pooling=body.pooling, config=settings)


def _clean(value: Any) -> Any:
    """Return a value of a configuration without what would choose code from elsewhere."""
    if not isinstance(value, Mapping):
        return value
    kept = (key for key in value if not str(key).startswith("_") and key not in FORBIDDEN)
    return {key: _clean(value[key]) for key in kept}


def _described(kind: str, config: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if kind not in POOLING:
        raise ValueError(f"{kind} is no model type that nearkin knows")
    values = {key: value for key, value in config.items() if key != "model_type"}
    described = AutoConfig.for_model(kind, **values)
    model_class: type[nn.Module] = MODEL_MAPPING[type(described)]
    return model_class, described


def construction(model_class: type[nn.Module], pooling: str) -> dict[str, Any]:
    """Return the arguments that leave away a pooling layer which is not used."""
    if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        return {"add_pooling_layer": pooling == POOLED}
    return {}


def _with_weights(
    folder: Path, kind: str, config: Mapping[str, Any]
) -> tuple[TransformersNetwork, str]:
    """Return the network of a folder, and which of its weights are missing or left over."""
    model_class, settings = _described(kind, config)
    # AIMv2 may come without the pooling that is trained for texts.
    pooling = POOLING[kind] if getattr(settings, "use_head", True) else AVERAGE
    load_model: Any = model_class
    with quiet():
        model, report = load_model.from_pretrained(
            folder,
            config=settings,
            local_files_only=True,
            weights_only=True,
            dtype=torch.float32,
            output_loading_info=True,
            **construction(model_class, pooling),
        )
    unexpected = [
        name
        for name in report["unexpected_keys"]
        if not name.startswith(UNUSED) and not name.endswith("position_ids")
    ]
    differing = differences(sorted(report["missing_keys"]), sorted(unexpected))
    return TransformersNetwork(aligned(model).eval(), kind, pooling), differing


def aligned(model: nn.Module) -> nn.Module:
    """Return a model with copies of its weights, in place.

    Where a file was mapped, weights may begin at any byte, and kernels then round otherwise than
    with a copy of the same weights.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing: what matters of it is reported by nearkin."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# ---------------------------------------------------------------- preprocessing of transformers


BY_NUMBER: Final = {int(number): name for name, number in RESAMPLING.items()}  # Pillow's


def _view(folder: Path, kind: str, image_size: int | None) -> Preprocessing:
    """Return the preprocessing of a folder, by the rules of the image processors of transformers.

    Those of the Pillow backend, whose interpolation other libraries have too.
    """
    processor = _processor(folder, kind)
    crop, resize_to, size = _geometry(processor)
    view = Preprocessing(
        image_size=size,
        crop=crop,
        resize_to=resize_to,
        interpolation=BY_NUMBER[int(processor["resample"])],
        crop_rounding="down",
        **_statistics(processor),
    )
    return view.resized(image_size) if image_size else view


def _processor(folder: Path, kind: str) -> dict[str, Any]:
    """Return the values of a folder's image processor; those it leaves out are the class's."""
    from transformers.models.auto.image_processing_auto import (
        IMAGE_PROCESSOR_MAPPING_NAMES,
        get_image_processor_class_from_name,
    )

    stored: dict[str, Any] = {}
    if (folder / "preprocessor_config.json").is_file():
        stored = read_json(folder / "preprocessor_config.json")
    elif (folder / "processor_config.json").is_file():
        stored = read_json(folder / "processor_config.json").get("image_processor", {})
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
    # Old names: `ViTFeatureExtractor`, `ViTImageProcessorFast`.
    named = stored.get("image_processor_type", stored.get("feature_extractor_type", ""))
    named = named.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    for name in (named and f"{named}Pil", named, names.get("pil"), names.get("torchvision")):
        cls = get_image_processor_class_from_name(name) if name else None
        if stored and cls is not None:
            stored.pop("auto_map", None)
            return {**cls(**stored).to_dict(), "class": cls.__name__}
    raise ValueError("it has no preprocessor_config.json that transformers knows")


def _geometry(processor: Mapping[str, Any]) -> tuple[Crop, int, int]:
    """Return how the square is cut, pixels before the crop, and its side."""
    if not processor.get("do_resize"):
        raise ValueError("its images are not resized")
    size = processor.get("size") or {}
    short = size.get("shortest_edge")
    if short and processor["class"].startswith("ConvNext"):
        share = float(processor.get("crop_pct") or 224 / 256)
        # Larger images are not cropped.
        return ("squash", short, short) if short >= 384 else ("center", int(short / share), short)
    edge = int(short or _square(size))
    # Networks take squares, where transformers would leave the longer side as it is.
    cropped = _square(processor["crop_size"]) if processor.get("do_center_crop") else edge
    return ("center" if short else "squash"), edge, cropped


def _square(size: Mapping[str, int]) -> int:
    if not size.get("height") or size.get("width") != size["height"]:
        raise ValueError(f"its size {dict(size)} is no square")
    return int(size["height"])


def _statistics(processor: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return mean and deviation for pixels from 0 to 1."""
    factor = 255 * (processor["rescale_factor"] if processor["do_rescale"] else 1)
    given = {"mean": 0.0, "std": 1.0}
    if processor.get("do_normalize"):
        given = {name: processor[f"image_{name}"] for name in given}
    return {name: tuple(x / factor for x in _three(value)) for name, value in given.items()}


def _three(value: Any) -> tuple[float, ...]:
    return (float(value),) * 3 if isinstance(value, int | float) else tuple(map(float, value))
