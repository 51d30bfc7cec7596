"""Copies among synthetic vectors with planted copies: time, peak memory and recall.

    python -m benchmarks duplicates [--counts 100000 1000000] [--dim 384] [--folder FOLDER]

The vectors fill about 26 dimensions, as a spectrum that falls like the root of the rank, and one
in fifty is a copy of another one with a cosine of .955 to .995; copies are looked for from .95 on.
They are written to FOLDER (by default a temporary one) as `nearkin embed` does, in parts. Every
step is a process of its own, in CPU time, with its peak memory above that after imports: below
200,000 vectors all are compared, by nearkin and by range_search of faiss; above, `nearkin index`
makes an index, and copies are looked for by it, by nearkin and, without comparing true features,
by faiss. Recall is the share of the planted copies that are in the cluster of what they are copies
of. Without faiss there is nothing to compare with, and no index.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

import nearkin
from benchmarks.shared.memory import alone
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from nearkin.commands.index import COPY_PROBES, SHORTLIST
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import Note, PartFolder, open_table

THRESHOLD: Final = 0.95
SHARE: Final = 50  # One in so many vectors is a copy
EXACT: Final = 200_000
BLOCK: Final = 65_536
OPTIONS: Final = (
    Option("counts", [100_000, 1_000_000], "numbers of vectors", quick=[2000]),
    Option("dim", 384, "numbers of a vector", quick=64),
    Option("folder", "", "where the vectors are written"),
)


def planted(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are copies, and the rows that they are copies of."""
    drawn = np.random.default_rng(1).permutation(count)[: 2 * (count // SHARE)]
    return drawn[::2], drawn[1::2]


def block(start: int, stop: int, dim: int) -> np.ndarray:
    """Return unit vectors of these rows, before copies are planted."""
    scale = (1 / np.sqrt(np.arange(1, dim + 1))).astype(np.float32)
    rng = np.random.default_rng((2, start))
    x = rng.standard_normal((stop - start, dim), np.float32) * scale
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def write(folder: Path, count: int, dim: int) -> None:
    """Write the vectors in parts."""
    copies, originals = planted(count)
    parts = PartFolder.claim(folder, Note("", "synthetic", count, BLOCK))
    wanted = np.empty((len(originals), dim), np.float32)
    for fill in (True, False):  # first the originals, which lie anywhere
        for number, start in enumerate(range(0, count, BLOCK)):
            stop = min(start + BLOCK, count)
            x = block(start, stop, dim)
            if fill:
                inside = (originals >= start) & (originals < stop)
                wanted[inside] = x[originals[inside] - start]
                continue
            own = np.flatnonzero((copies >= start) & (copies < stop))
            rng = np.random.default_rng((3, start))
            cosine = rng.uniform(0.955, 0.995, (len(own), 1)).astype(np.float32)
            noise = x[copies[own] - start]  # as other vectors, made orthogonal
            noise -= (noise * wanted[own]).sum(axis=1, keepdims=True) * wanted[own]
            noise /= np.linalg.norm(noise, axis=1, keepdims=True)
            x[copies[own] - start] = cosine * wanted[own] + np.sqrt(1 - cosine**2) * noise
            names = tuple(f"{row:09}.jpg" for row in range(start, stop))
            unknown = np.full(stop - start, -1)
            splits = np.full(stop - start, "")
            parts.write(number, Embeddings(x, unknown, paths=names, splits=splits))


def by_nearkin(table: Path, index: Path, count: int) -> float:
    """Look for copies; return the recall."""
    found = nearkin.duplicates(table, threshold=THRESHOLD, index=index if count >= EXACT else None)
    of = {copy.path: copy.of for copy in found.copies}
    paths = [[f"{row:09}.jpg" for row in rows.tolist()] for rows in planted(count)]
    together = [one in of and of[one] == of.get(two) for one, two in zip(*paths, strict=True)]
    return float(np.mean(together))


def by_faiss(table: Path, index: Path, count: int) -> float:
    """Search for all within the threshold, or neighbors by the index; return the recall."""
    faiss: Any = import_module("faiss")
    opened = open_table(table)
    if count < EXACT:
        x = opened.gather().numpy()
        exact = faiss.IndexFlatIP(x.shape[1])
        exact.add(x)
        ends, _, near = exact.range_search(x, THRESHOLD)
        own = np.repeat(np.arange(count), np.diff(ends.astype(np.int64)))
    else:
        by = faiss.read_index(str(index))
        by.nprobe = COPY_PROBES
        found = [by.search(part.vectors.numpy(), SHORTLIST)[1] for part in opened.blocks()]
        near, own = np.concatenate(found).ravel(), np.repeat(np.arange(count), SHORTLIST)
    keys, (copies, originals) = np.sort(own * count + near), planted(count)
    wanted = copies * count + originals, originals * count + copies
    hit = np.any([np.isin(each, keys, assume_unique=True) for each in wanted], axis=0)
    return float(hit.mean())


def build_index(table: Path, index: Path) -> None:
    """Make the index that both search."""
    nearkin.build_index(table, index)


def run(options: Namespace) -> Iterator[Row]:
    """Do the steps of each count, each in a process of its own."""
    has_faiss = find_spec("faiss") is not None
    if max(options.counts) >= EXACT and not has_faiss:
        raise SystemExit(f"an index takes faiss; without it, ask for less than {EXACT} vectors")
    for count in options.counts:
        with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
            table, index = Path(folder) / "vectors", Path(folder) / "vectors.faiss"
            case = f"{count} vectors of {options.dim}"
            alone(write, table, count, options.dim)
            if count >= EXACT:
                yield Row(f"{case}, index", alone(build_index, table, index).cpu_seconds, "CPU s")
            own = alone(by_nearkin, table, index, count)
            found = {"recall": own.result}
            if not has_faiss:
                yield Row(case, own.cpu_seconds, "CPU s", more=found | {"MB": own.megabytes})
                continue
            other = alone(by_faiss, table, index, count)
            found["recall of faiss"] = other.result
            for unit, figure in (("CPU s", "cpu_seconds"), ("MB", "megabytes")):
                one, two = ([getattr(cost, figure)] for cost in (own, other))
                yield compared(case, one, two, against="faiss", unit=unit, **found)
