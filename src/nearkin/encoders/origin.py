"""Where weights come from and what their license allows: kept in the file, printed with it."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NOT_STATED: Final = "not stated"
RESTRICTED: Final = re.compile(
    r"(^|\W)nc(\W|$)|non-?commercial|research|dinov3|seer|(^|\W)fair-|apple-am|gated|gemma", re.I
)
"""Licenses that do not allow every use, or weights that are handed out on request."""
RESTRICTION: Final = (
    "these weights are not for every use, and neither is what is trained from them; read it first"
)
FRONT_MATTER: Final = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
MAX_CARD: Final = 1_000_000  # bytes of a README that are read


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
    card = folder / "README.md"
    if not card.is_file():
        return NOT_STATED
    with card.open(encoding="utf-8", errors="replace") as opened:
        front = FRONT_MATTER.match(opened.read(MAX_CARD))
    named = {key: _entry(front[1] if front else "", key) for key in ("license", "license_name")}
    # `license: other` is the hub's word for one that only has a name or a link.
    license_ = named["license_name"] if named["license"] == "other" else named["license"]
    gated = "extra_gated" in front[1] if front else False
    return (license_ or named["license"] or NOT_STATED) + (" (gated)" if gated else "")


def _entry(front: str, key: str) -> str:
    """Return the value of a key of front matter, without its quotes."""
    line = re.search(rf"^{key}:[ \t]*(\S[^\n]*)$", front, re.MULTILINE)
    return line[1].strip().strip("'\"")[:100] if line else ""


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
