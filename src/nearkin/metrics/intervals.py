"""How far a number measured on a sample of images may be from the truth: 95 % intervals.

Images that come in groups, such as bursts and near-duplicates, are not independent. Each interval
is that of as many independent images as tell the same, the effective number; without groups, all
images count. tests/metrics/test_coverage.py simulates how often the intervals hold the truth.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Groups = Int[np.ndarray, " n"] | None
"""The group of each image, images of one of which are not independent; None: all are."""

Z: Final = 1.959963984540054  # Standard deviations around the mean that hold 95 % of a normal law
RARE: Final = 0.05  # One-sided error of the end of an interval near 0 or 1


class Interval(NamedTuple):
    """The ends of a 95 % confidence interval, and how many independent images it is that of."""

    low: float
    high: float
    effective_n: float | None  # None where that has no meaning


# Shares and means


def wilson(share: float, n: float) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927), good also for few images; [0, 1] for none.

    Near 0 and 1 it holds the truth too seldom, down to .84. There its outer end is that of the
    one-sided interval by the binomial law, a modification of Brown, Cai & DasGupta (Interval
    estimation for a binomial proportion. Statistical Science 2001, section 4.1.1). The number `n`
    of images may be a fraction, unlike one of scipy's.

    >>> "{:.4f} {:.4f}".format(*wilson(0.8, 10.0))
    '0.4902 0.9632'
    """
    from scipy.special import betaincinv

    if n <= 0:
        return 0.0, 1.0
    center = share + Z**2 / (2 * n)
    half = Z * (share * (1 - share) / n + (Z / (2 * n)) ** 2) ** 0.5
    shrink = 1 + Z**2 / n
    low, high = (center - half) / shrink, (center + half) / shrink
    right, wrong = share * n, (1 - share) * n
    low = min(low, float(betaincinv(right, wrong + 1, RARE))) if right > 0 else 0.0
    high = max(high, float(betaincinv(right + 1, wrong, 1 - RARE))) if wrong > 0 else 1.0
    return low, high


def score_interval(values: Float[np.ndarray, " n"], groups: Groups = None) -> Interval:
    """Interval of the mean of a score from 0 to 1 of each image.

    Wilson's, with an effective number: `n` times the variance that right and wrong images with
    this mean would have, over that of the scores, and divided by the design effect of groups.
    """
    n, mean = len(values), float(values.mean()) if len(values) else 0.0
    spread = float(np.square(values - mean).sum()) / max(n, 1)
    effect = design_effect(values, groups)
    effective = effective_number(effect, groups, values != np.median(values))
    effective *= _binomial_ratio(mean, spread, n)
    return Interval(*wilson(mean, effective), effective)


def crossed_interval(correct: Bool[np.ndarray, "draws n"], groups: Groups = None) -> Interval:
    """Interval of a mean accuracy over draws of what was learned from and over images.

    Of the variance of the mean over images, and that of draws, less what images in common make of
    it (Owen. The pigeonhole bootstrap. Annals of Applied Statistics 2007, has the model).
    """
    of_images = score_interval(correct.mean(axis=0), groups)
    effective, mean = of_images.effective_n or 0.0, float(correct.mean())
    draws, n = correct.shape
    if draws > 1 and n > 1 and 0 < mean < 1:
        of_draws = correct.mean(axis=1)
        rest = correct - of_draws[:, None] - correct.mean(axis=0) + mean
        noise = float(np.square(rest).sum()) / ((draws - 1) * (n - 1) * n)
        variance = max(0.0, float(of_draws.var(ddof=1)) - noise) / draws
        variance *= (_quantile(draws - 1) / Z) ** 2
        effective = 1 / (1 / effective + variance / (mean * (1 - mean)))
    return Interval(*wilson(mean, effective), effective)


