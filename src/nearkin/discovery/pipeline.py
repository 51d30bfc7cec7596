"""The three stages of a discovery in order: features, known classes, all classes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.discovery.data import DiscoveryData, DiscoveryTask, batch_size, check_sizes
from nearkin.discovery.features import (
    CachedFeatures,
    DiscoveryEncoder,
    Extracted,
    Extraction,
    FinetunedEncoder,
    FrozenEncoder,
    ViewSettings,
    check_train_layers,
    readable_features,
)
from nearkin.discovery.findings import Finding, early_findings
from nearkin.discovery.layers import (
    PlannedStage,
    last_block,
    planned_time,
    pretraining_time,
    time_left,
    time_network,
)
from nearkin.discovery.number import NumberOfClasses, estimate_number
from nearkin.discovery.stages import (
    Stage,
    StageInit,
    class_stage,
    known_stage,
    shared_with_workers,
    stage_init,
)
from nearkin.discovery.trials import (
    FOLDS,
    OBJECTIVES,
    Candidate,
    Trial,
    Trials,
    best,
    candidates,
    mean_accuracy,
    shorter,
    usual,
)
from nearkin.encoders.encoder import Encoder, load
from nearkin.method import Method
from nearkin.metrics.kmeans import COPIES, WIDEST
from nearkin.pace import span
from nearkin.report.pages import write_page
from nearkin.run.auto import precision_of, resolve
from nearkin.run.failures import resource_errors, state_memory
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.opening import open_run
from nearkin.run.reporter import Logger
from nearkin.schema import Value
from nearkin.training.session import train_encoder
from nearkin.training.start import write_start
from nearkin.types import UNKNOWN

SEEDS: Final = 3
"""Trainings of the last stage on top of a frozen encoder; a finetuned one is trained once."""
GAIN: Final = 0.01
"""Accuracy on hidden classes by which a network must beat a layer on top, as trials vary."""
SHARED: Final = (
    "val", "seed", "device", "devices", "workers", "cache", "scan", "max_bad", "max_time",
)  # fmt: skip
"""Settings that the first stage takes over."""
BASE_LOSS: Final[dict[str, Value]] = {
    "novel_weight": 0.0,
    "known_weight": 0.0,
    "joint_weight": 0.0,
}
"""Options of NCL without its contrastive terms, and with two separate heads."""
BASELINES: Final[dict[str, dict[str, Value]]] = {
    "base loss": BASE_LOSS,
    "rank statistics": BASE_LOSS | {"pseudo_labels": "ranks"},
}
"""Options of NCL for its own base loss, and for AutoNovel's (Han et al. 2020)."""


@dataclass(frozen=True, eq=False)
class DiscoveryState:
    """What stands before the first training on labels."""

    config: DiscoverConfig  # It says what learns from labels, also where that was `auto`
    dataset: DiscoveryData
    pretrained: Encoder
    base: TrainConfig  # Settings that all later trainings share
    frozen: FrozenEncoder  # Features that have seen no label
    encoder: DiscoveryEncoder  # What the later stages train on
    estimate: NumberOfClasses | None  # None where the number of novel classes was given
    task: DiscoveryTask
    findings: list[Finding]
    trials: list[Trial]
    chosen: Candidate  # The objective of the last stage
    bad_rows: set[int]  # Of all images that were opened, those that turned out unreadable


def baseline_options(
    chosen: Candidate, options: Mapping[str, Value], num_novel: int
) -> dict[str, dict[str, Value]]:
    """Return the options of NCL for each baseline.

    Where the result is NCL's they are its `options`, but for what a baseline leaves out or
    replaces: so the base loss shows what the other terms add.
    """
    default = Candidate("ncl", OBJECTIVES["ncl"].default).options("ncd", num_novel)
    shared = options if chosen.method == "ncl" else default
    return {name: {**shared, **changed} for name, changed in BASELINES.items()}


def num_seeds(config: DiscoverConfig) -> int:
    """Return how often the last stage is trained, where it is known what learns."""
    if config.num_seeds != "auto":
        return config.num_seeds
    return SEEDS if config.train_layers == "top" else 1


