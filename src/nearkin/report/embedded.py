"""The embeddings of a run, read again from its table."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int

from nearkin.data.images import Images
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import as_text
from nearkin.evaluation.knn import answers, num_neighbors
from nearkin.evaluation.vectors import open_vectors
from nearkin.run.folder import RunFolder
from nearkin.tables import usable


@dataclass(frozen=True, eq=False)
class Embedded:
    """The embeddings of a run, as its table has them."""

    number: Int[np.ndarray, " n"]
    """Each image's row among all images of the run."""
    names: tuple[str, ...]
    labels: np.ndarray
    """Names of classes; '' where unknown."""
    splits: np.ndarray
    """train or test; '' where neither is said."""
    vectors: Float32[np.ndarray, "n d"]


def embedded(folder: RunFolder, images: Images) -> Embedded:
    """The embeddings of those images that are among these, in their order.

    Raises:
        CheckpointError: If the table is damaged.
        DataError: If there are none.
    """
    from pyarrow import parquet

    blocks = list(open_vectors(folder.embeddings).blocks())
    with (
        usable(folder.embeddings, "make it again with nearkin embed"),
        folder.embeddings.open("rb") as file,  # pyarrow takes no path that is not UTF-8
    ):
        splits = parquet.read_table(file, columns=["split"])["split"].to_pylist()
    names = [name for block in blocks for name in block.paths.to_pylist()]
    labels = [name or "" for block in blocks for name in block.labels.to_pylist()]
    place = {as_text(name): row for row, name in enumerate(images.names)}
    number = np.array([place.get(name, -1) for name in names], np.int64)
    vectors = torch.cat([block.vectors for block in blocks]).numpy()
    order = np.argsort(number, kind="stable")
    order = order[number[order] >= 0]
    if not len(order):
        raise DataError(
            f"none of the {len(names)} images of {folder.path} is among these {len(images)}; "
            "give the images of the run"
        )
    return Embedded(
        number[order],
        tuple(names[row] for row in order.tolist()),
        np.array(labels, np.str_)[order],
        np.array(splits, np.str_)[order],
        vectors[order],
    )


def voted(found: Embedded) -> np.ndarray:
    """The class that its nearest training images give each held-out image with a label.

    The answers behind the kNN accuracy; '' for all other images.
    """
    labeled = found.labels != ""
    bank, asked = (np.flatnonzero(labeled & (found.splits == part)) for part in ("train", "test"))
    said = np.full(len(found.labels), "", found.labels.dtype)
    if len(bank) and len(asked):
        vectors, queries = (torch.from_numpy(found.vectors[rows]) for rows in (bank, asked))
        k = num_neighbors(len(bank))
        said[asked] = answers(vectors, found.labels[bank], queries, k=k)
    return said
