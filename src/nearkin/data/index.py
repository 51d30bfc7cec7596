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
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64, UInt8

VERSION: Final = 1
"""Of the remembered files; another version has other names."""


def kept_folder(kind: str) -> Path:
    """The user's own folder for one kind of what can be found out again."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "nearkin" / kind


def index_path(key: str, kind: str) -> Path:
    """Where one kind of finding about the data at a place is remembered."""
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return kept_folder("index") / f"{name}-{kind}-{VERSION}.npz"


def recall(
    path: Path,
    names: Sequence[str],
    states: Int64[np.ndarray, "files 2"],
    columns: Mapping[str, np.ndarray],
) -> Bool[np.ndarray, " files"]:
    """Fill in what is remembered of each file that is as it was when it was looked at.

    Args:
        path: Where it is remembered.
        names: The files as they are now.
        states: Their bytes and when they were written.
        columns: A row for each file, to be filled in.

    Returns:
        Which rows are filled in.
    """
    known = np.zeros(len(names), np.bool_)
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            then, now = _common(file["names"], names)
            same = (file["stats"][then] == states[now]).all(axis=1)
            for name, column in columns.items():
                column[now[same]] = file[name][then[same]]
            known[now[same]] = True
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        known[:] = False  # absent or damaged: it is only a memory
    return known


def _common(
    stored: UInt8[np.ndarray, " bytes"], names: Sequence[str]
) -> tuple[Int64[np.ndarray, " common"], Int64[np.ndarray, " common"]]:
    """The rows then, and now, of the names that there were and still are."""
    if np.array_equal(stored, _joined(names)):
        return np.arange(len(names)), np.arange(len(names))
    then_names = stored.tobytes().decode("utf-8", "surrogateescape").split("\0")
    then = {name: row for row, name in enumerate(then_names)}
    rows = np.array([then.get(name, -1) for name in names], np.int64)
    return rows[rows >= 0], np.flatnonzero(rows >= 0)


def _joined(names: Sequence[str]) -> UInt8[np.ndarray, " bytes"]:
    return np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), np.uint8)


def remember(
    path: Path,
    names: Sequence[str],
    states: Int64[np.ndarray, "files 2"],
    columns: Mapping[str, np.ndarray],
) -> None:
    """Keep one value per file and column, in place of all that was remembered there."""
    own = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(own, allow_pickle=False, names=_joined(names), stats=states, **columns)
        own.replace(path)
    except OSError:  # a full or read-only disk costs the next start some time, nothing else
        with suppress(OSError):
            own.unlink()