class TrainedMethods(NamedTuple):
    """The methods of the last stage."""

    methods: list[Method[Any]]
    """One per seed. The first is the result, the others show which classes are stable."""
    baselines: Mapping[str, Method[Any]]
    calibration: Sequence[Trial]
    """Trials by which the scores of the result are calibrated."""


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
        if planned := planned_time(self.config, self.device):
            self.log.info(f"plan   {planned} in all; for another time, give --max-time 2h")
        pretrained = self._pretrained(dataset)
        check_train_layers(pretrained, self.config.train_layers)
        base = self._base(pretrained, dataset)
        cached, bad_rows = self._cached(pretrained, dataset, base)
        if bad_rows:  # decoding may leave too few, where headers promised enough
            dataset = dataset.without(bad_rows)
            check_sizes(dataset, self.config)
        # Whatever the later stages train, the number of classes is estimated and the setting is
        # tuned on frozen features: a trial takes seconds there, and needs no second encoder.
        frozen = FrozenEncoder(cached, self.device)
        estimate = self._estimate(cached, dataset)
        task = self._task(dataset, estimate)
        for step, columns in (
            ("k-means", COPIES * WIDEST),
            ("probabilities", 2 * (task.num_known + task.num_novel)),
        ):
            size = 8 * columns * len(task.label)
            state_memory(f"           {step} of all images", size, self.log)
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
        trials, chosen = self._chosen(frozen, task, base)
        state = DiscoveryState(
            config=replace(self.config, cache=base.cache, train_layers="top", max_time=""),
            dataset=dataset,
            pretrained=pretrained,
            base=base,
            frozen=frozen,
            encoder=frozen,
            estimate=estimate,
            task=task,
            findings=findings,
            trials=trials,
            chosen=chosen,
            bad_rows=bad_rows,
        )
        return self._with_layers(state)

    def _pretrained(self, dataset: DiscoveryData) -> Encoder:
        """Stage 1: an encoder that has seen no label."""
        config, stage = self.config, self.folder.stage("features")
        trust = config.trust_remote_code
        if config.from_run:
            self.log.info(f"stage 1/3  features: from {config.from_run}")
            if self.folder.start.exists():  # its source may be gone by now
                return load(self.folder.start, trust_remote_code=trust)
            encoder = load(
                config.from_run, allow_partial=config.allow_partial, trust_remote_code=trust
            )
            for line in encoder.lines():
                self.log.info(f"           {line}")
            write_start(self.folder, encoder)
            # What features are of is the file, as in a run that is resumed.
            return load(self.folder.start, trust_remote_code=trust)
        if stage.summary.exists():
            return load(stage.path, trust_remote_code=trust)
        self.log.info(f"stage 1/3  features: {config.method}, without labels")
        settings = TrainConfig(method=config.method, labels="none", **self._shared(*SHARED))
        parts = dataset.pretraining_parts()
        # A run folder of its own, so that it is resumed like any other training.
        resume = stage.config.exists()
        with open_run(
            stage, settings, resume=resume, overwrite=False, reporter=self.log, stage=True
        ) as run:
            settings = resolve(run.config, parts.train, self.device)
            settings = replace(settings, max_time=pretraining_time(settings.max_time))
            with resource_errors(int(settings.batch_size)):
                train_encoder(
                    stage, settings, parts, data=self.data, device=self.device, log=run.log
                )
                if config.report:
                    write_page(stage, parts.images)
        return load(stage.path)

    def _shared(self, *names: str) -> dict[str, Any]:
        """Return settings that a discovery and a training both have."""
        return {name: getattr(self.config, name) for name in names}

    def _base(self, pretrained: Encoder, dataset: DiscoveryData) -> TrainConfig:
        """Resolve the settings that all later stages share, on top of a frozen encoder."""
        config = self.config
        requested = TrainConfig(
            method="ncl",
            backbone=str(pretrained.details["backbone"]),
            image_size=pretrained.image_size,
            epochs=1,  # each stage has a length of its own
            **self._shared("augment", "seed", "devices", "workers", "cache"),
            # On cached features a step is so short that a lower precision gains no time.
            precision="fp32",
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
        images = dataset.images

        def extract() -> Extracted:
            if earlier := self._earlier_features(pretrained, dataset):
                self.log.info(f"           features: from {earlier}")
                return CachedFeatures.read(earlier, len(images))
            views = f"{self.config.num_views} views of each"
            self.log.info(f"           features of {len(images)} images and {views}")
            numbers = len(images) * pretrained.backbone.feature_dim * (1 + self.config.num_views)
            state_memory("           features, and a copy to write", 2 * 4 * numbers, self.log)
            drawn = ViewSettings(base.augment, self.config.num_views, base.seed)
            workers, on_progress = int(base.workers), self.log.progress
            every = Extraction(pretrained, images, drawn, self.device, workers, on_progress)
            return every.compute_in(self.folder.feature_parts)

        return readable_features(self.folder, images, extract)

    def _earlier_features(self, pretrained: Encoder, dataset: DiscoveryData) -> Path | None:
        """Return the features of the accepted discovery, if these are of the same views."""
        run, views = RunFolder(Path(self.config.accept)), ("augment", "num_views", "seed")
        if not (self.config.accept and run.cached_features.exists() and run.data.exists()):
            return None
        config, _ = run.settings_of(DiscoverConfig)
        fingerprint = json.loads(run.data.read_text(encoding="utf-8"))["fingerprint"]
        same = all(getattr(config, name) == getattr(self.config, name) for name in views)
        same = same and fingerprint.startswith(f"{dataset.images.fingerprint}-")
        # A finetuned encoder is another one than that of the features.
        same = same and config.train_layers == "top"
        if not same:
            return None
        encoder = load(run.path, trust_remote_code=self.config.trust_remote_code)
        return run.cached_features if encoder.digest == pretrained.digest else None

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

    def _chosen(
        self, frozen: FrozenEncoder, task: DiscoveryTask, base: TrainConfig
    ) -> tuple[list[Trial], Candidate]:
        """Search for hidden known classes with every candidate, and choose the best.

        A single one is tried too: trials also calibrate the classifier.
        """
        config, tried = self.config, candidates(self.config)
        folder = self.folder.stage("trials").path
        trials, total = list[Trial](), FOLDS * len(tried)
        settings = config.mode, folder, config.options, config.start
        every = Trials(frozen, task, base, *settings, train=shorter)
        for trial in every.run(tried):
            trials.append(trial)
            self.log.progress(len(trials), total, "trials on hidden known classes")
        for candidate in tried if trials else ():
            self.log.info(
                f"           {candidate}: {mean_accuracy(trials, candidate):.1%} "
                "accuracy on hidden known classes"
            )
        chosen = best(trials) if trials else usual(config)
        if not trials:
            self.log.info(f"           too few labels of known classes to hide some: {chosen}")
        return trials, chosen

    def _with_layers(self, state: DiscoveryState) -> DiscoveryState:
        """Return the state in which `--train-layers` learn from labels."""
        layers = self.config.train_layers
        if layers == "auto":
            layers = self._layers(state)
        if layers != "top":
            state = self._finetuned(state, layers)
        # From here on a resumed run has no choice.
        self.folder.write_settings(state.config, data_name(self.data))
        return state

    def _finetuned(self, state: DiscoveryState, layers: str) -> DiscoveryState:
        """Return the state in which layers of the network itself learn."""
        config = replace(state.config, train_layers=layers)
        base = replace(state.base, precision=precision_of(self.device))
        images = state.dataset.images
        kept = self.folder.finetuned_features
        encoder = FinetunedEncoder(state.pretrained, images, config, base, self.device, kept)
        return replace(state, config=config, base=base, encoder=encoder)

    def _layers(self, state: DiscoveryState) -> str:
        """Return the last block and `top`, if time allows and hidden classes gain; or `top`."""
        block = last_block(state.pretrained.backbone)
        if not block or not state.trials:
            why = "the network has no blocks" if state.trials else "no known class can be hidden"
            self.log.info(f"           --train-layers top: {why}")
            return "top"
        trained = f"{block},top"
        finetuned = self._finetuned(state, trained)
        # What was started had time enough, whatever is measured where a run is resumed.
        started = self.folder.stage("calibration-known").path.exists()
        if not started and not self._fits(finetuned):
            return "top"
        (trial,) = self._calibrating(finetuned)
        (frozen,) = (each for each in state.trials if each.repeats(trial))
        # Not at a tie: a layer on top is one of three seeds, and takes seconds for new labels.
        layers = trained if trial.accuracy > frozen.accuracy + GAIN else "top"
        self.log.info(
            f"           --train-layers {layers}: {trial.accuracy:.1%} accuracy on hidden known "
            f"classes if {block} is trained too, {frozen.accuracy:.1%} if only a layer on top is"
        )
        return layers

    def _fits(self, state: DiscoveryState) -> bool:
        """Whether all trainings of the network fit into the time that is left."""
        planned = planned_time(self.config, self.device)
        if not planned:
            return True
        known = self._known_stage(state)
        init = StageInit(known.method)
        method, options = state.chosen.method, self._options(state)
        last = class_stage(state.encoder, state.task, state.base, init, method, options)
        results = num_seeds(state.config) + len(BASELINES) * state.config.baselines
        # Each stage once more with known classes hidden.
        stages = PlannedStage(known, 2), PlannedStage(last, results + 1)
        left = time_left(planned, self.log.seconds)
        assert isinstance(state.encoder, FinetunedEncoder)
        needed, busy = time_network(state.encoder, stages, left)
        layers = state.config.train_layers
        text = f"training {layers} takes about {span(needed)}, {span(left)} of {planned} are left"
        if busy:
            self.log.info(f"warning: the machine is busy: {busy}")
        if needed > left:
            text += f"; so --train-layers top, for {layers} give more --max-time or name it"
        self.log.info(f"           {text}")
        return needed <= left

    def _known_stage(self, state: DiscoveryState) -> Stage:
        base = replace(state.base, epochs=state.config.known_epochs)
        return known_stage(state.encoder, state.task, base)

    def _options(self, state: DiscoveryState) -> dict[str, Value]:
        """Return the options of the method of the last stage."""
        own = state.chosen.options(state.config.mode, state.task.num_novel)
        return own | dict(state.config.options)

    def train(self, state: DiscoveryState) -> TrainedMethods:
        """Train stages 2 and 3, and the baselines of stage 3."""
        config, task = state.config, state.task
        self.log.info(f"stage 2/3  {task.num_known} known classes")
        known = self._known_stage(state)
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

        chosen, method, options = state.chosen, state.chosen.method, self._options(state)
        count = num_seeds(config)
        self.log.info(f"stage 3/3  {task.num_novel} novel classes by {chosen}, {count} seeds")
        methods = [trained(f"{method}-{seed}", method, options, seed) for seed in range(count)]
        # Baselines are NCL's, which has a head for novel classes.
        has_baselines = config.baselines and task.num_novel > 0
        baselines = baseline_options(chosen, options, task.num_novel) if has_baselines else {}
        trained_baselines = {
            name: trained(name.replace(" ", "-"), "ncl", own) for name, own in baselines.items()
        }
        return TrainedMethods(methods, trained_baselines, self._calibrating(state))

    def _calibrating(self, state: DiscoveryState) -> Sequence[Trial]:
        """Return trials of what is used, by which its scores are calibrated.

        Probabilities of a network that is trained itself differ from those on top of a frozen one.
        """
        config, folder = state.config, self.folder.stage("calibration").path
        if config.train_layers == "top" or not state.trials:
            return state.trials
        self.log.info("           calibration: the network, with some known classes hidden")
        trials = Trials(
            state.encoder,
            state.task,
            state.base,
            config.mode,
            folder,
            config.options,
            config.start,
            train=lambda stage, name: self._train(stage, f"calibration-{name}", state),
            known_epochs=config.known_epochs,
        )
        return list(trials.run([state.chosen], num_folds=1))

    def _train(self, stage: Stage, name: str, state: DiscoveryState) -> None:
        images = state.dataset.images
        workers = shared_with_workers(
            stage, state.config, state.pretrained.preprocessing, state.bad_rows, images.fingerprint
        )
        stage.run(self.folder.stage(name), self.log, workers)
