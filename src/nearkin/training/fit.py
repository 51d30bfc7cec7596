"""Train to the last step: checkpoints, metrics and evaluation on the way."""

import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import torch

from nearkin.config import TrainConfig
from nearkin.data.batches import BatchLoader, growing
from nearkin.data.samplers import BatchSampler
from nearkin.distributed import (
    all_reduce_max,
    broadcast_bytes,
    failing_together,
    full_weights,
    gather_weights,
    shard,
    world_size,
)
from nearkin.method import Method, Schedule, half_cosine
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.blocks import network_parts
from nearkin.networks.branch import Backbone
from nearkin.pace import Pace
from nearkin.run.auto import PRECISIONS
from nearkin.run.csv_logger import CSVLogger
from nearkin.run.data import note_machine
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.training import checkpoint
from nearkin.training.anchor import ANCHOR, Anchor
from nearkin.training.checkpoint import Checkpointer, Files
from nearkin.training.health import PATIENCE, Alarm, Evaluate
from nearkin.training.loop import steps
from nearkin.training.optimizer import (
    build_optimizer,
    main_rate,
    restore_optimizer,
    warmup_cosine,
    warmup_milestones,
)
from nearkin.training.signals import Interrupts
from nearkin.types import Batch, Step

PAUSE: Final = 1.0  # Seconds between lines on epochs, at least, if nothing was evaluated

# Of metrics.csv. Nothing in it depends on the clock, so equal runs have equal files.
COLUMNS = ("step", "epoch", "loss", "lr", "feature_std", "effective_rank", "mean_cosine", "knn")


