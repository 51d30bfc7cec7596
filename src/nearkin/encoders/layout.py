"""The layout of Hugging Face's folders: config.json, a model card, weights in one form."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from nearkin.errors import UsageError
from nearkin.files import usable

WEIGHTS: Final = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pth", "model.pth",
    "open_clip_model.safetensors", "open_clip_pytorch_model.bin",
)  # fmt: skip
"""Files of weights, or of what parts they are in; the first that is there is read."""
INDEX: Final = ".index.json"
MAX_CONFIG: Final = 20_000_000  # bytes; lists of 21,000 classes take a few megabytes
DESCRIPTIONS: Final = (
    "config.json", "preprocessor_config.json", "processor_config.json", "README.md"
)  # fmt: skip
"""What is read besides the weights."""


def is_folder(path: Path) -> bool:
    """Whether a folder is of the Hugging Face layout."""
    return (path / "config.json").is_file()


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; inside `usable`, as it may be anything."""
    if file.stat().st_size > MAX_CONFIG:
        raise ValueError(f"it has {file.stat().st_size} bytes")
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: If it is damaged, or the weights are not where they should be.
    """
    with usable(folder / "config.json", "give a folder that timm or transformers has written"):
        config = read_json(folder / "config.json")
        if not isinstance(config.get("architecture", config.get("model_type")), str):
            raise ValueError("it names neither an architecture of timm nor a model_type")
        for name in WEIGHTS:
            if name.endswith(INDEX) and (folder / name).is_file():
                _check_parts(folder, read_json(folder / name))
    return config


def _check_parts(folder: Path, index: Mapping[str, Any]) -> None:
    """Refuse an index of parts that lie elsewhere."""
    for part in set(index["weight_map"].values()):
        # A hub's cache links its files into a folder of contents: links are the user's own.
        if not isinstance(part, str) or Path(part).name != part or part in ("", "..", "."):
            raise ValueError(f"its index names {part!r}, which is not in the folder")
        if not (folder / part).is_file():
            raise ValueError(f"its part {part} is missing")


def weights_among(files: Collection[str]) -> list[str]:
    """Return patterns of the weights among files: of one file, or of an index and its parts.

    >>> weights_among(["config.json", "model.safetensors.index.json"])
    ['model.safetensors.index.json', 'model-*.safetensors']
    """
    name = next((name for name in WEIGHTS if name in files), "")
    if not name.endswith(INDEX):
        return [name] if name else []
    whole = Path(name.removesuffix(INDEX))
    return [name, f"{whole.stem}-*{whole.suffix}"]


def weights_file(folder: Path) -> Path:
    """Return the file of weights in a folder, or of their index; a UsageError without any."""
    found = weights_among([file.name for file in folder.iterdir()])
    if not found:
        raise UsageError(f"{folder} has a config.json but no weights; put model.safetensors there")
    return folder / found[0]
