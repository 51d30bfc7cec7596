"""`nearkin discover`: novel class discovery."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nearkin.choices import OBJECTIVE_METHODS
from nearkin.commands.settings import given
from nearkin.commands.train import Run
from nearkin.config import DiscoverConfig
from nearkin.discovery.data import (
    BATCH_SIZE,
    DiscoveryData,
    check_sizes,
    open_discovery_data,
)
from nearkin.discovery.features import check_train_layers
from nearkin.discovery.outcome import build_outcome
from nearkin.discovery.pipeline import Pipeline
from nearkin.discovery.report import write_outcome
from nearkin.discovery.stages import run_worker
from nearkin.discovery.trials import OBJECTIVES, candidates, of_mode
from nearkin.distributed import is_main_process, worker_group
from nearkin.encoders.encoder import load
from nearkin.errors import UsageError
from nearkin.extensions import check_trusted
from nearkin.methods import method_class, parameters
from nearkin.run.data import held_share, note_labels, write_bad_files
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, clear, data_name, run_folder
from nearkin.run.named import LABEL_COLUMNS
from nearkin.run.opening import check_copies, kept_copy, open_run, self_contained
from nearkin.run.options import checked_options
from nearkin.run.reporter import Reporter
from nearkin.schema import Value, option, suggestion
from nearkin.tables import write_csv


def discover(
    data: Any,
    config: DiscoverConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    **settings: Any,
) -> Run:
    """Find novel classes among images of which some are labeled.

    Options of the objective's method, uno, ncl or simgcd, are given by their names.

    Args:
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`); a
            name such as `digits`; or, from Python, arrays or a data set (docs/data.md).
        config: The settings, of which `settings` replaces some.
        out: The run folder; runs/DATA-MODE if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        reporter: Receives log lines and progress; None is silent.
        settings: Fields of `nearkin.DiscoverConfig`, and options of the last stage's method.

    Returns:
        The finished run: `run.path`, `run.summary`.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, _ = given(DiscoverConfig, config, settings)
    if not is_main_process():
        run_worker(data)
        return Run(run_folder(out, data, config.mode, again=True))
    # Everything that can be refused is, before the run folder is touched and time is spent.
    folder = run_folder(out, data, config.mode, again=resume or overwrite)
    config = _checked(config, folder, resume=resume)
    held_share(data, config)
    check_copies(folder, config.copy_to, data, resume=resume)
    with open_run(
        folder,
        config,
        resume=resume,
        overwrite=overwrite,
        encoders=[config.from_run, config.accept],
        reporter=reporter,
    ) as run:
        config, log = replace(run.config, val=held_share(data, run.config)), run.log
        list_bad = partial(write_bad_files, folder.bad_files)
        resumed = folder if resume else None
        dataset = open_discovery_data(data, config, log.progress, list_bad, resumed)
        for line in dataset.lines():
            log.info(line)
        check_sizes(dataset, config)
        write_bad_files(folder.bad_files, dataset.images)
        if overwrite:
            clear(folder)
        note_labels(folder, dataset.parts)
        if config.accept:
            write_csv(folder.accepted, LABEL_COLUMNS, dataset.accepted.items())
        if folder.summary.exists():
            # Workers that torchrun or SLURM has started wait for a first process to end with.
            with worker_group(1, run_worker):
                log.info("already complete")
            return Run(folder)
        folder.write_settings(config, data_name(data))
        with resource_errors(BATCH_SIZE):
            _run(Pipeline(data, config, folder, run.device, log), dataset)
    return Run(folder)


def _run(pipeline: Pipeline, dataset: DiscoveryData) -> None:
    """Run the three stages, classify all images, and write what was found."""
    # Workers live as long as the trainings; classifying and scoring need none of them.
    with worker_group(pipeline.config.devices, run_worker, pipeline.data):
        state = pipeline.prepare(dataset)
        trained = pipeline.train(state)
    pipeline.log.info("classifying all images")
    write_outcome(build_outcome(pipeline, state, trained), pipeline.log)
    shutil.rmtree(pipeline.folder.finetuned_features, ignore_errors=True)


def _checked(config: DiscoverConfig, folder: RunFolder, *, resume: bool) -> DiscoverConfig:
    """Return the settings, checked as far as possible without the data."""
    if config.accept:
        config = _next_round(config)
    if bool(config.labeled) == bool(config.known):
        raise UsageError(
            "say which classes are known: either --labeled PATH, or --known A,B where the data "
            "themselves have labels"
        )
    config = self_contained(config)
    if method_class(config.method).uses_teacher:
        raise UsageError(
            f"{config.method} learns from a teacher; train it first by `nearkin train --method "
            f"{config.method} --teacher ENCODER`, then give its run with --from"
        )
    if method_class(config.method).uses_labels:
        raise UsageError(f"--method {config.method} learns from labels; the first stage has none")
    config = _with_objective(config)
    _check_tuned(config)
    _check_time(config)
    if "num_novel_classes" in config.options:
        raise UsageError("--num-novel-classes is an option of nearkin train; give --classes here")
    if source := kept_copy(folder.start, config.from_run, resume=resume):
        trust = config.trust_remote_code
        encoder = load(source, allow_partial=config.allow_partial, trust_remote_code=trust)
        check_train_layers(encoder, config.train_layers)
    return replace(config, options=_options(config))


