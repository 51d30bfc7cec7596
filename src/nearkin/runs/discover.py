"""`nearkin discover`: the classes nobody named, beside some that are known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.config import DiscoverConfig, TrainConfig, continued
from nearkin.discovery.calibration import Calibration, fit
from nearkin.discovery.findings import few_pictures, findings
from nearkin.discovery.number import NumberOfClasses
from nearkin.discovery.predictions import Predictions
from nearkin.distributed import choose_device, device_name
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.method import Method
from nearkin.runs.arms import clustered_arm, trained_arm
from nearkin.runs.build import resolve
from nearkin.runs.classifier import Classifier, new_names, still, write_classifier
from nearkin.runs.counting import count_classes
from nearkin.runs.data import same_data, write_bad_files
from nearkin.runs.discovery_report import write_outcome
from nearkin.runs.encoder import Encoder, load, write_encoder
from nearkin.runs.failures import foreseen
from nearkin.runs.folder import RunFolder, clear, data_name, default_folder, opened
from nearkin.runs.kept import read_looks, rows_of, write_looks
from nearkin.runs.learn import Learning
from nearkin.runs.material import Material, division, open_material, without
from nearkin.runs.outcome import Outcome
from nearkin.runs.reporter import Logged, Reporter, Silent
from nearkin.runs.stages import Task
from nearkin.runs.train import Run, train
from nearkin.runs.trials import METHODS, STRENGTHS, USUAL, Trial, Trials, best, mean_accuracy
from nearkin.runs.trunk import FrozenTrunk, LiveTrunk, Looks, Trunk, look
from nearkin.tables import read_numbers
from nearkin.types import UNKNOWN
from nearkin.version import __version__

USUAL_BATCH = 128
LOOKED_AT = 2000
"""Pictures whose silhouettes are compared."""


def discover(
    data: Any,
    config: DiscoverConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Find the classes among pictures of which some have a known class.

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
    path = Path(out) if out else default_folder(data, config.mode, resume=resume)
    with (
        opened(path, resume=resume, overwrite=overwrite) as folder,
        Logged(reporter or Silent(), folder.log) as told,
    ):
        if resume and folder.config.exists():
            config = continued(config, folder.discovery_settings()[0])
        device = choose_device(config.device)
        told.line(
            f"nearkin {__version__} | {device_name(device)} | seed {config.seed} | "
            f"writing {path.resolve()}"
        )
        material = open_material(data, config)
        for line in material.lines():
            told.line(line)
        write_bad_files(folder.bad_files, material.images)
        if overwrite:
            clear(folder)
        same_data(folder.data, material.parts)
        folder.write_settings(config, data_name(data))
        with foreseen(USUAL_BATCH):
            _Discovery(data, config, folder, device, told).run(material)
        told.line(f"done   {path.resolve()}")
    return Run(folder)


@dataclass(frozen=True, eq=False)
class _Discovery:
    """The stages of one discovery, in their order."""

    data: Any
    config: DiscoverConfig
    folder: RunFolder
    device: torch.device
    told: Logged

    def run(self, material: Material) -> None:
        """From pictures to classes."""
        encoder = self._encoder()
        base = self._base(encoder, material)
        kept, material = self._kept(encoder, material, base)
        counted = self._count(kept, material)
        task = self._task(material, counted)
        frozen = FrozenTrunk(kept, self.device)
        trials = self._trials(frozen, task, base)
        strength = self._strength(trials)
        trunk = frozen if self.config.trained == "top" else self._live(encoder, material, base)
        learned = Learning(self.config, self.folder, trunk, task, base, self.told).run(strength)
        self.told.line("reading off the classes")
        network = encoder.backbone if trunk is frozen else learned.ours[0].backbone
        write_encoder(self.folder.encoder, network, encoder.details)
        classifier = self._classifier(learned.ours[0], trunk, task, material, base)
        classifier = replace(classifier, calibration=calibrated(trials, strength))
        write_classifier(self.folder.classifier, classifier)
        looks, _ = trunk.seen(learned.ours[0])
        predictions = classifier.predict(looks, tuple(material.images.names), material.label)
        arms = [trained_arm(trunk, method, task.num_known) for method in learned.ours]
        baselines = {"k-means": clustered_arm(kept.center, task, base.seed)} | {
            name: trained_arm(trunk, method, task.num_known)
            for name, method in learned.baselines.items()
        }
        outcome = Outcome(
            folder=self.folder,
            config=self.config,
            data=data_name(self.data),
            material=material,
            task=task,
            predictions=predictions,
            calibration=classifier.calibration,
            ours=arms[0],
            seeds=arms[1:],
            baselines=baselines,
            counted=counted,
            trials=trials,
            strength=strength,
            findings=findings(
                predictions,
                mode=self.config.mode,
                positive_rate=self._positive_rate(),
                silhouettes=blurred(kept.center, predictions, task),
            ),
        )
        write_outcome(outcome, self.told)

    def _encoder(self) -> Encoder:
        """Stage 1: features without labels."""
        if self.config.from_run:
            self.told.line(f"stage 1/3  features: from {self.config.from_run}")
            return load(self.config.from_run)
        stage, config = self.folder.stage("features"), self.config
        if not stage.summary.exists():
            self.told.line(f"stage 1/3  features: {config.method}, without labels")
            share, seed = division(self.data, config)
            settings = TrainConfig(
                method=config.method,
                labels="none",
                val=share,
                seed=seed,
                device=config.device,
                workers=config.workers,
                max_bad=config.max_bad,
            )
            resume = stage.config.exists()
            train(self.data, settings, out=stage.path, resume=resume, reporter=self.told)
        return load(stage.path)

    def _base(self, encoder: Encoder, material: Material) -> TrainConfig:
        """What all later stages have in common."""
        config, count = self.config, len(material.parts.train_rows)
        batch = min(USUAL_BATCH, count) if config.batch_size == "auto" else config.batch_size
        asked = TrainConfig(
            method=METHODS["ncd"],
            backbone=str(encoder.details["backbone"]),
            image_size=encoder.image_size,
            augment=config.augment,
            batch_size=batch,
            seed=config.seed,
            workers=config.workers,
            precision="fp32" if config.trained == "top" else "auto",
        )
        resolved = resolve(asked, material.parts.train, self.device)
        return replace(resolved, epochs=config.epochs, options={})

    def _kept(
        self, encoder: Encoder, material: Material, base: TrainConfig
    ) -> tuple[Looks, Material]:
        """What the encoder sees, computed once, of the pictures that can be read."""
        path = self.folder.stage("features").path.with_name("kept.safetensors")
        if not path.exists():
            count = f"{len(material.images)} pictures and {self.config.num_views} views of each"
            self.told.line(f"           looking at {count}")
            seen = look(
                encoder,
                material.images,
                base.augment,
                self.config.num_views,
                base.seed,
                self.device,
                int(base.workers),
            )
            write_looks(path, *seen)
        kept, bad = read_looks(path)
        found = {material.images.names[row]: reason for row, reason in bad.items()}
        write_bad_files(self.folder.bad_files, material.images, found)
        readable = np.setdiff1d(np.arange(len(material.images)), list(bad))
        return rows_of(kept, readable), without(material, set(bad))

    def _count(self, kept: Looks, material: Material) -> NumberOfClasses | None:
        path = self.folder.stage("features").path.with_name("number.json")
        counted = count_classes(path, kept, material, self.config)
        if counted:
            each = ", ".join(f"{name} {number}" for name, number in counted.estimates.items())
            self.told.line(
                f"           {counted.chosen} novel classes, between {counted.low} and "
                f"{counted.high} ({each}); fix it with --classes N"
            )
        return counted

    def _task(self, material: Material, counted: NumberOfClasses | None) -> Task:
        number = counted.chosen if counted else int(self.config.classes)
        label = material.label.copy()
        label[material.parts.test_rows] = UNKNOWN
        task = Task(label, material.parts.train_rows, len(material.classes), number)
        few = few_pictures(len(task.unlabeled), number)
        if few:
            self.told.line(f"warning: {few.text}")
        return task

    def _trials(self, frozen: FrozenTrunk, task: Task, base: TrainConfig) -> list[Trial]:
        """What came of hiding known classes, for every strength in question."""
        mode, given = self.config.mode, self.config.strength
        strengths = STRENGTHS[mode] if given == "auto" else (given,)
        folder = self.folder.stage("trials").path
        found = list(Trials(frozen, task, base, mode, folder, self.config.options).run(strengths))
        for strength in strengths if found else ():
            accuracy = mean_accuracy(found, strength)
            self.told.line(
                f"           hiding known classes: strength {strength:g} {accuracy:.1%}"
            )
        return found

    def _strength(self, trials: list[Trial]) -> float:
        if self.config.strength != "auto":
            return self.config.strength
        if trials:
            return best(trials)
        usual = USUAL[self.config.mode]
        self.told.line(f"           too few known classes to hide some: strength {usual:g}")
        return usual

    def _live(self, encoder: Encoder, material: Material, base: TrainConfig) -> LiveTrunk:
        return LiveTrunk(
            encoder,
            material.images,
            base.augment,
            self.config.num_views,
            self.config.trained,
            base.seed,
            self.device,
            int(base.workers),
        )

    def _classifier(
        self,
        method: Method[Any],
        trunk: Trunk,
        task: Task,
        material: Material,
        base: TrainConfig,
    ) -> Classifier:
        _, layer = trunk.seen(method)
        heads: Any = method.heads
        return Classifier(
            layer=still(layer),
            heads=still(heads),
            classes=new_names(material.classes, task.num_novel),
            num_known=task.num_known,
            disjoint=self.config.mode == "ncd",
            calibration=None,
            details={
                "augment": base.augment,
                "num_views": self.config.num_views,
                "seed": base.seed,
            },
        )

    def _positive_rate(self) -> float | None:
        """Of the last epoch, in the mode that pairs pictures."""
        if self.config.mode == "gcd":
            return None
        rows = read_numbers(self.folder.stage(f"{METHODS['ncd']}-0").metrics)
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
    before: Float[Tensor, "images _"], predictions: Predictions, task: Task
) -> tuple[float, float]:
    """Silhouettes of k-means of some unlabeled pictures, before and after learning from labels."""
    from sklearn.metrics import silhouette_score

    rows = task.unlabeled[:: len(task.unlabeled) // LOOKED_AT + 1]
    after = torch.from_numpy(predictions.features)

    def score(features: Float[Tensor, "images _"]) -> float:
        x = compact(features[torch.from_numpy(rows)])
        nothing = np.full(len(x), UNKNOWN)
        found = constrained_kmeans(x, nothing, task.num_novel, seed=0, starts=4).cluster
        return float(silhouette_score(x, found)) if len(np.unique(found)) > 1 else 0.0

    return score(before), score(after)
