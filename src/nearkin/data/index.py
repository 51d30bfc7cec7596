"""An index of what is known of each file, computed once and stored until the file changes."""

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool
from torch.utils.data import Dataset

from nearkin.data.decode import BadImage, quiet
from nearkin.data.images import Images, in_bytes
from nearkin.data.listing import Listing
from nearkin.data.loader import prefetch
from nearkin.distributed import available_cpus
from nearkin.files import whole
from nearkin.pace import ProgressCallback, tracked
from nearkin.places import cache_folder

VERSION: Final = 6  # Of the index; another version has other file names
THREADS: Final = 8  # Enough to hide the latency of a disk or of a network
BLOCK: Final = 2**6  # Files that a worker computes at once: few, or slow ones count as hung
MANY: Final = 2**14  # Files from which on starting processes pays
Record = tuple[Any, ...]  # The values of one file
Compute = Callable[[int], Record]  # Those of a row; a `BadImage` if there are none


def indexed(
    files: Listing | Images,
    name: str,
    dtype: np.dtype[Any],
    compute: Compute,
    what: str,
    on_progress: ProgressCallback,
) -> tuple[np.ndarray, dict[int, str]]:
    """A record of each file: from the index of this name or, if it is not in there, computed.

    Threads compute and, if many files are new, processes with threads. A file without a record has
    zeros and a reason. It may be no fault of the file but of a permission, a package, a disk or a
    store, so these are tried again at every start.
    """
    records, known = np.zeros(len(files.names), dtype), np.zeros(len(files.names), np.bool_)
    path = None
    if files.key:
        data = hashlib.sha256(in_bytes(files.key)).hexdigest()[:32]
        path = cache_folder("index") / f"{data}-{name}-{VERSION}.npz"
        known = _load(path, files, records)
    fresh = np.flatnonzero(~known)
    blocks = _Blocks(compute, fresh)
    workers = available_cpus() if len(fresh) >= MANY else 0
    computed = prefetch(blocks, 0, len(blocks), workers, images=BLOCK)
    answers = chain.from_iterable(tracked(computed, len(fresh), what, on_progress))
    reasons = dict[int, str]()
    for row, answer in zip(fresh.tolist(), answers, strict=True):
        if isinstance(answer, str):
            reasons[row] = answer
        else:
            records[row] = answer
            known[row] = True
    if path and len(reasons) < len(fresh):
        _save(path, files, records, known)
    return records, reasons


def by_range(name: str, images: Images) -> str:
    """Name an index of what depends on the range of the values, where they have more than 8 bits.

    New images may change the range of all.
    """
    return f"{name}{zlib.crc32(repr(images.channels).encode()) if images.channels else ''}"


def _load(path: Path, files: Listing | Images, records: np.ndarray) -> Bool[np.ndarray, " files"]:
    """Fill in the records of files that have not changed; return which rows these are."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            then = np.arange(len(records))  # as a rule; a table of millions of names is large
            if (stored := file["names"].tobytes()) != _joined(files.names):
                names = stored.decode("utf-8", "surrogateescape").split("\0")
                row_of = {name: row for row, name in enumerate(names)}
                then = np.array([row_of.get(name, -1) for name in files.names], np.int64)
            unchanged = (file["states"][then] == files.states).all(axis=1)
            unchanged &= files.states[:, 1] != 0  # what has no time may be another file
            same: np.ndarray = (then >= 0) & file["known"][then] & unchanged
            records[same] = file["records"][then[same]]
            return same
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        return np.zeros(len(records), np.bool_)  # absent or damaged: all can be computed again


def _joined(names: Sequence[str]) -> bytes:
    return in_bytes("\0".join(names))


def _save(
    path: Path, files: Listing | Images, records: np.ndarray, known: Bool[np.ndarray, " files"]
) -> None:
    """Store an index in place of the one before."""
    names = np.frombuffer(_joined(files.names), np.uint8)
    columns = {"names": names, "states": files.states, "records": records, "known": known}
    with suppress(OSError):  # a full or read-only disk costs the next start some time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as own, own.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **columns)


class _Blocks(Dataset[list[Record | str]]):
    """The records of some rows, or why there are none, block by block.

    For the loader's processes, which get `compute`, that may hold a million names, once.
    """

    def __init__(self, compute: Compute, rows: np.ndarray) -> None:
        self.compute = compute
        self.rows = np.split(rows, range(BLOCK, len(rows), BLOCK)) if len(rows) else []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[Record | str]:
        with quiet, ThreadPoolExecutor(THREADS) as pool:
            parts = np.array_split(self.rows[number], THREADS)
            answers = pool.map(lambda rows: list(map(self._answer, rows.tolist())), parts)
            return list(chain.from_iterable(answers))

    def _answer(self, row: int) -> Record | str:
        try:
            return self.compute(row)
        except BadImage as error:
            return error.reason
