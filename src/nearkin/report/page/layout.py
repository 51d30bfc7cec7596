"""Images on a plane: those that are alike lie close together (t-SNE)."""

from typing import Final

import numpy as np
from jaxtyping import Float, Float32, Int

PERPLEXITY: Final = 30
"""How many others each image is drawn to, about."""
FEWEST: Final = 4
"""Of fewer images, the principal components show all there is."""
BLOCK: Final = 1024
"""Rows compared with all others at once."""
ANCHORS: Final = 10
"""Images that a new one is placed amid."""


def lay_out(features: Float32[np.ndarray, "n d"], *, threads: int = 1) -> Float[np.ndarray, "n 2"]:
    """The place of each image on a map, by the cosines of its features to those of others.

    Nothing is drawn at random: the map starts at the principal components, and the neighbors it is
    made from are exact. So the same features lie at the same places, to the bit.

    Args:
        features: A row per image.
        threads: Processor threads to use.
    """
    from threadpoolctl import threadpool_limits

    unit = _unit(features)
    with threadpool_limits(threads):  # a product of matrices rounds by their number
        start = _principal(unit)
        if len(unit) < FEWEST or not start.any():
            return start
        k = min(3 * PERPLEXITY, len(unit) - 1)
        others, similarity = _nearest(unit, unit, k + 1)
    return _spread(start, *_without_itself(others, similarity), threads)


def place(
    new: Float32[np.ndarray, "m d"],
    features: Float32[np.ndarray, "n d"],
    places: Float[np.ndarray, "n 2"],
) -> Float[np.ndarray, "m 2"]:
    """Places for new images on a map that stays as it is: amid those they are most like.

    The median of the places of the nearest images, each counting by the inverse of its squared
    distance: an image that is on the map already lies on itself, and one whose neighbors lie in
    two groups goes to one of them, where a mean would lie between.

    Args:
        new: Features of the new images.
        features: Those of the images of the map, of which there is at least one.
        places: Where these are.
    """
    anchors, similarity = _nearest(_unit(new), _unit(features), min(ANCHORS, len(features)))
    weight = 1 / np.maximum(1 - similarity.astype(np.float64), 1e-7)
    lying = places[anchors]
    order = lying.argsort(axis=1, kind="stable")
    reached = np.take_along_axis(weight[:, :, None], order, axis=1).cumsum(axis=1)
    middle = (reached >= reached[:, -1:] / 2).argmax(axis=1)[:, None]
    found = np.take_along_axis(lying, np.take_along_axis(order, middle, axis=1), axis=1)
    return np.asarray(found[:, 0])


def _unit(features: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(length > 0, length, 1)


def _principal(unit: Float32[np.ndarray, "n d"]) -> Float[np.ndarray, "n 2"]:
    """The two principal components; the farthest image of each lies on its positive side."""
    found = np.zeros((len(unit), 2))
    centered = unit.astype(np.float64)
    centered -= centered.sum(axis=0) / max(1, len(unit))
    if np.abs(centered).max(initial=0) < 1e-6:  # no more than rounding
        return found
    _, axes = np.linalg.eigh(centered.T @ centered)
    scores = centered @ axes[:, : -min(2, axes.shape[1]) - 1 : -1]
    farthest = np.abs(scores).argmax(axis=0)
    found[:, : scores.shape[1]] = scores * np.sign(scores[farthest, range(scores.shape[1])])
    return found


def _nearest(
    queries: Float32[np.ndarray, "m d"], keys: Float32[np.ndarray, "n d"], k: int
) -> tuple[Int[np.ndarray, "m k"], Float32[np.ndarray, "m k"]]:
    """The most similar keys of each query, and their cosines, most similar first."""
    found, cosines = [], []
    for block in np.array_split(queries, range(BLOCK, len(queries), BLOCK)):
        similarity = block @ keys.T
        near = np.argpartition(-similarity, k - 1, axis=1)[:, :k]
        near.sort(axis=1)  # so that equals stay in order
        order = np.argsort(-np.take_along_axis(similarity, near, axis=1), axis=1, kind="stable")
        near = np.take_along_axis(near, order, axis=1)
        found.append(near)
        cosines.append(np.take_along_axis(similarity, near, axis=1))
    return np.concatenate(found), np.concatenate(cosines)


def _without_itself(
    others: Int[np.ndarray, "n more"], similarity: Float32[np.ndarray, "n more"]
) -> tuple[Int[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]:
    """Each row less the image itself, or less its last where copies have pushed it out."""
    itself = others == np.arange(len(others))[:, None]
    itself[~itself.any(axis=1), -1] = True
    shape = len(others), others.shape[1] - 1
    return others[~itself].reshape(shape), similarity[~itself].reshape(shape)


def _spread(
    start: Float[np.ndarray, "n 2"],
    neighbors: Int[np.ndarray, "n k"],
    similarity: Float32[np.ndarray, "n k"],
    threads: int,
) -> Float[np.ndarray, "n 2"]:
    """Let images be drawn to their neighbors, and repel all others, from these places on."""
    from openTSNE import TSNE
    from openTSNE.affinity import PerplexityBasedNN
    from openTSNE.nearest_neighbors import PrecomputedNeighbors

    distance = np.maximum(1 - similarity.astype(np.float64), 0)
    attraction = PerplexityBasedNN(
        knn_index=PrecomputedNeighbors(neighbors, distance),
        perplexity=min(PERPLEXITY, neighbors.shape[1] / 3),
        n_jobs=threads,
    )
    small = start * (1e-4 / start[:, 0].std())
    map_ = TSNE(n_jobs=threads).fit(affinities=attraction, initialization=small)
    return np.array(map_, dtype=np.float64)
