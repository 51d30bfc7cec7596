"""What was found out about files, remembered between runs for as long as they do not change.

Lies in $XDG_CACHE_HOME/nearkin/index (by default in ~/.cache). Where that cannot be written,
nothing is remembered.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from nearkin.data.sources import Stat

VERSION: Final = 1
"""Of the remembered files; another version has other names."""


def index_path(key: str, kind: str) -> Path:
    """Where one kind of finding about the data at a place is remembered."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return root / "nearkin" / "index" / f"{name}-{kind}-{VERSION}.npz"


def recall(
    path: Path, files: Mapping[str, Stat], columns: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """What these columns say of each file that is as it was when it was looked at."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
            stats = [Stat(*stat) for stat in file["stats"].tolist()]
            values = zip(*(file[column] for column in columns), strict=True)
        rows = zip(names, stats, values, strict=True)
        return {name: said for name, stat, said in rows if files.get(name) == stat}
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}  # absent or damaged: it is only a memory


def remember(path: Path, files: Mapping[str, Stat], columns: Mapping[str, np.ndarray]) -> None:
    """Keep one value per file and column, in place of all that was remembered there."""
    names = "\0".join(files).encode("utf-8", "surrogateescape")
    own = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            own,
            allow_pickle=False,
            names=np.frombuffer(names, np.uint8),
            stats=np.array(list(files.values()), np.int64),
            **columns,
        )
        own.replace(path)
    except OSError:  # a full or read-only disk costs the next start some time, nothing else
        with suppress(OSError):
            own.unlink()
