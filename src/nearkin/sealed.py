"""Sealed files: written whole or not at all, and proving themselves whole when read.

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
    """What proves that nothing of the content has changed, and nothing is missing."""
    return MAGIC + len(content).to_bytes(8, "big") + hashlib.sha256(content).digest()


def write(path: Path, content: bytes) -> None:
    """Make a sealed file appear at once and for good; see `write_whole`."""
    write_whole(path, content, seal(content))


def read(path: Path) -> bytes | None:
    """The content of a sealed file; None if the file is damaged, absent, or was never sealed."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # listed a moment ago; another rank has set it aside since
        return None
    content = raw[:-SEAL_SIZE]
    return content if raw[-SEAL_SIZE:] == seal(content) else None


def remove_partial(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder that nobody is writing to."""
    for partial in folder.glob(f"*{PARTIAL}[0-9]*"):
        partial.unlink(missing_ok=True)
