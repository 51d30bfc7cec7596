"""One temperature for a classifier's probabilities, and the calibration error that it leaves."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int

from nearkin.types import UNLABELED

MIN_TEMPERATURE: Final = 0.05
MAX_TEMPERATURE: Final = 20.0
BINS: Final = 10
SHRINKAGE: Final = 10.0
"""How strongly few images keep a temperature near 1: a normal prior on its logarithm has this
precision, a standard deviation of .32."""
FOLDS: Final = 10
EPSILON: Final = 1e-12  # Keeps the log-loss of a wrong image with probability 1 finite

Probability = Float[np.ndarray, "n classes"]
Numbers = Int[np.ndarray, " n"]


@dataclass(frozen=True)
class Calibration:
    """A temperature for log-probabilities, and the calibration error with and without it."""

    temperature: float
    num_images: int  # How many images it was fitted to
    error_before: float  # Expected calibration error of the largest probability, from 0 to 1
    error_after: float  # The same with the temperature, on the same images


def calibrated(probability: Probability, calibration: Calibration | None) -> Probability:
    """Return `p^(1 / temperature)`, scaled so that rows sum to 1; `p` without a calibration.

    The classes of a row keep their order, and a class with probability 0 keeps it.
    """
    return _rescale(probability, calibration.temperature) if calibration else probability


def fit_calibration(probability: Probability, target: Numbers, groups: Numbers) -> Calibration:
    """Fit the temperature at which what is known of these images is most probable.

    It has the least log-loss from 0.05 to 20 (Guo et al. On calibration of modern neural networks.
    ICML 2017, arXiv:1706.04599, section 4.2) of these images and of one more that is spread
    evenly over the classes, and is drawn towards 1: few images that are all right would otherwise
    ask for certainty. It is 1 unless temperatures that are fitted to other groups
    have clearly less log-loss: by more than the standard error of the sum over the groups. There
    is one image at least.

    Args:
        probability: Of each class, by a classifier that has not seen the image's label.
        target: The class of each image; `UNLABELED` where it is only known not to be the most
            probable one, as of an image in a cluster that another class was matched with.
        groups: The group of each image, such as itself; no group is on both sides of a fold.

    >>> certain = np.array([[0.99, 0.01]] * 4000)
    >>> fitted = fit_calibration(certain, np.arange(4000) % 4 // 3, np.arange(4000))
    >>> calibrated(certain, fitted)[0].round(2)
    array([0.75, 0.25])
    """
    temperature = 1.0
    gain = _gains(probability, target, groups)
    if len(gain) > 1 and gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)):
        temperature = _best_temperature(probability, target)
    correct = probability.argmax(axis=1) == target
    after = _rescale(probability, temperature).max(axis=1)
    return Calibration(
        temperature=temperature,
        num_images=len(target),
        error_before=calibration_error(probability.max(axis=1), correct),
        error_after=calibration_error(after, correct),
    )


def _gains(
    probability: Probability, target: Numbers, groups: Numbers
) -> Float[np.ndarray, " groups"]:
    """Return how much less log-loss each group has at a temperature of others."""
    names, member = np.unique(groups, return_inverse=True)
    gain, folds = np.zeros(len(target)), member % FOLDS
    for fold in np.unique(folds) if len(names) > 1 else ():
        out = folds == fold
        temperature = _best_temperature(probability[~out], target[~out])
        own = (_rescale(probability[out], each) for each in (1.0, temperature))
        before, after = (_log_likelihood(each, target[out]) for each in own)
        gain[out] = after - before
    return np.bincount(member, gain)


def _best_temperature(probability: Probability, target: Numbers) -> float:
    """Return the temperature of least log-loss, drawn towards 1; 1 where none is better."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        rescaled = _rescale(probability, float(np.exp(log_temperature))).clip(min=EPSILON)
        likelihood = _log_likelihood(rescaled, target).sum() + np.log(rescaled).mean()
        return float(SHRINKAGE / 2 * log_temperature**2 - likelihood)

    bounds = (np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE))
    best = float(minimize_scalar(loss, bounds=bounds, method="bounded").x)
    return float(np.exp(min((0.0, best), key=loss)))


def _log_likelihood(probability: Probability, target: Numbers) -> Float[np.ndarray, " n"]:
    """Return the log-probability of each target, or that the most probable class is wrong."""
    own = probability[np.arange(len(target)), target]
    wrong = 1 - probability.max(axis=1)
    return np.asarray(np.log(np.where(target == UNLABELED, wrong, own).clip(min=EPSILON)))


def calibration_error(score: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> float:
    """Return the expected calibration error, from 0 (best) to 1.

    Over ten bins with the same number of images (Nixon et al. Measuring calibration in deep
    learning. 2019, arXiv:1904.01685), except that equal scores share a bin.

    >>> calibration_error(np.full(4, 0.875), np.array([True, True, True, False]))
    0.125
    """
    edges = np.quantile(score, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, score)
    difference = np.bincount(bins, weights=score - correct)
    return float(np.abs(difference).sum() / len(score))


def _rescale(probability: Probability, temperature: float) -> Probability:
    power = probability.astype(np.float64) ** (1 / temperature)
    return np.asarray(power / power.sum(axis=1, keepdims=True))
