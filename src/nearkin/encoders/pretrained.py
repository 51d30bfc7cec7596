"""Encoders of other libraries, by name or file, with their own preprocessing, origin and licence.

    dinov2-small | dinov2-base | dinov2-large   recommended (Oquab et al. 2024), Apache-2.0
    timm:NAME[.TAG], timm:local-dir:FOLDER      timm, by its own loading
    torchvision:NAME[.WEIGHTS]                  torchvision, by its own loading
    FOLDER                                      config.json and weights: of timm or transformers
    ARCHITECTURE@FILE                           a checkpoint; the architecture is one of the above

Weights that are not on this computer are downloaded by the library that has them, into its own
cache; with HF_HUB_OFFLINE=1 nothing is.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

from torch import nn

from nearkin.config import suggestion
from nearkin.data.preprocessing import Preprocessing
from nearkin.errors import UsageError
from nearkin.networks.backbone import NATIVE, native, timm_names, torchvision_names

DINOV2: Final = {
    f"dinov2-{size}": f"timm:vit_{size}_patch14_dinov2.lvd142m"
    for size in ("small", "base", "large")
}
"""Names of the recommended encoders. Images are cropped as by their authors: 224 of 256 px."""
SIZE: Final = 224
RESIZE: Final = 256


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network with its weights, and all that is needed to use it right."""

    body: nn.Module
    backbone: str  # How `untrained` builds it again
    preprocessing: Preprocessing
    details: dict[str, Any]


def is_name(source: str) -> bool:
    """Whether a text names an encoder of a library or a checkpoint, rather than a run."""
    return "@" in source or source in DINOV2 or source.startswith(("timm:", "torchvision:"))


