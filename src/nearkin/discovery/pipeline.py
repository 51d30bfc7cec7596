"""The three stages of a discovery in order: features, known classes, all classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from nearkin.config import DiscoverConfig, TrainConfig, Value
from nearkin.discovery.data import DiscoveryData, DiscoveryTask, batch_size
from nearkin.discovery.features import (
    CachedFeatures,
    DiscoveryEncoder,
    FinetunedEncoder,
    FrozenEncoder,
    ViewSettings,
    check_train_layers,
    extract_features,
)
from nearkin.discovery.findings import Finding, early_findings
from nearkin.discovery.number import NumberOfClasses, estimate_number
from nearkin.discovery.stages import (
    Stage,
    class_stage,
    known_stage,
    shared_with_workers,
    stage_init,
)
from nearkin.discovery.trials import (
    FOLDS,
    MODE_RECIPES,
    Trial,
    Trials,
    best,
    mean_accuracy,
    tuned_options,
)
from nearkin.encoders.encoder import Encoder, load
from nearkin.method import Method
from nearkin.report.pages import write_page
from nearkin.run.data import write_bad_files
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, data_name, opened
from nearkin.run.opening import resumed_settings
from nearkin.run.reporter import Logger
from nearkin.run.settings import resolve
from nearkin.training.session import train_encoder
from nearkin.training.start import write_start
from nearkin.types import UNKNOWN

SEEDS: Final = 3
"""Trainings of the last stage on top of a frozen encoder; a finetuned one is trained once."""
SHARED: Final = ("val", "seed", "device", "devices", "workers", "cache", "scan", "max_bad")
"""Settings that the first stage takes over."""
BASE_LOSS: Final[dict[str, Value]] = {"novel_weight": 0.0, "known_weight": 0.0}
"""Options of NCL without its contrastive terms."""
BASELINES: Final[dict[str, dict[str, Value]]] = {
    "base loss": BASE_LOSS,
    "rank statistics": BASE_LOSS | {"pseudo_labels": "ranks"},
}
"""Options of NCL for its own base loss, and for AutoNovel's (Han et al. 2020)."""


@dataclass(frozen=True, eq=False)
class DiscoveryState:
    """What stands before the first training on labels."""

    dataset: DiscoveryData
    pretrained: Encoder
    base: TrainConfig  # Settings that all later trainings share
    frozen: FrozenEncoder  # Features that have seen no label
    encoder: DiscoveryEncoder  # What the later stages train on
    estimate: NumberOfClasses | None  # None where the number of novel classes was given
    task: DiscoveryTask
    findings: list[Finding]
    trials: list[Trial]
    tuned: float  # The chosen value of the mode's tuned setting
    bad_rows: set[int]  # Of all images that were opened, those that turned out unreadable


