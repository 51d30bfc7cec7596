"""Sealed files: written atomically, and verified by a checksum when read.

A file is its content, followed by the seal:

    "nearkin" and a line feed | length of the content, 8 bytes | SHA-256 of the content
"""

import hashlib
from pathlib import Path
from typing import Final

from nearkin.tables import PARTIAL, write_whole

MAGIC: Final = b"nearkin\n"
SEAL_SIZE: Final = len(MAGIC) + 8 + hashlib.sha256().digest_size


def seal(content: bytes) -> bytes:
    """Return the seal of a content."""
    return MAGIC + len(content).to_bytes(8, "big") + hashlib.sha256(content).digest()


def write(path: Path, content: bytes) -> None:
    """Write a sealed file, whole or not at all."""
    write_whole(path, content, seal(content))


def read(path: Path) -> bytes | None:
    """Return the content of a sealed file; None if it is damaged, absent, or was never sealed."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # another rank has set it aside since it was listed
        return None
    content = raw[:-SEAL_SIZE]
    return content if raw[-SEAL_SIZE:] == seal(content) else None


def remove_partial(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder that nobody writes to."""
    for partial in folder.glob(f"*{PARTIAL}[0-9]*"):
        partial.unlink(missing_ok=True)
