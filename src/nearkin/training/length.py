"""How long a training is: the number of epochs that fit into a time, measured at its start."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from statistics import fmean, median
from typing import Any, Final

from nearkin.config import Duration, TrainConfig, seconds
from nearkin.data.batches import BatchLoader
from nearkin.data.split import Split
from nearkin.distributed import CpuTime, broadcast_bytes
from nearkin.method import Method
from nearkin.networks.backbone import as_current
from nearkin.pace import count, span
from nearkin.run.auto import MAX_EVALUATIONS, with_length
from nearkin.run.reporter import Logger
from nearkin.training.average import IMAGES, SHARES
from nearkin.training.fit import anchor_for, optimizer_for, sharded, training_steps
from nearkin.training.health import Monitor

WARM_UP: Final = 2  # Steps of an estimate that are not timed, at least
TIMED: Final = 6  # Steps that are timed after them, at least
PREFETCHED: Final = 2  # Batches that a loader worker reads ahead, by default of PyTorch
BUSY: Final = 1.2  # Slowdown by other processes from which on a machine is called busy
MEASURING: Final = 2.0  # Times as long as encoding all images, for measures and page beside it
LEFT: Final = 1 / 15  # The share of a time that is left for the end at least


@dataclass(frozen=True)
class EpochTime:
    """How long an epoch takes, measured beside whatever else the machine does."""

    seconds: float
    alone: float  # Without other processes, about
    taken: float  # The share of the CPUs that other processes take

    @property
    def busy(self) -> str:
        """A text if other processes make a difference; empty if not, or where it is unknown."""
        slowdown = self.seconds / self.alone
        if slowdown < BUSY:
            return ""
        times = f"{slowdown:.{1 if slowdown < 10 else 0}f} times"
        return f"other processes take {self.taken:.0%} of the CPUs, steps {times} as long"


def time_epoch(
    config: TrainConfig, method: Method[Any], parts: Sequence[BatchLoader]
) -> EpochTime:
    """Estimate how long an epoch takes here, as the mean over equal parts of a training."""
    times = [_time_epoch(config, method, part) for part in parts]
    return EpochTime(*map(fmean, zip(*map(astuple, times), strict=True)))


def _time_epoch(config: TrainConfig, method: Method[Any], batches: BatchLoader) -> EpochTime:
    """Time a few steps, and undo them."""
    # A usual step: the backbone learns, whatever the length of the training will be.
    usual, laps = replace(config, epochs=1, freeze_epochs=0), list[float]()
    # A cache leaves nothing to decode after the first epoch. Without one, workers must be as busy
    # as they will be: no step that is timed has waited since before the first one, and there is
    # more to read than is trained on.
    workers = int(config.workers) if config.cache == "off" else 0
    warm_up, group = max(WARM_UP, workers), max(1, workers)
    total = warm_up + group * math.ceil(TIMED / group)
    fed = closing(batches.load(0, total + PREFETCHED * workers))
    with undone(method), fed as read:
        optimizer, anchor = optimizer_for(method, usual), anchor_for(method, usual)
        trained, start = sharded(usual, method, optimizer), CpuTime.now()
        before = start.clock
        for _ in training_steps(
            usual, trained, optimizer, read, start=0, total=total, anchor=anchor
        ):
            laps.append(time.perf_counter() - before)
            before = time.perf_counter()
    # Of all steps: by now loader workers have ended, and no longer count as other processes.
    spent = CpuTime.now() - start
    seconds = seconds_per_step(laps[warm_up:], group) * batches.sampler.steps_per_epoch
    return EpochTime(seconds, seconds / spent.slowdown, spent.taken)


@contextmanager
def undone(method: Method[Any]) -> Iterator[None]:
    """Give a method its state back after a `with` block, from the memory of the host.

    On a GPU, a training that fits is tried in the memory that it will take.
    """
    state = {name: x.detach().to("cpu", copy=True) for name, x in method.state_dict().items()}
    device = next(method.parameters()).device
    try:
        yield
    finally:
        for name, weight in method.named_parameters():  # sharding has emptied them
            weight.data, weight.grad = state[name].to(device), None
        method.load_state_dict(as_current(state, method))


def seconds_per_step(laps: Sequence[float], group: int) -> float:
    """Return the seconds of a usual step: the median over groups of consecutive ones.

    Workers that are slower than the steps end together: one step waits for all of them, and then
    as many as there are workers wait for nothing. A group has each of these once.

    >>> seconds_per_step([8.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0], group=4)
    2.0
    """
    return median(fmean(laps[first : first + group]) for first in range(0, len(laps), group))


@dataclass(frozen=True)
class Overhead:
    """Seconds of a run that are not steps."""

    start: float = 0.0  # That have passed before the first step
    evaluation: float = 0.0  # Of one during training
    end: float = 0.0  # For features, measures and page


def time_overhead(
    log: Logger, monitor: Monitor, method: Method[Any], config: TrainConfig, split: Split
) -> Overhead:
    """Estimate what a run takes beside its steps, by encoding some images."""
    each = monitor.seconds_per_image(method)
    num_images = len(split.images) + (len(SHARES) + 1) * IMAGES * bool(config.encoder)
    return Overhead(log.seconds, each * monitor.num_images, MEASURING * each * num_images)


def with_epochs(
    config: TrainConfig,
    method: Method[Any],
    parts: Sequence[BatchLoader],
    time_overhead: Callable[[], Overhead] = Overhead,
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
    overhead = time_overhead()
    epochs = planned_epochs(config, epoch.seconds, overhead)
    epochs = int(broadcast_bytes(str(epochs).encode()))
    if log and epoch.busy:
        alone = planned_epochs(config, epoch.alone, overhead)
        log.info(
            f"warning: the machine is busy: {epoch.busy}; --max-time {config.max_time} is "
            f"{count(epochs, 'epoch')} at this speed, also if it changes; alone it would "
            f"be about {alone}"
        )
    if log and (too_short := time_is_short(config.max_time, epoch.seconds, overhead)):
        log.info(f"warning: {too_short}")
    device = next(method.parameters()).device
    return with_length(config, epochs, parts[0].sampler.steps_per_epoch, device)


def planned_epochs(
    config: TrainConfig, epoch_seconds: float, overhead: Overhead = Overhead()
) -> int:
    """Return the number of epochs of a training that may have a time, a number, or both.

    What is not steps takes its part of a time, a fifteenth is left for the end in any case, and
    one epoch is trained at least.

    >>> planned_epochs(TrainConfig(max_time="45m"), epoch_seconds=60.0)
    42
    """
    most = math.inf if config.epochs == "auto" else config.epochs
    if not config.max_time:
        return int(most)
    left, each = _seconds_left(config.max_time, overhead), overhead.evaluation
    if config.evaluate_every == "auto":  # after each epoch, but at most so often
        fitting = max(
            left / (epoch_seconds + each), (left - MAX_EVALUATIONS * each) / epoch_seconds
        )
    else:
        fitting = left / (epoch_seconds + each / (config.evaluate_every or math.inf))
    return int(min(most, max(1, fitting)))


def time_is_short(duration: Duration, epoch_seconds: float, overhead: Overhead) -> str:
    """Return a sentence if a single epoch does not fit into a duration; else ''."""
    needed = epoch_seconds + overhead.evaluation
    if needed <= _seconds_left(duration, overhead):
        return ""
    whole = overhead.start + needed + overhead.end
    return (
        f"--max-time {duration} is too short for one epoch, which is trained all the same; the "
        f"run takes about {span(max(1.0, whole))}"
    )


def _seconds_left(duration: Duration, overhead: Overhead) -> float:
    """Return what a duration leaves for steps and evaluations."""
    whole = seconds(duration)
    return whole - overhead.start - max(LEFT * whole, overhead.end)