def balanced_interval(
    correct: Bool[np.ndarray, " n"], classes: Int[np.ndarray, " n"], groups: Groups = None
) -> tuple[float, Interval]:
    """Mean recall of the classes that there are, and its interval.

    As `score_interval`, each image with the weight that its class gives it (Kish 1965, section
    11.7). A class has the variance of its own images and of one more, which is that of all.
    """
    _, member, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    hits, k = np.bincount(member, correct), len(sizes)
    recall, value = hits / sizes, float((hits / sizes).mean())
    n = k**2 / float((1 / sizes).sum())
    within = (sizes * recall * (1 - recall) + value * (1 - value)) / sizes
    independent = float((within / sizes).sum()) / k**2
    effect = math.inf
    if groups is not None and independent:
        effect = max(1.0, _grouped_variance(correct, recall, member, groups) / independent)
    rarer = correct != (2 * np.count_nonzero(correct) >= len(correct))
    clustered = effective_number(effect, groups, rarer) / len(correct)
    effective = n * clustered * _binomial_ratio(value, independent * n, n)
    return value, Interval(*wilson(value, effective), effective)


def _grouped_variance(
    correct: Bool[np.ndarray, " n"],
    recall: Float[np.ndarray, " k"],
    member: Int[np.ndarray, " n"],
    groups: Int[np.ndarray, " n"],
) -> float:
    """Variance of the mean recall with groups as the sample, as if each class had one more."""
    count = np.bincount(np.unique(np.stack([member, groups], axis=1), axis=0)[:, 0])
    center = (recall * count + recall.mean()) / (count + 1)
    kept = (count**2 + count - 1) / (count + 1) ** 2
    sizes = np.bincount(member)
    away = (correct - center[member]) / (sizes * np.sqrt(kept))[member]
    sums = np.bincount(np.unique(groups, return_inverse=True)[1], away)
    return float(np.square(sums).sum()) / len(sizes) ** 2


def positive_interval(values: Float[np.ndarray, " n"], groups: Groups = None) -> Interval:
    """Interval of the mean of numbers above 0, such as losses, of which a few are large.

    Student's of its logarithm, by the delta method; all above 0 of fewer than two values.

    >>> "{:.3f} {:.3f} {:.0f}".format(*positive_interval(np.array([0.5, 0.6, 0.7])))
    '0.397 0.908 3'
    """
    n, mean = len(values), float(values.mean())
    if n < 2 or mean <= 0:
        return Interval(0.0, math.inf, float(n))
    effective = effective_number(design_effect(values, groups), groups, np.ones(n, bool))
    error = _quantile(n - 1) * float(values.std(ddof=1)) / effective**0.5 / mean
    return Interval(mean * math.exp(-error), mean * math.exp(error), effective)


def _binomial_ratio(mean: float, spread: float, n: int | float) -> float:
    """Return the variance of right and wrong images with this mean, over that of the scores."""
    # Half an image of score 0 and half a one of 1 are added to both, so that few images that score
    # alike are not certain: of right and wrong images the ratio is 1, always.
    center = (n * mean + 0.5) / (n + 1)
    further = ((1 - center) ** 2 + center**2) / 2
    return center * (1 - center) * (n + 1) / (n * (spread + (mean - center) ** 2) + further)


# Groups


def effective_number(effect: float, groups: Groups, telling: Bool[np.ndarray, " n"]) -> float:
    """Return how many independent images tell as much as these.

    Their number over the design effect, and less where few groups tell of their variance: the
    normal law is replaced by Student's (Korn & Graubard. Confidence intervals for proportions with
    small expected number of positive counts estimated from survey data. Survey Methodology 1998).
    No less than if the images of each group were all alike. `effect` is the design effect,
    infinite if unknown, and `telling` the images that the variance is known from.
    """
    n = len(telling)
    if groups is None or not n:
        return float(n)
    fewest = _alike(groups)
    if fewest == n:
        return float(n)
    if effect == math.inf:
        return fewest
    student = (Z / _quantile(min(len(np.unique(groups[telling])), fewest - 1))) ** 2
    return max(n / effect * student, min(n / effect, fewest))


