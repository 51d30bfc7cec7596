"""Health: whether the embeddings of different images still differ; the loss does not show it.

A collapsed encoder often has the lower loss. Bounds differ by method: healthy embeddings of some
look like collapsed ones of others. docs/health.md describes how they were measured.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.errors import DivergedError
from nearkin.measures.geometry import effective_rank, feature_std, mean_cosine
from nearkin.method import HealthBounds, Method
from nearkin.objectives import unit

PATIENCE: Final = 3  # Evaluations in a row that must show a collapse before it is reported
SETTLED: Final = 0.25  # Share of a training before which embeddings may still be alike
RECOVERY: Final = (
    0.1  # Share of the way back to its bound per evaluation that counts as recovering
)

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
}  # Measured bounds of built-in methods by class name; the others have the defaults


def bounds_of(method: type[Method[Any]]) -> HealthBounds:
    """Return the bounds that a method declares, or else those that were measured."""
    # A method of the user's may be named like a built-in one.
    built_in = method.__module__.startswith("nearkin.methods.")
    measured = BOUNDS.get(method.__name__) if built_in else None
    return method.health_bounds or measured or HealthBounds()


@torch.no_grad()
def health(embeddings: Float[Tensor, "n d"]) -> dict[str, float]:
    """Measure how much the embeddings of `n` different images differ, by their directions.

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


def violations(health: Mapping[str, float], method: type[Method[Any]]) -> dict[str, float]:
    """Return how far each measure that is out of the method's bounds is away from its bound.

    Empty for healthy embeddings. The keys say what is wrong, in words.
    """
    bounds = bounds_of(method)
    min_rank = bounds.min_rank * health["directions"]
    distances = {
        f"effective rank below {min_rank:.0f}": min_rank - health["effective_rank"],
        f"spread below {bounds.min_std:.2f}": bounds.min_std - health["feature_std"],
        f"mean cosine above {bounds.max_cosine:.2f}": health["mean_cosine"] - bounds.max_cosine,
    }
    return {name: far for name, far in distances.items() if not far <= 0}  # NaN is a violation


def verdict(health: Mapping[str, float], method: type[Method[Any]]) -> str:
    """Say in one sentence how the embeddings are, and what to do if they have collapsed."""
    wrong = violations(health, method)
    text = (
        f"{'collapsed' if wrong else 'healthy'}: the embeddings use "
        f"{health['effective_rank']:.0f} of {health['directions']:.0f} directions "
        f"(spread {health['feature_std']:.2f}, mean cosine {health['mean_cosine']:.2f})"
    )
    advice = "try a lower learning rate, stronger augmentations or a longer training"
    return f"{text}, {' and '.join(wrong)}; {advice}" if wrong else text


class Alarm:
    """Detects embeddings that have collapsed and stay so.

    Embeddings may start out of bounds and still be on their way: a measure that has gone a tenth
    of the way back to its bound since the evaluation before is recovering, and no sign of a
    collapse. Fluctuations of collapsed embeddings are much smaller than that.
    """

    def __init__(self, method: type[Method[Any]]) -> None:
        self.method = method
        self._before: dict[str, float] = {}
        self._in_a_row = 0

    def update(self, health: Mapping[str, float], progress: float) -> str:
        """Return the verdict at the third evaluation in a row that shows a collapse, else ''."""
        now = violations(health, self.method)
        stuck = any(
            not far <= (1 - RECOVERY) * self._before.get(name, 0.0) for name, far in now.items()
        )
        self._before = now
        self._in_a_row = self._in_a_row + 1 if stuck and progress >= SETTLED else 0
        return verdict(health, self.method) if self._in_a_row == PATIENCE else ""
