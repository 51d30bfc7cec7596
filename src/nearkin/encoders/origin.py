"""Where weights come from: folders and files of other libraries; license and checksum.

A folder of the Hugging Face layout has config.json, a model card, and weights in one form. What is
in a library's cache is taken as it is, without asking whether there is something newer: the same
command gives the same features, with a network and without.
"""

import contextlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse
from urllib.request import getproxies

from nearkin.errors import CheckpointError, NearkinError, UsageError
from nearkin.files import sha256, usable

CONNECT_SECONDS: Final = 5.0  # that a server may take to answer before weights are out of reach
HUB_NAMES: Final = ("model.safetensors", "pytorch_model.bin")
"""Files of weights in a repository of timm's on the Hugging Face hub, in the order it tries."""
NOT_STATED: Final = "not stated"
RESTRICTED: Final = re.compile(
    r"(^|\W)nc(\W|$)|non-?commercial|research|dinov3|seer|(^|\W)fair-|apple-am|gated|gemma", re.I
)
"""Licenses that do not allow every use, or weights that are handed out on request."""
RESTRICTION: Final = (
    "these weights are not for every use, and neither is what is trained from them; read it first"
)
MAX_CARD: Final = 1_000_000  # bytes of a README that is read

WEIGHTS: Final = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pth", "model.pth",
    "open_clip_model.safetensors", "open_clip_pytorch_model.bin",
)  # fmt: skip
"""Files of weights, or of what parts they are in; the first that is there is read."""
INDEX: Final = ".index.json"
MAX_CONFIG: Final = 20_000_000  # bytes; lists of 21,000 classes take a few megabytes
PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
"""Files in which transformers describes how images are prepared."""
DESCRIPTIONS: Final = ("config.json", *PROCESSORS, "README.md")
"""What is read besides the weights."""


# ---------------------------------------------------------------- folders


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


# ---------------------------------------------------------------- downloads


def hub_file(name: str, repository: str, filename: str | None = None) -> Path:
    """Return a file of weights on the Hugging Face hub, downloaded into the hub's own cache.

    The encoder's name is for messages; the repository is `owner/name` or `owner/name@revision`.

    Raises:
        UsageError: If it is not there and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import RemoteEntryNotFoundError

    repository, _, revision = repository.partition("@")
    names = (filename,) if filename else HUB_NAMES
    at = revision or "main"
    for each in names:
        cached = try_to_load_from_cache(repository, each, revision=at)
        if isinstance(cached, str):
            return Path(cached)
    with fetching(name, f"{ENDPOINT}/{repository}/resolve/{at}/{names[0]}"):
        for each in names:
            with contextlib.suppress(RemoteEntryNotFoundError):
                return Path(hf_hub_download(repository, each, revision=at))
    raise UsageError(f"{ENDPOINT}/{repository} has no weights that nearkin reads")


def hub_folder(name: str, repository: str) -> Path:
    """Return a repository of the Hugging Face hub as a folder: config.json, model card, weights.

    Of several formats of the same weights, one is downloaded. Arguments and errors are those of
    `hub_file`.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT

    repository, _, revision = repository.partition("@")
    at = revision or "main"
    cached = try_to_load_from_cache(repository, "config.json", revision=at)
    if isinstance(cached, str) and _has_all(Path(cached).parent):
        return Path(cached).parent
    with fetching(name, f"{ENDPOINT}/{repository}/tree/{at}"):
        files = HfApi().list_repo_files(repository, revision=at)
        wanted = [*DESCRIPTIONS, *weights_among(files)]
        folder = Path(snapshot_download(repository, revision=at, allow_patterns=wanted))
    if not is_folder(folder):
        raise UsageError(
            f"{ENDPOINT}/{repository} has no config.json: it is of neither timm nor transformers"
        )
    return folder


def _has_all(folder: Path) -> bool:
    """Whether a folder of the hub's cache has all that is read; others may fetch a part of it."""
    with contextlib.suppress(NearkinError):
        config, _ = read_config(folder), weights_file(folder)
        return "architecture" in config or any((folder / name).is_file() for name in PROCESSORS)
    return False


