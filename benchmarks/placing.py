"""Images that the landmarks of a map leave out, placed in different ways: which neighbors stay.

python benchmarks/placing.py RUN/embeddings.parquet
python benchmarks/placing.py RUN/embeddings.parquet --landmarks 10000 --held-out 4000
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from openTSNE import affinity
from openTSNE.tsne import PartialTSNEEmbedding, TSNEEmbedding
from sklearn.manifold import trustworthiness
from sklearn.neighbors import NearestNeighbors

from nearkin.evaluation.table import open_table
from nearkin.measures.neighbors import nearest
from nearkin.report.image_map import Layout, place

K = 10


def kept(true: np.ndarray, shown: np.ndarray) -> float:
    """Return the share of each row's entries that are in the same row of the other."""
    return float(
        np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(true, shown, strict=True)])
    )


def transformed(
    layout: Layout,
    xy: np.ndarray,
    start: np.ndarray,
    index: np.ndarray,
    cosine: np.ndarray,
    steps: int,
) -> np.ndarray:
    """Return what openTSNE's `transform` makes of given neighbors, as it does by default."""
    options: dict[str, Any] = {"negative_gradient_method": "fft", "dof": 1, "n_jobs": 1}
    distance = np.maximum(0, 1 - cosine).astype(np.float64)
    form: dict[str, Any] = {"symmetrize": False, "normalization": "point-wise"}
    attraction = affinity.joint_probabilities_nn(
        index, distance, [5], n_reference_samples=len(xy), n_jobs=1, **form
    )
    whole = TSNEEmbedding(xy, layout.affinities, **options)
    some = PartialTSNEEmbedding(start, whole, attraction, **options)
    limits: dict[str, Any] = {"max_grad_norm": 0.25, "max_step_norm": None}
    some.optimize(steps, exaggeration=1.5, learning_rate=0.1, momentum=0.8, inplace=True, **limits)
    return np.array(some)


def main() -> None:
    """Print a line per way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--landmarks", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=4_000)
    options = parser.parse_args()
    table = open_table(options.vectors)
    order = np.random.default_rng(0).permutation(len(table))
    landmarks = table.gather(np.sort(order[: options.landmarks]))
    others = table.gather(np.sort(order[options.landmarks :][: options.held_out]))
    layout = Layout(landmarks.numpy(), threads=1)
    xy = layout.optimized()
    cosine, index = (each.numpy() for each in nearest(landmarks, others, 15))
    true = nearest(others, others, K, exclude_self=True)[1].numpy()
    near, weights = xy[index[:, :K]], 1 / np.maximum(2 - 2 * cosine[:, :K, None], 2e-7)
    start = place(others.numpy(), landmarks.numpy(), xy)
    ways: dict[str, Callable[[], np.ndarray]] = {
        "geometric median": lambda: place(others.numpy(), landmarks.numpy(), xy),
        "mean": lambda: (near * weights).sum(axis=1) / weights.sum(axis=1),
        "transform, 50 steps": lambda: transformed(layout, xy, start, index, cosine, 50),
        "transform, 250 steps": lambda: transformed(layout, xy, start, index, cosine, 250),
    }
    print("way                    trustworthiness   kept   landmarks kept   CPU time")
    for name, way in ways.items():
        begun = process_time()
        placed = way()
        seconds = process_time() - begun
        shown = NearestNeighbors(n_neighbors=K + 1).fit(placed).kneighbors(placed)[1][:, 1:]
        among = NearestNeighbors(n_neighbors=K).fit(xy).kneighbors(placed)[1]
        trust = trustworthiness(others.numpy(), placed, n_neighbors=K, metric="cosine")
        print(
            f"{name:22s} {trust:15.4f} {kept(true, shown):6.4f} "
            f"{kept(index[:, :K], among):16.4f} {seconds:8.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
