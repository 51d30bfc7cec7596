"""Test images with a near-duplicate or a group in the training part; what scores owe to them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Bool

from nearkin.metrics.metric import Metric
from nearkin.pace import count

SCORED: Final = ("kNN top-1", "linear probe")


@dataclass(frozen=True, slots=True)
class Leaks:
    """How many test images the training part has a near-duplicate of, or images of their group."""

    leaked: int
    test: int
    accuracies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By metric: the accuracy on all labeled test images, and on those that are not leaked."""
    grouped: bool = False  # Whether the data name groups, so that some may share no more than one

    def __str__(self) -> str:
        """One sentence, without its period."""
        among = "have a near-duplicate among the training images"
        if self.grouped:
            among = "share a group with training images, or have a near-duplicate among them"
        text = f"{self.leaked} of {count(self.test, 'test image')} {among}"
        each = [
            f"{name} is {without:.3f} instead of {every:.3f}"
            for name, (every, without) in self.accuracies.items()
        ]
        return f"{text}; without them {', '.join(each)}" if each else text


def find_leaks(
    leaked: Bool[np.ndarray, " test"], metrics: Iterable[Metric], *, grouped: bool = False
) -> Leaks | None:
    """Score an encoder anew on the test images that are not leaked; None if none is."""
    if not leaked.any():
        return None
    accuracies = {}
    for metric in metrics:
        if metric.name in SCORED and metric.outcome is not None:
            correct = metric.outcome.correct
            clean = correct[~leaked[metric.outcome.rows]]
            if len(clean):
                accuracies[metric.name] = (float(correct.mean()), float(clean.mean()))
    return Leaks(int(leaked.sum()), len(leaked), accuracies, grouped)
