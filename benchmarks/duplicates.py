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
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

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
            inside = np.flatnonzero((copies >= start) & (copies < stop))
            rng = np.random.default_rng((3, start))
            cosine = rng.uniform(0.955, 0.995, (len(inside), 1)).astype(np.float32)
            noise = x[copies[inside] - start]  # as other vectors, made orthogonal
            noise -= (noise * wanted[inside]).sum(axis=1, keepdims=True) * wanted[inside]
            noise /= np.linalg.norm(noise, axis=1, keepdims=True)
            x[copies[inside] - start] = cosine * wanted[inside] + np.sqrt(1 - cosine**2) * noise
            names = tuple(f"{row:09}.jpg" for row in range(start, stop))
            unknown = np.full(stop - start, -1)
            splits = np.full(stop - start, "")
            parts.write(number, Embeddings(x, unknown, paths=names, splits=splits))


def recall(pairs: set[tuple[str, str]], count: int, of: dict[str, str]) -> str:
    """Say which share of the planted copies was found."""
    copies, originals = planted(count)
    found = 0
    for copy, original in zip(copies.tolist(), originals.tolist(), strict=True):
        one, two = f"{copy:09}.jpg", f"{original:09}.jpg"
        found += of.get(one, one) == of.get(two, two) or bool(pairs & {(one, two), (two, one)})
    return f"recall {found / len(copies):.4f} of {len(copies)}"


def step(name: str, folder: Path, count: int, dim: int) -> str:
    """Do one step; return what to print."""
    table, index = folder / "vectors", folder / "vectors.faiss"
    if name == "write":
        write(table, count, dim)
        return ""
    if name == "index":
        import nearkin

        return nearkin.build_index(table, index).kind
    if name == "nearkin":
        import nearkin

        by = index if count >= EXACT else None
        found = nearkin.duplicates(table, threshold=THRESHOLD, index=by)
        of = {copy.path: copy.of for copy in found.copies}
        return f"{recall(set(), count, of)}; {len(found.dropped)} dropped"
    return faiss_alone(table, index, count)


def faiss_alone(table: Path, index: Path, count: int) -> str:
    """Search with faiss: all within the threshold, or ten neighbors of each by the index."""
    import faiss

    from nearkin.commands.index import COPY_PROBES, SHORTLIST
    from nearkin.evaluation.table import open_table

    opened, pairs = open_table(table), set[tuple[str, str]]()
    if count < EXACT:
        x = opened.gather().numpy()
        exact = faiss.IndexFlatIP(x.shape[1])
        exact.add(x)
        ends, _, near = exact.range_search(x, THRESHOLD)
        own = np.repeat(np.arange(len(x)), np.diff(ends).astype(np.int64))
    else:
        by = faiss.read_index(str(index))
        by.nprobe = COPY_PROBES
        found = [by.search(part.vectors.numpy(), SHORTLIST)[1] for part in opened.blocks()]
        near, own = np.concatenate(found).ravel(), np.repeat(np.arange(count), SHORTLIST)
    copies, originals = planted(count)
    wanted = set(zip(copies.tolist(), originals.tolist(), strict=True))
    pairs = wanted & (set(zip(own.tolist(), near.tolist(), strict=True)) if count < EXACT else wanted)
    if count >= EXACT:
        keys = np.sort(own * count + near)
        both = [copies * count + originals, originals * count + copies]
        hit = np.any([keys[np.searchsorted(keys, k).clip(max=len(keys) - 1)] == k for k in both], 0)
        return f"recall {hit.mean():.4f} among ten neighbors, not compared"
    return f"recall {len(pairs) / len(copies):.4f}"
