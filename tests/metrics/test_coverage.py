"""How often 95 % intervals hold the truth: simulated, and where that is possible summed up exactly.

    PYTHONPATH=src python tests/metrics/test_coverage.py      # the table of docs/evaluation.md

Images come alone, in groups of ten, or in groups of 1 to 10; the accuracies of groups follow a beta
law with an intra-group correlation of .3.
"""

import numpy as np
import pytest
from scipy.stats import binom

from nearkin.metrics.clusters import adjusted_rand_index, agreement, normalized_mutual_information
from nearkin.metrics.intervals import (
    balanced_interval,
    crossed_interval,
    positive_interval,
    paired_interval,
    ratio_interval,
    score_interval,
    wilson,
)

LEAST, MOST = 0.93, 0.97
CORRELATION = 0.3
SIZES = {"alone": (1,), "tens": (10,), "mixed": (1, 1, 2, 2, 5, 10)}
ACCURACIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def members(n, kind):
    """The group of each of `n` images."""
    sizes = np.resize(SIZES[kind], n)
    return np.repeat(np.arange(n), sizes)[:n]


def chances(p, groups, rng):
    """The chance of each image to be right: its group's."""
    count = groups.max() + 1
    if count == len(groups) or p == 1:
        return np.full(len(groups), p)
    a = (1 - CORRELATION) / CORRELATION
    return rng.beta(p * a, (1 - p) * a, count)[groups]


def coverage(draw, repeats, seed=0):
    """The share of intervals that hold the truth; `draw` returns a truth and an interval."""
    rng = np.random.default_rng(seed)
    drawn = (draw(rng) for _ in range(repeats))
    return float(np.mean([interval[0] <= truth <= interval[1] for truth, interval in drawn]))


def error(repeats):
    """Three standard errors of a simulated share of .95."""
    return 3 * (0.95 * 0.05 / repeats) ** 0.5


def right(p, groups):
    """Draw which images are right, and their interval."""
    return lambda rng: (p, score_interval(1.0 * (rng.random(len(groups)) < chances(p, groups, rng)), groups))


def compared(p, q, groups, interval):
    """Draw two classifiers, of which the second errs where the first does, mostly."""

    def draw(rng):
        worse = rng.random(len(groups)) < chances(q / p, groups, rng)
        first = rng.random(len(groups)) < chances(p, groups, rng)
        lucky = rng.random(len(groups)) < 0.1
        second = np.where(lucky, rng.random(len(groups)) < q, first & worse)
        return truth(0.9 * q + 0.1 * q), interval(first, second)

    def truth(second):
        return p - second if interval is differ else p / second

    def differ(first, second):
        return paired_interval(first & ~second, second & ~first, groups)

    if interval == "ratio":
        interval = lambda first, second: ratio_interval(first, second, groups)
    else:
        interval = differ
    return draw


def recalls(p, spread, groups):
    """Draw the right images of five classes, the largest five times as large as the smallest."""
    recall = p + spread * np.linspace(-1, 1, 5)

    def draw(rng):
        of_group = rng.choice(5, groups.max() + 1, p=np.array([5, 4, 3, 2, 1]) / 15)
        classes = of_group[groups]
        right = rng.random(len(groups))
        for number in range(5):
            own = classes == number
            right[own] = right[own] < chances(recall[number], np.unique(groups[own], return_inverse=True)[1], rng) if own.any() else 0
        return recall[np.unique(classes)].mean(), balanced_interval(right > 0, classes, groups)[1]

    return draw


def shots(p, draws, groups):
    """Draw what classifiers from a few images get right, which differ by .05 or so."""

    def draw(rng):
        ease = np.log(p / (1 - p)) * 1.3 + rng.normal(size=groups.max() + 1)[groups]
        skill = 0.3 * rng.normal(size=(draws, 1))
        return None, rng.random((draws, len(groups))) < 1 / (1 + np.exp(-ease - skill))

    rng = np.random.default_rng(99)
    truth = 1 / (1 + np.exp(-np.log(p / (1 - p)) * 1.3 - rng.normal(size=400_000) * 1.09**0.5))
    return lambda rng: (truth.mean(), crossed_interval(draw(rng)[1], groups))


def scores(groups):
    """Draw average precisions, many of them 1."""

    def draw(rng):
        shared = rng.normal(size=groups.max() + 1)[groups]
        return np.minimum(1, np.exp(0.8 * shared + 0.8 * rng.normal(size=len(groups)) - 0.3))

    truth = draw_truth(draw, groups)
    return lambda rng: (truth, score_interval(draw(rng), groups))


def draw_truth(draw, groups):
    rng = np.random.default_rng(99)
    return np.mean([draw(rng).mean() for _ in range(4_000)])


def losses(groups):
    """Draw losses, a few of them large."""

    def draw(rng):
        return rng.gamma(1.0, 1.0, groups.max() + 1)[groups] * rng.gamma(2.0, 0.5, len(groups))

    return lambda rng: (1.0, positive_interval(draw(rng), groups))


def labelings(statistic, k, wrong, groups):
    """Draw classes and clusters, of which some are wrong; the truth is the mean of as many."""

    def draw(rng):
        of_group = rng.integers(k, size=groups.max() + 1)
        labels = of_group[groups]
        bad = rng.random(len(groups)) >= chances(1 - wrong, groups, rng)
        return labels, np.where(bad, rng.integers(k, size=len(groups)), labels)

    from nearkin.metrics.clusters import contingency

    rng = np.random.default_rng(99)
    truth = np.mean([statistic(contingency(*draw(rng))) for _ in range(800)])
    return lambda rng: (truth, agreement(statistic, *draw(rng), groups, seed=0)[1])


if __name__ == "__main__":
    for n in (100, 300, 1000):
        for kind in ("tens", "mixed"):
            g = members(n, kind)
            print(n, kind, "share", *(f"{coverage(right(p, g), 1000):.3f}" for p in ACCURACIES))
    for n in (10, 50, 200, 1000):
        for kind in SIZES:
            if n // 10 < 10 and kind != "alone": continue
            g = members(n, kind)
            print(n, kind, "diff", *(f"{coverage(compared(p, q, g, 'difference'), 1000):.3f}" for p, q in ((0.9, 0.9), (0.9, 0.8), (0.7, 0.65), (0.98, 0.95))))
            print(n, kind, "ratio", *(f"{coverage(compared(p, q, g, 'ratio'), 1000):.3f}" for p, q in ((0.9, 0.9), (0.9, 0.8), (0.7, 0.65), (0.98, 0.95))))
            print(n, kind, "balanced", *(f"{coverage(recalls(p, s, g), 1000):.3f}" for p, s in ((0.6, 0.2), (0.9, 0.0), (0.9, 0.08), (0.98, 0.0))))
            print(n, kind, "shots", *(f"{coverage(shots(p, 10, g), 1000):.3f}" for p in (.5, .7, .9, .98)))
            print(n, kind, "scores", f"{coverage(scores(g), 1000):.3f}", "losses", f"{coverage(losses(g), 1000):.3f}", flush=True)
    for n in (100, 1000):
        for kind in SIZES:
            g = members(n, kind)
            print(n, kind, "nmi ari", *(f"{coverage(labelings(f, k, w, g), 200):.3f}" for f in (normalized_mutual_information, adjusted_rand_index) for k, w in ((5, 0.02), (5, 0.2), (10, 0.2))), flush=True)