class TrainedMethods(NamedTuple):
    """The methods of the last stage."""

    methods: list[Method[Any]]
    """One per seed. The first is the result, the others show which classes are stable."""
    baselines: Mapping[str, Method[Any]]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Runs the stages, each from where an earlier, interrupted run has left it."""

    data: Any
    config: DiscoverConfig
    folder: RunFolder
    device: torch.device
    log: Logger

    def prepare(self, dataset: DiscoveryData) -> DiscoveryState:
        """Train or load the encoder, estimate the number of classes, and tune by trials."""
        pretrained = self._pretrained(dataset)
        check_train_layers(pretrained, self.config.train_layers)
        base = self._base(pretrained, dataset)
        cached, bad_rows = self._cached(pretrained, dataset, base)
        dataset = dataset.without(bad_rows)
        # Whatever the later stages train, the number of classes is estimated and the setting is
        # tuned on frozen features: a trial takes seconds there, and needs no second encoder.
        frozen = FrozenEncoder(cached, self.device)
        encoder: DiscoveryEncoder = frozen
        if self.config.train_layers != "top":
            images = dataset.images
            encoder = FinetunedEncoder(pretrained, images, self.config, base, self.device)
        estimate = self._estimate(cached, dataset)
        task = self._task(dataset, estimate)
        # Warnings of what is clear already come before time is spent on training.
        findings = early_findings(
            cached.center[torch.from_numpy(task.rows)].numpy(),
            task.label[task.rows],
            dataset.classes,
            num_novel=task.num_novel,
            mode=self.config.mode,
        )
        for finding in findings:
            self.log.info(f"warning: {finding.text}")
        trials, tuned = self._tuned(frozen, task, base)
        return DiscoveryState(
            dataset=dataset,
            pretrained=pretrained,
            base=base,
            frozen=frozen,
            encoder=encoder,
            estimate=estimate,
            task=task,
            findings=findings,
            trials=trials,
            tuned=tuned,
            bad_rows=bad_rows,
        )

    def _pretrained(self, dataset: DiscoveryData) -> Encoder:
        """Stage 1: an encoder that has seen no label."""
        config, stage = self.config, self.folder.stage("features")
        if config.from_run:
            self.log.info(f"stage 1/3  features: from {config.from_run}")
            if self.folder.start.exists():  # its source may be gone by now
                return load(self.folder.start)
            encoder = load(config.from_run, allow_partial=config.allow_partial)
            for line in encoder.lines():
                self.log.info(f"           {line}")
            write_start(self.folder, encoder)
            # What features are of is the file, as in a run that is resumed.
            return load(self.folder.start)
        if stage.summary.exists():
            return load(stage.path)
        self.log.info(f"stage 1/3  features: {config.method}, without labels")
        settings = TrainConfig(method=config.method, labels="none", **self._shared(*SHARED))
        parts = dataset.pretraining_parts(settings.val, settings.seed)
        # A run folder of its own, so that it is resumed like any other training.
        with (
            opened(stage.path, resume=stage.config.exists(), overwrite=False) as folder,
            Logger(self.log, folder.log) as log,
        ):
            settings = resumed_settings(folder, settings)
            settings = resolve(settings, parts.train, self.device)
            with resource_errors(int(settings.batch_size)):
                train_encoder(folder, settings, parts, data=self.data, device=self.device, log=log)
                write_page(folder, parts.images)
        return load(stage.path)

    def _shared(self, *names: str) -> dict[str, Any]:
        """Return settings that a discovery and a training both have."""
        return {name: getattr(self.config, name) for name in names}

    def _base(self, pretrained: Encoder, dataset: DiscoveryData) -> TrainConfig:
        """Resolve the settings that all later stages share."""
        config = self.config
        requested = TrainConfig(
            method=MODE_RECIPES["ncd"].method,
            backbone=str(pretrained.details["backbone"]),
            image_size=pretrained.image_size,
            epochs=1,  # each stage has a length of its own
            **self._shared("augment", "seed", "devices", "workers", "cache"),
            # On cached features a step is so short that a lower precision gains no time.
            precision="fp32" if config.train_layers == "top" else "auto",
        )
        resolved = resolve(requested, dataset.parts.train, self.device)
        # A resumed run may find more or less room for a cache, and cached photos are other pixels.
        self.folder.write_settings(replace(config, cache=resolved.cache), data_name(self.data))
        return replace(
            resolved,
            batch_size=batch_size(dataset, config),
            options={},
            **self._shared("epochs", "lr_milestones"),
        )

    def _cached(
        self, pretrained: Encoder, dataset: DiscoveryData, base: TrainConfig
    ) -> tuple[CachedFeatures, set[int]]:
        """Return the features of readable images, extracted once, and the rows of the others."""
        path, images = self.folder.cached_features, dataset.images
        if not path.exists():
            views = f"{self.config.num_views} views of each"
            self.log.info(f"           features of {len(images)} images and {views}")
            drawn = ViewSettings(base.augment, self.config.num_views, base.seed)
            workers, on_progress = int(base.workers), self.log.progress
            features, bad = extract_features(
                pretrained, images, drawn, self.device, workers, on_progress
            )
            features.write(path, bad)
        features, bad = CachedFeatures.read(path, len(images))
        reasons = {images.names[row]: reason for row, reason in bad.items()}
        write_bad_files(self.folder.bad_files, images, reasons)
        return features.subset(np.setdiff1d(np.arange(len(images)), list(bad))), set(bad)

    def _estimate(self, cached: CachedFeatures, dataset: DiscoveryData) -> NumberOfClasses | None:
        if self.config.classes != "auto":
            return None
        self.log.info("           estimating the number of novel classes")
        estimate = estimate_number(self.folder.number, cached, dataset, self.config)
        self.log.info(
            f"           {estimate.chosen} novel classes, between {estimate.low} and "
            f"{estimate.high} ({estimate.text}); fix it with --classes N"
        )
        return estimate

    def _task(self, dataset: DiscoveryData, estimate: NumberOfClasses | None) -> DiscoveryTask:
        number = estimate.chosen if estimate else int(self.config.classes)
        label = dataset.label.copy()
        # Known classes are scored on held-out images, so their labels may train nothing.
        label[dataset.parts.test_rows] = UNKNOWN
        return DiscoveryTask(label, dataset.parts.train_rows, len(dataset.classes), number)

    def _tuned(
        self, frozen: FrozenEncoder, task: DiscoveryTask, base: TrainConfig
    ) -> tuple[list[Trial], float]:
        """Search for hidden known classes with every value in question, and choose the best.

        A value that was given is tried too: trials also calibrate the classifier.
        """
        mode = self.config.mode
        recipe = MODE_RECIPES[mode]
        name, requested = recipe.setting.replace("_", " "), getattr(self.config, recipe.setting)
        values = recipe.candidates if requested == "auto" else (float(requested),)
        folder = self.folder.stage("trials").path
        options, start = self.config.options, self.config.start
        trials, total = list[Trial](), FOLDS * len(values)
        for trial in Trials(frozen, task, base, mode, folder, options, start).run(values):
            trials.append(trial)
            self.log.progress(len(trials), total, "trials on hidden known classes")
        for value in values if trials else ():
            self.log.info(
                f"           {name} {value:g}: {mean_accuracy(trials, value):.1%} "
                "accuracy on hidden known classes"
            )
        if trials or requested != "auto":
            return trials, best(trials) if requested == "auto" else float(requested)
        self.log.info(f"           too few known classes to hide some: {name} {recipe.default:g}")
        return trials, recipe.default

    def train(self, state: DiscoveryState) -> TrainedMethods:
        """Train stages 2 and 3, and the baselines of stage 3."""
        config, task, mode = self.config, state.task, self.config.mode
        self.log.info(f"stage 2/3  {task.num_known} known classes")
        known = known_stage(state.encoder, task, replace(state.base, epochs=config.known_epochs))
        self._train(known, "known", state)
        init = stage_init(state.encoder, known.method, task, config.seed, config.start)

        def trained(
            name: str, method: str, options: Mapping[str, Value], seed: int = 0
        ) -> Method[Any]:
            self.log.info(f"           {name}")
            base = replace(state.base, seed=state.base.seed + seed)
            stage = class_stage(state.encoder, task, base, init, method, options)
            self._train(stage, name, state)
            return stage.method

        method, setting = MODE_RECIPES[mode].method, MODE_RECIPES[mode].setting
        count = config.num_seeds
        if count == "auto":
            count = SEEDS if config.train_layers == "top" else 1
        options = tuned_options(mode, state.tuned, task.num_novel) | dict(config.options)
        self.log.info(
            f"stage 3/3  {task.num_novel} novel classes by {method}, "
            f"{setting.replace('_', ' ')} {state.tuned:g}, {count} seeds"
        )
        methods = [trained(f"{method}-{seed}", method, options, seed) for seed in range(count)]
        rate = tuned_options("ncd", MODE_RECIPES["ncd"].default, task.num_novel)
        baselines = {
            name: trained(name.replace(" ", "-"), "ncl", rate | options)
            for name, options in (BASELINES if config.baselines else {}).items()
        }
        return TrainedMethods(methods, baselines)

    def _train(self, stage: Stage, name: str, state: DiscoveryState) -> None:
        workers = shared_with_workers(
            stage, self.config, state.pretrained.preprocessing, state.bad_rows
        )
        stage.run(self.folder.stage(name), self.log, workers)
