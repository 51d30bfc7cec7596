"""The map of a run: t-SNE coordinates, nearest neighbors, colorings; thumbnails of its images."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from PIL import Image
from threadpoolctl import threadpool_limits
from torch import Tensor

from nearkin.data.batches import CenterCrops, squares
from nearkin.data.channels import preview
from nearkin.data.decode import MIDDLE_GRAY
from nearkin.data.images import SMALL_SIDE, Images
from nearkin.distributed import available_cpus
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measures import knn_classes
from nearkin.evaluation.table import digest, read_embeddings
from nearkin.measures.matching import cluster_accuracy
from nearkin.measures.neighbors import nearest
from nearkin.report.page.map import Coloring, ImageMap
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, usable, write_whole

MAX_IMAGES: Final = 20_000  # a map of more images shows a sample that is balanced over classes
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
ANCHORS: Final = 10  # images by which a new one is placed


Nearest = tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]
"""The cosine similarity of each image's nearest others, most similar first, and which they are."""


def image_map(
    folder: RunFolder, embeddings: Embeddings, images: Images, early: "EarlyMap | None" = None
) -> ImageMap | None:
    """Return the map of a run; None if fewer than two images can be shown.

    Coordinates are stored in the run folder, so that a map stays the same for the same
    embeddings. `early` is on the way to store them.
    """
    if len(embeddings.rows) < 2:
        return None
    rows = balanced(embeddings.class_names, MAX_IMAGES)
    vectors = torch.from_numpy(embeddings.vectors[rows])
    # One search for the page and for t-SNE.
    similarity, neighbors = nearest(vectors, vectors, MOST_NEIGHBORS, exclude_self=True)
    sheets, side = tiles(images.subset(embeddings.rows[rows]), workers=available_cpus())
    colored = colorings(folder, embeddings, rows)
    if early:
        early.wait()  # last: all else is computed meanwhile
    return ImageMap(
        number=embeddings.rows[rows],
        names=tuple(embeddings.paths[row] for row in rows.tolist()),
        xy=coordinates(folder, embeddings.vectors[rows], rows, (similarity, neighbors)),
        neighbors=neighbors[:, :NEIGHBORS].numpy().astype(np.int32),
        similarity=similarity[:, :NEIGHBORS].numpy(),
        colorings=colored,
        sheets=sheets,
        side=side,
        columns=COLUMNS,
        per_sheet=PER_SHEET,
        total=len(embeddings.rows),
    )


