"""Stages 2 and 3 of a discovery: known classes, all classes, and what these are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nearkin.config import DiscoverConfig, Value
from nearkin.discovery.arms import BASELINES
from nearkin.discovery.ground import DiscoveryState
from nearkin.discovery.others import beside
from nearkin.discovery.stages import Stage, StageInit, begun, class_stage, known_stage
from nearkin.discovery.trials import MODE_METHOD, USUAL, strength_options
from nearkin.method import Method
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger

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
    ground: DiscoveryState
    log: Logger

    def run(self) -> Learned:
        """Train all of them, or go on where they were stopped."""
        self.log.line(f"stage 2/3  {self.ground.task.num_known} known classes")
        base = replace(self.ground.base, epochs=self.config.known_epochs)
        known = known_stage(self.ground.trunk, self.ground.task, base)
        self._train(known, "known")
        config, ground = self.config, self.ground
        start = begun(ground.trunk, known.method, ground.task, config.seed, config.start)
        mode, count, strength = self.config.mode, self._num_seeds(), self.ground.strength
        options = strength_options(mode, strength, self.ground.task.num_novel)
        options |= dict(self.config.options)
        self.log.line(
            f"stage 3/3  {self.ground.task.num_novel} novel classes by {MODE_METHOD[mode]}, "
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
        return SEEDS if self.config.trained == "top" else 1

    def _baselines(self, start: StageInit) -> dict[str, Method[Any]]:
        rate = strength_options("ncd", USUAL["ncd"], self.ground.task.num_novel)
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
        ground = self.ground
        base = replace(ground.base, seed=ground.base.seed + seed)
        known, clusters = start
        stage = class_stage(ground.trunk, ground.task, base, known, method, options, clusters)
        self._train(stage, name)
        return stage.method

    def _train(self, stage: Stage, name: str) -> None:
        others = beside(stage, self.config, self.ground.bad)
        stage.run(self.folder.stage(name), self.log, others)
