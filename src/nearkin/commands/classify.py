"""`nearkin classify`: classes from labels of some images or of all, on top of any encoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nearkin.classification.data import LabeledData, open_labeled_data
from nearkin.classification.finetuning import FineTuner
from nearkin.classification.metrics import baselines, measure
from nearkin.classification.outcome import OURS, Outcome, write_outcome
from nearkin.classification.probes import Trained, train_attentive, train_linear
from nearkin.classifier.assignments import assign
from nearkin.classifier.classifier import pooled
from nearkin.classifier.features import UNTOUCHED, CachedFeatures, Extraction
from nearkin.classifier.layers import trained_parts
from nearkin.classifier.report import complete_results
from nearkin.commands.arguments import (
    EncoderLike,
    PathLike,
    command,
    given,
    name_of,
    processes,
    refuse,
)
from nearkin.commands.run import Run
from nearkin.config import ClassifyConfig
from nearkin.data.cache import cache_for, check_cache, free_disk
from nearkin.distributed import free_memory, is_main_process
from nearkin.encoders.encoder import Encoder, check_named, load, write_encoder
from nearkin.errors import UsageError
from nearkin.run.auto import check_batch
from nearkin.run.data import held_share, note_labels, note_undecodable
from nearkin.run.folder import clear, data_name, run_folder
from nearkin.run.opening import OpenRun, check_copies, kept_copy, open_run, self_contained
from nearkin.run.reporter import Reporter
from nearkin.training.start import write_start


@command
def classify(
    encoder: EncoderLike,
    data: Any,
    config: ClassifyConfig | None = None,
    *,
    output: PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> Run:
    """Learn classes from labels of some images or of all, on top of any encoder.

    Leaves a calibrated classifier, which `nearkin predict` applies to new images.

    Args:
        encoder: A run, a name such as dinov2-small or timm:NAME, or a file; what `load` takes.
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`); a
            name such as `digits`; or, from Python, arrays or a data set (docs/data.md).
        config: The settings, of which `settings` replaces some.
        output: The run folder; runs/DATA-classify if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.ClassifyConfig`.

    Returns:
        The finished run: its metrics, encoder and report.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(ClassifyConfig, config, {**settings, "encoder": name_of(encoder)})
    name, folder = data_name(data), run_folder(output, data, "classify", again=resume or overwrite)
    if not is_main_process():  # of several that were started: this command takes one
        return Run(folder)
    # Everything that can be refused is, before the run folder is touched and time is spent.
    start = _checked(config, kept_copy(folder.start, config.encoder, resume=resume))
    config = self_contained(config)
    if not (resume and folder.config.exists()):  # else its encoder's run may be another by now
        config = replace(config, val=held_share(data, config))
    check_copies(folder, config.copy_to, data, resume=resume)
    with open_run(folder, config, data, verbose, resume=resume, overwrite=overwrite) as run:
        config, log = run.config, run.log
        for line in start.lines():
            log.info(line)
        dataset = open_labeled_data(data, config, log.progress, folder, folder if resume else None)
        for line in dataset.lines():
            log.info(line)
        if config.batch_size != "auto":
            check_batch(config.batch_size, len(dataset.train_rows), 1)
        check_cache(config.cache, start.preprocessing.applied(dataset.images))
        if overwrite:
            clear(folder)
        note_labels(folder, dataset.parts)
        if folder.summary.exists():
            complete_results(run, dataset.images, name)
            return Run(folder)
        config = _resolved(config, dataset, start)
        folder.write_settings(config, name)
        # A resumed run needs the source no longer; trained on is the file from the start.
        write_start(folder, start)
        start = load(folder.start, trust_remote_code=config.trust_remote_code)
        _work(replace(run, config=config), name, dataset, start)
    return Run(folder)


