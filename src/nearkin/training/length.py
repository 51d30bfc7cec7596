"""How long a training is: the number of epochs that fit into a time, measured at its start."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Final

from nearkin.config import TrainConfig, seconds
from nearkin.data.batches import Feed
from nearkin.distributed import CpuTime, broadcast_bytes
from nearkin.method import Method
from nearkin.pace import count
from nearkin.run.reporter import Logger
from nearkin.run.settings import LOOKS, with_length
from nearkin.training.fit import optimizer_for, sharded, training_steps
from nearkin.training.health import Monitor

TIMED: Final = 8  # Steps timed to estimate a run; the first two are left out
BUSY: Final = 1.2  # Slowdown by other processes from which on a machine is called busy
MEASURING: Final = 2.0  # Times as long as encoding all images, for measures and page beside it
LEFT: Final = 1 / 15  # The share of a time that is left for the end at least


@dataclass(frozen=True)
class EpochTime:
    """How long an epoch takes, measured beside whatever else the machine does."""

    seconds: float
    slowdown: float  # How many times as long as without other processes, about
    taken: float  # The share of the CPUs that other processes take

    @property
    def alone(self) -> float:
        """Seconds that an epoch would take without other processes, about."""
        return self.seconds / self.slowdown

    @property
    def busy(self) -> str:
        """A text if other processes make a difference; empty if not, or where it is unknown."""
        if self.slowdown < BUSY:
            return ""
        times = f"{self.slowdown:.{1 if self.slowdown < 10 else 0}f} times"
        return f"other processes take {self.taken:.0%} of the CPUs, steps {times} as long"


def time_epoch(config: TrainConfig, method: Method[Any], parts: Sequence[Feed]) -> EpochTime:
    """Estimate how long an epoch takes here, as the mean over equal parts of a training."""
    times = [_time_epoch(config, method, part) for part in parts]
    seconds, alone = (
        fmean(each) for each in zip(*((t.seconds, t.alone) for t in times), strict=True)
    )
    return EpochTime(seconds, seconds / alone, fmean(time.taken for time in times))


def _time_epoch(config: TrainConfig, method: Method[Any], batches: Feed) -> EpochTime:
    """Time a few steps of a copy of the method."""
    # A usual step: the backbone learns, whatever the length of the training will be.
    trial, usual = copy.deepcopy(method), replace(config, epochs=1, freeze_epochs=0)
    optimizer = optimizer_for(trial, usual)
    trained, laps, start = sharded(usual, trial, optimizer), [], CpuTime.now()
    before = start.clock
    fed = batches.between(0, TIMED)
    for _ in training_steps(usual, trained, optimizer, fed, start=0, total=TIMED):
        laps.append(time.perf_counter() - before)
        before = time.perf_counter()
    # Of all steps: by now loader workers have ended, and no longer count as other processes.
    spent = CpuTime.now() - start
    seconds = median(laps[2:]) * batches.order.steps_per_epoch
    return EpochTime(seconds, spent.slowdown, spent.taken)


@dataclass(frozen=True)
class Beside:
    """Seconds of a run that are not steps."""

    start: float = 0.0  # That have passed before the first step
    look: float = 0.0  # Of an evaluation during training
    end: float = 0.0  # For features, measures and page


def time_beside(log: Logger, monitor: Monitor, method: Method[Any], num_images: int) -> Beside:
    """Estimate what a run takes beside its steps, by encoding some images."""
    each = monitor.seconds_per_image(method)
    return Beside(log.seconds, each * monitor.num_images, MEASURING * each * num_images)


def with_epochs(
    config: TrainConfig,
    method: Method[Any],
    parts: Sequence[Feed],
    time_beside: Callable[[], Beside] = Beside,
    log: Logger | None = None,
) -> TrainConfig:
    """Replace --max-time, if there is one, by a number of epochs.

    It is the same in all processes: that of the first one, as it is the one that is measured.
    Where the number was `auto` as well, it has a limit.
    """
    if not config.max_time:
        return config
    # From here on the length is fixed: schedules depend on it, so a clock may not end the run.
    epoch = time_epoch(config, method, parts)
    beside = time_beside()
    epochs = planned_epochs(config, epoch.seconds, beside)
    epochs = int(broadcast_bytes(str(epochs).encode()))
    if log and epoch.busy:
        alone = planned_epochs(config, epoch.alone, beside)
        log.info(
            f"warning: the machine is busy: {epoch.busy}; --max-time {config.max_time} is "
            f"{count(epochs, 'epoch')} at this speed, which stay if it changes; alone it would "
            f"be about {alone}"
        )
    device = next(method.parameters()).device
    return with_length(config, epochs, parts[0].order.steps_per_epoch, device)


def planned_epochs(config: TrainConfig, epoch_seconds: float, beside: Beside = Beside()) -> int:
    """Return the number of epochs of a training that may have a time, a number, or both."""
    most = math.inf if config.epochs == "auto" else config.epochs
    if not config.max_time:
        return int(most)
    if config.evaluate_every == "auto":
        fitting = epochs_within(config.max_time, epoch_seconds, beside, looks=LOOKS)
    else:
        each = beside.look / config.evaluate_every if config.evaluate_every else 0.0
        fitting = epochs_within(config.max_time, epoch_seconds + each, beside)
    return int(min(most, fitting))


def epochs_within(
    duration: str, epoch_seconds: float, beside: Beside = Beside(), looks: int = 0
) -> int:
    """Return how many epochs fit into a duration, beside what is not steps; at least one.

    A fifteenth of it is left for the end in any case. There is a look after each epoch, but at
    most `looks` of them.

    >>> epochs_within("45m", epoch_seconds=60.0)
    42
    """
    whole = seconds(duration)
    left = whole - beside.start - max(LEFT * whole, beside.end)
    few = left / (epoch_seconds + beside.look) if looks else 0.0
    many = (left - looks * beside.look) / epoch_seconds
    return max(1, int(max(few, many)))
