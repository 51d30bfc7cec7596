"""What do a person's labels bring to a discovery, round by round?

In each of five rounds one image per novel class is labeled with its true class: those that the
report puts first, or random ones; then all is learned again from all labels. The gain of `all`,
the accuracy of held-out images by version 2 of GCD, stands beside what is left to gain: the same
layer trained on the labels of all images (ceiling). Arms of which only one part is changed show
what it brings. A class that has a label is known from then on, and as many novel classes are
searched as are left.
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
from benchmarks.discovery.tables import interval
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.classifier.assignments import Assignments, assign
from nearkin.classifier.classifier import Classifier, Predictions, frozen_copy, heads_of
from nearkin.classifier.features import ViewSettings
from nearkin.classifier.reference import reference_of
from nearkin.discovery.clusters import label_first
from nearkin.discovery.features import top_features
from nearkin.discovery.rounds import class_of_clusters
from nearkin.discovery.scores import joint_match
from nearkin.discovery.stages import class_stage, known_stage, stage_init
from nearkin.discovery.task import DiscoveryTask, Mode
from nearkin.discovery.trials import OBJECTIVES, Candidate, shorter
from nearkin.method import Method
from nearkin.metrics.clusters import right
from nearkin.types import UNLABELED

ARMS: Final = ["put first", "random", "clusters anew", "layer continued", "mask forgotten"]
OPTIONS: Final = (
    Option("sets", ["omniglot", "caltech"], "what is discovered", ["digits"]),
    Option("seeds", [6, 7, 8], "each draws novel classes and labels", [6, 7]),
    Option("modes", ["gcd", "ncd"], "of the first discovery", ["gcd"]),
    Option("labeled", 5, "rounds", 1),
    Option("arms", ARMS, "see `Round`", ARMS[:2]),
)  # fmt: skip
Labels = Int64[np.ndarray, " images"]
"""The class of each image as in `Bench.truth`, `UNLABELED` where nobody has labeled it."""


@dataclass(frozen=True, eq=False)
class Round:
    """A discovery from the labels that are there, after another one or as the first."""

    bench: Bench
    mode: Mode
    label: Labels
    arm: str = "put first"
    before: "Round | None" = None

    @cached_property
    def order(self) -> list[int]:
        """All classes: those that were known at first, those with a label since, then others."""
        first, every = self.bench.task(self.mode).num_known, int(self.bench.truth.max()) + 1
        labeled = set(self.label.tolist())
        return sorted(range(every), key=lambda number: (number >= first, number not in labeled))

    @cached_property
    def task(self) -> DiscoveryTask:
        """As many novel classes are searched as are without a label."""
        given, labeled = self.bench.task(self.mode), set(self.label.tolist())
        known = given.num_known + len(labeled - {UNLABELED, *range(given.num_known)})
        number = np.append(np.argsort(self.order), UNLABELED)  # the last entry is of UNLABELED
        excluded = given.num_known if self.mode == "ncd" else 0
        if self.arm == "mask forgotten" and self.before is not None:
            excluded = 0
        novel = len(self.order) - known
        task = DiscoveryTask(number[self.label], given.rows, known, novel, excluded)
        if self.before is None or self.arm == "clusters anew":
            return task
        return replace(task, start=self._start(task, number))

    def _start(self, task: DiscoveryTask, number: Int64[np.ndarray, " numbers"]) -> Labels:
        """Return the clusters of the round before, renamed by the labels."""
        assert self.before is not None
        found, earlier = self.before.assignments, self.before.task.num_known
        cluster = np.full(len(self.label), UNLABELED)
        cluster[found.rows] = found.cluster
        new = np.flatnonzero((cluster >= earlier) & (self.label != UNLABELED))
        pairs = [(str(cluster[row]), str(self.label[row])) for row in new.tolist()]
        named = {int(key): int(value) for key, value in class_of_clusters(pairs).items()}
        became = {each: int(number[self.before.order[each]]) for each in range(earlier)}
        became |= {each: int(number[label]) for each, label in named.items()}
        left = [each for each in np.unique(found.cluster).tolist() if each not in became]
        became |= {
            each: task.num_known + place for place, each in enumerate(left[: task.num_novel])
        }
        return np.array([became.get(each, UNLABELED) for each in cluster.tolist()], np.int64)

    @cached_property
    def method(self) -> Method[Any]:
        """What the stages learn, in half the steps of a usual discovery."""
        bench, task = self.bench, self.task
        known = known_stage(bench.encoder, task, bench.base)
        if self.before is not None and self.arm == "layer continued":
            known.method.backbone.load_state_dict(self.before.method.backbone.state_dict())
        shorter(known, "known")
        init = stage_init(bench.encoder, known.method, task, bench.seed)
        mode: Mode = "gcd" if self.before else self.mode
        chosen = Candidate(mode, OBJECTIVES[mode].values[0])
        options = chosen.options(task.num_novel)
        stage = class_stage(bench.encoder, task, bench.base, init, chosen.method, options)
        shorter(stage, "class")
        return stage.method

    def predict(self, classifier: Classifier, *, masked: bool) -> Predictions:
        """Classify all images, unlabeled ones as such or as if they were new."""
        task, names = self.task, tuple(map(str, self.bench.images.names))
        excluded = (task.label == UNLABELED)[:, None] & task.excluded if masked else None
        cached = self.bench.encoder.cached
        return classifier.predict(cached, names, task.label, excluded=excluded)

    @cached_property
    def classifier(self) -> Classifier:
        """The layer and the heads that were learned."""
        task, bench = self.task, self.bench
        return Classifier(
            layer=frozen_copy(self.method.backbone),
            heads=frozen_copy(heads_of(self.method)),
            classes=tuple(map(str, range(task.num_known + task.num_novel))),
            num_known=task.num_known,
            calibration=None,
            drawn=ViewSettings(bench.base.augment, 8, 0),
        )

    @cached_property
    def assignments(self) -> Assignments:
        """What assignments.csv has: all images without a label, those held out too."""
        task, center = self.task, self.bench.encoder.cached.center
        found = self.predict(self.classifier, masked=True).cluster
        labeled, rows = task.label != UNLABELED, task.rows
        own = np.where(labeled, task.label, found)
        learned = center[torch.from_numpy(rows)]
        count = len(self.classifier.classes)
        reference = reference_of(learned, own[rows], labeled[rows], count)
        classifier = replace(self.classifier, reference=reference)
        return assign(self.predict(classifier, masked=True), classifier.top_reference)

    @cached_property
    def accuracy(self) -> float:
        """The accuracy of held-out images, all classes possible, under one match of all."""
        y = self.bench.truth[self.bench.held_out]
        x = self.predict(self.classifier, masked=False).cluster[self.bench.held_out]
        return float(right(y, x, joint_match(y, x, self.bench.task(self.mode).num_known)).mean())

    def next(self, arm: str, number: int) -> "Round":
        """Return the next round, in which as many images are labeled as classes were novel."""
        count = self.bench.task(self.mode).num_novel
        if arm == "random":
            rng = np.random.default_rng([self.bench.seed, number])
            rows = rng.permutation(self.task.unlabeled)[:count]
        else:
            rows = self.assignments.rows[label_first(self.assignments, self.task.rows)[:count]]
        label = self.label.copy()
        label[rows] = self.bench.truth[rows]
        return Round(self.bench, self.mode, label, arm, self)


def ceiling(bench: Bench) -> float:
    """Return the accuracy of held-out images with the labels of all others."""
    label = np.where(bench.held_out, UNLABELED, bench.truth)
    rows = np.flatnonzero(~bench.held_out)
    stage = known_stage(
        bench.encoder, DiscoveryTask(label, rows, int(bench.truth.max()) + 1, 0), bench.base
    )
    shorter(stage, "known")
    features = top_features(bench.encoder, stage.method, np.flatnonzero(bench.held_out))
    with torch.inference_mode():
        found = frozen_copy(stage.method.get_submodule("known"))(features).argmax(dim=1)
    return float((found.numpy() == bench.truth[bench.held_out]).mean())


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each set, mode and arm."""
    for name in options.sets:
        benches = [Bench(name, seed, Path(options.data)) for seed in options.seeds]
        most = np.array([ceiling(each) for each in benches])
        for mode in options.modes:
            starts = [Round(each, mode, _given(each, mode)) for each in benches]
            for arm in options.arms:
                if mode == "ncd" or arm != "mask forgotten":
                    rounds = [_accuracies(start, arm, options.labeled) for start in starts]
                    yield _row(f"{name}, {mode}, {arm}", np.array(rounds), most)


def _given(bench: Bench, mode: Mode) -> Labels:
    return np.where(bench.task(mode).label == UNLABELED, UNLABELED, bench.truth)


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
    """Return the share of what is left to gain that was gained after the last round."""
    gained = (found[:, -1] - found[:, 0]) / (most - found[:, 0])
    mean, half = interval(gained.tolist())
    more = {f"round {number}": float(each) for number, each in enumerate(found.mean(axis=0))}
    more |= {"ceiling": float(most.mean()), "by seed": found.round(4).tolist()}
    return Row(
        case, mean, "of the gap", interval=(mean - half, mean + half), rounds=len(found), more=more
    )