def optimizer_for(method: Method[Any], config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a resolved configuration."""
    assert config.optimizer != "auto"
    # Where a training is no continued one, `auto` is none of it.
    layer_decay = 1.0 if config.layer_decay == "auto" else config.layer_decay
    return build_optimizer(
        method,
        name=config.optimizer,
        lr=float(config.lr),
        weight_decay=float(config.weight_decay),
        layer_decay=layer_decay,
        separate_backbone=frozen_share(config) > 0,
        lars_form=config.lars_form,
    )


def frozen_share(config: TrainConfig) -> float:
    """Return the first share of a resolved training in which the backbone is frozen."""
    return 0.0 if config.freeze_epochs == "auto" else config.freeze_epochs / int(config.epochs)


def schedule_for(config: TrainConfig, total: int) -> Schedule:
    """Build the learning rate schedule of a resolved configuration of so many steps.

    A warm-up shorter than a step is left out: its first rate, often zero, would be that step's.
    """
    moving = total * (1 - frozen_share(config))  # steps of the backbone, which warms up last
    warmup = config.warmup if config.warmup * moving >= 1 else 0.0
    if config.lr_milestones:
        return warmup_milestones(config.lr_milestones, warmup, config.warmup_start)
    return warmup_cosine(warmup, config.cosine_end, config.warmup_start)


def training_steps(
    config: TrainConfig,
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    start: int,
    total: int,
    anchor: Anchor | None = None,
) -> Iterator[tuple[int, Step[Any]]]:
    """Take the steps of a resolved configuration; see `steps`."""
    first, last = float(config.weight_decay), config.final_weight_decay
    return steps(
        method,
        optimizer,
        batches,
        start=start,
        total=total,
        schedule=schedule_for(config, total),
        weight_decay=half_cosine(first, first if last == "auto" else last),
        clip_norm=config.clip_norm,
        seed=config.seed,
        precision=PRECISIONS[config.precision],
        frozen=frozen_share(config),
        anchor=anchor,
    )


@dataclass(frozen=True)
class Lead:
    """What the first process does beside the steps: it evaluates, logs and writes files."""

    folder: RunFolder
    log: Logger
    evaluate: Evaluate
    on_row: Callable[[Mapping[str, int | float]], object] = lambda _: None
    """Called with every row of metrics.csv, without its empty cells."""


def fit(
    config: TrainConfig,
    method: Method[Any],
    parts: Sequence[BatchLoader],
    lead: Lead | None = None,
) -> bool:
    """Train to the last step, from the newest checkpoint of the first process's run folder.

    Each of the `parts` has the batches of an equal part of the training. All processes run this
    together, and only the first has a `lead`. Returns whether any steps were left to take.
    """
    per_epoch = parts[0].sampler.steps_per_epoch
    total, every = int(config.epochs) * per_epoch, int(config.evaluate_every)
    optimizer, anchor = optimizer_for(method, config), Anchor.at(method, config.anchor)
    # Only the first process reads checkpoints; the others take over its optimizer and step. Their
    # weights and memories are made equal when the method is wrapped for several processes.
    start = broadcast_start(optimizer, _resume(lead, method, optimizer, total) if lead else 0)
    trained = sharded(config, method, optimizer) if start < total else method
    interrupts, record, files = Interrupts(), None, None
    with ExitStack() as stack:
        if lead:
            # Rows of metrics.csv after the checkpoint are dropped: those steps are taken again.
            terms = (*method.metrics, ANCHOR) if anchor else method.metrics
            journal = CSVLogger(lead.folder.metrics, (*COLUMNS, *terms), upto=start)
            stack.enter_context(journal)
            record = Record(lead, config, method, parts[0].sampler, start, journal, interrupts)
            files = Files(lead.folder, journal, lead.log)
        checkpointer = Checkpointer(files, trained, optimizer, config.save_every, start)
        stack.enter_context(interrupts)
        stack.enter_context(checkpointer.keeping_diverged())
        fed = growing(parts, start, total, total)
        for done, step in training_steps(
            config, trained, optimizer, fed, start=start, total=total, anchor=anchor
        ):
            checkpointer.done = done  # the state that an evaluation may find diverged
            due = done == total or bool(every and done % (every * per_epoch) == 0)
            with evaluating(method, trained) if due else nullcontext():
                if record:
                    record.after(done, step, main_rate(optimizer), due)
            # All processes must stop after the same step, whichever of them got the signal. It is
            # read once per step: a signal that comes while saving is for the next step.
            stop = all_reduce_max(interrupts.stop)
            checkpointer.after(
                done, requested=interrupts.take_save(), last=done == total or bool(stop)
            )
            if stop:
                interrupts.end(done, stop)
        if stop := all_reduce_max(interrupts.stop):
            interrupts.end(total, stop)
        gather_weights(method, trained)
    return start < total


@contextmanager
def evaluating(method: Method[Any], trained: Method[Any]) -> Iterator[None]:
    """Let the first process evaluate within a `with` block; what diverges there ends them all."""
    with failing_together(), full_weights(method, trained):
        yield


@dataclass(eq=False)
class Record:
    """Evaluates when that is due, writes metrics.csv, and logs epochs and lasting collapses."""

    lead: Lead
    config: TrainConfig
    method: Method[Any]
    sampler: BatchSampler
    start: int
    journal: CSVLogger
    interrupts: Interrupts  # Through which a collapse stops the run

    def __post_init__(self) -> None:
        self.terms = self.journal.columns[len(COLUMNS) :]
        self.per_epoch = self.sampler.steps_per_epoch
        self.total = int(self.config.epochs) * self.per_epoch
        rows = self.journal.rows()
        before = self.start - self.start % self.per_epoch  # rows may be gone with their file
        self.epoch = [row for row in rows if row["step"] > before]
        self.evaluated = [row for row in rows if "feature_std" in row]  # before it was resumed
        self.pace = Pace(self.total, self.sampler.batch_size)
        self.alarm = Alarm(type(self.method))
        self.logged = time.monotonic()
        self.lead.log.progress(self.start, self.total, "first step")

    def after(self, done: int, step: Step[Any], lr: float, due: bool) -> None:
        """Note a step, and evaluate the method if that is due."""
        values = {"loss": step.loss.item()} | {
            key: value.item() for key, value in step.metrics.items() if key in self.terms
        }
        at = f"epoch {-(-done // self.per_epoch)}/{self.config.epochs}"
        texts = [at, f"loss {values['loss']:.3f}", *self.pace.reach(done)]
        self.lead.log.progress(done, self.total, "  ".join(texts))
        measured = self._evaluated(done) if due else {}
        row = {"step": done, "epoch": done / self.per_epoch, "lr": lr, **values, **measured}
        self.journal.append(row)
        self.lead.on_row({name: row[name] for name in self.journal.columns if name in row})
        self.epoch.append(row)
        now = time.monotonic()
        awaited = due or now - self.logged >= PAUSE  # epochs of milliseconds share a line
        if done % self.per_epoch == 0 and awaited:
            self.logged = now
            means = _means(self.epoch, values)
            texts = [at, *means, *_metric_texts(measured), *self.pace.speed]
            self.lead.log.info("  ".join(texts))
            self.epoch.clear()

    def _evaluated(self, done: int) -> dict[str, float]:
        with self.pace.paused():  # evaluation counts for nothing in images per second
            measured = self.lead.evaluate(self.method)
        for row in self.evaluated:  # the alarm has no other memory; directions stay as many
            self.alarm.update({**measured, **row}, row["step"] / self.total)
        self.evaluated.clear()
        verdict = self.alarm.update(measured, done / self.total)
        if verdict and self.config.on_collapse == "stop" and done < self.total:
            self.interrupts.collapse(verdict)
        elif self.alarm.in_a_row == PATIENCE:
            self.lead.log.info(f"warning: {verdict}")
        return measured


def _metric_texts(measured: Mapping[str, float]) -> list[str]:
    form = {"knn": "kNN {:.1%}", "feature_std": "std {:.2f}", "effective_rank": "rank {:.1f}"}
    return [text.format(measured[name]) for name, text in form.items() if name in measured]


def sharded(
    config: TrainConfig, method: Method[Any], optimizer: torch.optim.Optimizer
) -> Method[Any]:
    """Return what takes the steps: the method, or with --fsdp a copy divided among processes."""
    if not config.fsdp:
        return method
    normalize_in_groups(method, groups=1)  # before it is divided: afterwards it cannot be changed
    return shard(method, optimizer, backbone_blocks(method))


def backbone_blocks(method: Method[Any]) -> list[str]:
    """Return the names of the blocks of all backbones, those of momentum encoders too."""
    bodies = {f"{n}.body": m.body for n, m in method.named_modules() if isinstance(m, Backbone)}
    parts = ((name, part) for name, body in bodies.items() for part in network_parts(body))
    return [f"{name}.{part.name}" for name, part in parts if part.is_block]


def broadcast_start(optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give every process the first one's optimizer state; return its step."""
    if world_size() == 1:
        return step
    content = io.BytesIO()
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, content)
    received = io.BytesIO(broadcast_bytes(content.getvalue()))
    first: dict[str, Any] = torch.load(received, map_location="cpu", weights_only=True)
    restore_optimizer(optimizer, first["optimizer"])
    return int(first["step"])


def _resume(lead: Lead, method: Method[Any], optimizer: torch.optim.Optimizer, total: int) -> int:
    """Restore the newest checkpoint; return the number of steps that are done."""
    restored = checkpoint.load(lead.folder.checkpoints, method, optimizer)
    for damaged in restored.damaged:
        lead.log.info(
            f"warning: {damaged.stem} is damaged, and kept as {damaged.name}; "
            f"what came after step {restored.step} is done again"
        )
    if restored.step:
        lead.log.info(f"resuming after step {restored.step} of {total}")
    device = next(method.parameters()).device
    if changes := note_machine(lead.folder.machine, device, restored.step):
        lead.log.info(
            f"warning: {changes}; from here on the bits are not those of an unbroken run"
        )
    return restored.step


def _means(rows: Sequence[Mapping[str, int | float]], names: Iterable[str]) -> list[str]:
    means = {name: fmean(row[name] for row in rows if name in row) for name in names}
    return [f"{name.replace('_', ' ')} {mean:.3f}" for name, mean in means.items()]
