"""Copies among synthetic vectors with planted copies: time, peak memory and recall.

    python benchmarks/duplicates.py [--counts 100000 1000000] [--dim 384] [--folder FOLDER]

The vectors fill about 26 dimensions, as a spectrum that falls like the root of the rank, and one
in fifty is a copy of another one with a cosine of .955 to .995; copies are looked for from .95 on.
They are written to FOLDER (by default a temporary one) as `nearkin embed` does, in parts. Every
step is a process of its own, whose peak memory is printed with wall and CPU time: below 200,000
vectors all are compared, by nearkin and by range_search of faiss; above, `nearkin index` makes an
index, and copies are looked for by it, by nearkin and, without comparing true features, by faiss.
Recall is the share of the planted copies that are in the cluster of what they are copies of.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

THRESHOLD: Final = 0.95
SHARE: Final = 50  # One in so many vectors is a copy
EXACT: Final = 200_000
BLOCK: Final = 65_536


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
    from nearkin.evaluation.embeddings import Embeddings
    from nearkin.evaluation.table import Note, PartFolder

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


def step(name: str, folder: Path, count: int, dim: int) -> str:
    """Do one step; return what to print."""
    table, index = folder / "vectors", folder / "vectors.faiss"
    if name == "write":
        write(table, count, dim)
        return f"{count} x {dim}"
    import nearkin

    if name == "index":
        return nearkin.build_index(table, index).kind
    if name == "faiss":
        return faiss_alone(table, index, count)
    by = index if count >= EXACT else None
    found = nearkin.duplicates(table, threshold=THRESHOLD, index=by)
    of = {copy.path: copy.of for copy in found.copies}
    paths = [[f"{row:09}.jpg" for row in rows.tolist()] for rows in planted(count)]
    together = [one in of and of[one] == of.get(two) for one, two in zip(*paths, strict=True)]
    sampled = found.recall_of_index()
    return f"recall {np.mean(together):.4f}; {len(found.dropped)} dropped; {sampled}"


def faiss_alone(table: Path, index: Path, count: int) -> str:
    """Search with faiss: all within the threshold, or neighbors of each by the index."""
    from nearkin.commands.index import COPY_PROBES, SHORTLIST
    from nearkin.evaluation.table import open_table

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
    return f"recall {hit.mean():.4f}"


def main() -> None:
    """Do the steps of each count, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.step:
        (name, folder), (count,) = typed.step, typed.counts
        start = time.perf_counter()
        told = step(name, Path(folder), count, typed.dim)
        wall, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        print(
            f"{name:8} {wall:7.0f} s, {used.ru_utime + used.ru_stime:7.0f} s of CPU time, "
            f"{used.ru_maxrss / 1e6:6.2f} GB; {told}"
        )
        return
    for count in typed.counts:
        print(f"{count} vectors of {typed.dim}", flush=True)
        by_index = ["index"] if count >= EXACT else []
        steps = ["write", *by_index, "nearkin", "faiss"]
        with tempfile.TemporaryDirectory(dir=typed.folder) as folder:
            for name in steps:
                size = ["--counts", str(count), "--dim", str(typed.dim)]
                subprocess.run(
                    [sys.executable, __file__, *size, "--step", name, folder], check=True
                )


if __name__ == "__main__":
    main()
