"""The shape of the features: what can be said without any label."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.errors import DataError
from nearkin.evaluation.measure import Measure
from nearkin.measures.hypersphere import alignment, uniformity
from nearkin.measures.neighbors import neighbor_agreement
from nearkin.measures.spectrum import effective_rank, feature_std, mean_cosine

LIMIT = 5_000
"""Images, at the most, that are looked at; evenly spaced among all."""
NEIGHBORS = 10


def looked_at(n: int) -> Int[np.ndarray, " seen"]:
    """The rows of the images, of `n`, whose geometry is measured."""
    return np.arange(min(n, LIMIT)) * n // max(min(n, LIMIT), 1)


def geometry(
    features: Float[Tensor, "n dim"],
    other_view: Float[Tensor, "seen dim"] | None = None,
    seen: Int[np.ndarray, " seen"] | None = None,
) -> list[Measure]:
    """Effective rank, spread and uniformity; with a second view also what the views share.

    Numbers about a sample: no intervals. Effective rank and neighbor agreement depend on the
    number of images, which their protocol says.

    Args:
        features: A row per image.
        other_view: The images in the rows `seen`, in another view.
        seen: The rows that are looked at; `looked_at` if None.

    Raises:
        DataError: If there are fewer than two images.
    """
    n = len(features)
    rows = looked_at(n) if seen is None else seen
    if len(rows) < 2:
        raise DataError("the geometry of features needs two images or more")
    images = f"{len(rows)} of {n} test images"
    x = features[torch.from_numpy(rows)]
    measures = {
        "effective rank": (effective_rank(x), f"centered features, dimension {x.shape[1]}"),
        "feature std": (feature_std(x), "unit features, times the root of the dimension"),
        "mean cosine": (mean_cosine(x), "over pairs of different images"),
        "uniformity": (uniformity(x), "unit features, t 2, over pairs of different images"),
    }
    if other_view is not None:
        y, k = other_view, min(NEIGHBORS, len(rows) - 1)
        measures |= {
            "alignment": (alignment(x, y), "squared distance of two views, unit features"),
            "neighbor agreement": (
                neighbor_agreement(x, y, k),
                f"share of the {k} nearest images that two views have in common, by cosine",
            ),
        }
    return [
        Measure(name, float(value), None, None, f"{protocol}, {images}")
        for name, (value, protocol) in measures.items()
    ]
