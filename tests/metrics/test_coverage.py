"""How often 95 % intervals hold the truth: summed up exactly for independent images, else simulated.

    PYTHONPATH=src:tests python tests/metrics/test_coverage.py 1000    # the table of docs/evaluation.md

Images come alone, in groups of ten, or in groups of 1 to 10. The accuracies of groups follow a beta
law with an intra-group correlation of .3.
"""

import sys
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom
from types_checked import unchecked

from nearkin.metrics.clusters import STATISTICS, agreement, contingency
from nearkin.metrics.intervals import (
    balanced_interval,
    crossed_interval,
    paired_interval,
    positive_interval,
    score_interval,
    wilson,
)

CORRELATION = 0.3
SIZES = {"alone": (1,), "tens": (10,), "mixed": (1, 1, 2, 2, 5, 10)}


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


def draw_right(p, groups, rng):
    return rng.random(len(groups)) < chances(p, groups, rng)


@unchecked()
def coverage(draw, repeats):
    """The share of intervals that hold the truth; `draw` returns a truth and an interval."""
    rng = np.random.default_rng(0)
    drawn = (draw(rng) for _ in range(repeats))
    return float(np.mean([interval[0] <= truth <= interval[1] for truth, interval in drawn]))


def shares(p, groups):
    return lambda rng: (p, score_interval(1.0 * draw_right(p, groups, rng), groups))


def pairs(p, q, groups, rng):
    """Two classifiers, of which the second errs where the first does, mostly."""
    first, kept = draw_right(p, groups, rng), draw_right(q / p, groups, rng)
    lucky = rng.random(len(groups)) < 0.1
    return first, np.where(lucky, rng.random(len(groups)) < q, first & kept)


def differences(p, q, groups):
    def draw(rng):
        first, second = pairs(p, q, groups, rng)
        return p - q, paired_interval(first & ~second, second & ~first, groups)

    return draw


def recalls(p, spread, groups):
    """Five classes, the largest five times as large as the smallest."""
    recall = p + spread * np.linspace(-1, 1, 5)

    def draw(rng):
        of_group = rng.choice(5, groups.max() + 1, p=np.array([5, 4, 3, 2, 1]) / 15)
        classes, right = of_group[groups], np.zeros(len(groups), bool)
        for number in np.unique(classes):
            own = classes == number
            _, few = np.unique(groups[own], return_inverse=True)
            right[own] = draw_right(recall[number], few, rng)
        return recall[np.unique(classes)].mean(), balanced_interval(right, classes, groups)[1]

    return draw


def logistic(x):
    return 1 / (1 + np.exp(-x))


def shots(p, groups):
    """Ten classifiers from a few images each, some better than others, on easy and hard images."""
    level = 1.3 * np.log(p / (1 - p))
    truth = logistic(level + np.random.default_rng(9).normal(size=400_000) * 1.09**0.5).mean()

    def draw(rng):
        ease = level + rng.normal(size=groups.max() + 1)[groups]
        chance = logistic(ease + 0.3 * rng.normal(size=(10, 1)))
        return truth, crossed_interval(rng.random(chance.shape) < chance, groups)

    return draw


def scores(groups):
    """Average precisions, many of them 1."""

    def values(rng):
        shared = rng.normal(size=groups.max() + 1)[groups]
        return np.minimum(1, np.exp(0.8 * shared + 0.8 * rng.normal(size=len(groups)) - 0.3))

    other = np.random.default_rng(9)
    truth = np.mean([values(other).mean() for _ in range(3_000)])
    return lambda rng: (truth, score_interval(values(rng), groups))


def losses(groups):
    """Losses, a few of them large."""

    def draw(rng):
        shared = rng.gamma(1.0, 1.0, groups.max() + 1)[groups]
        return 1.0, positive_interval(shared * rng.gamma(2.0, 0.5, len(groups)), groups)

    return draw


def labelings(name, wrong, groups):
    """Five classes and clusters; the truth is the mean of as many images."""

    def draw(rng):
        labels = rng.integers(5, size=groups.max() + 1)[groups]
        other = rng.integers(5, size=len(groups))
        return labels, np.where(draw_right(1 - wrong, groups, rng), labels, other)

    other = np.random.default_rng(9)
    truth = np.mean([STATISTICS[name][0](contingency(*draw(other))) for _ in range(300)])
    return lambda rng: (truth, agreement(*draw(rng), groups, seed=0)[name][1])


CASES = {
    "accuracy": lambda p, groups: shares(p, groups),
    "difference": lambda p, groups: differences(p, p - 0.05, groups),
    "balanced accuracy": lambda p, groups: recalls(p - 0.05, 0.05, groups),
    "few-shot": lambda p, groups: shots(p, groups),
    "average precision": lambda _, groups: scores(groups),
    "log-loss": lambda _, groups: losses(groups),
    "NMI": lambda p, groups: labelings("NMI", 1 - p, groups),
    "ARI": lambda p, groups: labelings("ARI", 1 - p, groups),
}


def exact(n, p):
    """The coverage of Wilson's interval, as modified, of `n` independent images."""
    ends = np.array([wilson(right / n, float(n)) for right in range(n + 1)])
    held = (ends[:, 0] <= p) & (p <= ends[:, 1])
    return float(binom.pmf(np.arange(n + 1), n, p)[held].sum())


@pytest.mark.parametrize("n", [10, 30, 100, 1000])
def test_the_interval_of_an_accuracy_holds_it_as_often_as_it_says(n):
    """With few images no interval has .95 at each accuracy; then it is more rather than less."""
    found = [exact(n, p) for p in np.linspace(0.5, 1.0, 26)]
    assert min(found) > 0.92
    assert np.median(found) > 0.945
    if n == 1000:
        assert np.median(found) < 0.955


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("NMI", "ARI")])
def test_intervals_of_images_in_groups_hold_the_truth(name):
    """Within three standard errors of the simulation: of .93 to .97, or more where few differ."""
    repeats = 300
    error = 3 * (0.95 * 0.05 / repeats) ** 0.5
    for n, kind, p in ((200, "tens", 0.7), (1000, "mixed", 0.9)):
        found = coverage(CASES[name](p, members(n, kind)), repeats)
        assert found > 0.93 - error, (n, kind, p)
        assert found < 0.97 + error or n == 200, (n, kind, p)


def test_few_images_in_few_groups_have_no_false_certainty():
    for name in ("accuracy", "balanced accuracy", "difference"):
        assert coverage(CASES[name](0.95, members(50, "mixed")), 300) > 0.9, name
        assert coverage(CASES[name](0.9, members(10, "alone")), 300) > 0.9, name


def test_two_labelings_agree_with_other_images_as_their_intervals_say():
    for name, kind in (("NMI", "alone"), ("ARI", "tens")):
        assert coverage(CASES[name](0.8, members(200, kind)), 20) >= 0.8, name


def table(repeats):
    """Rows of text: how often intervals of each kind hold the truth."""
    for name, of in CASES.items():
        for n, kind in product((10, 100, 1000), SIZES):
            if n == 10 and kind != "alone":
                continue
            few = repeats // 5 if name in ("NMI", "ARI") else repeats
            found = (coverage(of(p, members(n, kind)), few) for p in (0.6, 0.8, 0.9, 0.98))
            yield f"| {name} | {n} | {kind} | {' | '.join(f'{x:.3f}' for x in found)} |"


if __name__ == "__main__":
    for row in table(int(sys.argv[1])):
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
