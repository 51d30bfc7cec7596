"""The map of a run: its images with their neighbors, colorings and thumbnails."""

import base64
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from nearkin.data.batches import CenterCrops, squares
from nearkin.data.channels import preview
from nearkin.data.decode import MIDDLE_GRAY
from nearkin.data.images import SMALL_SIDE, Images
from nearkin.distributed import available_cpus
from nearkin.errors import CheckpointError
from nearkin.evaluation.column import ColumnTest
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.layout import (
    BLOCK,
    LANDMARKS,
    MOST_NEIGHBORS,
    NEIGHBORS,
    EarlyMap,
    Places,
    coordinates,
    map_rows,
    placed,
    z_order,
)
from nearkin.evaluation.metrics import knn_classes
from nearkin.metrics.clusters import match, right
from nearkin.metrics.neighbors import nearest
from nearkin.objectives.fused import blocks
from nearkin.report.page.map import Coloring, ImageMap, Role
from nearkin.run.data import noted_column
from nearkin.run.edits import cluster_rows, display_name, read_edited, written_labels
from nearkin.run.folder import RunFolder
from nearkin.text import as_text

Noted = TypeVar("Noted")

LABEL: Final = "The class in your data."  # What a coloring by labels says

ONE_FILE: Final = 50_000  # images of a page that is one file; of more, most is in files beside it

Read = Callable[[Int[np.ndarray, " rows"]], Iterable[Float[Tensor, "_ d"]]]


