"""Encoders of other libraries, by name or file, with their own preprocessing, origin and license.

docs/pretrained.md lists the names. Weights that are not on this computer are downloaded by the
library that has them, into its own cache; with HF_HUB_OFFLINE=1 nothing is.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from nearkin.encoders.checkpoints import RESIZE, SIZE, load_file
from nearkin.encoders.folders import load_transformers
from nearkin.encoders.libraries import (
    TORCHVISION_TERMS,
    Pretrained,
    check_size,
    load_timm,
    load_timm_folder,
    timm_weights,
    torchvision_weights,
)
from nearkin.encoders.origin import NOT_STATED, hub_folder, is_folder, read_config, torch_file
from nearkin.errors import UsageError
from nearkin.networks.backbone import architecture, timm_names, torchvision_names
from nearkin.run.folder import neighboring_runs
from nearkin.schema import suggestion

DINOV2: Final = {
    f"dinov2-{size}": f"timm:vit_{size}_patch14_dinov2.lvd142m"
    for size in ("small", "base", "large")
}
"""Names of the recommended encoders. Images are cropped as by their authors: 224 of 256 px."""
LOCAL_DIR: Final = "timm:local-dir:"
PREFIXES: Final = ("timm:", "torchvision:")
REPOSITORY: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PREFIXED: Final = re.compile(r"hf[-_]hub:(\w[\w.-]*/\w[\w.-]*(?:@[\w.-]+)?)")
PATHS: Final = ("runs", "torchvision")
"""What stands before a slash elsewhere: in paths of runs, and in names of untrained networks."""


def is_name(source: str) -> bool:
    """Whether a text names an encoder of a library or a checkpoint, rather than a run."""
    named = source in DINOV2 or source.startswith(PREFIXES)
    return named or "@" in source or bool(hub_repository(source))


def hub_repository(source: str) -> str:
    """Return the repository of the Hugging Face hub that a text names; '' if it names none.

    Without a prefix, a text that begins with a folder which is there is a path, maybe mistyped.
    """
    if match := PREFIXED.fullmatch(source):
        return match[1]
    owner = source.partition("/")[0]
    path = owner in PATHS or Path(owner).exists()
    return source if REPOSITORY.fullmatch(source) and not path else ""


def _canonical(source: str) -> str:
    """Return timm's name of what it has on the hub; anything else as it is."""
    owner, _, name = hub_repository(source).partition("/")
    return f"timm:{name}" if owner == "timm" and name.partition(".")[0] in timm_names() else source


def is_foreign(file: Path) -> bool:
    """Whether a .safetensors file has no header of nearkin's."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return "nearkin" not in (opened.metadata() or {})
    except Exception:  # a damaged file; reading it whole says so
        return False


def unknown(source: str) -> UsageError:
    """Return the error for a word that is neither a run nor a name, with the nearest names."""
    word = source.rpartition("/")[2]
    libraries = {"torchvision": torchvision_names(), "timm": timm_names()}
    exact = [f"{library}:{word}" for library, names in libraries.items() if word in names]
    known = [*neighboring_runs(Path(source)), *DINOV2]
    known += [f"{library}:{name}" for library, names in libraries.items() for name in names]
    hint = f" Did you mean {' or '.join(exact)}?" if exact else suggestion(source, known)
    return UsageError(
        f"{source} does not exist; `nearkin train` makes a run when it is done.{hint} An encoder "
        f"is a run folder, {', '.join(DINOV2)}, timm:NAME, torchvision:NAME, OWNER/NAME on the "
        "Hugging Face hub, a folder of its layout, or ARCHITECTURE@FILE"
    )


def license_of(name: str) -> str:
    """Return the license of the weights that a name of a library means, without loading them."""
    if name.startswith("torchvision:"):
        return TORCHVISION_TERMS
    return str(timm_weights(DINOV2.get(name, name)).license or NOT_STATED)


def load(source: str, *, image_size: int | None = None, allow_partial: bool = False) -> Pretrained:
    """Load an encoder of another library, by its name, a folder, or `ARCHITECTURE@FILE`.

    Raises:
        UsageError: If there is no such name or file, the weights do not fit, or they are not on
            this computer and cannot be downloaded.
        CheckpointError: If a file is damaged, or holds more than tensors.
    """
    loaded = _loaded(_canonical(source), image_size)
    if not loaded.differing:
        return loaded
    if not allow_partial:
        raise UsageError(
            f"the weights of {source} do not fit {loaded.details['backbone']}: "
            f"{loaded.differing}; give the right ones, or --allow-partial"
        )
    loaded.details["weights"] = [*loaded.details.get("weights", ()), loaded.differing]
    return loaded


def _loaded(source: str, image_size: int | None) -> Pretrained:
    path = Path(source.removeprefix(LOCAL_DIR))
    if source.startswith(LOCAL_DIR) or path.is_dir():
        return _of_folder(path, image_size)
    if repository := "" if path.is_file() else hub_repository(source):
        loaded = _of_folder(_fetched(source, repository), image_size)
        loaded.details["origin"]["source"] = f"https://huggingface.co/{repository}"
        return loaded
    named, at, file = ("", "@", source) if path.is_file() else source.partition("@")
    if at and not file:
        raise UsageError(f"{source} names no file; give ARCHITECTURE@FILE")
    if not at and not is_name(source):
        raise unknown(source)
    if named not in DINOV2:
        return _of_library(named, file, image_size, source)
    size = image_size or SIZE
    loaded = _of_library(DINOV2[named], file, size, source)
    view = replace(loaded.preprocessing, resize_to=size * RESIZE // SIZE)
    return replace(loaded, preprocessing=view)


def _of_library(name: str, file: str, size: int | None, label: str) -> Pretrained:
    """Load an architecture with the weights of a file, or with those of its library."""
    if file:
        return load_file(name, Path(file), size)
    if name.startswith("timm:"):
        return load_timm(name, size, label)
    weights = torchvision_weights(name)
    if size:
        check_size(name, size)
    # Not by torchvision's own reading, which unpickles anything.
    tagged = str(architecture(name)._replace(tag=weights.name))
    loaded = load_file(tagged, torch_file(name, weights.url), size)
    loaded.details["origin"]["source"] = weights.url  # not its place in the cache
    return loaded


def _fetched(source: str, repository: str) -> Path:
    """Return a repository of the Hugging Face hub as a folder, which may be in its cache."""
    try:
        return hub_folder(source, repository)
    except UsageError as error:
        if source != repository:
            raise
        raise UsageError(f"{source} is no path here, and on Hugging Face {error}") from error


def _of_folder(path: Path, image_size: int | None) -> Pretrained:
    """Load a folder of the Hugging Face layout, of timm or transformers."""
    if not is_folder(path):
        raise UsageError(f"{path} is no folder with a config.json and weights")
    config = read_config(path)
    load_folder = load_timm_folder if "architecture" in config else load_transformers
    return load_folder(path, config, image_size)
