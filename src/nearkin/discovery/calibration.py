"""How often a class is right at a given probability, learned from classes that were hidden."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from nearkin.errors import DataError

COLDEST: Final = 0.05
HOTTEST: Final = 20.0
BINS: Final = 10
LEAST: Final = 1e-12
"""Keeps the logarithm of a certainty that was wrong finite."""


@dataclass(frozen=True)
class Calibration:
    """One temperature for log-probabilities, and what it does to their error."""

    temperature: float
    num_images: int
    """How many images it was fitted to."""
    error_before: float
    """Expected calibration error of the largest probability, from 0 to 1."""
    error_after: float
    """The same with the temperature, on the same images."""

    def apply(self, probability: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
        """`p^(1 / temperature)`, scaled so that rows sum to 1.

        The classes of a row keep their order, and a class with probability 0 keeps it.
        """
        return _heat(probability, self.temperature)


def fit(
    probability: Float[np.ndarray, "n classes"], correct: Bool[np.ndarray, " n"]
) -> Calibration:
    """The temperature at which the largest probability best says how often it is right.

    It has the least binary log-loss against `correct` of all from 0.05 to 20, and is 1 where
    nothing is better. Temperature scaling is from Guo et al. On calibration of modern neural
    networks. ICML 2017, arXiv:1706.04599, section 4.2. They score the probability of the true
    class; a class that was found has no true counterpart, only a right or wrong image.

    Args:
        probability: Of the classes, for images whose true class was hidden from the classifier.
        correct: Whether the most probable class turned out to be right.

    Raises:
        DataError: If there is no image.

    >>> certain = np.array([[0.99, 0.01]] * 4)
    >>> fitted = fit(certain, np.array([True, True, True, False]))
    >>> fitted.apply(certain)[0].round(3)
    array([0.75, 0.25])
    """
    from scipy.optimize import minimize_scalar

    if not len(correct):
        raise DataError("no image to calibrate with; hide at least one known class")

    def loss(log_temperature: float) -> float:
        largest = _heat(probability, np.exp(log_temperature)).max(axis=1)
        likelihood = np.where(correct, largest, 1 - largest)
        return float(-np.log(likelihood.clip(min=LEAST)).mean())

    bounds = (np.log(COLDEST), np.log(HOTTEST))
    found = float(minimize_scalar(loss, bounds=bounds, method="bounded").x)
    temperature = float(np.exp(min((0.0, found), key=loss)))
    after = _heat(probability, temperature).max(axis=1)
    return Calibration(
        temperature=temperature,
        num_images=len(correct),
        error_before=calibration_error(probability.max(axis=1), correct),
        error_after=calibration_error(after, correct),
    )


def calibration_error(score: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> float:
    """Mean distance between what images' scores promise and how often they are right.

    The expected calibration error over ten bins with the same number of images (Nixon et al.
    Measuring calibration in deep learning. 2019, arXiv:1904.01685), but for equal scores, which
    share a bin. 0 is best, 1 worst.

    >>> calibration_error(np.full(4, 0.875), np.array([True, True, True, False]))
    0.125
    """
    edges = np.quantile(score, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, score)
    difference = np.bincount(bins, weights=score - correct)
    return float(np.abs(difference).sum() / len(score))


def _heat(
    probability: Float[np.ndarray, "n classes"], temperature: float
) -> Float[np.ndarray, "n classes"]:
    heated = probability.astype(np.float64) ** (1 / temperature)
    return np.asarray(heated / heated.sum(axis=1, keepdims=True))
