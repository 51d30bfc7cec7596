"""What comes before anything is learned from labels: features, the number of classes, a knob."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nearkin.commands.train import train
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.split import write_bad_files
from nearkin.discovery.data import DiscoveryData, DiscoveryTask, batch_size, division, without
from nearkin.discovery.findings import Finding, doubts
from nearkin.discovery.number import NumberOfClasses, count_classes
from nearkin.discovery.trials import (
    FOLDS,
    MODE_METHOD,
    STRENGTHS,
    USUAL,
    Trial,
    Trials,
    best,
    mean_accuracy,
)
from nearkin.discovery.trunk import (
    FrozenEncoder,
    Looks,
    Trunk,
    check_trained,
    finetuned_encoder,
    look,
    read_looks,
    rows_of,
    write_looks,
)
from nearkin.evaluation.encoder import Encoder, load
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.reporter import Logger
from nearkin.run.settings.build import resolve
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class DiscoveryState:
    """What a discovery stands on."""

    material: DiscoveryData
    encoder: Encoder
    base: TrainConfig
    """What all later trainings have in common."""
    frozen: FrozenEncoder
    """Features that no label has touched."""
    trunk: Trunk
    """What learns from labels stands on this."""
    counted: NumberOfClasses | None
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
    """Lays the ground, or finds what an earlier start has laid of it."""

    data: Any
    config: DiscoverConfig
    folder: RunFolder
    device: torch.device
    log: Logger

    def run(self, material: DiscoveryData) -> DiscoveryState:
        """Everything up to the first label."""
        encoder = self._encoder()
        check_trained(encoder, self.config.trained)
        base = self._base(encoder, material)
        kept, bad = self._kept(encoder, material, base)
        material = without(material, bad)
        frozen = FrozenEncoder(kept, self.device)
        trunk: Trunk = frozen
        if self.config.trained != "top":
            trunk = finetuned_encoder(encoder, material.images, self.config, base, self.device)
        counted = self._count(kept, material)
        task = self._task(material, counted)
        found = self._doubts(frozen, task, material)
        trials = self._trials(frozen, task, base)
        strength = self._strength(trials)
        return DiscoveryState(
            material, encoder, base, frozen, trunk, counted, task, found, trials, strength, bad
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

    def _base(self, encoder: Encoder, material: DiscoveryData) -> TrainConfig:
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
            precision="fp32" if config.trained == "top" else "auto",
        )
        resolved = resolve(asked, material.parts.train, self.device)
        # The next start may find more room or less, and cached photographs are other pixels.
        self.folder.write_settings(replace(config, cache=resolved.cache), data_name(self.data))
        return replace(
            resolved,
            batch_size=batch_size(material, config),
            epochs=config.epochs,
            drops=config.drops,
            options={},
        )

    def _kept(
        self, encoder: Encoder, material: DiscoveryData, base: TrainConfig
    ) -> tuple[Looks, set[int]]:
        """What the encoder sees, computed once, of images that can be read; and the others."""
        path = self.folder.kept
        if not path.exists():
            count = f"{len(material.images)} images and {self.config.num_views} views of each"
            self.log.line(f"           looking at {count}")
            seen = look(
                encoder,
                material.images,
                base.augment,
                self.config.num_views,
                base.seed,
                self.device,
                int(base.workers),
                self.log.progress,
            )
            write_looks(path, *seen)
        kept, bad = read_looks(path, len(material.images))
        found = {material.images.names[row]: reason for row, reason in bad.items()}
        write_bad_files(self.folder.bad_files, material.images, found)
        readable = np.setdiff1d(np.arange(len(material.images)), list(bad))
        return rows_of(kept, readable), set(bad)

    def _count(self, kept: Looks, material: DiscoveryData) -> NumberOfClasses | None:
        if self.config.classes == "auto":
            self.log.line("           counting the classes that have no name")
        counted = count_classes(self.folder.number, kept, material, self.config)
        if counted:
            each = ", ".join(f"{name} {number}" for name, number in counted.estimates.items())
            self.log.line(
                f"           {counted.chosen} novel classes, between {counted.low} and "
                f"{counted.high} ({each}); fix it with --classes N"
            )
        return counted

    def _task(self, material: DiscoveryData, counted: NumberOfClasses | None) -> DiscoveryTask:
        number = counted.chosen if counted else int(self.config.classes)
        label = material.label.copy()
        label[material.parts.test_rows] = UNKNOWN
        return DiscoveryTask(label, material.parts.train_rows, len(material.classes), number)

    def _doubts(
        self, frozen: FrozenEncoder, task: DiscoveryTask, material: DiscoveryData
    ) -> list[Finding]:
        """Told before the time is spent."""
        found = doubts(
            frozen.kept.center[torch.from_numpy(task.rows)].numpy(),
            task.label[task.rows],
            material.classes,
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
