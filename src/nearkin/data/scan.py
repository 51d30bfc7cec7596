"""The index: what the header of every file says, remembered between runs."""

import hashlib
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from nearkin.data.header import MAX_BYTES, BadImage, Header, header
from nearkin.data.rgb import decode
from nearkin.data.sources import Listing, Source, Stat

VERSION: Final = 1
"""Of the remembered file; another version has another name."""
THREADS: Final = 8
"""Enough to hide the latency of a disk or of a network."""
PREFIX: Final = 2**16
"""Bytes that nearly always hold the whole header."""

Found = dict[str, tuple[Stat, Header]]
"""Each file's state when it was looked at, and its header; of a bad one, the reason as format."""


def scan(listing: Listing, *, full: bool = False, cache: bool = True) -> dict[str, Header]:
    """Read the header of every listed file, or recall it if the file has not changed since.

    The index lies in $XDG_CACHE_HOME/nearkin/index (by default in ~/.cache). Where that cannot
    be written, nothing is remembered.

    Args:
        listing: the files.
        full: decode every picture, which finds damage behind the header.
        cache: use and keep the index.

    Returns:
        Each file's header. A bad file has a `BadImage` reason as its format, and no size.
    """
    path = _index_path(listing.key, full)
    known = _recall(path) if cache else {}
    files = listing.files
    found = {name: known[name] for name, stat in files.items() if _is(known, name, stat)}
    fresh = [name for name in files if name not in found]

    def look(name: str) -> Header:
        return _look(listing.source, name, files[name].bytes, full)

    with ThreadPoolExecutor(THREADS) as pool:
        for name, seen in zip(fresh, pool.map(look, fresh), strict=True):
            found[name] = (files[name], seen)
    if cache and fresh:
        _remember(path, found)
    return {name: seen for name, (_, seen) in found.items()}


def _is(known: Found, name: str, stat: Stat) -> bool:
    return name in known and known[name][0] == stat


def _look(source: Source, name: str, size: int, full: bool) -> Header:
    try:
        if size > MAX_BYTES:
            raise BadImage("too-large")
        if full:
            decode(_read(source, name))
        try:
            return header(_read(source, name, PREFIX))
        except BadImage:
            if size <= PREFIX:
                raise
            return header(_read(source, name))
    except BadImage as error:
        return Header(error.reason, 0, 0)


def _read(source: Source, name: str, limit: int | None = None) -> bytes:
    try:
        encoded = source.read(name, limit)
    except OSError as error:
        raise BadImage("unreadable") from error
    assert isinstance(encoded, bytes), name
    return encoded


def _index_path(key: str, full: bool) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kind = "full" if full else "headers"
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return root / "nearkin" / "index" / f"{name}-{kind}-{VERSION}.npz"


def _recall(path: Path) -> Found:
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
            stats, formats, sizes = (file[key].tolist() for key in ("stats", "formats", "sizes"))
        rows = zip(names, stats, formats, sizes, strict=True)
        return {name: (Stat(*stat), Header(fmt, *size)) for name, stat, fmt, size in rows}
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}  # absent or damaged: it is only a memory


def _remember(path: Path, found: Found) -> None:
    names = "\0".join(found).encode("utf-8", "surrogateescape")
    own = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            own,
            names=np.frombuffer(names, np.uint8),
            stats=np.array([stat for stat, _ in found.values()], np.int64),
            formats=np.array([seen.format for _, seen in found.values()]),
            sizes=np.array([seen[1:] for _, seen in found.values()], np.int32),
        )
        own.replace(path)
    except OSError:  # a full or read-only disk costs the next start some time, nothing else
        with suppress(OSError):
            own.unlink()