def _checked(config: ClassifyConfig, source: str | Path) -> Encoder:
    """Load the encoder from its source, and refuse settings that it cannot carry out."""
    frozen = config.train_layers in ("linear", "attentive")
    tuning = ("epochs", "lr", "layer_decay", "batch_size", "augment", "save_every")
    if frozen:
        why = "of fine-tuning; give --train-layers last:N or all, or leave it out"
        refuse(why, **{name: getattr(config, name) != "auto" for name in tuning})
    if config.labeled and config.labels != "auto":
        raise UsageError("--labels and --labeled exclude each other; give one")
    trust, partial = config.trust_remote_code, config.allow_partial
    encoder = load(source, allow_partial=partial, trust_remote_code=trust)
    check_named(encoder)
    if not frozen:
        trained_parts(encoder.backbone, config.train_layers)
    return encoder


def _resolved(config: ClassifyConfig, data: LabeledData, encoder: Encoder) -> ClassifyConfig:
    """Replace what depends on the machine: cached photographs are other pixels."""
    images = data.images
    cache: Any = config.cache
    if cache == "auto":
        memory, disk = free_memory(), free_disk()
        cache = cache_for(images, encoder.image_size, memory=memory, disk=disk)
    workers = 0 if images.is_small and config.workers == "auto" else processes(config.workers)
    return replace(config, workers=workers, cache=cache)


def _work(run: OpenRun[ClassifyConfig], data: str, dataset: LabeledData, encoder: Encoder) -> None:
    """Train, classify all images, measure, and write everything."""
    folder, log = run.folder, run.log
    given, dataset = _features(run, encoder, dataset)
    trained = _trained(run, encoder, given.center, dataset)
    log.info(trained.protocol)
    own, fitting = given, trained.encoder
    if trained.pooling is not None:
        fitting = pooled(fitting, trained.pooling, trained.head.in_features)
    if fitting is not encoder:
        log.info("classifying all images")
        # What classifies is what `predict` will load, so what it takes is computed the same way.
        own = _extraction(run, fitting, dataset).compute().features
    encoded_by = trained.encoder
    classifier = trained.classifier(dataset, own.center)
    write_encoder(
        folder.encoder, encoded_by.backbone, encoded_by.details, encoded_by.preprocessing
    )
    classifier.write(folder.classifier)
    # Only images that were learned from have a label here.
    predictions = classifier.predict(own, tuple(dataset.images.names), dataset.train_labels)
    metrics = {OURS: measure(classifier, predictions, trained, dataset)}
    if run.config.baselines:
        log.info("measuring the baselines")
        metrics |= baselines(run, trained, dataset, given.center)
    outcome = Outcome(
        run=run,
        data=data,
        dataset=dataset,
        trained=trained,
        classifier=classifier,
        features=(given if trained.encoder is encoder else own).center,
        assignments=assign(predictions, classifier.top_reference, classifier.calibration),
        metrics=metrics,
    )
    write_outcome(outcome)


def _features(
    run: OpenRun[ClassifyConfig], encoder: Encoder, dataset: LabeledData
) -> tuple[CachedFeatures, LabeledData]:
    """Return the features of readable images, and the data without the others."""
    images = dataset.images
    run.log.info(f"features of {len(images)} images")
    extracted = _extraction(run, encoder, dataset).compute()
    max_bad = run.config.max_bad
    notes = note_undecodable(run.folder, images, extracted.reasons(images), run.log, max_bad)
    cached, _ = extracted.readable(images)
    encoder.backbone.cpu()
    return cached, dataset.without(extracted.bad, notes)


def _extraction(
    run: OpenRun[ClassifyConfig], encoder: Encoder, dataset: LabeledData
) -> Extraction:
    where = run.device, int(run.config.workers), run.log, run.folder.kept_features
    return Extraction(encoder, dataset.images, UNTOUCHED, *where)


def _trained(
    run: OpenRun[ClassifyConfig], encoder: Encoder, features: torch.Tensor, dataset: LabeledData
) -> Trained:
    if run.config.train_layers == "linear":
        return train_linear(encoder, features, dataset, run.config.seed)
    if run.config.train_layers == "attentive":
        return train_attentive(run, encoder, dataset)
    return FineTuner(run, encoder, features, dataset).train()
