"""`nearkin discover`: novel class discovery."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nearkin.choices import MODE_METHODS
from nearkin.classifier.report import complete_results
from nearkin.commands.arguments import PathLike, command, given
from nearkin.commands.run import Run
from nearkin.config import OF_TRAINING, DiscoverConfig, TrainConfig
from nearkin.discovery.data import DiscoveryData, check_sizes, open_discovery_data
from nearkin.discovery.features import check_layers
from nearkin.discovery.outcome import build_outcome
from nearkin.discovery.pipeline import Pipeline, check_trained_layers
from nearkin.discovery.report import write_outcome
from nearkin.discovery.start import with_encoder
from nearkin.distributed import is_main_process
from nearkin.encoders.encoder import Encoder, check_named, load
from nearkin.errors import UsageError
from nearkin.extensions import check_trusted
from nearkin.methods import method_class
from nearkin.run.data import held_share, note_labels
from nearkin.run.folder import RunFolder, clear, data_name, neighboring_runs, run_folder
from nearkin.run.opening import (
    OpenRun,
    check_copies,
    kept_copy,
    open_run,
    resumed_settings,
    self_contained,
)
from nearkin.run.options import checked_options
from nearkin.run.reporter import Reporter
from nearkin.schema import option, suggestion
from nearkin.training.session import run_worker


@command
def discover(
    data: Any,
    config: DiscoverConfig | None = None,
    *,
    output: PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> Run:
    """Find novel classes among images of which some are labeled.

    Options of the last stage's method, simgcd, or ncl in mode ncd, are given by their names.

    Args:
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`); a
            name such as `digits`; or, from Python, arrays or a data set (docs/data.md).
        config: The settings, of which `settings` replaces some.
        output: The run folder; runs/DATA-MODE if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.DiscoverConfig`, and options of the last stage's method.

    Returns:
        The finished run: its metrics, encoder and report.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(DiscoverConfig, config, settings)
    if not is_main_process():
        return _helped(
            data, config, run_folder(output, data, config.mode, again=True), resume=resume
        )
    # Everything that can be refused is, before the run folder is touched and time is spent.
    folder = run_folder(output, data, config.mode, again=resume or overwrite)
    config, encoder = _checked(config, folder, resume=resume)
    name = data_name(data)
    if not (resume and folder.config.exists()):  # else its encoder's run may be another by now
        config = replace(config, val=held_share(data, config))
    check_copies(folder, config.copy_to, data, resume=resume)
    with open_run(folder, config, data, verbose, resume=resume, overwrite=overwrite) as run:
        config, log = run.config, run.log
        resumed = folder if resume else None
        dataset = open_discovery_data(data, config, log.progress, folder, resumed)
        for line in dataset.lines():
            log.info(line)
        config = _fitted(run, dataset, encoder)
        if overwrite:
            clear(folder)
        note_labels(folder, dataset.parts)
        if folder.summary.exists():
            complete_results(run, dataset.images, name)
            return Run(folder)
        folder.write_settings(config, name)
        if config.accept or config.mode == "ncd":
            dataset.accepted.write(folder)
        pipeline = Pipeline(data, replace(run, config=config))
        state = pipeline.prepare(dataset)
        methods, trials = pipeline.train(state), pipeline.calibrating(state)
        log.info("classifying all images")
        write_outcome(build_outcome(name, state, methods, trials))
    return Run(folder)


def _fitted(
    run: OpenRun[DiscoverConfig], dataset: DiscoveryData, encoder: Encoder | None
) -> DiscoverConfig:
    """Return the settings with what depends on the images decided, or refuse these."""
    config, left = run.config, dataset.accepted.num_left
    if config.classes == "auto" and left is not None:
        run.log.info(f"           {left} novel classes are left; take another with --classes N")
        config = replace(config, classes=left)
    check_sizes(dataset, config)
    if encoder:
        encoder.preprocessing.applied(dataset.images)
    config = with_encoder(config, dataset.images, run.log.info)
    check_trained_layers(dataset, config, run.device)
    return config


def _helped(data: Any, config: DiscoverConfig, folder: RunFolder, *, resume: bool) -> Run:
    """Take part in the training of an encoder, in which alone there are several processes."""
    if config.accept:  # which has an encoder
        return Run(folder)
    if resume:
        config = resumed_settings(folder, _with_options(self_contained(config)))
    trained = resume and folder.stage("features").summary.exists()
    if config.encoder == "auto" and not trained:
        run_worker(data)
    return Run(folder)


