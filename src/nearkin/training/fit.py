"""Train to the last step: checkpoints, metrics and evaluation on the way."""

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
    full_weights,
    gather_weights,
    is_sharded,
    shard,
    world_size,
)
from nearkin.errors import DivergedError
from nearkin.method import Method, Schedule
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.pace import Pace
from nearkin.run.data import note_machine
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.run.settings import PRECISIONS
from nearkin.tables import Journal
from nearkin.training import checkpoint
from nearkin.training.checkpoint import Checkpointer
from nearkin.training.health import Evaluate, PeriodicEvaluation, evaluation_due, metric_texts
from nearkin.training.loop import steps
from nearkin.training.optimizer import (
    build_optimizer,
    restore_optimizer,
    warmup_cosine,
    warmup_milestones,
)
from nearkin.training.signals import Interrupts
from nearkin.types import Batch, Step

# Of metrics.csv. Nothing in it depends on the clock, so equal runs have equal files.
COLUMNS = ("step", "epoch", "loss", "lr", "feature_std", "effective_rank", "mean_cosine", "knn")

TIMED = 8  # Steps timed to estimate a run; the first two are left out


def optimizer_for(method: Method[Any], config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a resolved configuration."""
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
    """Build the learning rate schedule of a resolved configuration."""
    if config.lr_milestones:
        milestones = [float(share) for share in config.lr_milestones.split(",")]
        return warmup_milestones(milestones, config.warmup, config.warmup_start)
    return warmup_cosine(config.warmup, config.cosine_end, config.warmup_start)


def training_steps(
    config: TrainConfig,
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    start: int,
    total: int,
) -> Iterator[tuple[int, Step[Any]]]:
    """Take the steps of a resolved configuration; see `steps`."""
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
    evaluate: Evaluate,
    log: Logger,
    terms: Sequence[str] = (),
) -> bool:
    """Train from the newest checkpoint of the run folder to the last step.

    `evaluate` measures the method now and then, leaving it as it was; `terms` are metrics of the
    method to log beside the loss. Returns whether any steps were left to take.
    """
    per_epoch, batch_size = batches.order.steps_per_epoch, batches.order.batch_size
    total = int(config.epochs) * per_epoch
    optimizer = optimizer_for(method, config)
    # Only the first process reads checkpoints; the others take over its optimizer and step. Their
    # weights and memories are made equal when the method is wrapped for several processes.
    start = broadcast_start(optimizer, _resume(folder, method, optimizer, total, log))
    trained = sharded(config, method, optimizer) if start < total else method
    with ExitStack() as stack:
        # Rows of metrics.csv after the checkpoint are dropped: those steps are taken again.
        journal = stack.enter_context(Journal(folder.metrics, (*COLUMNS, *terms), upto=start))
        interrupts = stack.enter_context(Interrupts())
        checkpointer = stack.enter_context(
            Checkpointer(
                folder, trained, optimizer, journal, log, config.save_every, start
            ).keeping_diverged()
        )
        evaluation = PeriodicEvaluation(evaluate, config, method, trained, log, interrupts)
        epoch, pace = journal.rows()[start - start % per_epoch :], Pace(total, batch_size)
        log.progress(start, total, "first step")
        for done, step in training_steps(
            config, trained, optimizer, batches.between(start, total), start=start, total=total
        ):
            values = {"loss": step.loss.item()} | {
                key: value.item() for key, value in step.metrics.items() if key in terms
            }
            at = f"epoch {-(-done // per_epoch)}/{config.epochs}"
            log.progress(
                done, total, "  ".join([at, f"loss {values['loss']:.3f}", *pace.reach(done)])
            )
            with pace.paused():  # evaluation counts for nothing in images per second
                measured = evaluation.after(done, per_epoch, total)
            row = {"step": done, "epoch": done / per_epoch, **values, **measured}
            journal.append(row | {"lr": optimizer.param_groups[0]["lr"]})
            epoch.append(row)
            if done % per_epoch == 0:
                log.info(
                    "  ".join([at, *_means(epoch, values), *metric_texts(measured), *pace.speed])
                )
                epoch.clear()
            # All processes must stop after the same step, whichever of them got the signal. It is
            # read once per step: a signal that comes while saving is for the next step.
            stop = all_reduce_max(interrupts.stop)
            checkpointer.after(
                done, requested=interrupts.take_save(), last=done == total or bool(stop)
            )
            if stop:
                interrupts.end(done, stop)
        stop_if_requested(interrupts, total)
        gather_weights(method, trained)
    return start < total


def stop_if_requested(interrupts: Interrupts, done: int) -> None:
    """End all processes after the same step, if any of them got a signal."""
    if stop := all_reduce_max(interrupts.stop):
        interrupts.end(done, stop)


def sharded(
    config: TrainConfig, method: Method[Any], optimizer: torch.optim.Optimizer
) -> Method[Any]:
    """Return what takes the steps: the method, or with --fsdp a copy divided among processes."""
    if not config.fsdp:
        return method
    normalize_in_groups(method, groups=1)  # before it is divided: afterwards it cannot be changed
    return shard(method, optimizer)


def broadcast_start(optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give every process the first one's optimizer state; return its step."""
    if world_size() == 1:
        return step
    state = broadcast_state({"step": step, "optimizer": optimizer.state_dict()})
    restore_optimizer(optimizer, state["optimizer"])
    first: int = state["step"]
    return first


def broadcast_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first process's state in all of them: tensors, numbers and text by name."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    received = io.BytesIO(broadcast_bytes(content.getvalue()))
    first: dict[str, Any] = torch.load(received, map_location="cpu", weights_only=True)
    return first


def _resume(
    folder: RunFolder,
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    total: int,
    log: Logger,
) -> int:
    """Restore the newest checkpoint; return the number of steps that are done."""
    restored = checkpoint.load(folder.checkpoints, method, optimizer)
    for damaged in restored.damaged:
        log.info(
            f"warning: {damaged.stem} is damaged, and kept as {damaged.name}; "
            f"what came after step {restored.step} is done again"
        )
    if restored.step:
        log.info(f"resuming after step {restored.step} of {total}")
    device = next(method.parameters()).device
    if changes := note_machine(folder.machine, device, restored.step):
        log.info(f"warning: {changes}; from here on the bits are not those of an unbroken run")
    return restored.step


def _means(rows: Sequence[Mapping[str, int | float]], names: Iterable[str]) -> list[str]:
    means = {name: fmean(row[name] for row in rows if name in row) for name in names}
    return [f"{name.replace('_', ' ')} {mean:.3f}" for name, mean in means.items()]


def seconds_per_epoch(config: TrainConfig, method: Method[Any], batches: Feed) -> float:
    """Estimate how long an epoch takes here, by timing a few steps of a copy of the method."""
    trial = copy.deepcopy(method)
    optimizer = optimizer_for(trial, config)
    laps, before = [], time.perf_counter()
    trained, fed = sharded(config, trial, optimizer), batches.between(0, TIMED)
    for _ in training_steps(config, trained, optimizer, fed, start=0, total=TIMED):
        laps.append(time.perf_counter() - before)
        before = time.perf_counter()
    return median(laps[2:]) * batches.order.steps_per_epoch


def with_epochs(config: TrainConfig, method: Method[Any], batches: Feed) -> TrainConfig:
    """Replace --max-time by a number of epochs, the same in all processes."""
    if not config.max_time:
        return config
    # From here on the length is fixed: schedules depend on it, so a clock may not end the run.
    pace = broadcast_bytes(repr(seconds_per_epoch(config, method, batches)).encode())
    return replace(config, epochs=epochs_within(config.max_time, float(pace)), max_time="")


def epochs_within(duration: str, epoch_seconds: float) -> int:
    """Return how many epochs fit into a duration less a fifteenth, which is for evaluation.

    >>> epochs_within("45m", epoch_seconds=60.0)
    42
    """
    return max(1, int(seconds(duration) * 14 / 15 / epoch_seconds))


def fit_worker(config: TrainConfig, method: Method[Any], batches: Feed) -> None:
    """Take the first process's steps in another process, which writes no files.

    Every collective call of `fit` has its counterpart here, in the same order, or all would hang.
    """
    per_epoch = batches.order.steps_per_epoch
    total, every = int(config.epochs) * per_epoch, int(config.evaluate_every)
    optimizer = optimizer_for(method, config)
    start = done = broadcast_start(optimizer, 0)
    trained = sharded(config, method, optimizer) if start < total else method
    fed = batches.between(start, total)
    try:
        with Interrupts() as interrupts:
            for done, _ in training_steps(
                config, trained, optimizer, fed, start=start, total=total
            ):
                if evaluation_due(every, done, per_epoch, total):
                    with full_weights(method, trained):  # the first needs all parts to evaluate
                        pass
                stop = all_reduce_max(interrupts.stop)
                if is_sharded(trained) and all_reduce_max(0):  # the first saves
                    checkpoint.join_save(done, trained, optimizer)
                if stop:
                    interrupts.end(done, stop)
            stop_if_requested(interrupts, total)
            gather_weights(method, trained)
    except DivergedError:  # the first keeps the state for a replay
        checkpoint.join_save(done, trained, optimizer, finite=False)
        raise
