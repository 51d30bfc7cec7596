"""Leave classes out: hide known classes, search for them as if novel, and tune by the result.

Nothing is chosen by the labels that a result is scored on (Troisemaine et al. 2024,
"A practical approach to novel class discovery in tabular data", make this the core of a method).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from nearkin.config import MODE_METHODS, TrainConfig, Value
from nearkin.data.rng import permutation
from nearkin.discovery.classifier import class_probability, frozen_copy, heads_of, top_features
from nearkin.discovery.data import DiscoveryTask, Mode
from nearkin.discovery.features import FrozenEncoder
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import StageInit, class_stage, known_stage, stage_init
from nearkin.measures.matching import right
from nearkin.tables import usable
from nearkin.types import UNKNOWN


@dataclass(frozen=True)
class ModeRecipe:
    """What a mode trains, and what its trials choose."""

    method: str  # Of the last stage
    setting: str  # That trials choose
    candidates: tuple[float, ...]  # The values tried
    default: float  # Where too few classes are known to hide some


MODE_RECIPES: Final[dict[Mode, ModeRecipe]] = {
    "ncd": ModeRecipe(MODE_METHODS["ncd"], "pair_rate", (0.25, 0.5, 0.75), default=0.5),
    "gcd": ModeRecipe(MODE_METHODS["gcd"], "entropy_weight", (0.5, 1.0, 2.0), default=1.0),
}
FOLDS: Final = 3
STEPS: Final = 0.5  # Share of a training's steps that a trial takes
HIDDEN: Final = 0.25  # Share of the known classes that a fold hides; two at least


def tuned_options(mode: Mode, value: float, num_novel: int) -> dict[str, Value]:
    """Return the options of the mode's method for a value of its tuned setting.

    A pair rate is relative to the positive pairs of equally large classes, of which there are
    1 / num_novel: so a value that was chosen with few hidden classes fits many novel ones.
    """
    if mode == "ncd":
        return {"positive_rate": min(1.0, value / num_novel)}
    return {"entropy_weight": value}


@dataclass(frozen=True, eq=False)
class Trial:
    """The result of searching for some hidden classes."""

    fold: int
    value: float  # Of the tuned setting
    accuracy: float  # Share of the hidden images that were put into the right class
    probability: Float[np.ndarray, "images classes"]
    correct: Bool[np.ndarray, " images"]
    """Whether the most probable class is right, clusters matched with classes."""


def folds(num_known: int, seed: int) -> list[Int64[np.ndarray, " hidden"]]:
    """Return the classes that each fold hides; no folds if fewer than two would remain known.

    >>> [fold.tolist() for fold in folds(3, seed=0)]
    []
    """
    hidden = max(2, round(HIDDEN * num_known))
    if num_known - hidden < 2:
        return []
    order = permutation(seed, 0, num_known)
    disjoint = (FOLDS - 1) * hidden < num_known
    starts = [hidden * fold if disjoint else num_known * fold // FOLDS for fold in range(FOLDS)]
    return [np.sort(order[np.arange(start, start + hidden) % num_known]) for start in starts]


@dataclass(frozen=True, eq=False)
class Trials:
    """Everything that trials have in common."""

    encoder: FrozenEncoder
    task: DiscoveryTask  # Only its labeled images are used
    base: TrainConfig
    mode: Mode  # ncd hides classes; gcd also hides half of the labels of the others
    folder: Path  # Where finished trials are kept, so that a resumed run does none twice
    options: Mapping[str, Value]  # Of the mode's method, beside the tuned one
    start: str  # Where heads start: at `clusters` or at `random`

    def run(self, values: Sequence[float]) -> Iterator[Trial]:
        """Try every value in every fold."""
        for fold, hidden in enumerate(folds(self.task.num_known, self.base.seed)):
            task, truth = self._hide(hidden)
            init = None
            for value in values:
                path = self.folder / f"{self.mode}-{fold}-{value:g}.npz"
                if not path.exists():
                    # The known classes are learned anew in each fold: a network that was
                    # trained on all of them has seen the labels of the hidden ones.
                    init = init or self._init(task)
                    self._try(task, truth, init, value, path)
                probability, correct = _read(path, task)
                yield Trial(fold, value, float(correct.mean()), probability, correct)

    def _hide(
        self, hidden: Int64[np.ndarray, " hidden"]
    ) -> tuple[DiscoveryTask, Int64[np.ndarray, " images"]]:
        """Return the task of finding some known classes, and the truth: hidden ones come last."""
        old, count = self.task.label, self.task.num_known
        rest = np.setdiff1d(np.arange(count), hidden)
        number = np.full(count + 1, UNKNOWN)  # the last entry is that of UNKNOWN, which is -1
        number[np.concatenate([rest, hidden])] = np.arange(count)
        truth, label = number[old], number[old]
        label[truth >= len(rest)] = UNKNOWN
        if self.mode == "gcd":
            label[permutation(self.base.seed, 1, len(label)) % 2 == 0] = UNKNOWN
        return DiscoveryTask(label, self.task.labeled, len(rest), len(hidden)), truth

    def _init(self, task: DiscoveryTask) -> StageInit:
        """Train on the classes that stay known."""
        stage = known_stage(self.encoder, task, replace(self.base, epochs="auto"))
        stage.try_out()
        return stage_init(self.encoder, stage.method, task, self.base.seed, self.start)

    def _try(
        self, task: DiscoveryTask, truth: np.ndarray, init: StageInit, value: float, path: Path
    ) -> None:
        """Search for the hidden classes and write how well they were found."""
        options = dict(self.options) | tuned_options(self.mode, value, task.num_novel)
        method = MODE_RECIPES[self.mode].method
        stage = class_stage(self.encoder, task, self.base, init, method, options)
        stage.try_out(STEPS)
        disjoint = self.mode == "ncd"
        features = top_features(self.encoder, stage.method, task.unlabeled)
        with torch.inference_mode():
            heads = frozen_copy(heads_of(stage.method))
            probability = class_probability(heads, features, task.num_known, disjoint).numpy()
        y, x = truth[task.unlabeled], probability.argmax(axis=1)
        match = novel_match if disjoint else joint_match
        correct = right(y, x, match(y, x, task.num_known))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp.npz")
        np.savez(partial, probability=probability, correct=correct)
        partial.replace(path)


def _read(path: Path, task: DiscoveryTask) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities, and whether they are right, from the file of a trial."""
    shape = len(task.unlabeled), task.num_known + task.num_novel
    with usable(path, "remove it, it will be made again"):
        with np.load(path, allow_pickle=False) as file:
            probability, correct = file["probability"], file["correct"]
        if probability.shape != shape or correct.shape != shape[:1] or correct.dtype != bool:
            raise ValueError("it is of other images")
        if not ((probability >= 0) & np.isfinite(probability)).all():
            raise ValueError("its probabilities are none")
    return probability, correct


def best(trials: Sequence[Trial]) -> float:
    """Return the value with the highest mean accuracy over the folds; of equals, the smallest."""
    values = sorted({trial.value for trial in trials})
    return max(values, key=lambda value: mean_accuracy(trials, value))


def mean_accuracy(trials: Sequence[Trial], value: float) -> float:
    """Return the mean accuracy over the folds."""
    return fmean(trial.accuracy for trial in trials if trial.value == value)
