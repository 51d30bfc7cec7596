"""How long a training is: the number of epochs that fit into a time, measured at its start."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import Any, Final

from nearkin.config import Duration, TrainConfig, seconds
from nearkin.data.batches import BatchLoader
from nearkin.data.split import Split
from nearkin.distributed import broadcast_bytes
from nearkin.method import Method
from nearkin.metrics.probe import WIDEST, probe_seconds
from nearkin.networks.backbone import as_current
from nearkin.pace import span
from nearkin.run.auto import MAX_EVALUATIONS, with_length
from nearkin.run.reporter import Logger
from nearkin.training.anchor import Anchor
from nearkin.training.average import IMAGES, SHARES
from nearkin.training.fit import optimizer_for, sharded, training_steps
from nearkin.training.health import Monitor
from nearkin.types import Batch

WARM_UP: Final = 2  # Steps of an estimate that are not timed, at least
TIMED: Final = 6  # Steps that are timed after them, at least
PREFETCHED: Final = 2  # Batches that a loader worker reads ahead, by default of PyTorch
MEASURING: Final = 2.0  # Times as long as encoding all images, for measures and page beside it
LEFT: Final = 1 / 15  # The share of a time that is left for the end at least


def time_epoch(config: TrainConfig, method: Method[Any], parts: Sequence[BatchLoader]) -> float:
    """Estimate the seconds of an epoch here, as the mean over equal parts of a training."""
    return fmean(_time_epoch(config, method, part) for part in parts)


def _time_epoch(config: TrainConfig, method: Method[Any], batches: BatchLoader) -> float:
    """Time a few steps, and undo them."""
    # A usual step: the backbone learns, whatever the length of the training will be.
    usual = replace(config, epochs=1, freeze_epochs=0)
    # A cache leaves nothing to decode after the first epoch.
    workers = int(config.workers) if config.cache == "off" else 0
    with undone(method):
        optimizer, anchor = optimizer_for(method, usual), Anchor.at(method, usual.anchor)
        trained = sharded(usual, method, optimizer)

        def steps(read: Iterator[Batch], total: int) -> Iterator[object]:
            return training_steps(
                usual, trained, optimizer, read, start=0, total=total, anchor=anchor
            )

        return _timed(steps, batches, workers)


def time_filling(config: TrainConfig, batches: BatchLoader) -> float:
    """Estimate the seconds in which the first epoch fills the cache, if there is one.

    Afterwards it has all images of the steps that `time_epoch` takes.
    """
    return 0.0 if config.cache == "off" else _timed(islice, batches, int(config.workers))


def _timed(
    steps: Callable[[Iterator[Batch], int], Iterator[object]], batches: BatchLoader, workers: int
) -> float:
    """Estimate the seconds of an epoch by those of a few steps, given batches and their number.

    Workers are as busy as they will be: no step that is timed has waited since before the first
    one, and there is more to read than is used.
    """
    warm_up, group, laps = max(WARM_UP, workers), max(1, workers), list[float]()
    total = warm_up + group * math.ceil(TIMED / group)
    with closing(batches.load(0, total + PREFETCHED * workers)) as read:
        before = time.perf_counter()
        for _ in steps(read, total):
            laps.append(time.perf_counter() - before)
            before = time.perf_counter()
    return seconds_per_step(laps[warm_up:], group) * batches.sampler.steps_per_epoch


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

    start: float = 0.0  # That have passed before the first step, and those that fill a cache
    evaluation: float = 0.0  # Of one during training
    end: float = 0.0  # For features, measures and page


def time_overhead(
    log: Logger, monitor: Monitor, method: Method[Any], config: TrainConfig, split: Split
) -> Overhead:
    """Estimate what a run takes beside its steps, by encoding some images."""
    each = monitor.seconds_per_image(method)
    num_images = len(split.images) + (len(SHARES) + 1) * IMAGES * bool(config.encoder)
    end = MEASURING * each * num_images
    if monitor.scored:
        networks = 2 + bool(config.encoder) + bool(config.teacher)  # this one, and it untrained
        labels, dim = split.train.labels, method.backbone.feature_dim
        end += networks * probe_seconds(labels, dim, monitor.device)
        end += probe_seconds(labels, WIDEST, monitor.device)  # of raw pixels
    return Overhead(log.seconds, each * monitor.num_images, end)


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
    filling, epoch = time_filling(config, parts[0]), time_epoch(config, method, parts)
    overhead = time_overhead()
    overhead = replace(overhead, start=overhead.start + filling)
    epochs = planned_epochs(config, epoch, overhead)
    epochs = int(broadcast_bytes(str(epochs).encode()))
    if log and (too_short := time_is_short(config.max_time, epoch, overhead)):
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
