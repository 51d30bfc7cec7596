"""The map of a run: t-SNE coordinates, nearest neighbors, colorings; thumbnails of its images."""

import base64
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread
from typing import Any, Final, NamedTuple

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
from nearkin.distributed import available_cpus, free_memory
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn_classes
from nearkin.evaluation.vectors import read_embeddings
from nearkin.files import read_arrays, sha256, usable, write_whole
from nearkin.metrics.clusters import cluster_accuracy
from nearkin.metrics.neighbors import nearest
from nearkin.objectives.fused import blocks
from nearkin.report.page.map import Coloring, ImageMap, Role
from nearkin.run.folder import RunFolder
from nearkin.run.named import written_labels
from nearkin.tables import read_csv
from nearkin.text import as_text

MAX_IMAGES: Final = 1_000_000  # a map of more images shows a sample that is balanced over classes
LANDMARKS: Final = 20_000  # of more images, a balanced sample is laid out, and places the others
ONE_FILE: Final = 50_000  # images of a page that is one file; of more, most is in files beside it
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
BLOCK: Final = 4_096  # images that are placed, or decoded, at once


Nearest = tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]
"""The cosine similarity of each image's nearest others, most similar first, and which they are."""
Read = Callable[[Int[np.ndarray, " rows"]], Iterable[Float[Tensor, "_ d"]]]


def image_map(
    folder: RunFolder | None,
    embeddings: Embeddings,
    images: Images,
    early: "EarlyMap | None" = None,
    *,
    read: Read | None = None,
    landmarks: int = LANDMARKS,
    one_file: int = ONE_FILE,
) -> ImageMap | None:
    """Return the map of a run, or of a table; None if fewer than two images can be shown.

    Coordinates of landmarks are stored in the run folder, so that a map stays the same for the
    same embeddings. `early` is on the way to store them. Of more than `one_file` images, those
    that are close on the map follow each other, so that files of some thousand hold what is in
    view together; their sheets are made when they are asked for. `read` yields the features of
    ascending rows block by block, where `embeddings` has none of them in memory.
    """
    if len(embeddings.rows) < 2:
        return None
    on_map, among = map_rows(embeddings.class_names, landmarks)
    read = read or (lambda rows: (embeddings.tensor[rows[x]] for x in blocks(len(rows), BLOCK)))
    bank = torch.cat(list(read(on_map[among])))
    # One search for the page and for t-SNE.
    near = nearest(bank, bank, MOST_NEIGHBORS, exclude_self=True)
    chosen, in_files = images.subset(embeddings.rows[on_map]), len(on_map) > one_file
    side = min(SIDE, int(chosen.sizes.min(axis=1).max()))
    order = np.arange(len(on_map))
    sheets = () if in_files else tiles(chosen, side, workers=available_cpus())
    if early:
        early.wait()  # last: all else is computed meanwhile
    own = Places(
        coordinates(folder, bank.numpy(), on_map[among], near),
        *(each[:, :NEIGHBORS].numpy() for each in near),
    )
    places = own
    if len(among) < len(on_map):
        places = placed(read(on_map), bank, own, among)
    if in_files:
        order = z_order(places.xy)
    position = np.argsort(order)  # of each image on the page
    rows = on_map[order]
    return ImageMap(
        number=embeddings.rows[rows],
        names=tuple(embeddings.paths[row] for row in rows.tolist()),
        xy=places.xy[order],
        neighbors=position[among[places.neighbors[order]]].astype(np.int32),
        similarity=places.similarity[order],
        colorings=colorings(folder, embeddings, rows),
        sheets=sheets or sheets_in_order(chosen, order, side, workers=available_cpus()),
        side=side,
        columns=COLUMNS,
        per_sheet=PER_SHEET,
        total=len(embeddings.rows),
        among=len(among) if len(among) < len(on_map) else 0,
        per_file=BLOCK if in_files else 0,
    )


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
    folder: RunFolder | None, embeddings: Embeddings, rows: Int[np.ndarray, " rows"]
) -> tuple[Coloring, ...]:
    """Return the colorings of these rows, the most informative first, without constant ones."""
    if folder is None:
        candidates = _of_table(embeddings)
    elif folder.clusters.exists():
        candidates = _of_discovery(folder, embeddings)
    elif folder.assignments.exists():
        candidates = _of_classification(folder, embeddings)
    else:
        candidates = _of_training(embeddings)
    return tuple(
        replace(one, values=one.values[rows])
        for one in candidates
        if len(one.classes) != 1
        and (one.values[rows] >= 0 if _is_named(one) else np.isfinite(one.values[rows])).any()
    )


def _is_named(coloring: Coloring) -> bool:
    """Whether its values are classes, even if none is known."""
    return bool(np.issubdtype(coloring.values.dtype, np.integer))


def _of_table(embeddings: Embeddings) -> Iterator[Coloring]:
    yield by_name("Label", embeddings.class_names, note="The class in your data.")
    yield by_name("Split", embeddings.splits, note="As your data name it.")


