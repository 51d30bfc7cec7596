"""The layout of images in the plane: t-SNE of landmarks, by which all others are placed."""

import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from threadpoolctl import threadpool_limits
from torch import Tensor

from nearkin.data.images import Images
from nearkin.distributed import available_cpus, free_memory
from nearkin.evaluation.table import read_embeddings
from nearkin.files import read_arrays, sha256, usable, write_whole
from nearkin.metrics.components import principal_components
from nearkin.metrics.neighbors import Nearest, nearest
from nearkin.metrics.selection import balanced
from nearkin.run.folder import RunFolder

MAX_IMAGES: Final = 1_000_000  # a map of more images shows a sample that is balanced over classes
LANDMARKS: Final = 20_000  # of more images, a balanced sample is laid out, and places the others
NEIGHBORS: Final = 12
FEW: Final = 10_000  # images up to which t-SNE is as fast in one thread as in several
PERPLEXITY: Final = 30
# Iterations of t-SNE after its early exaggeration: 500 is usual. The last ones cost the most, as
# the map has spread by then. Of 20,000 images of CIFAR-10 the whole takes 20 s of CPU time instead
# of 55, and 34.0 % of the nearest neighbors stay neighbors instead of 34.4 %.
ITERATIONS, ITERATIONS_OF_MANY = 500, 250
MOST_NEIGHBORS: Final = 3 * PERPLEXITY  # that attract an image in t-SNE
CHECKED: Final = 10  # iterations of t-SNE after which a thread sees whether it is to stop
MIN_TSNE: Final = 4  # of fewer images, the principal components show everything
ANCHORS: Final = 10  # images by which a new one is placed, no more than `NEIGHBORS`
BLOCK: Final = 4_096  # images that are placed, or decoded, at once

Vectors = Float32[np.ndarray, "n dim"]
Rows = Int[np.ndarray, " n"]
Coordinates = Float[np.ndarray, "n 2"]


def map_rows(
    labels: np.ndarray, landmarks: int = LANDMARKS
) -> tuple[Int[np.ndarray, " on_map"], Int[np.ndarray, " landmarks"]]:
    """Return which images are on the map, and which of these are its landmarks."""
    on_map = balanced(labels, MAX_IMAGES)
    return on_map, balanced(labels[on_map], landmarks)


def landmark_rows(labels: np.ndarray) -> Int[np.ndarray, " landmarks"]:
    """Return which images are the landmarks of the map."""
    on_map, among = map_rows(labels)
    return np.take(on_map, among)


def coordinates(
    folder: RunFolder | None, vectors: Vectors, rows: Rows, neighbors: Nearest | None = None
) -> Coordinates:
    """Return the stored coordinates if they belong to these rows and embeddings, else new ones.

    Without a folder, or in one that cannot be written to, they are computed each time.
    `neighbors` are those of `Layout`.
    """
    stored = None if folder is None else _stored(folder, rows)
    return stored if stored is not None else _computed(folder, rows, Layout(vectors, neighbors))


def _stored(folder: RunFolder, rows: Rows) -> Coordinates | None:
    """Return the coordinates in a run folder; None unless they are of these rows."""
    if not folder.map.exists():
        return None
    advice = "remove it, and it is made anew"
    with usable(folder.map, advice), folder.map.open("rb") as file:
        arrays = read_arrays(file, free_memory())
        fingerprint, of, xy = (arrays[name] for name in ("fingerprint", "rows", "xy"))
    fits = np.array_equal(of, rows) and str(fingerprint) == sha256(folder.embeddings)
    return xy if fits else None


def _computed(
    folder: RunFolder | None, rows: Rows, layout: "Layout", stop: Event | None = None
) -> Coordinates:
    """Compute coordinates, and store them in the run folder if it can be written to."""
    if folder is None:
        return layout.optimized(stop)
    fingerprint, content = np.array(sha256(folder.embeddings)), io.BytesIO()
    xy = layout.optimized(stop)
    np.savez(content, allow_pickle=False, fingerprint=fingerprint, rows=rows, xy=xy)
    with suppress(OSError):
        write_whole(folder.map, content.getvalue())
    return xy


class EarlyMap:
    """The coordinates of a run's map, computed by a thread beside whatever else is to be done.

    They are the same as without a thread. Most of t-SNE keeps one CPU busy, however many there
    are. On leaving the `with` block, an unfinished computation is given up.
    """

    def __init__(self, folder: RunFolder, images: Images) -> None:
        self._folder, self._images = folder, images
        self._stop, self._pool = Event(), ThreadPoolExecutor(1)

    def start(self) -> None:
        """Begin, as soon as the run folder has its embeddings."""
        embeddings = read_embeddings(self._folder.embeddings, self._images)
        rows = landmark_rows(embeddings.class_names)
        if _stored(self._folder, rows) is not None:
            return
        # Not in the thread: the number of threads of matrix products is one for all.
        layout = Layout(embeddings.vectors[rows])
        # Whoever needs the map computes it if that fails, and meets the error.
        self._pool.submit(_computed, self._folder, rows, layout, self._stop)

    def wait(self) -> None:
        """Wait until the coordinates are stored, if they are on the way."""
        self._pool.shutdown()

    def __enter__(self) -> "EarlyMap":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self.wait()