def quantile(groups: Groups) -> float:
    """Return how many standard errors an interval has on either side: Student's of few groups."""
    if groups is None or not len(groups) or _alike(groups) == len(groups):
        return Z
    return _quantile(_alike(groups) - 1)


def _alike(groups: Int[np.ndarray, " n"]) -> float:
    """Return the effective number of images if those of a group are all alike."""
    sizes = np.unique(groups, return_counts=True)[1]
    return float(sizes.sum()) ** 2 / float(np.square(sizes, dtype=np.float64).sum())


def _quantile(freedom: int | float) -> float:
    """Return the quantile of Student's law with so many degrees of freedom, at least one."""
    from scipy.stats import t

    return float(t.ppf(0.975, max(1.0, freedom)))


def design_effect(values: Float[np.ndarray, " n"], groups: Groups) -> float:
    """How many times the variance of a mean is that of independent images; at least 1.

    The variance with whole groups as the sample, over that of images (Kish 1965, section 5.4).
    Infinite where it is not known: values that are all alike, or a single group.
    """
    n = len(values)
    if groups is None or len(np.unique(groups)) == n:
        return 1.0
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    deviation = values - values.mean()
    alone = float(np.square(deviation).sum()) * n / (n - 1)
    if len(sizes) == 1 or alone == 0:
        return math.inf
    sums = np.bincount(member, deviation)
    together = float(np.square(sums).sum()) * len(sizes) / (len(sizes) - 1)
    return max(1.0, together / alone)


# Two encoders on the same images


def paired_interval(
    gained: Bool[np.ndarray, " n"],
    lost: Bool[np.ndarray, " n"],
    groups: Groups = None,
    variance: float = 0.0,
) -> Interval:
    """Interval of the difference of two accuracies on the same images.

    `gained` are the images that only the first gets right, `lost` those that only the second does:
    `tango`, with the effective number of images (Rao & Scott 1992). A `variance` from what is not
    the sampling of these images, see `jackknife`, adds to the squared distance of an end.

    >>> gained = np.arange(30) < 18
    >>> "{:.3f} {:.3f} {:.0f}".format(*paired_interval(gained, ~gained & gained))
    '0.418 0.754 30'
    """
    n, gain = len(gained), gained.astype(np.float64) - lost
    effective = effective_number(design_effect(gain, groups), groups, gained | lost)
    share = effective / max(n, 1)
    low, high = tango(float(gained.sum()) * share, float(lost.sum()) * share, effective)
    value = float(gain.mean()) if n else 0.0
    low, high = (math.hypot(value - end, Z * math.sqrt(variance)) for end in (low, high))
    return Interval(max(-1.0, value - low), min(1.0, value + high), effective)


def tango(gained: float, lost: float, total: float) -> tuple[float, float]:
    """Score interval of the difference of two paired proportions (Tango 1998, equation 8).

    It holds differences that a score test does not reject, with the most likely probability of a
    loss under that difference. Good also for few images and where nothing differs; [-1, 1] for
    none. Counts may be fractions: of images that only the first classifier gets right, that only
    the second does, and of all.

    >>> "{:.3f} {:.3f}".format(*tango(1.0, 7.0, 21.0))
    '-0.517 -0.026'
    """
    if total <= 0:
        return -1.0, 1.0
    value = (gained - lost) / total

    def accepted(difference: float) -> bool:
        linear = (2 * total + lost - gained) * difference - gained - lost
        constant = -lost * difference * (1 - difference)
        root = math.sqrt(max(0.0, linear**2 - 8 * total * constant))
        loss = (root - linear) / (4 * total)  # the most likely probability of a loss
        variance = max(0.0, 2 * loss + difference * (1 - difference)) / total
        return bool((value - difference) ** 2 <= Z**2 * variance)

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

    The delete-a-group jackknife (Kott 2001) of the part that images have in common, so only
    products of different images are summed: a small change of what was learned flips single images
    at random, which the sampling of images covers already, and which would count `folds` times.
    Values are of each image, without one of equal parts of that sample in turn.

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
