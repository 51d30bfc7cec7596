"""Hold known classes out, search for them as if novel: choose a setting, and calibrate, by that.

Nothing is chosen by the labels that a result is scored on (DTC, Han et al. 2019, and GCD, Vaze et
al. 2022, hold classes out to count novel ones; Troisemaine et al. 2024, "A practical approach to
novel class discovery in tabular data", to tune a method).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from nearkin.choices import MODE_METHODS
from nearkin.classifier.classifier import class_probability
from nearkin.config import DiscoverConfig
from nearkin.data.rng import permutation
from nearkin.discovery.features import for_inference, top_features
from nearkin.discovery.scores import joint_match, mode_match
from nearkin.discovery.stages import Stage, StageInit, Stages
from nearkin.discovery.task import DiscoveryTask
from nearkin.distributed import free_memory
from nearkin.files import read_arrays, usable, whole
from nearkin.metrics.clusters import right
from nearkin.metrics.probe import LEFT_OUT, folds_of
from nearkin.run.options import within
from nearkin.schema import Value
from nearkin.types import UNLABELED

RATES: Final = (0.5, 0.25, 0.75)
"""Shares of positive pairs that are tried for NCL, relative to those of equally large classes. The
first one counts unless another is clearly better."""
FOLDS: Final = 3
STEPS: Final = 0.5  # Share of a training's steps that a trial takes
MOST_HIDDEN: Final = 0.6  # Largest share of the known classes that a fold hides


@dataclass(frozen=True)
class Candidate:
    """A method, with a share of positive pairs where it has one that is not given."""

    method: str
    rate: float | None = None

    def options(self, num_novel: int) -> dict[str, Value]:
        """Return the options that are chosen.

        A rate is relative to that of equally large classes, 1 / num_novel: so one that was chosen
        with few held-out classes fits many novel ones.
        """
        return {} if self.rate is None else {"positive_rate": min(1.0, self.rate / num_novel)}

    def __str__(self) -> str:
        """As in files and in the log: `ncl-0.5` or `simgcd`."""
        return self.method if self.rate is None else f"{self.method}-{self.rate:g}"


def candidates(config: DiscoverConfig) -> list[Candidate]:
    """Return what trials compare: one candidate, where there is nothing to choose."""
    by_rate = config.options.get("pseudo_labels", "closest") == "closest"
    fixed = config.mode == "gcd" or "positive_rate" in config.options or not by_rate
    rates: Sequence[float | None] = (None,) if fixed else RATES
    return [Candidate(MODE_METHODS[config.mode], rate) for rate in rates]


@dataclass(frozen=True, eq=False)
class Trial:
    """The result of searching for some hidden classes."""

    candidate: Candidate
    accuracy: float
    """Of images that were not learned from: the mean of that of known and of hidden classes, all
    classes possible, clusters matched with classes."""
    probability: Float[np.ndarray, "images classes"]
    """Of the unlabeled images that were learned from."""
    correct: Bool[np.ndarray, " images"]  # Whether the most probable class of these is right
    rows: Int64[np.ndarray, " images"]  # Which these are


def folds(num_known: int, num_novel: int, seed: int) -> list[Int64[np.ndarray, " hidden"]]:
    """Return the classes that each fold hides: no folds, if fewer than two would remain known.

    As many beside those that stay known as there are novel classes beside the known ones, within
    bounds: an objective that finds a few classes beside many may lose many beside a few.
    """
    alike = math.ceil(num_known * num_novel / (num_known + num_novel))
    hidden = max(2, min(alike, int(MOST_HIDDEN * num_known)))
    if num_known - hidden < 2:
        return []
    order = permutation(seed, 0, num_known)
    disjoint = (FOLDS - 1) * hidden < num_known
    starts = [hidden * fold if disjoint else num_known * fold // FOLDS for fold in range(FOLDS)]
    return [np.sort(order[np.arange(start, start + hidden) % num_known]) for start in starts]


@dataclass(frozen=True, eq=False)
class Trials:
    """Everything that trials have in common."""

    stages: Stages
    """Of their task, only the labeled images are used. In mode ncd classes are hidden; in gcd also
    half of the labels of the others."""
    groups: Int64[np.ndarray, " images"]  # Those of one are learned from, or all are scored
    folder: Path  # Where finished trials are kept, so that a resumed run does none twice
    options: Mapping[str, Value]  # That were given for the method
    train: Callable[[Stage, float], None]  # Trains a stage for a share of its steps

    def run(self, tried: Sequence[Candidate], num_folds: int = FOLDS) -> Iterator[Trial]:
        """Try every candidate in every fold, or in some."""
        task, seed = self.stages.task, self.stages.base.seed
        every = enumerate(map(self._hide, folds(task.num_known, task.num_novel, seed)))
        # Where there are few labels, some folds leave too few of them to learn from.
        labeled = (each for each in every if len(each[1].stages.task.labeled) >= 2)
        for fold, hiding in islice(labeled, num_folds):
            init, own = None, hiding.stages.task
            for candidate in tried:
                path = self.folder / f"{task.mode}-{fold}-{candidate}.npz"
                if not path.exists():
                    # The start is made anew in each fold: a network that was trained on all
                    # known classes has seen the labels of the hidden ones.
                    init = init or hiding.stages.start(lambda stage: self.train(stage, 1.0))
                    self._try(hiding, init, candidate, path)
                yield Trial(candidate, *_read(path, own), own.unlabeled)

    def _hide(self, hidden: Int64[np.ndarray, " hidden"]) -> "_Hiding":
        """Hide some known classes; their numbers come last."""
        task, seed = self.stages.task, self.stages.base.seed
        rest = np.setdiff1d(np.arange(task.num_known), hidden)
        # The last entry is that of UNLABELED, which is -1.
        number = np.full(task.num_known + 1, UNLABELED)
        number[np.concatenate([rest, hidden])] = np.arange(task.num_known)
        truth, label = number[task.label], number[task.label]
        label[truth >= len(rest)] = UNLABELED
        if not task.disjoint:
            label[permutation(seed, 1, len(label)) % 2 == 0] = UNLABELED
        of_labeled = truth[task.labeled], self.groups[task.labeled]
        is_scored = folds_of(*of_labeled, seed, folds=1) != LEFT_OUT  # a fifth of each class
        scored, rows = task.labeled[is_scored], task.labeled[~is_scored]
        hiding = DiscoveryTask(label, rows, len(rest), len(hidden), task.mode)
        return _Hiding(replace(self.stages, task=hiding), truth, scored)

    def _try(self, hiding: "_Hiding", init: StageInit, candidate: Candidate, path: Path) -> None:
        """Search for the hidden classes and write how well they were found."""
        stages, truth, task = hiding.stages, hiding.truth, hiding.stages.task
        given = within(task.method, self.options, max(2, len(task.unlabeled)))
        options = candidate.options(task.num_novel) | given
        stage = stages.classes(init, options)
        self.train(stage, STEPS)
        heads = for_inference(stage.method.get_submodule("heads"))
        features = top_features(stages.encoder, stage.method)
        learned, scored = (features[torch.from_numpy(x)] for x in (task.unlabeled, hiding.scored))
        with torch.inference_mode():
            impossible = task.only_novel if task.disjoint else None
            probability = class_probability(heads, learned, impossible).numpy()
            classes = class_probability(heads, scored).numpy().argmax(axis=1)
        y, x = truth[task.unlabeled], probability.argmax(axis=1)
        correct = right(y, x, mode_match(y, x, task))
        accuracy = correct.mean()
        if len(hiding.scored):
            accuracy = balanced_accuracy(truth[hiding.scored], classes, task.num_known)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial, partial.open("wb") as file:
            np.savez(file, accuracy=accuracy, probability=probability, correct=correct)


class _Hiding(NamedTuple):
    """A task of finding some known classes."""

    stages: Stages
    truth: Int64[np.ndarray, " images"]  # The classes, hidden ones last
    scored: Int64[np.ndarray, " scored"]  # Images of all classes that are not learned from


def balanced_accuracy(
    truth: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_known: int
) -> float:
    """Return the mean of the accuracies of known and of novel classes, under one match of all."""
    correct = right(truth, predicted, joint_match(truth, predicted, num_known))
    known = truth < num_known
    return fmean(float(correct[part].mean()) for part in (known, ~known) if part.any())


def _read(path: Path, task: DiscoveryTask) -> tuple[float, np.ndarray, np.ndarray]:
    """Return accuracy, probabilities, and whether they are right, from the file of a trial."""
    shape = len(task.unlabeled), task.num_classes
    with usable(path, "remove it, it will be made again"):
        with path.open("rb") as file:
            stored = read_arrays(file, free_memory())
        accuracy = float(stored["accuracy"])
        probability, correct = stored["probability"], stored["correct"]
        if probability.shape != shape or correct.shape != shape[:1] or correct.dtype != bool:
            raise ValueError("it is of other images")
        if not ((probability >= 0) & np.isfinite(probability)).all() or not 0 <= accuracy <= 1:
            raise ValueError("its probabilities are none")
    return accuracy, probability, correct


def best(trials: Sequence[Trial]) -> Candidate:
    """Return the first candidate that is not clearly worse than the best one.

    Clearly: by more than a standard error of the mean difference over the folds, of which a single
    one has none (the one-standard-error rule, Breiman et al. 1984, section 3.4.3).
    """
    accuracy = accuracies(trials)
    top = max(accuracy, key=lambda each: fmean(accuracy[each]))
    for candidate, own in accuracy.items():
        behind = np.subtract(accuracy[top], own)
        error = behind.std(ddof=1) / math.sqrt(len(behind)) if len(behind) > 1 else 0.0
        if behind.mean() <= error:
            return candidate
    return top


def accuracies(trials: Sequence[Trial]) -> dict[Candidate, list[float]]:
    """Return the accuracy in each fold, by candidate."""
    of = defaultdict[Candidate, list[float]](list)
    for trial in trials:
        of[trial.candidate].append(trial.accuracy)
    return of
