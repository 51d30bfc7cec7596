"""Hold known classes out, search for them as if novel: choose a setting, and calibrate, by that.

Nothing is chosen by the labels that a result is scored on (DTC, Han et al. 2019, and GCD, Vaze et
al. 2022, hold classes out to count novel ones; Troisemaine et al. 2024, "A practical approach to
novel class discovery in tabular data", to tune a method).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from nearkin.choices import MODE_METHODS
from nearkin.classifier.classifier import class_probability, frozen_copy, heads_of
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.rng import permutation
from nearkin.discovery.features import DiscoveryEncoder, top_features
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import Stage, StageInit, class_stage, stage_init
from nearkin.discovery.task import DiscoveryTask, Mode
from nearkin.distributed import free_memory
from nearkin.files import read_arrays, usable, whole
from nearkin.metrics.clusters import right
from nearkin.run.options import within
from nearkin.schema import Value
from nearkin.types import UNLABELED

RATES: Final = (0.5, 0.25, 0.75)
"""Shares of positive pairs that are tried for NCL, relative to those of equally large classes. The
first one counts unless another is clearly better."""
OPTIONS: Final[Mapping[Mode, Mapping[str, Value]]] = {
    "gcd": {"entropy_weight": 1.0},
    "ncd": {"joint_weight": 1.0},  # its two heads are also trained as one classifier
}
"""Options of the method of a mode that differ from its own."""
FOLDS: Final = 3
STEPS: Final = 0.5  # Share of a training's steps that a trial takes
MOST_HIDDEN: Final = 0.6  # Largest share of the known classes that a fold hides
SCORED: Final = 0.2  # Share of each known class that a trial does not learn from


@dataclass(frozen=True)
class Candidate:
    """The method of a mode, with a share of positive pairs where it has one that is not given."""

    mode: Mode
    rate: float | None = None

    @property
    def method(self) -> str:
        """The method of the last stage."""
        return MODE_METHODS[self.mode]

    def options(self, num_novel: int) -> dict[str, Value]:
        """Return the options of the method.

        A rate is relative to that of equally large classes, 1 / num_novel: so one that was chosen
        with few held-out classes fits many novel ones.
        """
        own = dict(OPTIONS[self.mode])
        if self.rate is not None:
            own["positive_rate"] = min(1.0, self.rate / num_novel)
        return own

    def __str__(self) -> str:
        """As in files and in the log.

        >>> str(Candidate("ncd", 0.5)), str(Candidate("gcd"))
        ('ncl-0.5', 'simgcd')
        """
        return self.method if self.rate is None else f"{self.method}-{self.rate:g}"


def candidates(config: DiscoverConfig) -> list[Candidate]:
    """Return what trials compare: one candidate, where there is nothing to choose."""
    if config.mode == "gcd" or "positive_rate" in config.options:
        return [Candidate(config.mode)]
    return [Candidate("ncd", rate) for rate in RATES]


@dataclass(frozen=True, eq=False)
class Trial:
    """The result of searching for some hidden classes."""

    fold: int
    candidate: Candidate
    accuracy: float
    """Of images that were not learned from: the mean of that of known and of hidden classes, all
    classes possible, clusters matched with classes."""
    probability: Float[np.ndarray, "images classes"]
    """Of the unlabeled images that were learned from."""
    correct: Bool[np.ndarray, " images"]  # Whether the most probable class of these is right
    rows: Int64[np.ndarray, " images"]  # Which these are


def num_hidden(num_known: int, num_novel: int) -> int:
    """Return how many known classes a fold hides; 0 if fewer than two would remain known.

    As many beside those that stay known as there are novel classes beside the known ones, within
    bounds: an objective that finds a few classes beside many may lose many beside a few.

    >>> num_hidden(5, 5), num_hidden(69, 30), num_hidden(10, 1000), num_hidden(3, 3)
    (3, 21, 6, 0)
    """
    alike = math.ceil(num_known * num_novel / (num_known + num_novel))
    hidden = max(2, min(alike, int(MOST_HIDDEN * num_known)))
    return hidden if num_known - hidden >= 2 else 0


def folds(num_known: int, num_novel: int, seed: int) -> list[Int64[np.ndarray, " hidden"]]:
    """Return the classes that each fold hides: no folds, if it would hide none."""
    hidden = num_hidden(num_known, num_novel)
    if not hidden:
        return []
    order = permutation(seed, 0, num_known)
    disjoint = (FOLDS - 1) * hidden < num_known
    starts = [hidden * fold if disjoint else num_known * fold // FOLDS for fold in range(FOLDS)]
    return [np.sort(order[np.arange(start, start + hidden) % num_known]) for start in starts]


@dataclass(frozen=True, eq=False)
class Trials:
    """Everything that trials have in common."""

    encoder: DiscoveryEncoder
    task: DiscoveryTask  # Only its labeled images are used
    base: TrainConfig
    mode: Mode  # ncd hides classes; gcd also hides half of the labels of the others
    folder: Path  # Where finished trials are kept, so that a resumed run does none twice
    options: Mapping[str, Value]  # That were given for the method
    train: Callable[[Stage, str], None]
    """Trains a stage, `known` or `class`."""

    def run(self, tried: Sequence[Candidate], num_folds: int = FOLDS) -> Iterator[Trial]:
        """Try every candidate in every fold, or in some."""
        task = self.task
        every = enumerate(map(self._hide, folds(task.num_known, task.num_novel, self.base.seed)))
        # Where there are few labels, some folds leave too few of them to learn from.
        labeled = (each for each in every if len(each[1].task.labeled) >= 2)
        for fold, hiding in islice(labeled, num_folds):
            init = None
            for candidate in tried:
                path = self.folder / f"{self.mode}-{fold}-{candidate}.npz"
                if not path.exists():
                    # The start is made anew in each fold: a network that was trained on all
                    # known classes has seen the labels of the hidden ones.
                    init = init or self._init(hiding.task, candidate.method)
                    self._try(hiding, init, candidate, path)
                yield Trial(fold, candidate, *_read(path, hiding.task), hiding.task.unlabeled)

    def _hide(self, hidden: Int64[np.ndarray, " hidden"]) -> "_Hiding":
        """Hide some known classes; their numbers come last."""
        old, count = self.task.label, self.task.num_known
        rest = np.setdiff1d(np.arange(count), hidden)
        number = np.full(count + 1, UNLABELED)  # the last entry is that of UNLABELED, which is -1
        number[np.concatenate([rest, hidden])] = np.arange(count)
        truth, label = number[old], number[old]
        label[truth >= len(rest)] = UNLABELED
        if self.mode == "gcd":
            label[permutation(self.base.seed, 1, len(label)) % 2 == 0] = UNLABELED
        labeled = self.task.labeled
        scored = labeled[_some_of_each(truth[labeled], self.base.seed)]
        rows = np.setdiff1d(labeled, scored)
        return _Hiding(DiscoveryTask(label, rows, len(rest), len(hidden)), truth, scored)

    def _init(self, task: DiscoveryTask, method: str) -> StageInit:
        return stage_init(
            self.encoder, task, self.base, method, lambda stage: self.train(stage, "known")
        )

    def _try(self, hiding: "_Hiding", init: StageInit, candidate: Candidate, path: Path) -> None:
        """Search for the hidden classes and write how well they were found."""
        task, truth = hiding.task, hiding.truth
        given = within(candidate.method, self.options, max(2, len(task.unlabeled)))
        options = candidate.options(task.num_novel) | given
        stage = class_stage(self.encoder, task, self.base, init, candidate.method, options)
        self.train(stage, "class")
        heads = frozen_copy(heads_of(stage.method))
        features = top_features(self.encoder, stage.method)

        def predicted(
            rows: Int64[np.ndarray, " n"], impossible: Bool[np.ndarray, "1 classes"] | None
        ) -> np.ndarray:
            some = features[torch.from_numpy(rows)]
            with torch.inference_mode():
                return class_probability(heads, some, impossible).numpy()

        disjoint, rows = self.mode == "ncd", task.unlabeled
        probability = predicted(rows, task.only_novel if disjoint else None)
        y, x = truth[rows], probability.argmax(axis=1)
        matched = (novel_match if disjoint else joint_match)(y, x, task.num_known)
        correct = right(y, x, matched)
        accuracy = correct.mean()
        if len(hiding.scored):
            classes = predicted(hiding.scored, None).argmax(axis=1)
            accuracy = balanced_accuracy(truth[hiding.scored], classes, task.num_known)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial, partial.open("wb") as file:
            np.savez(file, accuracy=accuracy, probability=probability, correct=correct)


def shorter(stage: Stage, name: str) -> None:
    """Train without writing anything, the classes for a share of the steps."""
    stage.try_out(STEPS if name == "class" else 1.0)


class _Hiding(NamedTuple):
    """A task of finding some known classes."""

    task: DiscoveryTask
    truth: Int64[np.ndarray, " images"]  # The classes, hidden ones last
    scored: Int64[np.ndarray, " scored"]  # Images of all classes that are not learned from


def _some_of_each(label: Int64[np.ndarray, " n"], seed: int) -> Int64[np.ndarray, " some"]:
    """Return `SCORED` of the images of each class, drawn at random."""
    order = permutation(seed, 2, len(label))
    of_class = (order[label[order] == number] for number in np.unique(label))
    chosen = [rows[: int(SCORED * len(rows))] for rows in of_class]
    return np.sort(np.concatenate(chosen))


def balanced_accuracy(
    truth: Int64[np.ndarray, " n"], predicted: Int64[np.ndarray, " n"], num_known: int
) -> float:
    """Return the mean of the accuracies of known and of novel classes, under one match of all."""
    correct = right(truth, predicted, joint_match(truth, predicted, num_known))
    known = truth < num_known
    return fmean(float(correct[part].mean()) for part in (known, ~known) if part.any())


def _read(path: Path, task: DiscoveryTask) -> tuple[float, np.ndarray, np.ndarray]:
    """Return accuracy, probabilities, and whether they are right, from the file of a trial."""
    shape = len(task.unlabeled), task.num_known + task.num_novel
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
    tried = dict.fromkeys(trial.candidate for trial in trials)
    accuracy = {each: _accuracies(trials, each) for each in tried}
    top = max(tried, key=lambda each: fmean(accuracy[each]))
    for candidate in tried:
        behind = np.subtract(accuracy[top], accuracy[candidate])
        error = behind.std(ddof=1) / math.sqrt(len(behind)) if len(behind) > 1 else 0.0
        if behind.mean() <= error:
            return candidate
    return top


def mean_accuracy(trials: Sequence[Trial], candidate: Candidate) -> float:
    """Return the mean accuracy over the folds."""
    return fmean(_accuracies(trials, candidate))


def _accuracies(trials: Sequence[Trial], candidate: Candidate) -> list[float]:
    """Return the accuracy in each fold."""
    return [trial.accuracy for trial in trials if trial.candidate == candidate]
