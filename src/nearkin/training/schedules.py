"""Schedules: the part of the peak learning rate that is due at each point of training."""

import math
from collections.abc import Sequence

from nearkin.errors import UsageError
from nearkin.method import Schedule


def constant() -> Schedule:
    """The peak, always.

    >>> schedule = constant()
    >>> [schedule(progress) for progress in (0.0, 0.5, 1.0)]
    [1.0, 1.0, 1.0]
    """
    return lambda _: 1.0


def warmup_cosine(warmup: float = 0.0, final: float = 0.0, start: float = 0.0) -> Schedule:
    """Rise in a line to the peak, then fall along half a cosine to `final`.

    The cosine is that of Loshchilov & Hutter (2017, eq. 5) without restarts, the warm-up that of
    Goyal et al. (2017, section 2.2).

    Args:
        warmup: How much of training the rise takes; at least 0 and less than 1.
        final: What is left of the peak at the end, between 0 and 1.
        start: What there is of the peak at the beginning, between 0 and 1.

    Raises:
        UsageError: If an argument is out of its range.

    >>> schedule = warmup_cosine(warmup=0.5, final=0.2)
    >>> [round(schedule(progress), 3) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]
    [0.0, 0.5, 1.0, 0.6, 0.2]
    """
    if not 0 <= final <= 1:
        raise UsageError(f"final is {final}; choose a part of the peak, from 0 to 1")

    def cosine(progress: float) -> float:
        fallen = (progress - warmup) / (1 - warmup)
        return final + (1 - final) * (1 + math.cos(math.pi * fallen)) / 2

    return _risen(warmup, start, cosine)


def warmup_milestones(
    milestones: Sequence[float], warmup: float = 0.0, start: float = 0.0
) -> Schedule:
    """Rise in a line to the peak, and drop to a tenth at each of some points of training.

    So InstDisc and MoCo v1 are trained (Wu et al. 2018, section 4.3).

    Args:
        milestones: Shares of training.
        warmup: How much of training the rise takes; at least 0 and less than 1.
        start: What there is of the peak at the beginning, between 0 and 1.

    Raises:
        UsageError: If an argument is out of its range.

    >>> schedule = warmup_milestones([0.6, 0.8])
    >>> [round(schedule(progress), 3) for progress in (0.0, 0.59, 0.6, 0.8, 1.0)]
    [1.0, 1.0, 0.1, 0.01, 0.01]
    """

    def steps(progress: float) -> float:
        return float(0.1 ** sum(progress >= milestone for milestone in milestones))

    return _risen(warmup, start, steps)


def _risen(warmup: float, start: float, fall: Schedule) -> Schedule:
    """A line from `start` to 1, and then a schedule."""
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup is {warmup}; choose a part of training, from 0 to less than 1")
    if not 0 <= start <= 1:
        raise UsageError(f"start is {start}; choose a part of the peak, from 0 to 1")

    def schedule(progress: float) -> float:
        if progress < warmup:
            return start + (1 - start) * progress / warmup
        return fall(progress)

    return schedule
