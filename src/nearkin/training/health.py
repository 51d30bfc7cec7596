"""Health: whether the embeddings still differ, which the loss does not tell.

A collapsed encoder often has the lower loss. The bounds below separate sabotaged and untrained
runs of docs/ablations.md from healthy ones there and of every method on digits (docs/results.md).
"""

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.errors import DivergedError
from nearkin.measures.spectrum import effective_rank, feature_std, mean_cosine
from nearkin.objectives import unit

LEAST_RANK: Final = 0.08
"""Effective rank, as a part of the directions there could be, below which they have collapsed."""

LEAST_STD: Final = 0.65
"""Standard deviation, as a part of that of evenly spread vectors, below which they have."""

MOST_COSINE: Final = 0.55
"""Mean cosine between the embeddings of different images above which they have."""


@torch.no_grad()
def health(embeddings: Float[Tensor, "n d"]) -> dict[str, float]:
    """How much the embeddings of `n` different images differ, judged by their directions.

    Returns:
        `effective_rank`, up to `directions`; `directions`, the most that `n` vectors of
        `d` numbers can use; `feature_std`, 1 where they are spread evenly over the sphere and 0
        where they are alike; `mean_cosine`, between -1 and 1, 0 where they are spread evenly.

    Raises:
        DivergedError: If the embeddings are not finite.
    """
    if not embeddings.isfinite().all():
        raise DivergedError("the embeddings are no longer finite; try a smaller --lr")
    z = unit(embeddings.float())
    return {
        "effective_rank": float(effective_rank(z)),
        "directions": float(min(z.shape)),
        "feature_std": float(feature_std(z)),
        "mean_cosine": float(mean_cosine(z)),
    }


def collapsed(health: Mapping[str, float]) -> bool:
    """Whether the embeddings have become too alike to be of use.

    >>> collapsed(dict(effective_rank=31.0, directions=64.0, feature_std=1.0, mean_cosine=0.0))
    False
    """
    healthy = (
        health["effective_rank"] >= LEAST_RANK * health["directions"]
        and health["feature_std"] >= LEAST_STD
        and health["mean_cosine"] <= MOST_COSINE
    )
    return not healthy


def verdict(health: Mapping[str, float]) -> str:
    """One sentence that says how the embeddings are, and what to do if they have collapsed.

    >>> verdict(dict(effective_rank=31.0, directions=64.0, feature_std=0.98, mean_cosine=0.01))
    'healthy: the embeddings use 31 of 64 directions (spread 0.98, mean cosine 0.01)'
    """
    state, advice = "healthy", ""
    if collapsed(health):
        state = "collapsed"
        advice = "; train longer, or try a lower learning rate or stronger augmentations"
    return (
        f"{state}: the embeddings use {health['effective_rank']:.0f} of "
        f"{health['directions']:.0f} directions (spread {health['feature_std']:.2f}, "
        f"mean cosine {health['mean_cosine']:.2f}){advice}"
    )
