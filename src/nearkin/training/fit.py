"""The steps of a run: training, with everything that is written on the way."""

import copy
import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from nearkin.config import TrainConfig, seconds
from nearkin.data.batches import Feed
from nearkin.distributed import (
    all_reduce_max,
    broadcast_bytes,
    collect,
    is_sharded,
    shard,
    whole,
    world_size,
)
from nearkin.errors import DivergedError
from nearkin.method import Method, Schedule
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.pace import Pace
from nearkin.run.folder import RunFolder
from nearkin.run.machine import note_machine
from nearkin.run.reporter import Logger
from nearkin.run.settings.build import PRECISIONS
from nearkin.tables import Journal
from nearkin.training import checkpoint
from nearkin.training.loop import steps
from nearkin.training.monitor import Looker, Watch, look_due, shown
from nearkin.training.optimizer import build_optimizer, restore_optimizer
from nearkin.training.saver import Saver
from nearkin.training.schedules import warmup_cosine, warmup_milestones
from nearkin.training.signals import Requests
from nearkin.types import Batch, Step

COLUMNS = (
    "step", "epoch", "loss", "lr", "feature_std", "effective_rank", "mean_cosine", "knn",
)  # fmt: skip
"""Of metrics.csv. Nothing in it depends on the clock, so equal runs have equal files."""

TIMED = 8
"""Steps timed to estimate a run; the first two are left out."""