class Layout:
    """T-SNE of cosine distances: where it starts, and what attracts the images.

    Deterministic to the bit: it starts at the principal components, with exact neighbors.
    `neighbors` are the `MOST_NEIGHBORS` nearest others of each image, if they are known.
    """

    def __init__(self, features: Vectors, neighbors: Nearest | None = None) -> None:
        self.threads = available_cpus() if len(features) > FEW else 1
        length = np.linalg.norm(features, axis=1, keepdims=True)
        unit = features / np.where(length > 0, length, 1)
        self.affinities: Any = None
        with threadpool_limits(self.threads):  # products round differently per number of threads
            self.start = _principal_components(unit)
        if len(unit) < MIN_TSNE or not self.start.any():
            return
        if neighbors is None:
            bank = torch.from_numpy(features)
            neighbors = nearest(bank, bank, MOST_NEIGHBORS, exclude_self=True)
        similarity, index = (each.numpy() for each in neighbors)
        from openTSNE.affinity import PerplexityBasedNN
        from openTSNE.nearest_neighbors import PrecomputedNeighbors

        self.affinities = PerplexityBasedNN(
            knn_index=PrecomputedNeighbors(index, np.maximum(0, 1 - similarity)),
            perplexity=min(PERPLEXITY, index.shape[1] / 3),
            n_jobs=self.threads,
        )

    def optimized(self, stop: Event | None = None) -> Coordinates:
        """Return the coordinates; InterruptedError once `stop` is set."""
        if self.affinities is None:
            return self.start
        from openTSNE import TSNE

        def check(*_: object) -> None:
            if stop and stop.is_set():
                raise InterruptedError

        small = self.start * (1e-4 / self.start[:, 0].std())  # as van der Maaten's t-SNE starts
        method = TSNE(
            n_iter=ITERATIONS if len(small) <= FEW else ITERATIONS_OF_MANY,
            n_jobs=self.threads,
            callbacks=check,
            callbacks_every_iters=CHECKED,
        )
        xy = method.fit(affinities=self.affinities, initialization=small)
        return np.array(xy, dtype=np.float64)


def place(
    new: Float32[np.ndarray, "m dim"], features: Vectors, xy: Coordinates
) -> Float[np.ndarray, "m 2"]:
    """Return coordinates of new images on the map of these features.

    An image of the map lands on itself, and one between two groups in one of them: a mean of
    places, other than their median, would be between.
    """
    bank = torch.from_numpy(features)
    similarity, anchors = nearest(bank, torch.from_numpy(new), ANCHORS)
    return _medians(xy[anchors.numpy()], similarity.numpy())


def _medians(
    near: Float[np.ndarray, "m k 2"], similarity: Float32[np.ndarray, "m k"]
) -> Float[np.ndarray, "m 2"]:
    """The geometric median of each row's places, nearly, weighted by inverse squared distances.

    Five steps by Weiszfeld (1937) from the median of each coordinate, which many rows share.
    """
    weights = 1 / np.maximum(2 - 2 * similarity.astype(np.float64), 2e-7)
    order = near.argsort(axis=1, kind="stable")
    cumulated = np.take_along_axis(weights[:, :, None], order, axis=1).cumsum(axis=1)
    middle = (cumulated >= cumulated[:, -1:] / 2).argmax(axis=1, keepdims=True)
    xy = np.take_along_axis(np.take_along_axis(near, order, axis=1), middle, axis=1)
    for _ in range(5):
        distance = np.linalg.norm(near - xy, axis=2)
        pull = (weights / np.maximum(distance, 1e-9))[:, :, None]
        xy = (near * pull).sum(axis=1, keepdims=True) / pull.sum(axis=1, keepdims=True)
    return xy[:, 0]


class Places(NamedTuple):
    """Where images lie, and the landmarks that they are most similar to."""

    xy: Coordinates
    similarity: Float32[np.ndarray, "n k"]
    neighbors: Int[np.ndarray, "n k"]


def placed(
    blocks: Iterable[Float[Tensor, "_ d"]],
    landmarks: Float[Tensor, "l d"],
    own: Places,
    among: Int[np.ndarray, " l"],
) -> Places:
    """Place many images by their nearest landmarks as `place` does, with one block in memory.

    The median keeps more neighbors than a mean or `transform` of openTSNE; see docs/benchmarks.md.
    The landmarks are the images `among` all, with places of their `own`.
    """
    pieces = list[Places]()
    for block in blocks:
        similarity, near = (each.numpy() for each in nearest(landmarks, block, NEIGHBORS))
        xy = _medians(own.xy[near[:, :ANCHORS]], similarity[:, :ANCHORS])
        width = own.neighbors.shape[1]
        pieces.append(Places(xy, similarity[:, :width], near[:, :width]))
    places = Places(*map(np.concatenate, zip(*pieces, strict=True)))
    for column, values in zip(places, own, strict=True):
        column[among] = values
    return places


def z_order(xy: Coordinates) -> Rows:
    """Return points along a Z-order curve, on which neighbors are mostly close to each other.

    >>> z_order(np.array([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [9.0, 8.0]])).tolist()
    [0, 2, 3, 1]
    """
    low = xy.min(axis=0)
    cells = ((xy - low) * (65_535 / max(1e-9, (xy - low).max()))).astype(np.int64)
    bits = [(cells >> bit & 1) << (2 * bit + np.arange(2)) for bit in range(16)]
    return np.argsort(np.sum(bits, axis=(0, 2)), kind="stable")


def _principal_components(unit: Vectors) -> Coordinates:
    scores = np.zeros((len(unit), 2))
    count = min(2, *unit.shape)
    if count and np.ptp(unit, axis=0).max() > 1e-6:  # more than rounding
        x = unit.astype(np.float64)
        mean, directions = principal_components(x, count)
        scores[:, :count] = x @ directions - mean @ directions
    return scores