def torch_file(name: str, url: str) -> Path:
    """Return torch's copy of the file at an address, downloaded if there is none.

    torch verifies what it downloads. What is there already may be of anybody, in a shared cache
    or put there by hand, so it is verified here. Errors are those of `hub_file`, and a
    CheckpointError if its SHA-256 does not begin as its name says.
    """
    from torch.hub import download_url_to_file  # noqa: TID251  (it reads nothing)

    file = _torch_cache() / Path(urlparse(url).path).name
    digest = re.search(r"-([0-9a-f]{8,64})\.", file.name)
    if not file.is_file():
        with fetching(name, url):
            file.parent.mkdir(parents=True, exist_ok=True)
            download_url_to_file(url, str(file), digest and digest[1])
    if digest and not sha256(file).startswith(digest[1]):
        raise CheckpointError(
            f"{file} is not the file of its name: its SHA-256 does not begin with {digest[1]}; "
            f"remove it, so that {url} is downloaded again"
        )
    return file


def _torch_cache() -> Path:
    from torch.hub import get_dir  # noqa: TID251  (it reads nothing)

    return Path(get_dir()) / "checkpoints"


@contextlib.contextmanager
def fetching(name: str, url: str) -> Iterator[None]:
    """Turn what goes wrong in a library's download into one line: what to do instead."""
    _reach(name, url)
    try:
        with to_stderr():
            yield
    except Exception as error:  # of many kinds, by the library and its version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _missing(name, url, reason) from error


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Send what a library prints, such as the start of a download, where progress goes.

    What timm warns of, nearkin says itself, in one line.
    """
    logger = logging.getLogger("timm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def _reach(name: str, url: str) -> None:
    """Refuse, within seconds, what no network leads to; the libraries try for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise _missing(name, url, "HF_HUB_OFFLINE is set")
    if getproxies():  # then names are resolved elsewhere
        return
    host = urlparse(url)
    port = host.port or (80 if host.scheme == "http" else 443)
    try:
        socket.create_connection((str(host.hostname), port), CONNECT_SECONDS).close()
    except OSError as error:
        raise _missing(name, url, f"no connection to {host.hostname}") from error


def _missing(name: str, url: str, reason: str) -> UsageError:
    gated = " (its license has to be accepted there first)" if "gated" in reason.lower() else ""
    missing = f"the weights of {name} are not on this computer and cannot be downloaded ({reason})"
    if "/tree/" in url:
        return UsageError(f"{missing}; download {url}{gated} elsewhere, and give the folder")
    cache_hint = f"put it into {_torch_cache()}, or " if "/resolve/" not in url else ""
    return UsageError(
        f"{missing}; download {url}{gated} elsewhere, and {cache_hint}give it as {name}@FILE"
    )


# ---------------------------------------------------------------- origin and license


def origin(source: str, license_: str | None, file: Path) -> dict[str, str]:
    """Return what an encoder's file keeps of where its weights come from: no path of this machine.

    `source` is an address, or the path of a file or folder, whose name is kept; `file` holds the
    weights or, of weights in parts, their index.
    """
    license_ = license_ or NOT_STATED
    return {"source": without_folder(source), "license": license_, "sha256": sha256(file)}


def without_folder(source: str) -> str:
    """Return the last part of a path, and all of an address or name.

    >>> without_folder("/home/me/weights.pth"), without_folder("timm:resnet18.a1_in1k")
    ('weights.pth', 'timm:resnet18.a1_in1k')
    """
    return source if "://" in source else Path(source).name or source


def origin_lines(origin: Mapping[str, str]) -> list[str]:
    """Lines of the log on where weights come from and what their license is."""
    if not origin:
        return []
    license_ = origin["license"]
    stated = f"license {license_}"
    if RESTRICTED.search(license_):
        stated = f"warning: {stated}: {RESTRICTION}"
    return [f"origin  {origin['source']}, SHA-256 {origin['sha256'][:16]}", stated]


def folder_license(folder: Path) -> str:
    """Return the license that the model card of a folder names, `README.md` with front matter."""
    from huggingface_hub import metadata_load

    card, named = folder / "README.md", dict[str, Any]()
    if card.is_file() and card.stat().st_size <= MAX_CARD:
        with contextlib.suppress(Exception):  # of many kinds: what stands there may be anything
            named = metadata_load(card) or {}
    license_ = named.get("license")
    license_ = ", ".join(map(str, license_)) if isinstance(license_, list) else license_
    # `license: other` is the hub's word for one that only has a name or a link.
    stated = (license_ == "other" and named.get("license_name")) or license_ or NOT_STATED
    gated = any(key.startswith("extra_gated") for key in named)
    return " ".join(str(stated).split())[:100] + (" (gated)" if gated else "")