def image_map(
    folder: RunFolder | None,
    embeddings: Embeddings,
    images: Images,
    early: EarlyMap | None = None,
    *,
    served: bool = False,
    read: Read | None = None,
    landmarks: int = LANDMARKS,
    one_file: int = ONE_FILE,
) -> ImageMap | None:
    """Return the map of a run, or of a table; None if fewer than two images can be shown.

    Coordinates of landmarks are stored in the run folder, so that a map stays the same for the
    same embeddings. `early` is on the way to store them. Of more than `one_file` images, those
    that are close on the map follow each other, so that files of some thousand hold what is in
    view together; their sheets are made when they are asked for. Where it is `served`, images can
    be labeled. `read` yields the features of ascending rows block by block, where `embeddings` has
    none of them in memory.
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
    sheets = () if in_files else tiles(chosen, side, workers=available_cpus())
    if early:
        early.wait()  # last: all else is computed meanwhile
    own = Places(
        coordinates(folder, bank.numpy(), on_map[among], near),
        *(each[:, :NEIGHBORS].numpy() for each in near),
    )
    by_landmarks = len(among) < len(on_map)  # else, all images are landmarks
    places = placed(read(on_map), bank, own, among) if by_landmarks else own
    order = z_order(places.xy) if in_files else np.arange(len(on_map))
    position = np.argsort(order)  # of each image on the page
    rows = on_map[order]
    shown, region = embeddings.rows[rows], images.source.region
    return ImageMap(
        number=shown,
        names=tuple(embeddings.paths[row] for row in rows.tolist()),
        xy=places.xy[order],
        neighbors=position[among[places.neighbors[order]]].astype(np.int32),
        similarity=places.similarity[order],
        colorings=colorings(folder, embeddings, rows, served=served),
        regions=np.array([x for x, row in enumerate(shown.tolist()) if region(row)], np.int64),
        sheets=sheets or sheets_in_order(chosen, order, side, workers=available_cpus()),
        side=side,
        columns=COLUMNS,
        per_sheet=PER_SHEET,
        total=len(embeddings.rows),
        among=len(among) if by_landmarks else 0,
        per_file=BLOCK if in_files else 0,
    )


# ---- colorings ----


def colorings(
    folder: RunFolder | None,
    embeddings: Embeddings,
    rows: Int[np.ndarray, " rows"],
    *,
    served: bool = False,
) -> tuple[Coloring, ...]:
    """Return the colorings of these rows, the most informative first, without constant ones."""

    def is_shown(one: Coloring) -> bool:
        if one.role == "label":
            return served or bool(one.known.any())
        return bool(one.known.any()) and len(one.classes) != 1

    every = (replace(one, values=one.values[rows]) for one in _computed(folder, embeddings))
    return tuple(filter(is_shown, every))


def _computed(folder: RunFolder | None, embeddings: Embeddings) -> Iterator[Coloring]:
    if folder is None:
        yield from _of_table(embeddings, "As your data name it.")
        return
    if folder.clusters.exists():
        yield from _of_discovery(folder, embeddings)
    elif folder.assignments.exists():
        yield from _of_classification(folder, embeddings)
    else:
        yield from _of_training(folder, embeddings)
    labels = {as_text(path): label for path, label in written_labels(folder).items()}
    note = "Labels that you have given, as in to_label.csv of the run."
    yield by_name("Your label", _of_each(embeddings, labels, ""), note, "label")


def _of_table(embeddings: Embeddings, split: str) -> Iterator[Coloring]:
    yield by_name("Label", embeddings.class_names, LABEL, "class")
    yield by_name("Split", embeddings.splits, split)


def _of_training(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    label, split = _of_table(embeddings, "Held-out images (test) were not trained on.")
    yield label
    predicted = knn_classes(embeddings)
    note = "Whether kNN predicts the class of a held-out image."
    yield _correct(embeddings.class_names == predicted, predicted != "", note)
    yield split
    if tested := folder.read_evaluated().get("column"):
        test = ColumnTest.stored(tested)
        values = noted_column(folder, test.column)
        yield by_name(test.column, _of_each(embeddings, values, ""), f"{test.sentence}.")


def _of_discovery(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    clusters = {row["cluster"]: row for row in cluster_rows(folder)}
    rows = _assigned(folder, embeddings)  # labeled images have none
    if gone := {row["cluster"] for row in rows if row} - clusters.keys():
        raise CheckpointError(f"{folder.clusters} has no row of {min(gone)}; put it back")
    labels = embeddings.class_names
    names = [
        display_name(clusters[row["cluster"]]) if row else label
        for row, label in zip(rows, labels.tolist(), strict=True)
    ]
    yield by_name("Class", names, "The predicted class; of labeled images, their label.", "class")
    kinds = [f"predicted {clusters[row['cluster']]['kind']}" if row else "labeled" for row in rows]
    yield by_name("Known or novel", kinds, "Labeled images came with their class.")
    yield _score(rows, "Confidence of the classifier in the predicted class.")
    cluster = _column(rows, "cluster")
    scored = (cluster != "") & (labels != "")
    if scored.any():
        yield by_name("Ground truth", labels, "The class by the labels hidden from training.")
        correct = np.full(len(labels), False)
        correct[scored] = _matched(labels[scored], cluster[scored])
        note = "Clusters are matched to the true classes with the Hungarian algorithm."
        yield _correct(correct, scored, note)


def _matched(labels: np.ndarray, clusters: np.ndarray) -> Bool[np.ndarray, " n"]:
    """Whether each image is of the class that its cluster is matched to."""
    truth, numbers = (np.unique(each, return_inverse=True)[1] for each in (labels, clusters))
    return right(truth, numbers, match(truth, numbers))


def _of_classification(folder: RunFolder, embeddings: Embeddings) -> Iterator[Coloring]:
    rows = _assigned(folder, embeddings)  # none, if it was learned from
    labels, predicted = embeddings.class_names, _column(rows, "cluster")
    both = np.where(predicted == "", labels, predicted)
    note = "The predicted class; of images that were learned from, their label."
    yield by_name("Class", both, note, "class")
    yield by_name("Label", labels, LABEL)
    note = "Whether the class of a held-out image is predicted."
    yield _correct(predicted == labels, (predicted != "") & (labels != ""), note)
    yield _score(rows, "Calibrated probability of the predicted class.")
    kinds = np.where(labels == "", "no label", np.where(predicted == "", "learned from", "test"))
    yield by_name("Role", kinds, "Which images were learned from, and which scored.")
    note = "outlier: like no class; border: between two; core: sure."
    yield by_name("Flag", _column(rows, "flag"), note)


def _assigned(folder: RunFolder, embeddings: Embeddings) -> list[Mapping[str, str]]:
    """The row of assignments.csv of each image, empty where it has none."""
    rows = read_edited(folder.assignments, ("path", "cluster"))
    by_path = {as_text(row["path"]): row for row in rows}
    return _of_each(embeddings, by_path, {})


def _of_each(embeddings: Embeddings, noted: Mapping[str, Noted], otherwise: Noted) -> list[Noted]:
    """What is noted of each image, by paths as they are written."""
    return [noted.get(as_text(path), otherwise) for path in embeddings.paths]


def _column(rows: Sequence[Mapping[str, str]], name: str) -> np.ndarray:
    return np.array([row.get(name, "") for row in rows])


def _score(rows: Sequence[Mapping[str, str]], note: str) -> Coloring:
    scores = np.array([row.get("score") or "nan" for row in rows], np.float32)
    return Coloring("Score", scores, note=note, role="score")


def _correct(right: Bool[np.ndarray, " n"], scored: Bool[np.ndarray, " n"], note: str) -> Coloring:
    return by_name("Correct", np.where(scored, np.where(right, "correct", "incorrect"), ""), note)


def by_name(name: str, values: np.ndarray | Sequence[str], note: str, role: Role = "") -> Coloring:
    """Return a coloring by class names, '' for unknown."""
    names = list(map(str, values))
    classes = sorted(sorted({*names} - {""}), key=natural)
    numbers = {each: number for number, each in enumerate(classes)} | {"": -1}
    positions = np.array([numbers[each] for each in names], np.int64)
    return Coloring(name, positions, tuple(classes), note, role)


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, in which numbers count by their value.

    >>> sorted(["new-10", "new-2", "new"], key=natural)
    ['new', 'new-2', 'new-10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


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
    return {
        row: data_uri(Image.fromarray(square))
        for row, square in squares(images, rows, side, workers)
    }


def data_uri(image: Image.Image) -> str:
    """Return an image as a `data:` URI: PNG up to 64 pixels, else WebP."""
    kind = "png" if max(image.size) <= SMALL_SIDE else "webp"
    content = encoded(image, kind, quality=QUALITY)
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
        ascending, num_places = chosen.argsort(), -(-len(chosen) // COLUMNS) * COLUMNS
        squares = np.full((num_places, side, side, 3), MIDDLE_GRAY, np.uint8)
        crops = CenterCrops(images.subset(chosen[ascending]), side, workers=workers)
        every = (square for batch in crops for square in batch.permute(0, 2, 3, 1).numpy())
        for place, square in zip(ascending, every, strict=True):
            squares[place] = preview(square)
        for own in blocks(num_places, PER_SHEET):
            grid = squares[own].reshape(-1, COLUMNS, side, side, 3).swapaxes(1, 2)
            yield Image.fromarray(grid.reshape(-1, COLUMNS * side, 3))
