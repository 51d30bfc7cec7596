"""How far a number measured on a sample of images may be from the truth.

`wilson` and `bootstrap` take images as independent: where they come in bursts, the truth may be
farther away. `paired_difference` respects the groups of images.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Int


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


def mean_interval(
    values: Float[np.ndarray, " n"], confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of the mean of a normal law from a few independent values (Student 1908).

    Returns:
        Its two ends; the whole line of numbers if there are fewer than two values.

    >>> low, high = mean_interval(np.array([0.5, 0.6, 0.7]))
    >>> f"{low:.3f} {high:.3f}"
    '0.352 0.848'
    """
    from scipy.special import stdtrit

    if len(values) < 2:
        return -np.inf, np.inf
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = quantile * float(values.std(ddof=1)) / len(values) ** 0.5
    return float(values.mean()) - half, float(values.mean()) + half


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


def paired_difference(
    new: Bool[np.ndarray, " n"],
    old: Bool[np.ndarray, " n"],
    *,
    groups: Int[np.ndarray, " n"] | None = None,
    variance: float = 0.0,
    confidence: float = 0.95,
) -> tuple[float, float, float]:
    """Difference of two accuracies on the same images, with its interval.

    Images that both get right, or both get wrong, tell nothing about the difference, so it is
    known far better than from the intervals of the two accuracies. Where images come in groups,
    counts are divided by the design effect before the interval is computed (Rao & Scott 1992).
    A further independent error adds to the squared distance of either end.

    Args:
        new: Whether the first classifier is right, of each image.
        old: Whether the second is, of the same images.
        groups: The group of each image; images of one group are not independent.
        variance: Variance of the difference from what is not the sampling of these images, such
            as that of the images that were learned from; see `jackknife`.
        confidence: Share of such intervals that hold the truth.

    Returns:
        Accuracy of `new` minus that of `old`, and the two ends of its interval.

    >>> right, wrong = np.ones(30, bool), np.zeros(30, bool)
    >>> mixed = np.arange(30) < 12
    >>> "{:.3f} [{:.3f}, {:.3f}]".format(*paired_difference(right, mixed))
    '0.600 [0.418, 0.754]'
    """
    gain = new.astype(np.float64) - old
    effect = 1.0 if groups is None else design_effect(gain, groups)
    gained, lost = float((gain > 0).sum()), float((gain < 0).sum())
    low, high = tango(gained / effect, lost / effect, len(gain) / effect, confidence)
    value, further = (
        float(gain.mean()) if len(gain) else 0.0,
        _quantile(confidence) ** 2 * variance,
    )
    low, high = (math.hypot(value - end, math.sqrt(further)) for end in (low, high))
    return value, max(-1.0, value - low), min(1.0, value + high)


def tango(
    gained: float, lost: float, total: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Score interval of the difference of two paired proportions (Tango 1998, equation 8).

    It holds differences that a score test does not reject, with the nuisance parameter, the
    probability of a loss, at its maximum of the likelihood under that difference. Good also for
    few images and where nothing differs. Counts may be fractions.

    Args:
        gained: Number of images that only the first classifier gets right.
        lost: Number of those that only the second gets right.
        total: Number of all images.
        confidence: Share of such intervals that hold the truth.

    Returns:
        Its two ends, within [-1, 1]; all of [-1, 1] if nothing was counted.

    >>> "{:.3f} {:.3f}".format(*tango(1.0, 7.0, 21.0))
    '-0.517 -0.026'
    """
    if total <= 0:
        return -1.0, 1.0
    z2, value = _quantile(confidence) ** 2, (gained - lost) / total

    def accepted(difference: float) -> bool:
        linear = (2 * total + lost - gained) * difference - gained - lost
        constant = -lost * difference * (1 - difference)
        root = math.sqrt(max(0.0, linear**2 - 8 * total * constant))
        loss = (root - linear) / (4 * total)  # the most likely probability of a loss
        variance = max(0.0, 2 * loss + difference * (1 - difference)) / total
        return bool((value - difference) ** 2 <= z2 * variance)

    def end(outside: float) -> float:
        if accepted(outside):
            return outside
        inside = value
        for _ in range(50):  # bisection: the score is monotonic in the difference
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if accepted(middle) else (inside, middle)
        return inside

    return end(-1.0), end(1.0)


def jackknife(values: Float[np.ndarray, "folds n"]) -> float:
    """Variance of a mean over images that comes from the sample that something was learned from.

    The delete-a-group jackknife (Kott 2001), for the part that images have in common: a small
    change of what was learned flips single images at random, which the sampling of images covers
    already, and which would count `folds` times. So only products of different images are summed.

    Args:
        values: Of each image, without one of equal parts of that sample in turn.

    Returns:
        The variance, at least 0; 0 for fewer than two images.

    >>> jackknife(np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))  # 2/3 of the squared deviations
    1.3333333333333333
    >>> jackknife(np.array([[1.0, 0.0], [0.0, 1.0]]))  # nothing in common
    0.0
    """
    folds, n = values.shape
    if n < 2:
        return 0.0
    deviation = values - values.mean(axis=0)
    products = np.square(deviation.sum(axis=1)) - np.square(deviation).sum(axis=1)
    common = float(products.sum()) / (n * (n - 1))
    return float(max(0.0, common * (folds - 1) / folds))


def design_effect(values: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"]) -> float:
    """How many times the variance of a mean is that of independent images; at least 1.

    The variance with whole groups as the sample, over that of images (Kish 1965, section 5.4).
    Values that are all alike show no variance: groups then count as one image each, as far as
    their sizes allow. The same holds where there is one group alone.
    """
    n = len(values)
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if n == len(sizes):
        return 1.0
    deviation = values - values.mean()
    alone = float(np.square(deviation).sum()) * n / (n - 1)
    if len(sizes) == 1 or alone == 0:
        return float(np.square(sizes, dtype=np.float64).sum() / n)
    sums = np.bincount(member, deviation)
    together = float(np.square(sums).sum()) * len(sizes) / (len(sizes) - 1)
    return max(1.0, together / alone)


def _quantile(confidence: float) -> float:
    """Return how many standard deviations around the mean hold this share of a normal law."""
    return NormalDist().inv_cdf((1 + confidence) / 2)
