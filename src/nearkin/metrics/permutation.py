"""A permutation test within classes: is a number larger than classes and chance make it?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int

PERMUTATIONS: Final = 999


@dataclass(frozen=True, slots=True)
class PermutationTest:
    """A statistic beside its values by chance."""

    value: float
    chance: float  # Its mean where images are shuffled within classes
    p: float  # How often that is as high, from 1 / (1 + PERMUTATIONS) to 1


def permutation_test(
    statistic: Callable[[Int[np.ndarray, " n"]], float],
    classes: Int[np.ndarray, " n"],
    rng: np.random.Generator,
) -> PermutationTest:
    """Compare a statistic with what it is once images are shuffled within each class.

    The true order counts as one more permutation, so that the p of what means nothing is at most
    q in at most a share q of all cases (Phipson & Smyth 2010, equation 2). The statistic is of an
    order, in which the image at place `i` takes what is known of image `order[i]`; the larger, the
    further from chance.
    """
    value = statistic(np.arange(len(classes)))
    by_class = np.argsort(classes, kind="stable")
    chance, order = np.empty(PERMUTATIONS), np.empty_like(by_class)
    for number in range(PERMUTATIONS):
        order[by_class] = np.lexsort((rng.random(len(classes)), classes))
        chance[number] = statistic(order)
    p = (1 + int((chance >= value).sum())) / (1 + PERMUTATIONS)
    return PermutationTest(value, float(chance.mean()), p)
