"""Health: whether the embeddings still differ, which the loss does not tell.

A collapsed encoder often has the lower loss. Bounds differ by method: healthy embeddings of some
look like collapsed ones of others. docs/health.md describes how they were measured.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.errors import DivergedError
from nearkin.evaluation.geometry import effective_rank, feature_std, mean_cosine
from nearkin.method import HealthBounds, Method
from nearkin.objectives import unit

LOOKS: Final = 3
"""Looks in a row that must show a collapse, before it is told."""

SETTLED: Final = 0.25
"""Share of a training before which embeddings may be as alike as those of an untrained network."""

BOUNDS: Final[Mapping[str, HealthBounds]] = {
    "DINO": HealthBounds(min_rank=0.04, min_std=0.3, max_cosine=0.79),
    "InstDisc": HealthBounds(min_std=0.32, max_cosine=0.77),
    "InstDiscParametric": HealthBounds(min_rank=0.11),
    "MoCoEndToEnd": HealthBounds(min_rank=0.1),
    "MoCoMemoryBank": HealthBounds(min_std=0.34, max_cosine=0.73),
    "NCL": HealthBounds(min_rank=0.11, min_std=0.35, max_cosine=0.72),
    "RotNet": HealthBounds(min_rank=0.2, min_std=0.26, max_cosine=0.86),
    "SimCLR": HealthBounds(min_rank=0.14),
    "SimGCD": HealthBounds(min_rank=0.02, min_std=0.35, max_cosine=0.74),
    "Supervised": HealthBounds(min_rank=0.17, min_std=0.3, max_cosine=0.81),
    "SwAV": HealthBounds(min_rank=0.05, min_std=0.25, max_cosine=0.82),
    "VICReg": HealthBounds(min_rank=0.14, min_std=0.32, max_cosine=0.79),
}
"""Measured bounds by the name of the method's class; the others have the defaults."""


def bounds_of(method: type[Method[Any]]) -> HealthBounds:
    """Return the bounds that a method declares, or else those that were measured."""
    return method.health_bounds or BOUNDS.get(method.__name__, HealthBounds())


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


def signs(health: Mapping[str, float], method: type[Method[Any]]) -> list[str]:
    """What shows that embeddings have become too alike to be of use: nothing, if they have not.

    Args:
        health: What `health` measures.
        method: What trains them, which knows the bounds of its healthy embeddings.
    """
    rank, most = health["effective_rank"], health["directions"]
    std, cosine = health["feature_std"], health["mean_cosine"]
    bounds = bounds_of(method)
    found = []
    if not rank >= bounds.min_rank * most:  # NaN is no good sign
        found.append(f"effective rank below {bounds.min_rank * most:.0f}")
    if not std >= bounds.min_std:
        found.append(f"spread below {bounds.min_std:.2f}")
    if not cosine <= bounds.max_cosine:
        found.append(f"mean cosine above {bounds.max_cosine:.2f}")
    return found


def verdict(health: Mapping[str, float], method: type[Method[Any]]) -> str:
    """One sentence that says how the embeddings are, and what to do if they have collapsed."""
    found = signs(health, method)
    state = "collapsed" if found else "healthy"
    seen = (
        f"{state}: the embeddings use {health['effective_rank']:.0f} of "
        f"{health['directions']:.0f} directions (spread {health['feature_std']:.2f}, "
        f"mean cosine {health['mean_cosine']:.2f})"
    )
    if not found:
        return seen
    return (
        f"{seen}, {' and '.join(found)}; try a lower learning rate, stronger augmentations or a "
        "longer training"
    )


class Alarm:
    """Notices embeddings that have collapsed and stay so.

    Args:
        method: What trains them.
    """

    def __init__(self, method: type[Method[Any]]) -> None:
        self.method = method
        self._row = 0

    def hear(self, health: Mapping[str, float], progress: float) -> str:
        """The verdict, at the third look in a row that shows a collapse; otherwise nothing."""
        bad = progress >= SETTLED and bool(signs(health, self.method))
        self._row = self._row + 1 if bad else 0
        return verdict(health, self.method) if self._row == LOOKS else ""