def _of_training(embeddings: Embeddings) -> Iterator[Coloring]:
    yield by_name("Label", embeddings.class_names, note="The class in your data.")
    predicted = knn_classes(embeddings)
    correct = np.where(embeddings.class_names == predicted, "correct", "incorrect")
    correct[predicted == ""] = ""
    yield by_name("Correct", correct, note="Whether kNN predicts the class of a held-out image.")
    yield by_name("Split", embeddings.splits, note="Held-out images (test) were not trained on.")


def _of_discovery(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    clusters = {row["cluster"]: row for row in read_csv(folder.clusters)}
    rows = _assigned(folder, embeddings)  # labeled images have none
    names = [
        display_name(clusters[row["cluster"]]) if row else label
        for row, label in zip(rows, embeddings.class_names.tolist(), strict=True)
    ]
    note = "The predicted class; of labeled images, their label."
    yield by_name("Class", names, note=note, role="class")
    kinds = [f"predicted {clusters[row['cluster']]['kind']}" if row else "labeled" for row in rows]
    yield by_name("Known or novel", kinds, note="Labeled images came with their class.")
    scores = np.array([row.get("score") or "nan" for row in rows], np.float32)
    note = "Confidence of the classifier in the predicted class."
    yield Coloring("Score", scores, note=note, role="score")
    labels = {as_text(path): label for path, label in written_labels(folder).items()}
    own = [labels.get(as_text(name), "") for name in embeddings.paths]
    yield by_name("Your label", own, note="Labels for the next round.", role="label")
    cluster = np.array([row.get("cluster", "") for row in rows])
    yield from _of_ground_truth(cluster, embeddings.class_names)


def _of_classification(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    rows = _assigned(folder, embeddings)  # none, if it was learned from
    labels = embeddings.class_names
    predicted = np.array([row.get("cluster", "") for row in rows])
    both = np.where(predicted == "", labels, predicted)
    note = "The predicted class; of images that were learned from, their label."
    yield by_name("Class", both, note=note, role="class")
    yield by_name("Label", labels, note="The class in your data.")
    scored = (predicted != "") & (labels != "")
    correct = np.where(predicted == labels, "correct", "incorrect")
    note = "Whether the class of a held-out image is predicted."
    yield by_name("Correct", np.where(scored, correct, ""), note=note)
    scores = np.array([row.get("score") or "nan" for row in rows], np.float32)
    note = "Calibrated probability of the predicted class."
    yield Coloring("Score", scores, note=note, role="score")
    kinds = np.where(labels == "", "no label", np.where(predicted == "", "learned from", "test"))
    yield by_name("Role", kinds, note="Which images were learned from, and which scored.")
    flags = np.array([row.get("flag", "") for row in rows])
    yield by_name("Flag", flags, note="outlier: like no class; border: between two; core: sure.")


def _assigned(folder: RunFolder, embeddings: Embeddings) -> list[Mapping[str, str]]:
    """The row of assignments.csv of each image, empty where it has none."""
    by_path = {as_text(row["path"]): row for row in read_csv(folder.assignments)}
    return [by_path.get(as_text(name), {}) for name in embeddings.paths]


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


def by_name(
    name: str, values: np.ndarray | Sequence[str], *, note: str, role: Role = ""
) -> Coloring:
    """Return a coloring by class names, '' for unknown."""
    found, numbers = np.unique(values, return_inverse=True)
    classes: list[str] = sorted(found.tolist(), key=natural)
    place = {each: position for position, each in enumerate(classes)}
    positions = np.array([place[each] for each in found.tolist()], np.int64)
    unknown = int("" in classes)  # which comes first
    return Coloring(name, positions[numbers] - unknown, tuple(classes[unknown:]), note, role)


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, in which numbers count by their value.

    >>> sorted(["new-10", "new-2", "new"], key=natural)
    ['new', 'new-2', 'new-10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


# ---- coordinates ----


def coordinates(
    folder: RunFolder | None,
    vectors: Float32[np.ndarray, "n dim"],
    rows: Int[np.ndarray, " n"],
    neighbors: Nearest | None = None,
) -> Float[np.ndarray, "n 2"]:
    """Return the stored coordinates if they belong to these rows and embeddings, else new ones.

    Without a folder, or in one that cannot be written to, they are computed each time.
    `neighbors` are those of `tsne`.
    """
    if folder is None:
        return tsne(vectors, neighbors)
    stored = _stored_coordinates(folder, rows)
    return stored if stored is not None else _store(folder, rows, Layout(vectors, neighbors))


def _stored_coordinates(
    folder: RunFolder, rows: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n 2"] | None:
    """Return the coordinates in a run folder; None unless they are of these rows."""
    if not folder.map.exists():
        return None
    advice = "remove it, and it is made anew"
    with usable(folder.map, advice), folder.map.open("rb") as file:
        arrays = read_arrays(file, free_memory())
        stored = {name: arrays[name] for name in ("fingerprint", "rows", "xy")}
    fits = np.array_equal(stored["rows"], rows)
    return (
        stored["xy"] if fits and str(stored["fingerprint"]) == sha256(folder.embeddings) else None
    )


def _store(
    folder: RunFolder, rows: Int[np.ndarray, " n"], layout: "Layout", stop: Event | None = None
) -> Float[np.ndarray, "n 2"]:
    """Compute coordinates, and store them in the run folder if it can be written to."""
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
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, as soon as the run folder has its embeddings."""
        embeddings = read_embeddings(self._folder.embeddings, self._images)
        rows = landmark_rows(embeddings.class_names)
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

    The geometric median of the nearest images' places, weighted by the inverse squared distance:
    an image of the map lands on itself, and one between two groups lands in one of them, where a
    mean would land between.
    """
    bank = torch.from_numpy(features)
    similarity, anchors = nearest(bank, torch.from_numpy(new), min(ANCHORS, len(features)))
    return _medians(xy[anchors.numpy()], similarity.numpy())


def _medians(
    near: Float[np.ndarray, "m k 2"], similarity: Float32[np.ndarray, "m k"]
) -> Float[np.ndarray, "m 2"]:
    """The weighted geometric median of each row's places, nearly: five steps by Weiszfeld (1937).

    They start at the median of each coordinate alone, of which many rows would share one.
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

    xy: Float[np.ndarray, "n 2"]
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

    Args:
        blocks: Features of all images.
        landmarks: Features of the landmarks.
        own: The places of the landmarks, whose neighbors are other landmarks.
        among: Which of all images are the landmarks.
    """
    pieces = list[Places]()
    for block in blocks:
        k = min(max(ANCHORS, NEIGHBORS), len(landmarks))
        similarity, near = (each.numpy() for each in nearest(landmarks, block, k))
        xy = _medians(own.xy[near[:, :ANCHORS]], similarity[:, :ANCHORS])
        width = own.neighbors.shape[1]
        pieces.append(Places(xy, similarity[:, :width], near[:, :width]))
    places = Places(*map(np.concatenate, zip(*pieces, strict=True)))
    for column, values in zip(places, own, strict=True):
        column[among] = values
    return places


def z_order(xy: Float[np.ndarray, "n 2"]) -> Int[np.ndarray, " n"]:
    """Return points along a Z-order curve, on which neighbors are mostly close to each other.

    >>> z_order(np.array([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [9.0, 8.0]])).tolist()
    [0, 2, 3, 1]
    """
    low = xy.min(axis=0)
    cells = ((xy - low) * (65_535 / max(1e-9, (xy - low).max()))).astype(np.int64)
    bits = [(cells >> bit & 1) << (2 * bit + np.arange(2)) for bit in range(16)]
    return np.argsort(np.sum(bits, axis=(0, 2)), kind="stable")


def _unit(features: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(length > 0, length, 1)


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
MAX_BYTES: Final = 450
"""Of an image on its sheet: a page of 20,000 must stay below 15 MB, and base64 adds a third."""
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


def tiles(images: Images, side: int, workers: int = 0) -> tuple[bytes, ...]:
    """Return sheets of the central squares of all images, small enough for a page of one file.

    Sheets are WebP images of `PER_SHEET` squares, `COLUMNS` in a row; unreadable images are gray.
    """
    arrays = list(_sheets(images, np.arange(len(images)), side, workers))
    sheets: tuple[bytes, ...] = ()
    for quality in QUALITIES:
        sheets = tuple(_webp(sheet, quality) for sheet in arrays)
        if sum(map(len, sheets)) <= MAX_BYTES * max(len(images), LANDMARKS):
            break
    return sheets


def sheets_in_order(
    images: Images, order: Int[np.ndarray, " n"], side: int, workers: int = 0
) -> Iterator[bytes]:
    """Yield the sheets of images in any order, with some thousand images in memory."""
    return (_webp(sheet, QUALITIES[0]) for sheet in _sheets(images, order, side, workers))


def _webp(sheet: Image.Image, quality: int) -> bytes:
    lossless = sheet.width <= COLUMNS * SIDE // 2  # of very small images every pixel counts
    return encoded(sheet, "webp", quality=quality, lossless=lossless)


def _sheets(
    images: Images, order: Int[np.ndarray, " n"], side: int, workers: int
) -> Iterator[Image.Image]:
    for part in blocks(len(order), BLOCK):
        chosen = order[part]
        ascending = chosen.argsort()
        squares = np.empty((len(chosen), side, side, 3), np.uint8)
        crops = CenterCrops(images.subset(chosen[ascending]), side, workers=workers)
        every = (square for batch in crops for square in batch.permute(0, 2, 3, 1).numpy())
        for place, square in zip(ascending, every, strict=True):
            squares[place] = preview(square)
        for own in blocks(len(squares), PER_SHEET):
            yield _sheet(squares[own])


def _sheet(squares: UInt8[np.ndarray, "n side side 3"]) -> Image.Image:
    rows, side = -(-len(squares) // COLUMNS), squares.shape[1]
    sheet = np.full((rows * COLUMNS, side, side, 3), MIDDLE_GRAY, np.uint8)
    sheet[: len(squares)] = squares
    grid = sheet.reshape(rows, COLUMNS, side, side, 3).swapaxes(1, 2)
    return Image.fromarray(grid.reshape(rows * side, COLUMNS * side, 3))
