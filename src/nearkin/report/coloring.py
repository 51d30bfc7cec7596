"""By what the pictures on the map can be colored, read off the tables of a run."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from nearkin.measures.matching import cluster_accuracy
from nearkin.report.embedded import Embedded, voted
from nearkin.report.page.map import Coloring
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv


def colorings(
    folder: RunFolder, found: Embedded, rows: Int[np.ndarray, " rows"]
) -> tuple[Coloring, ...]:
    """All that there is to say about the pictures in these rows, the most telling first."""
    discovered = folder.assignments.exists()
    made = _of_discovery(folder, found) if discovered else _of_training(found)
    return tuple(
        Coloring(one.name, one.of[rows], one.classes, one.note)
        for one in made
        if len(one.classes) != 1 and _says_something(one.of[rows])
    )


def _says_something(of: np.ndarray) -> bool:
    return bool((of >= 0).any() if of.dtype.kind == "i" else np.isfinite(of).any())


def _of_training(found: Embedded) -> Iterator[Coloring]:
    yield named("Label", found.labels, note="The class in your data; training did not see it.")
    answers = voted(found)
    correct = np.where(found.labels == answers, "right", "wrong")
    correct[answers == ""] = ""
    yield named(
        "Correct",
        correct,
        note="Whether the nearest training pictures of a held-out picture give it its class.",
    )
    yield named("Split", found.splits, note="Held-out pictures (test) were never trained on.")


def _of_discovery(folder: RunFolder, found: Embedded) -> Iterator[Coloring]:
    clusters = {row["cluster"]: row for row in read_csv(folder.clusters)}
    assigned = {row["path"]: row for row in read_csv(folder.assignments)}
    given = [assigned.get(name) for name in found.names]
    known = {name: row["kind"] == "known" for name, row in clusters.items()}
    yield named(
        "Class",
        np.array([_called(row, label, clusters) for row, label in _pairs(given, found)]),
        note="The class that was found or, of pictures that came with one, their own.",
    )
    kinds = ["labeled" if row is None else _kind(known[row["cluster"]]) for row in given]
    yield named("Known or novel", np.array(kinds), note="Labeled pictures came with their class.")
    score = [np.nan if row is None else float(row["score"] or "nan") for row in given]
    yield Coloring("Score", np.array(score, np.float32), note="How sure the classifier is.")
    yield from _of_truth(given, found)


def _pairs(
    given: Sequence[Mapping[str, str] | None], found: Embedded
) -> Iterator[tuple[Mapping[str, str] | None, str]]:
    return zip(given, found.labels.tolist(), strict=True)


def _kind(known: bool) -> str:
    return "found to be known" if known else "novel"


def _called(
    row: Mapping[str, str] | None, label: str, clusters: Mapping[str, Mapping[str, str]]
) -> str:
    if row is None:
        return label
    return clusters[row["cluster"]]["name"].strip() or row["cluster"]


def _of_truth(given: Sequence[Mapping[str, str] | None], found: Embedded) -> Iterator[Coloring]:
    """What is true of pictures that came without a label, if that is known."""
    cluster = np.array(["" if row is None else row["cluster"] for row in given])
    scored = (cluster != "") & (found.labels != "")
    if not scored.any():
        return
    yield named("Truth", found.labels, note="The class by the labels that were kept aside.")
    truth = np.unique(found.labels[scored], return_inverse=True)[1]
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