def optimizer_for(method: Method[Any], config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer a resolved configuration describes."""
    assert config.optimizer != "auto"
    return build_optimizer(
        method,
        name=config.optimizer,
        lr=float(config.lr),
        weight_decay=float(config.weight_decay),
        eta=config.lars_eta,
        clip=config.lars_clip,
        vectors=config.lars_vectors,
    )


def schedule_for(config: TrainConfig) -> Schedule:
    """How the learning rate changes over a training."""
    if config.lr_milestones:
        milestones = [float(share) for share in config.lr_milestones.split(",")]
        return warmup_milestones(milestones, config.warmup, config.warmup_start)
    return warmup_cosine(config.warmup, config.cosine_end, config.warmup_start)


def steps_of(
    config: TrainConfig,
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    start: int,
    total: int,
) -> Iterator[tuple[int, Step[Any]]]:
    """The steps of a training that a resolved configuration describes; see `steps`."""
    return steps(
        method,
        optimizer,
        batches,
        start=start,
        total=total,
        schedule=schedule_for(config),
        seed=config.seed,
        precision=PRECISIONS[config.precision],
    )


def fit(
    folder: RunFolder,
    config: TrainConfig,
    method: Method[Any],
    batches: Feed,
    monitor: Looker,
    log: Logger,
    terms: Sequence[str] = (),
) -> bool:
    """Train from the newest checkpoint of the run folder to the last step.

    Args:
        folder: Where checkpoints and metrics go.
        config: Resolved settings.
        method: What to train.
        batches: What with.
        monitor: Who looks at it now and then.
        log: Who is told how it goes.
        terms: Metrics of the method that are noted and told beside the loss.

    Returns:
        Whether there was anything left to do.
    """
    per_epoch, batch_size = batches.order.steps_per_epoch, batches.order.batch_size
    total = int(config.epochs) * per_epoch
    optimizer = optimizer_for(method, config)
    start = same_start(optimizer, _restored(folder, method, optimizer, total, log))
    trained = trained_by(config, method, optimizer) if start < total else method
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(folder.metrics, (*COLUMNS, *terms), upto=start))
        asked = stack.enter_context(Requests())
        saver = stack.enter_context(
            Saver(folder, trained, optimizer, journal, log, config.save_every, start).capturing()
        )
        watch = Watch(monitor, config, method, trained, log, asked)
        epoch, pace = journal.rows()[start - start % per_epoch :], Pace(total, batch_size)
        log.progress(start, total, "first step")
        for done, step in steps_of(
            config, trained, optimizer, batches.between(start, total), start=start, total=total
        ):
            found = {"loss": step.loss.item()} | {key: step.metrics[key].item() for key in terms}
            at = f"epoch {-(-done // per_epoch)}/{config.epochs}"
            log.progress(
                done, total, "  ".join([at, f"loss {found['loss']:.3f}", *pace.reach(done)])
            )
            with pace.paused():
                looked = watch.after(done, per_epoch, total)
            row = {"step": done, "epoch": done / per_epoch, **found, **looked}
            journal.append(row | {"lr": optimizer.param_groups[0]["lr"]})
            epoch.append(row)
            if done % per_epoch == 0:
                log.line("  ".join([at, *_means(epoch, found), *shown(looked), *pace.speed]))
                epoch.clear()
            stop = all_reduce_max(
                asked.stop
            )  # once: what comes after the save is for the next step
            saver.after(done, asked=asked.take_save(), last=done == total or bool(stop))
            if stop:
                asked.end(done, stop)
        end_if_asked(asked, total)
        collect(method, trained)
    return start < total


def end_if_asked(asked: Requests, done: int) -> None:
    """End all processes after the same step, if any of them was asked to end."""
    if stop := all_reduce_max(asked.stop):
        asked.end(done, stop)


def trained_by(
    config: TrainConfig, method: Method[Any], optimizer: torch.optim.Optimizer
) -> Method[Any]:
    """What takes the steps: the method, or a copy that is divided among the processes."""
    if not config.fsdp:
        return method
    normalize_in_groups(method, groups=1)  # not once it is divided
    return shard(method, optimizer)


def same_start(optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give every process the first one's optimizer, and its step."""
    if world_size() == 1:
        return step
    state = same({"step": step, "optimizer": optimizer.state_dict()})
    restore_optimizer(optimizer, state["optimizer"])
    first: int = state["step"]
    return first


def same(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the first process has, in all of them: names of numbers, text, tensors, and such."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    sent = broadcast_bytes(content.getvalue())
    found: dict[str, Any] = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=True)
    return found


def _restored(
    folder: RunFolder,
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    total: int,
    log: Logger,
) -> int:
    """The step to go on from, with everything as it was then."""
    restored = checkpoint.load(folder.checkpoints, method, optimizer)
    for damaged in restored.damaged:
        log.line(
            f"warning: {damaged.stem} is damaged, and kept as {damaged.name}; "
            f"what came after step {restored.step} is done again"
        )
    if restored.step:
        log.line(f"resuming after step {restored.step} of {total}")
    changes = note_machine(folder.machine, next(method.parameters()).device, restored.step)
    if changes:
        log.line(f"warning: {changes}; from here on the bits are not those of an unbroken run")
    return restored.step


def _means(rows: Sequence[Mapping[str, int | float]], names: Iterable[str]) -> list[str]:
    """Means over an epoch, for a line."""
    return [f"{name.replace('_', ' ')} {fmean(row[name] for row in rows):.3f}" for name in names]


def seconds_per_epoch(config: TrainConfig, method: Method[Any], batches: Feed) -> float:
    """How long an epoch takes here, by timing a few steps of a copy of the method."""
    trial = copy.deepcopy(method)
    optimizer = optimizer_for(trial, config)
    laps, before = [], time.perf_counter()
    for _ in steps(
        trained_by(config, trial, optimizer),
        optimizer,
        batches.between(0, TIMED),
        start=0,
        total=TIMED,
        schedule=warmup_cosine(),
        seed=config.seed,
        precision=PRECISIONS[config.precision],
    ):
        laps.append(time.perf_counter() - before)
        before = time.perf_counter()
    return median(laps[2:]) * batches.order.steps_per_epoch


def timed(config: TrainConfig, method: Method[Any], batches: Feed) -> TrainConfig:
    """The configuration with a length in epochs; in all processes the same."""
    if not config.max_time:
        return config
    pace = broadcast_bytes(repr(seconds_per_epoch(config, method, batches)).encode())
    return replace(config, epochs=epochs_within(config.max_time, float(pace)), max_time="")


def epochs_within(duration: str, epoch_seconds: float) -> int:
    """How many epochs of a measured length fit into a duration, at least one.

    A fifteenth is kept back for looks on the way and the evaluation at the end.

    >>> epochs_within("45m", epoch_seconds=60.0)
    42
    """
    return max(1, int(seconds(duration) * 14 / 15 / epoch_seconds))


def accompany(config: TrainConfig, method: Method[Any], batches: Feed) -> None:
    """Take the steps that the first process takes in `fit`.

    Where networks are divided, the first needs all parts to look at them, and to save them.
    """
    per_epoch = batches.order.steps_per_epoch
    total, every = int(config.epochs) * per_epoch, int(config.evaluate_every)
    optimizer = optimizer_for(method, config)
    start = done = same_start(optimizer, 0)
    trained = trained_by(config, method, optimizer) if start < total else method
    fed = batches.between(start, total)
    try:
        with Requests() as asked:
            for done, _ in steps_of(config, trained, optimizer, fed, start=start, total=total):
                if look_due(every, done, per_epoch, total):
                    with whole(method, trained):
                        pass
                stop = all_reduce_max(asked.stop)
                if is_sharded(trained) and all_reduce_max(0):
                    checkpoint.take_part(done, trained, optimizer)
                if stop:
                    asked.end(done, stop)
            end_if_asked(asked, total)
            collect(method, trained)
    except DivergedError:  # which the first keeps for a replay
        checkpoint.take_part(done, trained, optimizer, finite=False)
        raise
