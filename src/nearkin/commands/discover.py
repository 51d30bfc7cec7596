"""`nearkin discover`: the classes nobody named, beside some that are known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.commands.train import Run
from nearkin.config import DiscoverConfig, continued
from nearkin.data.copies import check_destination
from nearkin.discovery.classifier import (
    Calibration,
    Classifier,
    Clustering,
    Predictions,
    fit,
    head_clustering,
    heads_of,
    kmeans_clustering,
    new_names,
    still,
    write_classifier,
)
from nearkin.discovery.data import (
    USUAL_BATCH,
    DiscoveryData,
    DiscoveryTask,
    batch_size,
    open_discovery_data,
)
from nearkin.discovery.features import check_trained
from nearkin.discovery.findings import findings
from nearkin.discovery.outcome import Outcome
from nearkin.discovery.pipeline import DiscoveryState, Learned, Learning, Preparation
from nearkin.discovery.report import write_outcome
from nearkin.discovery.stages import follow
from nearkin.discovery.trials import MODE_METHOD, Trial
from nearkin.distributed import choose_device, company, device_name, is_first
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.encoder import load, write_encoder
from nearkin.evaluation.evaluate import PIXEL_BANK, pixel_features
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.methods import method_class
from nearkin.run.data import same_data, write_bad_files
from nearkin.run.failures import foreseen
from nearkin.run.folder import RunFolder, clear, data_name
from nearkin.run.opened import default_folder, opened
from nearkin.run.reporter import Logger, Reporter, Silent
from nearkin.run.settings.build import self_contained
from nearkin.run.settings.options import checked_options
from nearkin.tables import read_numbers
from nearkin.types import UNKNOWN
from nearkin.version import __version__

LOOKED_AT = 2000
"""Images whose silhouettes are compared."""


def discover(
    data: Any,
    config: DiscoverConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Find the classes among images of which some have a known class.

    Args:
        data: What `open_images` takes.
        config: Settings.
        out: The run folder; `runs/DATA-MODE` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        reporter: Who is told how it goes.

    Returns:
        The finished run.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    if not is_first():
        follow(data)
        return Run(RunFolder(Path(out) if out else default_folder(data, config.mode, resume=True)))
    config = _asked(config)
    path = Path(out) if out else default_folder(data, config.mode, resume=resume)
    if config.copy_to and not (resume and RunFolder(path).summary.exists()):
        check_destination(Path(config.copy_to), [data_name(data)])
    with (
        opened(path, resume=resume, overwrite=overwrite) as folder,
        Logger(reporter or Silent(), folder.log) as log,
    ):
        if resume and folder.config.exists():
            config = continued(config, folder.discovery_settings()[0])
        device = choose_device(config.device)
        log.line(
            f"nearkin {__version__} | {device_name(device)} | seed {config.seed} | "
            f"writing {path.resolve()}"
        )
        dataset = open_discovery_data(data, config, folder.bad_files, log.progress)
        for line in dataset.lines():
            log.line(line)
        _fitting(dataset, config)
        write_bad_files(folder.bad_files, dataset.images)
        if overwrite:
            clear(folder)
        same_data(folder, dataset.parts)
        if folder.summary.exists():
            with company(1, follow):  # or processes that somebody else has started would wait
                log.line("already complete")
            return Run(folder)
        folder.write_settings(config, data_name(data))
        with foreseen(USUAL_BATCH):
            with company(config.devices, follow, data):
                state = Preparation(data, config, folder, device, log).run(dataset)
                learned = Learning(config, folder, state, log).run()
            log.line("reading off the classes")
            write_outcome(_find(state, learned, config, folder, data_name(data)), log)
        log.line(f"done   {path.resolve()}")
    return Run(folder)


def _asked(config: DiscoverConfig) -> DiscoverConfig:
    """What was asked for, checked as far as it can be without the data."""
    if config.accept:
        earlier, _ = RunFolder(Path(config.accept)).discovery_settings()
        if not (config.labeled or config.known):
            config = replace(config, labeled=earlier.labeled, known=earlier.known)
    if bool(config.labeled) == bool(config.known):
        raise UsageError(
            "say which classes are known: either --labeled PATH, or --known A,B where the data "
            "themselves have labels"
        )
    config = self_contained(config)
    if method_class(config.method).uses_labels:
        raise UsageError(f"--method {config.method} learns from labels; the first stage has none")
    if config.from_run:
        check_trained(load(config.from_run), config.train_layers)
    options = checked_options(MODE_METHOD[config.mode], config.options, DiscoverConfig)
    return replace(config, options=options)


def _fitting(dataset: DiscoveryData, config: DiscoverConfig) -> None:
    """Refuse settings that ask for more images than there are."""
    rows = dataset.parts.train_rows
    unlabeled = int((dataset.label[rows] == UNKNOWN).sum())
    if config.classes != "auto" and config.classes > unlabeled:
        raise DataError(
            f"{config.classes} novel classes among {unlabeled} unlabeled images; give fewer "
            "with --classes, or more images"
        )
    batch_size(dataset, config)


def _find(
    state: DiscoveryState, learned: Learned, config: DiscoverConfig, folder: RunFolder, data: str
) -> Outcome:
    """Read the classes off what was learned, and keep what sorts new images into them."""
    dataset, task, trunk = state.dataset, state.task, state.trunk
    looks, layer = trunk.seen(learned.ours[0])
    classifier = Classifier(
        layer=still(layer),
        heads=still(heads_of(learned.ours[0])),
        classes=new_names(dataset.classes, task.num_novel),
        num_known=task.num_known,
        disjoint=config.mode == "ncd",
        calibration=calibrated(state.trials, state.strength),
        details={
            "augment": state.base.augment,
            "num_views": config.num_views,
            "seed": state.base.seed,
        },
    )
    fixed = trunk is state.frozen
    network = state.encoder.backbone if fixed else learned.ours[0].backbone
    write_encoder(folder.encoder, network, state.encoder.details)
    write_classifier(folder.classifier, classifier)
    predictions = classifier.predict(looks, tuple(dataset.images.names), dataset.label)
    arms = [head_clustering(trunk, method, task.num_known) for method in learned.ours]
    center = state.frozen.kept.center
    baselines = clustered(state) | {
        name: head_clustering(trunk, method, task.num_known)
        for name, method in learned.baselines.items()
    }
    return Outcome(
        folder=folder,
        config=config,
        data=data,
        state=state,
        predictions=predictions,
        ours=arms[0],
        seeds=arms[1:],
        baselines=baselines,
        calibration=classifier.calibration,
        findings=state.doubts
        + findings(
            predictions,
            mode=config.mode,
            positive_rate=positive_rate(folder) if config.mode == "ncd" else None,
            silhouettes=blurred(center, predictions, task),
        ),
    )


def clustered(state: DiscoveryState) -> dict[str, Clustering]:
    """K-means: on features that no label has touched, and on raw pixels unless they are many."""
    task, seed, images = state.task, state.base.seed, state.dataset.images
    arms = {"k-means": kmeans_clustering(state.frozen.kept.center, task, seed)}
    if len(images) <= PIXEL_BANK:
        pixels = pixel_features(images, images, int(state.base.workers))[0]
        arms["k-means, pixels"] = kmeans_clustering(pixels, task, seed)
    return arms


def positive_rate(folder: RunFolder) -> float:
    """The mean of the last epoch."""
    rows = read_numbers(folder.stage(f"{MODE_METHOD['ncd']}-0").metrics)
    last = rows[-1]["epoch"]
    return fmean(row["positive_rate"] for row in rows if row["epoch"] > last - 1)


def calibrated(trials: Sequence[Trial], strength: float) -> Calibration | None:
    """What the trials of a strength say about how often the classifier is right."""
    chosen = [trial for trial in trials if trial.strength == strength]
    if not chosen:
        return None
    return fit(
        np.concatenate([trial.probability for trial in chosen]),
        np.concatenate([trial.correct for trial in chosen]),
    )


def blurred(
    before: Float[Tensor, "images _"], predictions: Predictions, task: DiscoveryTask
) -> tuple[float, float]:
    """Silhouettes of k-means of some unlabeled images, before and after learning from labels."""
    from sklearn.metrics import silhouette_score

    rows = task.unlabeled[:: len(task.unlabeled) // LOOKED_AT + 1]
    after = torch.from_numpy(predictions.features)

    def score(features: Float[Tensor, "images _"]) -> float:
        x = compact(features[torch.from_numpy(rows)])
        nothing = np.full(len(x), UNKNOWN)
        found = constrained_kmeans(x, nothing, task.num_novel, seed=0, starts=4).cluster
        return float(silhouette_score(x, found)) if len(np.unique(found)) > 1 else 0.0

    return score(before), score(after)
