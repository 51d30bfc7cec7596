"""One whole training: build what the settings describe, train it to the last step, evaluate it."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int64
from torch import nn

from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.cache import check_cache
from nearkin.data.images import Images
from nearkin.data.notes import plain
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.rng import seeded
from nearkin.data.samplers import BatchSampler, RandomBatchSampler
from nearkin.data.split import Split
from nearkin.data.views import View
from nearkin.distributed import broadcast_bytes, choose_device, training_group
from nearkin.encoders.encoder import Encoder, load, resized, write_encoder
from nearkin.encoders.origin import without_folder
from nearkin.encoders.projector import write_projector
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.baselines import untrained
from nearkin.evaluation.column import column_test, divided
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_split, label_free
from nearkin.evaluation.vectors import write_embeddings
from nearkin.extensions import label
from nearkin.labels.known import labels_of
from nearkin.method import Method
from nearkin.methods import method_class
from nearkin.networks.branch import Backbone, as_backbone, compile_branches, set_chunk_size
from nearkin.networks.input_size import check_patches, patch_size
from nearkin.networks.lora import merged
from nearkin.pace import under
from nearkin.run.auto import describe, length, shrunk, view_sides
from nearkin.run.data import (
    Values,
    note_column,
    note_data,
    note_labels,
    note_undecodable,
    noted_images,
    noted_values,
    open_usable,
    versions,
)
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.opening import requests_to_save_ignored, sources_of
from nearkin.run.options import kinds_of_views, known_classes
from nearkin.run.reporter import Logger
from nearkin.run.sheets import augmentation_sheet
from nearkin.training.average import IMAGES, Average, choose_average
from nearkin.training.fit import Lead, fit
from nearkin.training.health import Monitor, verdict
from nearkin.training.length import time_overhead, with_epochs
from nearkin.training.start import load_for, starting_backbone, write_start
from nearkin.training.teacher import distilled_origin, open_teacher, parts_of, read_teacher

TAKEN_OVER: Final = ("pooling", "origin", "fine_tuned")
"""Details that a trained encoder has from its start; its license is part of the origin."""


def _on(device: torch.device, config: TrainConfig) -> TrainConfig:
    """The settings of all processes: they take the kind of device that this one has found."""
    return replace(config, device=device.type) if config.device == "auto" else config


def train_encoder(
    folder: RunFolder,
    config: TrainConfig,
    split: Split,
    *,
    data: Any,
    device: torch.device,
    log: Logger,
    network: nn.Module | None = None,
    start: Encoder | None = None,
    ignored: Values | None = None,
    on_embeddings: Callable[[], object] = lambda: None,
    on_row: Callable[[Mapping[str, int | float]], object] = lambda _: None,
) -> bool:
    """Train an encoder from the newest checkpoint of a run folder to the last step; evaluate it.

    Writes everything of the run but its page. Other processes, if there are any, open `data`
    themselves and run `run_worker`. `start` is what `encoder` names, and `ignored` what the column
    to ignore says of each image. `on_embeddings` is called when the folder has the embeddings, and
    their evaluation begins; `on_row`, with every row of metrics.csv. Returns whether anything was
    left to do.

    Raises:
        CheckpointError: If the folder has checkpoints of other data.
    """
    note = note_labels if method_class(config.method).uses_labels else note_data
    for line in note(folder, split, sources_of(config), ignored):
        log.info(line)
    view = Preprocessing.of(int(config.image_size), split.images.channels)
    if start:
        start.preprocessing = start.preprocessing.for_images(split.images)
        write_start(folder, start)
        view = start.preprocessing.resized(int(config.image_size))
    teacher = open_teacher(folder, config, split.images)
    for line in teacher.lines() if teacher else []:
        log.info(f"teacher {line}")
    with training_group(config.devices, run_worker, data, network):
        # The workers build the same method and batches from the same settings: `run_worker`.
        images, rows = split.images.fingerprint, split.train_rows.tolist()
        shared = [asdict(_on(device, config)), str(folder.path.resolve()), images, rows]
        broadcast_bytes(json.dumps(shared).encode())
        method, batches = build(config, split.train, device, network, teacher, folder)
        parts = parts_of(folder, config, batches, teacher, log)
        monitor = Monitor(split, config, device, log.progress, view)
        overhead = partial(time_overhead, log, monitor, method, config, split)
        planned, config = config, with_epochs(config, method, parts, overhead, log)
        if config.compile != "off":
            compile_branches(method, graphs=config.compile == "graphs")
        folder.write_settings(config, data_name(data), planned.max_time)
        for line in [
            describe(config),
            *length(planned, config),
            *shrunk(config, len(split.train)),
            *grouped(config, batches.sampler),
        ]:
            log.info(line)
        folder.plots.mkdir(exist_ok=True)
        sheet = augmentation_sheet(batches, folder.augmentations, view_sides(config)[0])
        log.info(f"augmented views  {sheet.resolve()}")
        lead = Lead(folder, log, monitor.evaluate, on_row)
        trained = fit(config, method, parts, lead)
    # Evaluation takes one process: the workers have left by now.
    if not trained and folder.summary.exists():
        return False
    _Trained(
        folder, config, method, batches, monitor, split, network, start, teacher, log
    ).evaluate(on_embeddings)
    return True


def grouped(config: TrainConfig, sampler: BatchSampler) -> list[str]:
    """Return a line on the batches of a training that is to ignore a column."""
    if not isinstance(sampler, RandomBatchSampler) or sampler.values is None:
        return []
    return [
        f"ignore {config.ignore}: {sampler.num_pure} of {sampler.steps_per_epoch} batches of an "
        f"epoch have one of its {len(np.unique(sampler.values))} values"
    ]


def run_worker(data: Any, network: nn.Module | None = None) -> RunFolder:
    """Take the first process's steps in another process, with this one's part of every batch."""
    with requests_to_save_ignored(), training_group(1, run_worker):
        settings, path, fingerprint, rows = json.loads(broadcast_bytes(b""))
        config = TrainConfig(**settings)
        folder = RunFolder(Path(path))
        images = noted_images(folder, open_usable(data, config))
        check_same_images(images, fingerprint)
        teacher = open_teacher(folder, config, images)
        device = choose_device(config.device)
        train = images.subset(np.array(rows, np.int64))
        method, batches = build(config, train, device, network, teacher, folder)
        parts = parts_of(folder, config, batches, teacher)
        config = with_epochs(config, method, parts)
        fit(config, method, parts)
    return folder


def check_same_images(images: Images, fingerprint: str) -> None:
    """Refuse images of this process that are not those of the first one.

    Rows, queues and memories of all processes are gathered as if they were of the same images.
    """
    if images.fingerprint != fingerprint:
        raise DataError(
            f"a process of this training has other images than the first: {len(images)} usable "
            f"ones from {images.names[0]!r} to {images.names[-1]!r}; give every process the same "
            "files"
        )


def build(
    config: TrainConfig,
    images: Images,
    device: torch.device,
    network: nn.Module | None = None,
    teacher: Encoder | None = None,
    folder: RunFolder | None = None,
) -> tuple[Method[Any], Batches]:
    """Build the method that a resolved configuration describes, as it starts, and its batches.

    `folder` is that of the run, which holds the encoder that it starts from and the values that it
    ignores, if any. A teacher's features are not yet in the batches; see `parts_of`.
    """
    method, images = _method(config, images, network, teacher, folder)
    views, labels = _views_and_labels(config, images, method)
    body = method.backbone.body
    method = method.to(device).to(memory_format=torch.channels_last)
    if config.chunk_size:
        set_chunk_size(method, config.chunk_size, int(config.batch_size))
    batches = Batches.of(
        images,
        views,
        image_size=int(config.image_size),
        sampler=sampler_for(config, len(images), folder),
        device=device,
        workers=int(config.workers),
        cache=config.cache,
        labels=labels,
        multiple=patch_size(body),
    )
    sizes = {size for side in view_sides(config) for size in batches.resized(side).sizes}
    for size in {*batches.sizes, *sizes} - {int(config.image_size)}:
        as_backbone(body, size, name=method.backbone.name)  # multi-crop: tries it
    return method, batches


def check_networks(config: TrainConfig, images: Images, network: nn.Module | None) -> None:
    """Refuse what `build` does before it reads images, and a teacher that does not fit."""
    teacher = read_teacher(config, images) if config.teacher else None
    method, images = _method(config, images, network, teacher, None)
    _views_and_labels(config, images, method)
    check_cache(config.cache, images)


def _views_and_labels(
    config: TrainConfig, images: Images, method: Method[Any]
) -> tuple[tuple[View, ...], Int64[np.ndarray, " images"] | None]:
    """Return the views that a method takes, and the labels, which most methods never meet."""
    more, known = method.more_views and not config.num_views, known_classes(config)
    views = views_of(config.augment, kinds_of_views(config), more=more)
    return views, labels_of(known, images) if known else None


def _method(
    config: TrainConfig,
    images: Images,
    network: nn.Module | None,
    teacher: Encoder | None,
    folder: RunFolder | None,
) -> tuple[Method[Any], Images]:
    """Build a method on a CPU; also return the images in the range that its backbone takes."""
    cls = method_class(config.method)
    known = known_classes(config)
    counts = {"num_images": len(images), "num_known_classes": len(known)}
    counts["teacher_dim"] = teacher.num_features if teacher else 0
    accepted = inspect.signature(cls.__init__).parameters
    counts = {name: count for name, count in counts.items() if name in accepted}
    with seeded(config.seed, torch.device("cpu")):  # the same weights on every device
        backbone, images = starting_backbone(config, images, network, folder)
        method: Method[Any] = cls(backbone, **counts, **config.options)
    for side in {*view_sides(config)} - {int(config.image_size)}:
        check_patches(backbone.body, side, backbone.name, "--view-sizes")
    return method, images


def sampler_for(config: TrainConfig, num_images: int, folder: RunFolder | None) -> BatchSampler:
    """Return which images each step sees: of one value only, if a column is to be ignored."""
    window = 0 if config.shuffle_window == "auto" else config.shuffle_window  # of an older run
    batch_size, view_epochs = int(config.batch_size), int(config.teacher_views)
    shuffled = RandomBatchSampler(num_images, batch_size, config.seed, window, view_epochs)
    if not config.ignore:
        return shuffled
    assert folder, "the values are in the run folder"
    values, held_out = noted_values(folder)
    numbers = np.unique(values[~held_out], return_inverse=True)[1]
    return replace(shuffled, values=numbers)


def encoders_beside(
    encoder: Encoder,
    folder: RunFolder,
    config: TrainConfig,
    split: Split,
    device: torch.device,
    workers: int,
    network: nn.Module | None,
) -> dict[str, Encoder]:
    """Return the encoders that a training's result stands beside, by the name of their table.

    The teacher and the frozen start, if training had one, and the encoder's own architecture and
    preprocessing with the random weights of the seed. The split may be one of other images, all
    of which are held out.
    """
    beside = dict[str, Encoder]()
    if config.teacher:
        beside["teacher"] = load_for(config, folder.teacher)
    if config.encoder:
        beside["start"] = load_for(config, folder.start, network)
    images = split.train if len(split.train_rows) else split.test
    beside["untrained"] = untrained(
        encoder, images, seed=config.seed, device=device, workers=workers, network=network
    )
    return beside


@dataclass(frozen=True, eq=False)
class _Trained:
    """A training that has taken its last step, in one process."""

    folder: RunFolder
    config: TrainConfig
    method: Method[Any]
    batches: Batches
    monitor: Monitor
    split: Split
    network: nn.Module | None
    start: Encoder | None
    teacher: Encoder | None
    log: Logger

    def average(self, end: Backbone) -> tuple[Encoder, Average]:
        """Average the start of a training and its end, as images without labels decide.

        These are held out, unless there are too few.
        """
        config, split = self.config, self.split
        size, start = int(config.image_size), load_for(config, self.folder.start, self.network)
        held_out = len(split.test) > 1
        measure = partial(
            label_free,
            images=(split.test if held_out else split.train).spread(IMAGES),
            seed=config.seed,
            workers=int(config.workers),
            augment=config.augment,
            device=self.batches.device,
            on_progress=under("average of weights", self.log.progress),
        )
        same_size = start if size == start.image_size else resized(start, size)
        images = "held-out images" if held_out else "training images"
        kept, average = choose_average(start, same_size, end.body.state_dict(), measure, images)
        self.log.info(f"average {average.text}")
        return kept, average

    def write_encoder(self) -> dict[str, Any]:
        """Write the encoder's file; return its header, which says where the weights come from."""
        config, view = self.config, self.monitor.view
        details: dict[str, Any] = {
            "method": label(config.method),
            "backbone": config.backbone,
            "image_size": int(config.image_size),
            "epochs": int(config.epochs),
            "seed": config.seed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        if self.start:
            own = self.start.details
            details["start"] = without_folder(config.encoder)
            details |= {key: own[key] for key in TAKEN_OVER if key in own}
        if self.teacher:
            details["teacher"] = without_folder(config.teacher)
            if origin := self.teacher.details.get("origin"):
                details["origin"] = distilled_origin(origin, details.get("origin"))
        trained = merged(self.method.backbone)
        if config.encoder:
            kept, average = self.average(trained)
            trained, view = kept.backbone, kept.preprocessing
            details |= {"backbone": kept.details["backbone"], "image_size": kept.image_size}
            details["average"] = average.to_dict()
        write_encoder(self.folder.encoder, trained, details, view)
        return details

    def evaluate(self, on_embeddings: Callable[[], object]) -> None:
        """Write the encoder, its embeddings and its metrics."""
        folder, config, split, log = self.folder, self.config, self.split, self.log
        device, workers = self.batches.device, int(config.workers)
        details = self.write_encoder()
        # The last step is evaluated already.
        health = self.monitor.latest or self.monitor.evaluate(self.method)
        state = verdict(health, type(self.method))
        is_end = details.get("average", {}).get("share", 1.0) == 1.0
        log.info(f"health {'' if is_end else 'of the last step, which is not kept: '}{state}")
        # What is measured is the file, not the method in memory.
        # Its header names the backbone of the settings, which are trusted by now.
        encoder = load(folder.path, backbone=self.network, trust_remote_code=True)
        if is_end:  # it has learned on such features
            write_projector(folder.projector, self.method.online.projector, encoder)

        def encoded(embeddings: Embeddings) -> None:
            write_embeddings(folder.embeddings, replace(embeddings, encoder=encoder.digest))
            on_embeddings()

        evaluation, embeddings = evaluate_split(
            encoder,
            split,
            beside=encoders_beside(encoder, folder, config, split, device, workers, self.network),
            seed=config.seed,
            workers=workers,
            augment=config.augment,
            device=device,
            on_encoded=encoded,
            on_progress=log.progress,
        )
        if config.ignore:
            evaluation = _with_column(evaluation, folder, config, embeddings, split.images)
        bad_files = {split.train.names[row]: why for row, why in self.batches.bad.items()}
        bad_files |= embeddings.bad
        notes = note_undecodable(folder, split.images, bad_files, log)  # no end after hours
        # Last: a run without a summary is evaluated again.
        # The verdict and the title: the page is written again without the method's class.
        details |= {"title": type(self.method).__name__, "health": health, "verdict": state}
        details["notes"] = plain((*split.images.notes, *notes))
        folder.write_summary({**details, **versions(), **evaluation.to_dict()})
        log.debug("\n".join(replace(evaluation, differences={}, leaks=None).lines()))
        if evaluation.leaks:
            log.info(f"warning: {evaluation.leaks}")
        for kept in evaluation.kept:
            log.info(f"student {kept}")
        if evaluation.comparison:
            log.info(evaluation.comparison.line(folder.start))


def _with_column(
    evaluation: Evaluation,
    folder: RunFolder,
    config: TrainConfig,
    embeddings: Embeddings,
    images: Images,
) -> Evaluation:
    """Add how well features predict the column that the training was to ignore, or why not."""
    values, _ = noted_values(folder)
    parts = divided(embeddings, values[embeddings.rows])
    try:
        column = column_test(config.ignore, *parts, seed=config.seed)
    except (UsageError, DataError) as error:  # after hours, for which a number is missing
        left_out = {**evaluation.left_out, f"column {config.ignore}": str(error)}
        return replace(evaluation, left_out=left_out)
    note_column(folder, config.ignore, images, values)
    return replace(evaluation, column=column)
