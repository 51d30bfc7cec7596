"""The shape of the features: what can be said without any label."""

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.errors import DataError
from nearkin.evaluation.measure import Measure
from nearkin.measures.hypersphere import alignment, uniformity
from nearkin.measures.neighbors import neighbor_agreement
from nearkin.measures.spectrum import effective_rank, feature_std, mean_cosine

LIMIT = 5_000
"""Images, at the most, that are looked at; evenly spaced among all."""
NEIGHBORS = 10


def geometry(
    features: Float[Tensor, "n dim"], other_view: Float[Tensor, "n dim"] | None = None
) -> list[Measure]:
    """Effective rank, spread and uniformity; with a second view also what the views share.

    Numbers about a sample: no intervals. Effective rank and neighbor agreement depend on the
    number of images, which their protocol says.

    Args:
        features: A row per image.
        other_view: The same images in another view, in the same order.

    Raises:
        DataError: If there are fewer than two images.
    """
    n = len(features)
    if n < 2:
        raise DataError("the geometry of features needs two images or more")
    rows = torch.arange(min(n, LIMIT), device=features.device) * n // min(n, LIMIT)
    images = f"{len(rows)} of {n} test images"
    x = features[rows]
    measures = {
        "effective rank": (effective_rank(x), f"centered features, dimension {x.shape[1]}"),
        "feature std": (feature_std(x), "unit features, times the root of the dimension"),
        "mean cosine": (mean_cosine(x), "over pairs of different images"),
        "uniformity": (uniformity(x), "unit features, t 2, over pairs of different images"),
    }
    if other_view is not None:
        y, k = other_view[rows], min(NEIGHBORS, len(rows) - 1)
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
