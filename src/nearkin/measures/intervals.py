"""How far a number measured on a sample of images may be from the truth.

Images are taken as independent. Where they come in bursts, the truth may be farther away.
"""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from jaxtyping import Int


def wilson(successes: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927), good also near 0 and 1 and for few images.

    Returns:
        Its two ends, within [0, 1]; all of [0, 1] if nothing was counted.

    >>> low, high = wilson(8, 10)
    >>> f"{low:.4f} {high:.4f}"
    '0.4902 0.9433'
    """
    if total == 0:
        return 0.0, 1.0
    z, p = _quantile(confidence), successes / total
    center = p + z**2 / (2 * total)
    half = z * (p * (1 - p) / total + (z / (2 * total)) ** 2) ** 0.5
    shrink = 1 + z**2 / total
    return max(0.0, (center - half) / shrink), min(1.0, (center + half) / shrink)


def bootstrap(
    statistic: Callable[[Int[np.ndarray, " n"]], float],
    n: int,
    *,
    seed: int,
    bounds: tuple[float, float] = (0.0, 1.0),
    resamples: int = 200,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Interval of a statistic of `n` images: its value plus and minus its bootstrap error.

    Images are drawn with replacement; everything else, such as a clustering, stays as it is. The
    error is the standard deviation over the draws (Efron 1979). Quantiles of the draws are not
    used: repeated images raise agreement scores, and few images would fall outside of them.

    Args:
        statistic: The value of the statistic on the images of these rows.
        n: Number of images.
        seed: Decides what is drawn.
        bounds: What the statistic can be at the least and at the most.
        resamples: Number of draws.
        confidence: Share of such intervals that hold the truth.
    """
    generator = np.random.default_rng(seed)
    value = statistic(np.arange(n))
    draws = [statistic(generator.integers(n, size=n)) for _ in range(resamples)]
    half = _quantile(confidence) * float(np.std(draws, ddof=1))
    lowest, highest = bounds
    return max(lowest, value - half), min(highest, value + half)


def _quantile(confidence: float) -> float:
    """Return how many standard deviations around the mean hold this share of a normal law."""
    return NormalDist().inv_cdf((1 + confidence) / 2)