def _next_round(config: DiscoverConfig) -> DiscoverConfig:
    """Return the settings with what is left out taken from the discovery that is accepted."""
    if config.mode == "ncd":
        raise UsageError(
            "--accept leaves unlabeled images of the classes that it makes known, so --mode ncd "
            "does not hold; leave it out"
        )
    run = RunFolder(Path(config.accept))
    earlier, _ = run.settings_of(DiscoverConfig)
    if not (config.labeled or config.known):
        check_trusted({"labeled": earlier.labeled}, run.config, config.trust_remote_code)
        config = replace(config, labeled=earlier.labeled, known=earlier.known)
    # The encoder as it was before it saw a label: trials hide some of the labels again.
    encoders = (run.start, run.stage("features").path)
    fitted = earlier.train_layers != "top"
    encoder = next((path for path in encoders if fitted and path.exists()), run.path)
    return replace(config, from_run=config.from_run or str(encoder))


def _options(config: DiscoverConfig) -> dict[str, Value]:
    """Return the options of the objective's method, or refuse those that are none."""
    if config.objective != "auto":
        method = OBJECTIVE_METHODS[config.objective]
        return checked_options(method, config.options, DiscoverConfig)
    for name in config.options:
        of = [
            key
            for key in of_mode(config.mode)
            if name in parameters(method_class(OBJECTIVE_METHODS[key]))
        ]
        if of:
            which = " or ".join(f"--objective {key}" for key in of)
            raise UsageError(f"{option(name)} has an effect with {which} only; give it too")
        near = suggestion(name, DiscoverConfig.__dataclass_fields__)
        raise UsageError(
            f"unknown option {option(name)}.{near} `nearkin discover --help` lists them"
        )
    return {}


def _with_objective(config: DiscoverConfig) -> DiscoverConfig:
    """Return the settings with the one objective that takes known classes alone, if only these."""
    if config.classes != 0:
        return config
    if config.mode == "ncd" or config.objective not in ("auto", "simgcd"):
        other = "--mode ncd" if config.mode == "ncd" else f"--objective {config.objective}"
        raise UsageError(f"{other} searches novel classes, and --classes 0 says there are none")
    return replace(config, objective="simgcd")


def _check_tuned(config: DiscoverConfig) -> None:
    """Refuse an objective of another mode, and a setting of another objective: it does nothing."""
    objectives = of_mode(config.mode)
    if config.objective not in ("auto", *objectives):
        raise UsageError(
            f"--objective {config.objective} is not for --mode {config.mode}; give one of "
            f"{', '.join(objectives)}"
        )
    tried = {each.objective for each in candidates(config)}
    for name in {objective.setting for objective in OBJECTIVES.values() if objective.setting}:
        owners = sorted(key for key, each in OBJECTIVES.items() if each.setting == name)
        if getattr(config, name) != "auto" and not tried & set(owners):
            raise UsageError(
                f"{option(name)} is a setting of {' and '.join(owners)}; --mode {config.mode} "
                f"tries {' and '.join(sorted(tried))}"
            )


def _check_time(config: DiscoverConfig) -> None:
    """Refuse a time where nothing is left to plan."""
    if config.max_time and config.from_run and config.train_layers != "auto":
        raise UsageError(
            f"--max-time {config.max_time} has nothing to plan: --from gives the encoder, and "
            "--train-layers says what learns from labels; leave one of the three out"
        )
