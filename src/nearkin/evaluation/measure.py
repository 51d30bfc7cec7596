"""A measured number with its confidence interval and its protocol."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from nearkin.measures.intervals import wilson
from nearkin.types import UNKNOWN


@dataclass(frozen=True, slots=True)
class Measure:
    """A number with its 95 % confidence interval and its protocol."""

    name: str
    value: float
    low: float | None  # Lower end of the interval; None if the number has none
    high: float | None
    protocol: str  # All that must be the same for two numbers to be compared, in words

    def __str__(self) -> str:
        """The value and its interval, to three digits."""
        if self.low is None or self.high is None:
            return _short(self.value)
        return f"{_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"


def accuracy(name: str, correct: Bool[np.ndarray, " n"], protocol: str) -> Measure:
    """Return the share of correct predictions, with Wilson's interval.

    It takes images as independent, which those of one group are not, and its protocol says so.
    """
    low, high = wilson(int(correct.sum()), len(correct))
    protocol += "; interval as if images were independent"
    return Measure(name, float(correct.mean()), low, high, protocol)


def known(labels: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Return which images have a label."""
    return np.asarray(labels != UNKNOWN)


def unseen(train: Int[np.ndarray, " train"], test: Int[np.ndarray, " test"]) -> str:
    """Return a remark for protocols on test classes without training images, if any."""
    missing = len(np.setdiff1d(test, train))
    return f", {missing} test classes without any training image count as wrong" if missing else ""


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
