"""Where weights come from and what their license allows: kept in the file, printed with it."""

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

NOT_STATED: Final = "not stated"
RESTRICTED: Final = re.compile(
    r"(^|\W)nc(\W|$)|non-?commercial|research|dinov3|seer|(^|\W)fair-|apple-am|gated|gemma", re.I
)
"""Licenses that do not allow every use, or weights that are handed out on request."""
RESTRICTION: Final = (
    "these weights are not for every use, and neither is what is trained from them; read it first"
)
MAX_CARD: Final = 1_000_000  # bytes of a README that is read


def origin(source: str, license_: str | None, file: Path | None) -> dict[str, str]:
    """Return what an encoder's file keeps of where its weights come from: no path of this machine.

    Args:
        source: An address, or the path of a file or folder, whose name is kept.
        license_: The license that the source names.
        file: The weights, whose checksum is kept; None if it is not known which file was read.
    """
    checksum = sha256(file) if file else ""
    return {
        "source": without_folder(source),
        "license": license_ or NOT_STATED,
        "sha256": checksum,
    }


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
    checksum = f", SHA-256 {origin['sha256'][:16]}" if origin["sha256"] else ""
    lines, license_ = [f"origin  {origin['source']}{checksum}"], origin["license"]
    if RESTRICTED.search(license_):
        return [*lines, f"warning: license {license_}: {RESTRICTION}"]
    return [*lines, f"license {license_}"]


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


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
