"""The three stages of a discovery in order: features, known classes, all classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nearkin.commands.train import train
from nearkin.config import DiscoverConfig, TrainConfig, Value
from nearkin.discovery.classifier import BASELINES
from nearkin.discovery.data import DiscoveryData, DiscoveryTask, batch_size, division, without
from nearkin.discovery.features import (
    CachedFeatures,
    FrozenEncoder,
    Trunk,
    check_trained,
    finetuned_encoder,
    look,
    read_looks,
    rows_of,
    write_looks,
)
from nearkin.discovery.findings import Finding, doubts
from nearkin.discovery.number import NumberOfClasses, count_classes
from nearkin.discovery.stages import Stage, StageInit, begun, beside, class_stage, known_stage
from nearkin.discovery.trials import (
    FOLDS,
    MODE_METHOD,
    STRENGTHS,
    USUAL,
    Trial,
    Trials,
    best,
    mean_accuracy,
    strength_options,
)
from nearkin.evaluation.encoder import Encoder, load
from nearkin.method import Method
from nearkin.run.data import write_bad_files
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.reporter import Logger
from nearkin.run.settings.build import resolve
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class DiscoveryState:
    """What a discovery stands on."""

    dataset: DiscoveryData
    encoder: Encoder
    base: TrainConfig
    """What all later trainings have in common."""
    frozen: FrozenEncoder
    """Features that no label has touched."""
    trunk: Trunk
    """What learns from labels stands on this."""
    estimate: NumberOfClasses | None
    """None where the number of novel classes was given."""
    task: DiscoveryTask
    doubts: list[Finding]
    """What was clear before anything was learned from labels."""
    trials: list[Trial]
    strength: float
    bad: set[int]
    """Rows, among all images that were opened, of those that turned out unreadable."""


@dataclass(frozen=True, eq=False)
class Preparation:
    """Lays the state, or finds what an earlier start has laid of it."""

    data: Any
    config: DiscoverConfig
    folder: RunFolder
    device: torch.device
    log: Logger

    def run(self, dataset: DiscoveryData) -> DiscoveryState:
        """Everything up to the first label."""
        encoder = self._encoder()
        check_trained(encoder, self.config.train_layers)
        base = self._base(encoder, dataset)
        kept, bad = self._kept(encoder, dataset, base)
        dataset = without(dataset, bad)
        frozen = FrozenEncoder(kept, self.device)
        trunk: Trunk = frozen
        if self.config.train_layers != "top":
            trunk = finetuned_encoder(encoder, dataset.images, self.config, base, self.device)
        estimate = self._count(kept, dataset)
        task = self._task(dataset, estimate)
        found = self._doubts(frozen, task, dataset)
        trials = self._trials(frozen, task, base)
        strength = self._strength(trials)
        return DiscoveryState(
            dataset, encoder, base, frozen, trunk, estimate, task, found, trials, strength, bad
        )

    def _encoder(self) -> Encoder:
        """Stage 1: features without labels."""
        if self.config.from_run:
            self.log.line(f"stage 1/3  features: from {self.config.from_run}")
            return load(self.config.from_run)
        stage, config = self.folder.stage("features"), self.config
        if not stage.summary.exists():
            self.log.line(f"stage 1/3  features: {config.method}, without labels")
            share, seed = division(self.data, config)
            settings = TrainConfig(
                method=config.method,
                labels="none",
                val=share,
                seed=seed,
                device=config.device,
                devices=config.devices,
                workers=config.workers,
                cache=config.cache,
                scan=config.scan,
                max_bad=config.max_bad,
            )
            resume = stage.config.exists()
            train(self.data, settings, out=stage.path, resume=resume, reporter=self.log)
        return load(stage.path)

    def _base(self, encoder: Encoder, dataset: DiscoveryData) -> TrainConfig:
        """What all later stages have in common."""
        config = self.config
        asked = TrainConfig(
            method=MODE_METHOD["ncd"],
            backbone=str(encoder.details["backbone"]),
            image_size=encoder.image_size,
            augment=config.augment,
            seed=config.seed,
            devices=config.devices,
            workers=config.workers,
            cache=config.cache,
            precision="fp32" if config.train_layers == "top" else "auto",
        )
        resolved = resolve(asked, dataset.parts.train, self.device)
        # The next start may find more room or less, and cached photographs are other pixels.
        self.folder.write_settings(replace(config, cache=resolved.cache), data_name(self.data))
        return replace(
            resolved,
            batch_size=batch_size(dataset, config),
            epochs=config.epochs,
            lr_milestones=config.lr_milestones,
            options={},
        )

    def _kept(
        self, encoder: Encoder, dataset: DiscoveryData, base: TrainConfig
    ) -> tuple[CachedFeatures, set[int]]:
        """What the encoder sees, computed once, of images that can be read; and the others."""
        path = self.folder.kept
        if not path.exists():
            count = f"{len(dataset.images)} images and {self.config.num_views} views of each"
            self.log.line(f"           looking at {count}")
            seen = look(
                encoder,
                dataset.images,
                base.augment,
                self.config.num_views,
                base.seed,
                self.device,
                int(base.workers),
                self.log.progress,
            )
            write_looks(path, *seen)
        kept, bad = read_looks(path, len(dataset.images))
        found = {dataset.images.names[row]: reason for row, reason in bad.items()}
        write_bad_files(self.folder.bad_files, dataset.images, found)
        readable = np.setdiff1d(np.arange(len(dataset.images)), list(bad))
        return rows_of(kept, readable), set(bad)

    def _count(self, kept: CachedFeatures, dataset: DiscoveryData) -> NumberOfClasses | None:
        if self.config.classes == "auto":
            self.log.line("           counting the classes that have no name")
        estimate = count_classes(self.folder.number, kept, dataset, self.config)
        if estimate:
            each = ", ".join(f"{name} {number}" for name, number in estimate.estimates.items())
            self.log.line(
                f"           {estimate.chosen} novel classes, between {estimate.low} and "
                f"{estimate.high} ({each}); fix it with --classes N"
            )
        return estimate

    def _task(self, dataset: DiscoveryData, estimate: NumberOfClasses | None) -> DiscoveryTask:
        number = estimate.chosen if estimate else int(self.config.classes)
        label = dataset.label.copy()
        label[dataset.parts.test_rows] = UNKNOWN
        return DiscoveryTask(label, dataset.parts.train_rows, len(dataset.classes), number)

    def _doubts(
        self, frozen: FrozenEncoder, task: DiscoveryTask, dataset: DiscoveryData
    ) -> list[Finding]:
        """Told before the time is spent."""
        found = doubts(
            frozen.kept.center[torch.from_numpy(task.rows)].numpy(),
            task.label[task.rows],
            dataset.classes,
            num_novel=task.num_novel,
            mode=self.config.mode,
        )
        for finding in found:
            self.log.line(f"warning: {finding.text}")
        return found

    def _trials(
        self, frozen: FrozenEncoder, task: DiscoveryTask, base: TrainConfig
    ) -> list[Trial]:
        """What came of hiding known classes, for every strength in question."""
        mode, given = self.config.mode, self.config.strength
        strengths = STRENGTHS[mode] if given == "auto" else (given,)
        folder = self.folder.stage("trials").path
        options, start = self.config.options, self.config.start
        trials = Trials(frozen, task, base, mode, folder, options, start)
        total, found = FOLDS * len(strengths), list[Trial]()
        for trial in trials.run(strengths):
            found.append(trial)
            self.log.progress(len(found), total, "hiding known classes")
        for strength in strengths if found else ():
            accuracy = mean_accuracy(found, strength)
            self.log.line(f"           hiding known classes: strength {strength:g} {accuracy:.1%}")
        return found

    def _strength(self, trials: list[Trial]) -> float:
        if self.config.strength != "auto":
            return self.config.strength
        if trials:
            return best(trials)
        usual = USUAL[self.config.mode]
        self.log.line(f"           too few known classes to hide some: strength {usual:g}")
        return usual


SEEDS = 3
"""How often the last stage is trained on top of a frozen encoder; a whole network is once."""


@dataclass(frozen=True, eq=False)
class Learned:
    """Methods that have been trained."""

    ours: list[Method[Any]]
    """One per seed. The first is the result, the others tell what is found again."""
    baselines: Mapping[str, Method[Any]]


@dataclass(frozen=True, eq=False)
class Learning:
    """Everything that the trainings of a discovery have in common."""

    config: DiscoverConfig
    folder: RunFolder
    state: DiscoveryState
    log: Logger

    def run(self) -> Learned:
        """Train all of them, or go on where they were stopped."""
        self.log.line(f"stage 2/3  {self.state.task.num_known} known classes")
        base = replace(self.state.base, epochs=self.config.known_epochs)
        known = known_stage(self.state.trunk, self.state.task, base)
        self._train(known, "known")
        config, state = self.config, self.state
        start = begun(state.trunk, known.method, state.task, config.seed, config.start)
        mode, count, strength = self.config.mode, self._num_seeds(), self.state.strength
        options = strength_options(mode, strength, self.state.task.num_novel)
        options |= dict(self.config.options)
        self.log.line(
            f"stage 3/3  {self.state.task.num_novel} novel classes by {MODE_METHOD[mode]}, "
            f"strength {strength:g}, {count} seeds"
        )
        ours = [
            self._all(f"{MODE_METHOD[mode]}-{seed}", MODE_METHOD[mode], options, start, seed)
            for seed in range(count)
        ]
        return Learned(ours, self._baselines(start))

    def _num_seeds(self) -> int:
        if self.config.num_seeds != "auto":
            return self.config.num_seeds
        return SEEDS if self.config.train_layers == "top" else 1

    def _baselines(self, start: StageInit) -> dict[str, Method[Any]]:
        rate = strength_options("ncd", USUAL["ncd"], self.state.task.num_novel)
        arms = BASELINES if self.config.baselines else {}
        return {
            name: self._all(name.replace(" ", "-"), MODE_METHOD["ncd"], rate | options, start, 0)
            for name, options in arms.items()
        }

    def _all(
        self, name: str, method: str, options: Mapping[str, Value], start: StageInit, seed: int
    ) -> Method[Any]:
        """All classes, by one method with one seed."""
        self.log.line(f"           {name}")
        state = self.state
        base = replace(state.base, seed=state.base.seed + seed)
        known, clusters = start
        stage = class_stage(state.trunk, state.task, base, known, method, options, clusters)
        self._train(stage, name)
        return stage.method

    def _train(self, stage: Stage, name: str) -> None:
        others = beside(stage, self.config, self.state.bad)
        stage.run(self.folder.stage(name), self.log, others)