def _checked(
    config: DiscoverConfig, folder: RunFolder, *, resume: bool
) -> tuple[DiscoverConfig, Encoder | None]:
    """Return the settings, checked as far as possible without the data, and their encoder."""
    _check_encoder(config)
    if config.accept:
        config = _next_round(config, folder, resume=resume)
    if bool(config.labeled) == bool(config.known):
        raise UsageError(
            "say which classes are known: either --labeled PATH, or --known A,B where the data "
            "themselves have labels"
        )
    config = _with_options(self_contained(config))
    _check_method(config)
    if config.encoder == "auto":
        return config, None
    source = kept_copy(folder.start, config.encoder, resume=resume)
    trust = config.trust_remote_code
    encoder = load(source, allow_partial=config.allow_partial, trust_remote_code=trust)
    check_named(encoder)
    check_layers(config.train_layers, encoder.backbone)
    return config, encoder


def _check_encoder(config: DiscoverConfig) -> None:
    """Refuse how to train an encoder where one is given, and how to load one where none is."""
    named, usual = config.encoder != "auto", DiscoverConfig()
    by = "--encoder" if named else "--accept"
    for name in OF_TRAINING:
        value = getattr(config, name)
        if (named or config.accept) and value != getattr(usual, name):
            raise UsageError(
                f"{option(name)} {value} is of the training of an encoder, and {by} gives one; "
                "leave one of the two out"
            )
    if config.allow_partial and not named:
        raise UsageError("--allow-partial is of the encoder that --encoder names; give both")


def _check_method(config: DiscoverConfig) -> None:
    """Refuse a method of the first stage that needs more than images."""
    method = method_class(TrainConfig.method if config.method == "auto" else config.method)
    if method.uses_teacher:
        raise UsageError(
            f"{config.method} learns from a teacher; train it first by `nearkin train --method "
            f"{config.method} --teacher ENCODER`, then give its run with --encoder"
        )
    if method.uses_labels:
        raise UsageError(f"--method {config.method} learns from labels; the first stage has none")


def _next_round(config: DiscoverConfig, folder: RunFolder, *, resume: bool) -> DiscoverConfig:
    """Return the settings with what is left out taken from the discovery that is accepted.

    A round that goes on has its own settings; the accepted discovery may be gone.
    """
    if config.mode == "ncd":
        raise UsageError(
            "--accept leaves unlabeled images of the classes that it makes known, so --mode ncd "
            "does not hold; leave it out"
        )
    begun = resume and folder.config.exists()
    run = folder if begun else RunFolder(Path(config.accept))
    if not begun and not (run.config.exists() and run.kind == "discovery"):
        near = "" if run.path.exists() else suggestion(config.accept, neighboring_runs(run.path))
        raise UsageError(f"{config.accept} is no finished discovery; --accept wants one.{near}")
    earlier, _ = run.settings_of(DiscoverConfig)
    taken = dict[str, Any]()
    if not (config.labeled or config.known):
        taken |= {"labeled": earlier.labeled, "known": earlier.known}
    if config.encoder == "auto":
        taken["encoder"] = earlier.encoder if begun else str(_before_labels(run, earlier))
    check_trusted(taken, run.config, config.trust_remote_code)
    return replace(config, **taken)


def _before_labels(run: RunFolder, config: DiscoverConfig) -> Path:
    """Return the encoder of a discovery before it saw a label: trials hide some of these again."""
    encoders = (run.start, run.stage("features").path)
    fitted = config.train_layers != "top"
    return next((path for path in encoders if fitted and path.exists()), run.path)


def _with_options(config: DiscoverConfig) -> DiscoverConfig:
    """Return the settings with checked options of the last stage's method."""
    if config.classes == 0 and config.mode == "ncd":
        raise UsageError("--mode ncd searches novel classes, and --classes 0 says there are none")
    if "num_novel_classes" in config.options:
        raise UsageError("--num-novel-classes is of `nearkin train`; give --classes here")
    method = MODE_METHODS[config.mode]
    return replace(config, options=checked_options(method, config.options, DiscoverConfig))
