"""Weights that a library downloads: where they lie, and one line if they cannot be had."""

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlparse
from urllib.request import getproxies

from nearkin.encoders.layout import DESCRIPTIONS, is_folder, weights_among
from nearkin.encoders.origin import sha256
from nearkin.errors import CheckpointError, NearkinError, UsageError

CONNECT_SECONDS: Final = 5.0  # that a server may take to answer before weights are out of reach
HUB_NAMES: Final = ("model.safetensors", "pytorch_model.bin")
"""Files of weights in a repository of timm's on the Hugging Face hub, in the order it tries."""


def hub_file(name: str, repository: str, filename: str | None = None) -> Path:
    """Return the file of a repository on the Hugging Face hub, downloaded into its cache.

    A file in the cache is taken as it is, without asking the hub whether there is a newer one:
    the same command gives the same features, with a network and without.

    Args:
        name: The encoder, for messages.
        repository: `owner/name`, or `owner/name@revision`.
        filename: If not one of `HUB_NAMES`.

    Raises:
        UsageError: If it is not there and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, revision = repository.partition("@")
    names = (filename,) if filename else HUB_NAMES
    for each in names:
        cached = try_to_load_from_cache(repository, each, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached)
    page = f"{ENDPOINT}/{repository}/resolve/{revision or 'main'}/{names[0]}"
    _reach(name, page)
    with fetching(name, page):
        for each in names:
            try:
                return Path(hf_hub_download(repository, each, revision=revision or None))
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue
    raise UsageError(f"{ENDPOINT}/{repository} has no weights that nearkin reads")


def hub_folder(name: str, repository: str) -> Path:
    """Return a repository of the Hugging Face hub as a folder: config.json, model card, weights.

    Of several formats of the same weights, one is downloaded, into the hub's own cache. What is
    there is taken as it is, as by `hub_file`.

    Args:
        name: The encoder, for messages.
        repository: `owner/name`, or `owner/name@revision`.

    Raises:
        UsageError: If it is not there and cannot be downloaded, or has no weights that are read.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = repository.partition("@")
    at = revision or "main"
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(repository, revision=at, local_files_only=True))
        if is_folder(cached) and weights_among([file.name for file in cached.iterdir()]):
            return cached
    page = f"{ENDPOINT}/{repository}/tree/{at}"
    _reach(name, page)
    with fetching(name, page):
        files = HfApi().list_repo_files(repository, revision=at)
        wanted = [*DESCRIPTIONS, *weights_among(files)]
        folder = Path(snapshot_download(repository, revision=at, allow_patterns=wanted))
    if not is_folder(folder):
        raise UsageError(
            f"{ENDPOINT}/{repository} has no config.json: it is of neither timm nor transformers"
        )
    return folder


def torch_file(url: str) -> Path:
    """Return where torch keeps the file of an address."""
    from torch.hub import get_dir  # noqa: TID251  (it reads nothing)

    return Path(get_dir()) / "checkpoints" / Path(urlparse(url).path).name


def need_torch_file(name: str, url: str) -> Path:
    """Return torch's copy of the file at an address, downloaded if there is none.

    torch verifies what it downloads. What is there already may be of anybody, in a shared cache
    or put there by hand, so it is verified here.

    Raises:
        UsageError: If it cannot be had, with what to download, and where to put it.
        CheckpointError: If its SHA-256 does not begin as its name says.
    """
    from torch.hub import download_url_to_file  # noqa: TID251  (it reads nothing)

    file = torch_file(url)
    digest = re.search(r"-([0-9a-f]{8,64})\.", file.name)
    if not file.is_file():
        _reach(name, url)
        with fetching(name, url):
            file.parent.mkdir(parents=True, exist_ok=True)
            download_url_to_file(url, str(file), digest and digest[1])
    if digest and not sha256(file).startswith(digest[1]):
        raise CheckpointError(
            f"{file} is not the file of its name: its SHA-256 does not begin with {digest[1]}; "
            f"remove it, so that {url} is downloaded again"
        )
    return file


@contextlib.contextmanager
def fetching(name: str, url: str) -> Iterator[None]:
    """Turn what goes wrong in a library's download into one line: what to do instead."""
    try:
        with to_stderr():
            yield
    except NearkinError:
        raise
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
    host = urlparse(url)
    if getproxies():  # then names are resolved elsewhere
        return
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
    cache_hint = f"put it into {torch_file(url).parent}, or " if "/resolve/" not in url else ""
    return UsageError(
        f"{missing}; download {url}{gated} elsewhere, and {cache_hint}give it as {name}@FILE"
    )
