"""By what the images on the map can be colored, read off the tables of a run."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int

from nearkin.data.images import Images
from nearkin.distributed import available_cpus
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.knn import knn_classes
from nearkin.evaluation.shards import digest
from nearkin.measures.matching import cluster_accuracy
from nearkin.measures.neighbors import nearest
from nearkin.report.page.layout import lay_out
from nearkin.report.page.map import Coloring, ImageMap
from nearkin.report.thumbnails import COLUMNS, PER_SHEET, tiles
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, usable, write_whole


def colorings(
    folder: RunFolder, found: Embeddings, rows: Int[np.ndarray, " rows"]
) -> tuple[Coloring, ...]:
    """All that there is to say about the images in these rows, the most telling first."""
    discovered = folder.assignments.exists()
    made = _of_discovery(folder, found) if discovered else _of_training(found)
    return tuple(
        Coloring(one.name, one.of[rows], one.classes, one.note)
        for one in made
        if len(one.classes) != 1 and _says_something(one.of[rows])
    )


def _says_something(of: np.ndarray) -> bool:
    return bool((of >= 0).any() if of.dtype.kind == "i" else np.isfinite(of).any())


def _of_training(found: Embeddings) -> Iterator[Coloring]:
    yield named(
        "Label", found.class_names, note="The class in your data; training did not see it."
    )
    answers = knn_classes(found)
    correct = np.where(found.class_names == answers, "right", "wrong")
    correct[answers == ""] = ""
    yield named(
        "Correct",
        correct,
        note="Whether the nearest training images of a held-out image give it its class.",
    )
    yield named("Split", found.splits, note="Held-out images (test) were never trained on.")


def _of_discovery(folder: RunFolder, found: Embeddings) -> Iterator[Coloring]:
    clusters = {row["cluster"]: row for row in read_csv(folder.clusters)}
    assigned = {row["path"]: row for row in read_csv(folder.assignments)}
    given = [assigned.get(name) for name in found.paths]
    known = {name: row["kind"] == "known" for name, row in clusters.items()}
    yield named(
        "Class",
        np.array([_called(row, label, clusters) for row, label in _pairs(given, found)]),
        note="The class that was found or, of images that came with one, their own.",
    )
    kinds = ["labeled" if row is None else _kind(known[row["cluster"]]) for row in given]
    yield named("Known or novel", np.array(kinds), note="Labeled images came with their class.")
    score = [np.nan if row is None else float(row["score"] or "nan") for row in given]
    yield Coloring("Score", np.array(score, np.float32), note="How sure the classifier is.")
    yield from _of_truth(given, found)


def _pairs(
    given: Sequence[Mapping[str, str] | None], found: Embeddings
) -> Iterator[tuple[Mapping[str, str] | None, str]]:
    return zip(given, found.class_names.tolist(), strict=True)


def _kind(known: bool) -> str:
    return "found to be known" if known else "novel"


def _called(
    row: Mapping[str, str] | None, label: str, clusters: Mapping[str, Mapping[str, str]]
) -> str:
    if row is None:
        return label
    return clusters[row["cluster"]]["name"].strip() or row["cluster"]


def _of_truth(given: Sequence[Mapping[str, str] | None], found: Embeddings) -> Iterator[Coloring]:
    """What is true of images that came without a label, if that is known."""
    cluster = np.array(["" if row is None else row["cluster"] for row in given])
    scored = (cluster != "") & (found.class_names != "")
    if not scored.any():
        return
    yield named("Truth", found.class_names, note="The class by the labels that were kept aside.")
    truth = np.unique(found.class_names[scored], return_inverse=True)[1]
    names, own = np.unique(cluster[scored], return_inverse=True)
    _, mapping = cluster_accuracy(truth, own)
    answer = np.array([mapping.get(number, -1) for number in range(len(names))])[own]
    correct = np.full(len(cluster), "", "U5")
    correct[scored] = np.where(answer == truth, "right", "wrong")
    yield named(
        "Correct", correct, note="Classes that were found stand for the true ones they fit best."
    )


def named(name: str, values: np.ndarray, *, note: str) -> Coloring:
    """A coloring by names, of which '' says that nothing is known."""
    classes = sorted(set(values.tolist()) - {""})
    number = {value: place for place, value in enumerate(classes)} | {"": -1}
    of = np.array([number[value] for value in values.tolist()], np.int64)
    return Coloring(name, of, tuple(classes), note)


MOST: Final = 20_000
"""Images on a page; of more, a sample is shown that has as many of every class as it can."""
NEIGHBORS: Final = 12
FEW: Final = 10_000
"""Images up to which one thread finds their places as fast as several."""


def image_map(folder: RunFolder, found: Embeddings, images: Images) -> ImageMap | None:
    """What the map of a run shows; nothing if fewer than two of its images can be.

    Places are kept in the folder, so that the map stays the same for the same embeddings.

    Args:
        folder: The run.
        found: Its embeddings.
        images: Its images.
    """
    if len(found.rows) < 2:
        return None
    rows = balanced(found.class_names, MOST)
    vectors = torch.from_numpy(found.vectors[rows])
    similarity, neighbors = nearest(vectors, vectors, NEIGHBORS, exclude_self=True)
    shown = images.subset(found.rows[rows])
    made = tiles(shown, workers=available_cpus())
    names = tuple(found.paths[row] for row in rows.tolist())
    return ImageMap(
        number=found.rows[rows],
        names=names,
        place=places(folder, found.vectors[rows], rows),
        neighbors=neighbors.numpy().astype(np.int32),
        similarity=similarity.numpy(),
        colorings=colorings(folder, found, rows),
        sheets=made.sheets,
        side=made.side,
        columns=COLUMNS,
        per_sheet=PER_SHEET,
        total=len(found.rows),
    )


def balanced(labels: np.ndarray, most: int) -> Int[np.ndarray, " rows"]:
    """At most so many rows, evenly spread over each class, with as many of each as there can be.

    Args:
        labels: The class of each row; rows without one are a class of their own.
        most: How many.

    >>> balanced(np.array(["a", "a", "a", "a", "b"]), 3).tolist()
    [0, 3, 4]
    """
    if len(labels) <= most:
        return np.arange(len(labels))
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    shares, left = np.zeros(len(sizes), np.int64), most
    for seen, number in enumerate(np.argsort(sizes, kind="stable")):  # small classes first
        shares[number] = min(sizes[number], left // (len(sizes) - seen))
        left -= shares[number]
    rows = [
        np.flatnonzero(class_of == number)[np.linspace(0, size - 1, share).astype(np.int64)]
        for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    return np.sort(np.concatenate(rows))


def places(
    folder: RunFolder, vectors: Float32[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "n 2"]:
    """Where images lie: as kept in the folder, if that is of these embeddings, else anew.

    Where they cannot be kept, they are found anew each time.
    """
    of = digest(folder.embeddings)
    kept = _kept(folder.map) if folder.map.exists() else {}
    if kept.get("of") == of and np.array_equal(kept["rows"], rows):
        return np.asarray(kept["place"])
    place = lay_out(vectors, threads=available_cpus() if len(rows) > FEW else 1)
    held = io.BytesIO()
    np.savez(held, allow_pickle=False, of=np.array(of), rows=rows, place=place)
    with suppress(OSError):
        write_whole(folder.map, held.getvalue())
    return place


def _kept(path: Path) -> dict[str, Any]:
    with usable(path, "remove it, and it is made anew"), np.load(path, allow_pickle=False) as file:
        return {"of": str(file["of"]), "rows": file["rows"], "place": file["place"]}
