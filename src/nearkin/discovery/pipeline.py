"""The three stages of a discovery in order: features, known classes, all classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import torch

from nearkin.classifier.features import CachedFeatures, Extraction, ViewSettings
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.discovery.data import DiscoveryData, batch_size, check_sizes
from nearkin.discovery.features import (
    NUM_VIEWS,
    DiscoveryEncoder,
    FinetunedEncoder,
    FrozenEncoder,
    check_layers,
)
from nearkin.discovery.findings import Finding, early_findings, labels_seen, number_capped
from nearkin.discovery.number import NumberOfClasses, estimate_number
from nearkin.discovery.stages import OPTIONS, Stage, StageInit, Stages
from nearkin.discovery.start import kept_encoder
from nearkin.discovery.task import DiscoveryTask
from nearkin.discovery.trials import FOLDS, Candidate, Trial, Trials, accuracies, best, candidates
from nearkin.encoders.encoder import Encoder, load
from nearkin.method import Method
from nearkin.metrics.kmeans import COPIES, WIDEST
from nearkin.networks.backbone import build_backbone
from nearkin.report.pages import write_page
from nearkin.run.auto import precision_of, resolve
from nearkin.run.data import note_undecodable
from nearkin.run.failures import state_memory
from nearkin.run.folder import data_name
from nearkin.run.opening import OpenRun, open_run
from nearkin.schema import Value
from nearkin.training.session import train_encoder
from nearkin.training.start import write_start

SEEDS: Final = 3  # Trainings of the last stage on top of a frozen encoder
BASE: Final = ("augment", "seed", "workers", "cache")
"""Settings of a discovery that all its stages take over."""
FIRST: Final = (*BASE, "val", "device", "devices", "scan", "max_bad", "max_time")
"""Those that the training of an encoder takes over."""


def check_trained_layers(
    dataset: DiscoveryData, config: DiscoverConfig, device: torch.device
) -> None:
    """Refuse layers that an encoder which is still to be trained will not have."""
    if config.encoder == "auto" and config.train_layers != "top":
        parts = dataset.pretraining_parts()
        settings = resolve(_first_settings(config), parts.train, device)
        network = build_backbone(str(settings.backbone), int(settings.image_size))
        check_layers(config.train_layers, network)


def _first_settings(config: DiscoverConfig) -> TrainConfig:
    """Return the settings of the training of an encoder."""
    shared: dict[str, Any] = {name: getattr(config, name) for name in FIRST}
    return TrainConfig(method=config.method, labels="none", **shared)


@dataclass(frozen=True, eq=False)
class DiscoveryState:
    """What stands before the first training on labels."""

    run: OpenRun[DiscoverConfig]  # With the settings as they are carried out
    dataset: DiscoveryData
    pretrained: Encoder
    stages: Stages  # The later ones
    estimate: NumberOfClasses | None  # None where the number of novel classes was given
    findings: list[Finding]
    trials: list[Trial]
    chosen: Candidate  # The objective of the last stage

    @property
    def task(self) -> DiscoveryTask:
        """What the later stages are told."""
        return self.stages.task

    @property
    def seeds(self) -> dict[int, int]:
        """How often the last stage is trained with each number of novel classes.

        On frozen features, where a training takes seconds, also with the ends of the interval: two
        seeds tell whether they agree. The result's number comes first.
        """
        chosen = self.task.num_novel
        if self.run.config.train_layers != "top":
            return {chosen: 1}
        ends = (self.estimate.low, self.estimate.high) if self.estimate else ()
        return {chosen: SEEDS} | {number: 2 for number in ends if number != chosen}

    def options(self, num_novel: int) -> dict[str, Value]:
        """Return the options of the method of the last stage."""
        own = self.chosen.options(num_novel) | dict(self.run.config.options)
        return {**OPTIONS[self.chosen.method], **own}


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Runs the stages, each from where an earlier, interrupted run has left it."""

    data: Any
    run: OpenRun[DiscoverConfig]

    def prepare(self, dataset: DiscoveryData) -> DiscoveryState:
        """Train or load the encoder, estimate the number of classes, and choose by trials."""
        device, log, pretrained = self.run.device, self.run.log, self._pretrained(dataset)
        base = self._base(pretrained, dataset)
        cached, dataset = self._cached(pretrained, dataset, base)
        config = replace(self.run.config, cache=base.cache)
        run = replace(self.run, config=config)
        # Whatever the later stages train, the number of classes is estimated and the setting is
        # chosen on frozen features: a trial takes seconds there, and needs no second encoder.
        encoder: DiscoveryEncoder = FrozenEncoder(cached, device)
        task = dataset.task(config.mode)
        estimate = self._estimate(cached, task)
        task = replace(task, num_novel=estimate.chosen if estimate else int(config.classes))
        # Of probabilities, those of the images to assign are scaled and sorted, each in a copy.
        columns_of = {"k-means": COPIES * WIDEST, "probabilities": 4 * task.num_classes}
        for step, columns in columns_of.items():
            state_memory(f"           {step} of all images", 8 * columns * len(task.label), log)
        # Warnings of what is clear already come before time is spent on training.
        findings = [
            *labels_seen(pretrained),
            *(number_capped(estimate.high, estimate.most) if estimate else ()),
            *early_findings(cached.center, task, dataset.classes),
        ]
        for finding in findings:
            log.info(f"warning: {finding.text}")
        stages = Stages(encoder, task, base)
        trials, chosen = self._chosen(stages, dataset.images)
        if config.train_layers != "top":
            base = replace(base, precision=precision_of(device))
            how = config.train_layers, base, device, run.folder.kept_features
            encoder = FinetunedEncoder(pretrained, cached, dataset.images, *how)
            stages = Stages(encoder, task, base)
        return DiscoveryState(run, dataset, pretrained, stages, estimate, findings, trials, chosen)

    def _pretrained(self, dataset: DiscoveryData) -> Encoder:
        """Stage 1: an encoder that has seen no label."""
        config, folder, log = self.run.config, self.run.folder, self.run.log
        trust, partial = config.trust_remote_code, config.allow_partial
        if config.encoder == "auto":
            return self._trained_encoder(dataset)
        log.info(f"stage 1/3  features: from {config.encoder}")
        if not folder.start.exists():  # its source may be gone by now
            encoder = load(config.encoder, allow_partial=partial, trust_remote_code=trust)
            for line in encoder.lines():
                log.info(f"           {line}")
            write_start(folder, encoder)
        # What features are of is the file, as in a run that is resumed.
        return load(folder.start, trust_remote_code=trust)

    def _trained_encoder(self, dataset: DiscoveryData) -> Encoder:
        """Train an encoder in a run folder of its own, by all processes."""
        config, device, log = self.run.config, self.run.device, self.run.log
        stage = self.run.folder.stage("features")
        if not stage.summary.exists():
            log.info(f"stage 1/3  features: {config.method}, without labels")
            settings, parts = _first_settings(config), dataset.pretraining_parts()
            with open_run(
                stage, settings, self.data, log, resume=True, overwrite=False, stage=True
            ) as run:
                settings = resolve(run.config, parts.train, device)
                train_encoder(stage, settings, parts, data=self.data, device=device, log=run.log)
                if config.report:
                    write_page(stage, parts.images)
        return load(stage.path, trust_remote_code=config.trust_remote_code)

    def _base(self, pretrained: Encoder, dataset: DiscoveryData) -> TrainConfig:
        """Resolve the settings that all later stages share, on top of a frozen encoder."""
        config = self.run.config
        shared: dict[str, Any] = {name: getattr(config, name) for name in BASE}
        requested = TrainConfig(
            method="ncl",
            backbone=str(pretrained.details["backbone"]),
            image_size=pretrained.image_size,
            epochs=1,  # each stage has a length of its own
            **shared,
            # On cached features a step is so short that a lower precision gains no time.
            precision="fp32",
        )
        resolved = resolve(requested, dataset.parts.train, self.run.device)
        # A resumed run may find more or less room for a cache, and cached photos are other pixels.
        self.run.folder.write_settings(replace(config, cache=resolved.cache), data_name(self.data))
        batch = batch_size(dataset.task(config.mode), config)
        return replace(resolved, batch_size=batch, options={}, epochs=config.epochs)

    def _cached(
        self, pretrained: Encoder, dataset: DiscoveryData, base: TrainConfig
    ) -> tuple[CachedFeatures, DiscoveryData]:
        """Return the features of readable images, and the data without the others."""
        run, images = self.run, dataset.images
        run.log.info(f"           features of {len(images)} images and {NUM_VIEWS} views of each")
        # Those of views come in pieces, which are then joined.
        numbers = len(images) * pretrained.num_features * (1 + 2 * NUM_VIEWS)
        state_memory("           features", 4 * numbers, run.log)
        drawn = ViewSettings(base.augment, NUM_VIEWS, base.seed)
        where = run.device, int(base.workers), run.log, run.folder.kept_features
        extracted = Extraction(pretrained, images, drawn, *where).compute()
        reasons, max_bad = extracted.reasons(images), run.config.max_bad
        notes = note_undecodable(run.folder, images, reasons, run.log, max_bad)
        cached, _ = extracted.readable(images)
        if extracted.bad:  # decoding may leave too few, where headers promised enough
            dataset = dataset.without(extracted.bad, notes)
            check_sizes(dataset, run.config)
        return cached, dataset

    def _estimate(self, cached: CachedFeatures, task: DiscoveryTask) -> NumberOfClasses | None:
        config, folder, log = self.run.config, self.run.folder, self.run.log
        if config.classes != "auto":
            return None
        log.info("           estimating the number of novel classes")
        estimate = estimate_number(folder.number, cached.center, task, config.seed)
        log.info(
            f"           {estimate.chosen} novel classes, between {estimate.low} and "
            f"{estimate.high} ({estimate.text}); take another with --encoder "
            f"{kept_encoder(config, folder)} --classes N: features are kept"
        )
        return estimate

    def _chosen(self, stages: Stages, images: Images) -> tuple[list[Trial], Candidate]:
        """Search for held-out known classes with every candidate, and choose the best.

        A single one is tried too: trials also calibrate the classifier.
        """
        config, log = self.run.config, self.run.log
        tried, trials = candidates(config), list[Trial]()
        folder, total = self.run.folder.stage("trials").path, FOLDS * len(tried)
        every = Trials(stages, images.groups, folder, config.options, train=Stage.try_out)
        for trial in every.run(tried):
            trials.append(trial)
            log.progress(len(trials), total, "trials on held-out known classes")
        for candidate, by_fold in accuracies(trials).items():
            share = f"{fmean(by_fold):.1%}"
            log.info(f"           {candidate}: {share} accuracy on held-out known classes")
        if trials:
            return trials, best(trials)
        log.info(f"           too few labels to hold known classes out: {tried[0]}")
        return [], tried[0]

    def train(self, state: DiscoveryState) -> dict[int, list[Method[Any]]]:
        """Train stages 2 and 3; return a method per seed for each number of novel classes.

        The first seed of the first number is the result.
        """

        def train_known(stage: Stage) -> None:
            self.run.log.info(f"stage 2/3  {state.task.num_known} known classes")
            stage.run(self.run.folder.stage("known"), self.run.log)

        init = state.stages.start(train_known)
        return {number: self._classes(state, init, number) for number in state.seeds}

    def _classes(self, state: DiscoveryState, init: StageInit, number: int) -> list[Method[Any]]:
        """Train stage 3 with a number of novel classes."""
        count, name, base = state.seeds[number], state.task.method, state.stages.base
        stages = replace(state.stages, task=replace(state.task, num_novel=number))
        if number != state.task.num_novel:
            name = f"{name}-{number}-classes"
            init = init._replace(cluster=stages.clusters(init.features))
        self.run.log.info(f"stage 3/3  {number} novel classes by {state.chosen}, {count} seeds")
        methods = list[Method[Any]]()
        for seed in range(count):
            self.run.log.info(f"           {name}-{seed}")
            own = replace(base, seed=(base.seed + seed) % 2**32)
            stage = replace(stages, base=own).classes(init, state.options(number))
            stage.run(self.run.folder.stage(f"{name}-{seed}"), self.run.log)
            methods.append(stage.method)
        return methods

    def calibrating(self, state: DiscoveryState) -> Sequence[Trial]:
        """Return trials of what is used, by which its scores are calibrated.

        Probabilities of a network that is trained itself differ from those on top of a frozen one.
        """
        config, folder = state.run.config, self.run.folder.stage("calibration").path
        if config.train_layers == "top" or not state.trials:
            return [trial for trial in state.trials if trial.candidate == state.chosen]
        self.run.log.info("           calibration: the network, with some known classes held out")

        def train(stage: Stage, share: float) -> None:
            del share  # all of it: after a shorter training, probabilities are less sure
            name = "known" if stage.config.method == "supervised" else "class"
            stage.run(self.run.folder.stage(f"calibration-{name}"), self.run.log)

        groups = state.dataset.images.groups
        trials = Trials(state.stages, groups, folder, config.options, train=train)
        return list(trials.run([state.chosen], num_folds=1))