def balanced(labels: np.ndarray, max_rows: int) -> Int[np.ndarray, " rows"]:
    """Sample at most this many rows, as equally over classes and evenly within them as possible.

    Rows without a label are a class of their own.

    >>> balanced(np.array(["a", "a", "a", "a", "b"]), 3).tolist()
    [0, 3, 4]
    """
    if len(labels) <= max_rows:
        return np.arange(len(labels))
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    shares, left = np.zeros(len(sizes), np.int64), max_rows
    # Small classes first: what they cannot use is left to the others.
    for done, number in enumerate(np.argsort(sizes, kind="stable")):
        shares[number] = min(sizes[number], left // (len(sizes) - done))
        left -= shares[number]
    rows = [
        np.flatnonzero(class_of == number)[np.linspace(0, size - 1, share).astype(np.int64)]
        for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    return np.sort(np.concatenate(rows))


# ---- colorings ----


def colorings(
    folder: RunFolder, embeddings: Embeddings, rows: Int[np.ndarray, " rows"]
) -> tuple[Coloring, ...]:
    """Return the colorings of these rows, the most informative first, without constant ones."""
    if folder.clusters.exists():
        candidates = _of_discovery(folder, embeddings)
    elif folder.assignments.exists():
        candidates = _of_classification(folder, embeddings)
    else:
        candidates = _of_training(embeddings)
    return tuple(
        Coloring(one.name, one.values[rows], one.classes, one.note)
        for one in candidates
        if len(one.classes) != 1
        and ((one.values[rows] >= 0) if one.classes else np.isfinite(one.values[rows])).any()
    )


def _of_training(embeddings: Embeddings) -> Iterator[Coloring]:
    yield by_name("Label", embeddings.class_names, note="The class in your data.")
    predicted = knn_classes(embeddings)
    correct = np.where(embeddings.class_names == predicted, "correct", "incorrect")
    correct[predicted == ""] = ""
    yield by_name("Correct", correct, note="Whether kNN predicts the class of a held-out image.")
    yield by_name("Split", embeddings.splits, note="Held-out images (test) were not trained on.")


def _of_discovery(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    clusters = {row["cluster"]: row for row in read_csv(folder.clusters)}
    by_path = {row["path"]: row for row in read_csv(folder.assignments)}
    rows = [by_path.get(name, {}) for name in embeddings.paths]  # labeled images have none
    names = [
        display_name(clusters[row["cluster"]]) if row else label
        for row, label in zip(rows, embeddings.class_names.tolist(), strict=True)
    ]
    yield by_name("Class", names, note="The predicted class; of labeled images, their label.")
    kinds = [f"predicted {clusters[row['cluster']]['kind']}" if row else "labeled" for row in rows]
    yield by_name("Known or novel", kinds, note="Labeled images came with their class.")
    scores = np.array([row.get("score") or "nan" for row in rows], np.float32)
    note = "Confidence of the classifier in the predicted class."
    yield Coloring("Score", scores, note=note)
    cluster = np.array([row.get("cluster", "") for row in rows])
    yield from _of_ground_truth(cluster, embeddings.class_names)


def _of_classification(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    by_path = {row["path"]: row for row in read_csv(folder.assignments)}
    rows = [by_path.get(name, {}) for name in embeddings.paths]  # none, if it was learned from
    labels = embeddings.class_names
    predicted = np.array([row.get("cluster", "") for row in rows])
    both = np.where(predicted == "", labels, predicted)
    note = "The predicted class; of images that were learned from, their label."
    yield by_name("Class", both, note=note)
    yield by_name("Label", labels, note="The class in your data.")
    scored = (predicted != "") & (labels != "")
    correct = np.where(predicted == labels, "correct", "incorrect")
    note = "Whether the class of a held-out image is predicted."
    yield by_name("Correct", np.where(scored, correct, ""), note=note)
    scores = np.array([row.get("score") or "nan" for row in rows], np.float32)
    yield Coloring("Score", scores, note="Calibrated probability of the predicted class.")
    kinds = np.where(labels == "", "no label", np.where(predicted == "", "learned from", "test"))
    yield by_name("Role", kinds, note="Which images were learned from, and which scored.")
    flags = np.array([row.get("flag", "") for row in rows])
    yield by_name("Flag", flags, note="unlike: like no class; border: between two; core: sure.")


def display_name(row: Mapping[str, str]) -> str:
    """Return the name that the user gave to a class in clusters.csv, or else its cluster."""
    return row["name"].strip() or row["cluster"]


def _of_ground_truth(cluster: np.ndarray, labels: np.ndarray) -> Iterator[Coloring]:
    """Colorings by the true classes of images that came without a label, if these are known."""
    scored = (cluster != "") & (labels != "")
    if not scored.any():
        return
    yield by_name("Ground truth", labels, note="The class by the labels hidden from training.")
    truth = np.unique(labels[scored], return_inverse=True)[1]
    names, clusters = np.unique(cluster[scored], return_inverse=True)
    _, mapping = cluster_accuracy(truth, clusters)
    predicted = np.array([mapping.get(number, -1) for number in range(len(names))])[clusters]
    correct = np.full(len(cluster), "", "U9")
    correct[scored] = np.where(predicted == truth, "correct", "incorrect")
    note = "Clusters are matched to the true classes with the Hungarian algorithm."
    yield by_name("Correct", correct, note=note)


def by_name(name: str, values: np.ndarray | Sequence[str], *, note: str) -> Coloring:
    """Return a coloring by class names, '' for unknown."""
    classes, numbers = np.unique(values, return_inverse=True)
    unknown = int("" in classes)  # which comes first
    return Coloring(name, numbers - unknown, tuple(classes.tolist()[unknown:]), note)


# ---- coordinates ----


def coordinates(
    folder: RunFolder,
    vectors: Float32[np.ndarray, "n dim"],
    rows: Int[np.ndarray, " n"],
    neighbors: Nearest | None = None,
) -> Float[np.ndarray, "n 2"]:
    """Return the stored coordinates if they belong to these rows and embeddings, else new ones.

    In a folder that cannot be written to, they are computed each time. `neighbors` are those of
    `tsne`.
    """
    stored = _stored_coordinates(folder, rows)
    return stored if stored is not None else _store(folder, rows, Layout(vectors, neighbors))


def _stored_coordinates(
    folder: RunFolder, rows: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n 2"] | None:
    """Return the coordinates in a run folder; None unless they are of these rows."""
    if not folder.map.exists():
        return None
    advice = "remove it, and it is made anew"
    with usable(folder.map, advice), np.load(folder.map, allow_pickle=False) as file:
        stored = {name: file[name] for name in ("fingerprint", "rows", "xy")}
    fits = np.array_equal(stored["rows"], rows)
    return (
        stored["xy"] if fits and str(stored["fingerprint"]) == digest(folder.embeddings) else None
    )


def _store(
    folder: RunFolder, rows: Int[np.ndarray, " n"], layout: "Layout", stop: Event | None = None
) -> Float[np.ndarray, "n 2"]:
    """Compute coordinates, and store them in the run folder if it can be written to."""
    fingerprint, content = np.array(digest(folder.embeddings)), io.BytesIO()
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
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, as soon as the run folder has its embeddings."""
        embeddings = read_embeddings(self._folder.embeddings, self._images)
        rows = balanced(embeddings.class_names, MAX_IMAGES)
        if _stored_coordinates(self._folder, rows) is not None:
            return
        # Not in the thread: the number of threads of matrix products is one for all.
        layout = Layout(embeddings.vectors[rows])
        task = self._folder, rows, layout, self._stop
        self._thread = Thread(target=_store_quietly, args=task, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the coordinates are on the way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the coordinates are stored, if they are on the way."""
        if self._thread:
            self._thread.join()

    def __enter__(self) -> "EarlyMap":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self.wait()


def _store_quietly(*task: Any) -> None:
    with suppress(Exception):  # whoever needs the map computes it again, and meets the error
        _store(*task)


def tsne(
    features: Float32[np.ndarray, "n d"], neighbors: Nearest | None = None
) -> Float[np.ndarray, "n 2"]:
    """Return 2D coordinates by t-SNE of cosine distances.

    Deterministic to the bit: it starts at the principal components, with exact neighbors.
    `neighbors` are the `MOST_NEIGHBORS` nearest others of each image, if they are known.
    """
    return Layout(features, neighbors).optimized()


class Layout:
    """Where t-SNE starts, and what attracts the images."""

    def __init__(
        self,
        features: Float32[np.ndarray, "n d"],
        neighbors: Nearest | None = None,
        threads: int | None = None,
    ) -> None:
        own = available_cpus() if len(features) > FEW else 1
        self.threads = own if threads is None else threads
        unit = _unit(features)
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

    def optimized(self, stop: Event | None = None) -> Float[np.ndarray, "n 2"]:
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
    new: Float32[np.ndarray, "m d"],
    features: Float32[np.ndarray, "n d"],
    xy: Float[np.ndarray, "n 2"],
) -> Float[np.ndarray, "m 2"]:
    """Return coordinates of new images on the map of these features.

    The median of the nearest images' coordinates, weighted by the inverse squared distance: an
    image of the map lands on itself, and one between two groups lands in one of them, where a
    mean would land between.
    """
    k = min(ANCHORS, len(features))
    squared, anchors = _index(_unit(features)).kneighbors(_unit(new), k)
    near, weights = xy[anchors], 1 / np.maximum(squared[:, :, None], 2e-7)
    weights = np.broadcast_to(weights, near.shape)
    median = np.quantile(near, 0.5, axis=1, weights=weights, method="inverted_cdf")
    return np.asarray(median)


def _unit(features: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(length > 0, length, 1)


def _index(unit: Float32[np.ndarray, "n d"]) -> Any:
    from sklearn.neighbors import NearestNeighbors

    return NearestNeighbors(metric="sqeuclidean", algorithm="brute").fit(unit)


def _principal_components(unit: Float32[np.ndarray, "n d"]) -> Float[np.ndarray, "n 2"]:
    from sklearn.decomposition import PCA

    scores = np.zeros((len(unit), 2))
    components = min(2, *unit.shape)
    if components and np.ptp(unit, axis=0).max() > 1e-6:  # more than rounding
        pca = PCA(components, svd_solver="covariance_eigh")
        scores[:, :components] = pca.fit_transform(unit.astype(np.float64))
    return scores


QUALITY: Final = 80  # of WebP: 4 KB for a photograph of 96 pixels
SIDE: Final = 48
COLUMNS: Final = 16
PER_SHEET: Final = COLUMNS**2
MAX_BYTES: Final = 9_000_000
"""Of all sheets: a page of 20,000 images must stay below 15 MB, and base64 adds a third."""
QUALITIES: Final = (60, 35, 15)  # of WebP, tried in turn until all sheets are small enough


def thumbnails(
    images: Images, rows: Int[np.ndarray, " rows"], side: int = 96, workers: int = 0
) -> dict[int, str]:
    """Return the central squares of images as `data:` URIs, by row.

    PNG up to 64 pixels, else WebP. Unreadable images are left out; images that are all smaller
    than `side` keep the size of the largest of them.
    """
    return {row: _uri(square) for row, square in squares(images, rows, side, workers)}


def _uri(square: UInt8[Tensor, "3 side side"]) -> str:
    kind = "png" if square.shape[-1] <= SMALL_SIDE else "webp"
    content = encoded(Image.fromarray(square.permute(1, 2, 0).numpy()), kind, quality=QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as a file of this kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def tiles(images: Images, workers: int = 0) -> tuple[tuple[bytes, ...], int]:
    """Return sheets of the central squares of all images, and the side of a square in pixels.

    Sheets are WebP images of `PER_SHEET` squares, `COLUMNS` in a row; unreadable images are gray.
    Images that are all smaller than a tile keep the size of the largest of them.
    """
    side = min(SIDE, int(images.sizes.min(axis=1).max()))
    arrays = list(_sheets(images, side, workers))
    lossless = side <= SIDE // 2  # of very small images every pixel counts
    for quality in QUALITIES:
        sheets = tuple(
            encoded(sheet, "webp", quality=quality, lossless=lossless) for sheet in arrays
        )
        if sum(map(len, sheets)) <= MAX_BYTES:
            break
    return sheets, side


def _sheets(images: Images, side: int, workers: int) -> Iterator[Image.Image]:
    for batch in CenterCrops(images, side, batch_size=PER_SHEET, workers=workers):
        rows = -(-len(batch) // COLUMNS)
        sheet = np.full((rows * COLUMNS, side, side, 3), MIDDLE_GRAY, np.uint8)
        for place, square in enumerate(batch.permute(0, 2, 3, 1).numpy()):
            sheet[place] = preview(square)
        grid = sheet.reshape(rows, COLUMNS, side, side, 3).swapaxes(1, 2)
        yield Image.fromarray(grid.reshape(rows * side, COLUMNS * side, 3))
