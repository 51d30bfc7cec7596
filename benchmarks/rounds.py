"""What a person's labels bring to a discovery, round by round.

In each of five rounds one image per novel class gets its true label: those that the report puts
first, or random ones. Then all is learned again. A class that has a label is known from then on,
and as many novel classes are searched as are left. Scored is GCD accuracy (version 2) of all
held-out images. What it gains stands beside what is left to gain up to a linear probe of the same
features with the labels of all images (ceiling).
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64

from benchmarks.discovery.sets import Bench
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.seeds import interval
from nearkin.classifier.assignments import Assignments, assign
from nearkin.classifier.classifier import Classifier, frozen_copy, heads_of
from nearkin.classifier.features import ViewSettings
from nearkin.classifier.reference import reference_of
from nearkin.discovery.clusters import label_first
from nearkin.discovery.scores import joint_match
from nearkin.discovery.stages import class_stage, stage_init
from nearkin.discovery.task import DiscoveryTask, Mode
from nearkin.discovery.trials import OBJECTIVES, Candidate, shorter
from nearkin.method import Method
from nearkin.metrics.clusters import right
from nearkin.metrics.probe import train_probe
from nearkin.types import UNLABELED

ARMS: Final = ["put first", "random"]
OPTIONS: Final = (
    Option("sets", ["omniglot", "caltech"], "what is discovered", ["digits"]),
    Option("seeds", [6, 7, 8], "each draws novel classes and labels", [6, 7]),
    Option("modes", ["gcd", "ncd"], "of the first discovery", ["gcd"]),
    Option("labeled", 5, "rounds", 1),
    Option("arms", ARMS, "which images are labeled", ARMS[:1]),
)
Labels = Int64[np.ndarray, " images"]


@dataclass(frozen=True, eq=False)
class Round:
    """A discovery from the labels that are there, the first one or after another."""

    bench: Bench
    mode: Mode
    label: Labels  # As in `Bench.truth`, `UNLABELED` where nobody has labeled an image
    is_first: bool = True

    @cached_property
    def order(self) -> list[int]:
        """All classes: those that were known at first, those with a label since, then others."""
        first, every = self.bench.task(self.mode).num_known, int(self.bench.truth.max()) + 1
        labeled = set(self.label.tolist())
        return sorted(range(every), key=lambda number: (number >= first, number not in labeled))

    @cached_property
    def task(self) -> DiscoveryTask:
        """As many novel classes are searched as are without a label."""
        given = self.bench.task(self.mode)
        new = {*self.label.tolist()} - {UNLABELED, *range(given.num_known)}
        number = np.append(np.argsort(self.order), UNLABELED)  # the last entry is of UNLABELED
        known, novel = given.num_known + len(new), given.num_novel - len(new)
        return DiscoveryTask(number[self.label], given.rows, known, novel)

    @cached_property
    def method(self) -> Method[Any]:
        """What the stages learn, in half the steps of a usual discovery."""
        encoder, task, base = self.bench.encoder, self.task, self.bench.base
        mode: Mode = self.mode if self.is_first else "gcd"
        chosen = Candidate(mode, OBJECTIVES[mode].values[0])
        init = stage_init(
            encoder, task, base, chosen.method, lambda stage: shorter(stage, "known")
        )
        stage = class_stage(
            encoder, task, base, init, chosen.method, chosen.options(task.num_novel)
        )
        shorter(stage, "class")
        return stage.method

    @cached_property
    def classifier(self) -> Classifier:
        """The layer and the heads that were learned."""
        task = self.task
        return Classifier(
            layer=frozen_copy(self.method.backbone),
            heads=frozen_copy(heads_of(self.method)),
            classes=tuple(map(str, range(task.num_known + task.num_novel))),
            num_known=task.num_known,
            calibration=None,
            drawn=ViewSettings(self.bench.base.augment, 8, 0),
        )

    @cached_property
    def assignments(self) -> Assignments:
        """What assignments.csv has: all images without a label, those held out too."""
        task, cached, names = self.task, self.bench.encoder.cached, tuple(self.bench.images.names)
        unlabeled, classifier = task.label == UNLABELED, self.classifier
        first = self.bench.task(self.mode).num_known if self.mode == "ncd" else 0
        excluded = unlabeled[:, None] & (np.arange(len(classifier.classes)) < first)
        found = classifier.predict(cached, names, task.label, excluded=excluded).cluster
        own, rows = np.where(unlabeled, found, task.label), task.rows
        learned = cached.center[torch.from_numpy(rows)]
        reference = reference_of(learned, own[rows], ~unlabeled[rows], len(classifier.classes))
        classifier = replace(classifier, reference=reference)
        predictions = classifier.predict(cached, names, task.label, excluded=excluded)
        return assign(predictions, classifier.top_reference)

    @cached_property
    def accuracy(self) -> float:
        """The accuracy of held-out images, all classes possible, under one match of all."""
        bench, names = self.bench, tuple(self.bench.images.names)
        found = self.classifier.predict(bench.encoder.cached, names, self.task.label).cluster
        y, x = bench.truth[bench.held_out], found[bench.held_out]
        return float(right(y, x, joint_match(y, x, bench.task(self.mode).num_known)).mean())

    def next(self, arm: str, number: int) -> "Round":
        """Return the next round, with as many more labels as classes were novel at first."""
        rng, label = np.random.default_rng([self.bench.seed, number]), self.label.copy()
        rows = rng.permutation(self.task.unlabeled)
        if arm != "random":
            rows = self.assignments.rows[label_first(self.assignments, self.task.rows)]
        rows = rows[: self.bench.task(self.mode).num_novel]
        label[rows] = self.bench.truth[rows]
        return Round(self.bench, self.mode, label, is_first=False)


def ceiling(bench: Bench) -> float:
    """Return the accuracy of a linear probe that has all labels."""
    center, out = bench.encoder.cached.center, torch.from_numpy(bench.held_out)
    probe = train_probe(center[~out], bench.truth[~bench.held_out], seed=bench.seed)
    return float((probe.predict(center[out]) == bench.truth[bench.held_out]).mean())


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each set, mode and arm."""
    for name in options.sets:
        benches = [Bench(name, seed, Path(options.data)) for seed in options.seeds]
        most = np.array([ceiling(each) for each in benches])
        for mode in options.modes:
            given = [each.task(mode).label != UNLABELED for each in benches]
            starts = [
                Round(each, mode, np.where(known, each.truth, UNLABELED))
                for each, known in zip(benches, given, strict=True)
            ]
            for arm in options.arms:
                rounds = np.array([_accuracies(each, arm, options.labeled) for each in starts])
                yield _row(f"{name}, {mode}, {arm}", rounds, most)


def _accuracies(now: Round, arm: str, rounds: int) -> list[float]:
    """Return the accuracy at first and after each round."""
    found = [now.accuracy]
    for number in range(1, rounds + 1):
        now = now.next(arm, number)
        found.append(now.accuracy)
    return found


def _row(
    case: str, found: Float[np.ndarray, "seeds rounds"], most: Float[np.ndarray, " seeds"]
) -> Row:
    """Return the share of what was left to gain that the last round has gained."""
    gained = (found[:, -1] - found[:, 0]) / (most - found[:, 0])
    mean, half = interval(gained.tolist())
    more: dict[str, Any] = {f"{n}": each for n, each in enumerate(found.mean(axis=0).tolist())}
    more |= {"ceiling": float(most.mean()), "by seed": found.round(4).tolist()}
    ends = mean - half, mean + half
    return Row(case, mean, "of the gap", interval=ends, rounds=len(found), more=more)