def is_foreign(file: Path) -> bool:
    """Whether a .safetensors file has no header of nearkin's."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return "nearkin" not in (opened.metadata() or {})
    except Exception:  # a damaged file; reading it whole says so
        return False


def load(source: str, *, image_size: int | None = None, allow_partial: bool = False) -> Pretrained:
    """Load an encoder of another library; see the names above.

    Args:
        source: A name, a folder, or `ARCHITECTURE@FILE`.
        image_size: Side of the images in pixels, if not that of the encoder.
        allow_partial: Whether weights may be missing or left over.

    Raises:
        UsageError: If there is no such name or file, the weights do not fit, or they are not on
            this computer and cannot be downloaded.
        CheckpointError: If a file is damaged, or holds more than tensors.
    """
    name = DINOV2.get(source, source)
    if source in DINOV2:
        return _timm(name, image_size or SIZE, allow_partial, crop=SIZE / RESIZE)
    if not is_name(source):
        raise UsageError(
            f"{source} is no encoder: no run folder, and no name."
            f"{suggestion(source, [*DINOV2, *timm_names()])} Give a run, "
            f"{', '.join(DINOV2)}, timm:NAME, torchvision:NAME, or ARCHITECTURE@FILE"
        )
    if name.startswith("torchvision:"):
        return _torchvision(name, image_size)
    return _timm(name, image_size, allow_partial)


def origin_lines(origin: Mapping[str, str]) -> list[str]:
    """Lines of the log on where weights come from and what their licence is."""
    if not origin:
        return []
    lines = [f"origin  {origin['source']}, SHA-256 {origin['sha256'][:16]}"]
    license_ = origin["license"]
    if RESTRICTED.search(license_):
        return [*lines, f"warning: licence {license_}: {RESTRICTION}"]
    return [*lines, f"licence {license_}"]


RESTRICTED: Final = re.compile(r"(^|-)nc(-|$)|noncommercial|non-commercial|dinov3|fair-", re.I)
RESTRICTION: Final = (
    "these weights are not for every use, and neither is what is trained from them; read it first"
)


def _timm(
    name: str, image_size: int | None, allow_partial: bool, crop: float | None = None
) -> Pretrained:
    import timm

    match = NATIVE.fullmatch(name)
    if match is None:
        raise UsageError(f"{name} is no architecture of timm; give timm:NAME")
    config = timm.get_pretrained_cfg(match[2])
    if config is None or not config.has_weights:
        tags = [f"timm:{tag}" for tag in timm.list_pretrained(f"{match[2].partition('.')[0]}*")]
        raise UsageError(
            f"timm has no weights of {match[2]}.{suggestion(name, tags)} "
            "`nearkin backbones --pretrained` lists what it has"
        )
    size = image_size or config.input_size[-1]
    view = timm_view(config.to_dict(), size, crop)
    where = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else str(config.url)
    with _fetching(name, where):
        strict = {"pretrained": True, "pretrained_strict": not allow_partial}
        body = native(name, size, **strict)
    origin = {
        "source": where,
        "license": str(config.license or "not stated"),
        "sha256": _sha256_of_cached(config.hf_hub_id or "", str(config.url or "")),
    }
    return _described(body, name, view, origin)


def timm_view(config: Mapping[str, Any], size: int, crop: float | None = None) -> Preprocessing:
    """Return the preprocessing that a configuration of timm describes, at a size of images."""
    share = crop or config["crop_pct"]
    return Preprocessing(
        image_size=size,
        crop="squash" if config["crop_mode"] == "squash" else "center",
        resize_to=math.floor(size / share + 1e-6),
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def _torchvision(name: str, image_size: int | None) -> Pretrained:
    from torchvision.models import get_model_weights

    match = NATIVE.fullmatch(name)
    if match is None or match[2].partition(".")[0] not in torchvision_names():
        names = [f"torchvision:{each}" for each in torchvision_names()]
        raise UsageError(f"torchvision has no model {name}.{suggestion(name, names)}")
    bare, _, tag = match[2].partition(".")
    known = get_model_weights(bare)
    if tag not in ("", *known.__members__):
        hint = suggestion(tag, known.__members__)
        raise UsageError(f"torchvision has no weights {tag} of {bare}.{hint}")
    weights = known[tag] if tag else known.DEFAULT
    view = torchvision_view(weights.transforms(), image_size)
    with _fetching(name, weights.url):
        body = native(name, view.image_size, weights=weights)
    origin = {
        "source": weights.url,
        "license": "BSD-3-Clause as torchvision; trained on ImageNet, whose terms are its own",
        "sha256": _sha256_of_cached("", weights.url),
    }
    return _described(body, f"torchvision:{bare}.{weights.name}", view, origin)


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


def _described(
    body: nn.Module, name: str, view: Preprocessing, origin: Mapping[str, str]
) -> Pretrained:
    details = {"backbone": name, "pooling": pooling(body), "origin": dict(origin)}
    return Pretrained(body, name, view, details)


def pooling(body: nn.Module) -> str:
    """Name how a network makes one vector of an image."""
    kind = getattr(body, "global_pool", None)
    if isinstance(kind, str):
        return {"token": "class token", "avg": "average", "map": "attention"}.get(kind, kind)
    return "class token" if hasattr(body, "class_token") else "average"


@contextmanager
def _fetching(name: str, where: str) -> Iterator[None]:
    """Turn what goes wrong in a library's loading into one line: what to do without a network."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # of many kinds, by the library and its version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, RuntimeError) and "size mismatch" in str(error):
            raise UsageError(f"the weights of {name} do not fit it: {reason}") from error
        raise UsageError(
            f"the weights of {name} are not on this computer and cannot be downloaded ({reason}); "
            f"download {where} elsewhere and give its folder, or ARCHITECTURE@FILE"
        ) from error


def _sha256_of_cached(repository: str, url: str) -> str:
    """Return the SHA-256 of the file that a library has just read from its cache; or ''."""
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin")
    cached = [try_to_load_from_cache(repository, name) for name in names if repository]
    cached.append(str(_torch_home() / "hub" / "checkpoints" / Path(urlparse(url).path).name))
    for file in cached:
        if isinstance(file, str) and Path(file).is_file():
            return sha256(Path(file))
    return ""


def _torch_home() -> Path:
    """Return the folder of torch's downloads, by the rule that its documentation gives."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("TORCH_HOME", f"{cache}/torch")).expanduser()


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
