"""Leave classes out: hide some known classes, look for them as if novel, and choose by that.

Nothing is chosen by the labels that a result is scored on (Troisemaine et al. 2024,
"A practical approach to novel class discovery in tabular data", make it the core of a method).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from nearkin.config import TrainConfig, Value
from nearkin.data.rng import permutation
from nearkin.discovery.classifier import apply_layer, class_probability, heads_of, still
from nearkin.discovery.data import DiscoveryTask
from nearkin.discovery.features import FrozenEncoder
from nearkin.discovery.scores import joint_match, novel_match
from nearkin.discovery.stages import StageInit, Start, begun, class_stage, known_stage
from nearkin.measures.matching import right
from nearkin.method import Method
from nearkin.tables import usable
from nearkin.types import UNKNOWN

Mode = Literal["gcd", "ncd"]

STRENGTHS: Final[dict[Mode, tuple[float, ...]]] = {
    "ncd": (0.25, 0.5, 0.75),
    "gcd": (0.5, 1.0, 2.0),
}
"""What is tried; of ncd, as a part of the pairs that equally large classes would have."""
USUAL: Final[dict[Mode, float]] = {"ncd": 0.5, "gcd": 1.0}
"""What is taken where too few classes are known to hide some."""
FOLDS: Final = 3
SHORT: Final = 0.5
"""Share of a training's steps that a trial takes."""
HIDDEN: Final = 0.25
"""Share of the known classes that a fold hides; two at least."""
MODE_METHOD: Final[dict[Mode, str]] = {"ncd": "ncl", "gcd": "simgcd"}
"""The method of each mode."""


def strength_options(mode: Mode, strength: float, num_novel: int) -> dict[str, Value]:
    """The options of the mode's method that a strength comes to."""
    if mode == "ncd":
        return {"positive_rate": min(1.0, strength / num_novel)}
    return {"entropy_weight": strength}


@dataclass(frozen=True, eq=False)
class Trial:
    """What came of hiding some classes."""

    fold: int
    strength: float
    accuracy: float
    """Share of the images in question that were put into the right class."""
    probability: Float[np.ndarray, "images classes"]
    """Of the classes of each image in question."""
    correct: Bool[np.ndarray, " images"]
    """Whether the most probable one is right, clusters matched with classes."""


def folds(num_known: int, seed: int) -> list[Int64[np.ndarray, " hidden"]]:
    """The classes that each fold hides; no folds if fewer than two would remain known.

    >>> [fold.tolist() for fold in folds(3, seed=0)]
    []
    """
    hidden = max(2, round(HIDDEN * num_known))
    if num_known - hidden < 2:
        return []
    order = permutation(seed, 0, num_known)
    apart = (FOLDS - 1) * hidden < num_known
    starts = [hidden * fold if apart else num_known * fold // FOLDS for fold in range(FOLDS)]
    return [np.sort(order[np.arange(start, start + hidden) % num_known]) for start in starts]


@dataclass(frozen=True, eq=False)
class Trials:
    """Everything that trials have in common.

    Args:
        trunk: What the networks stand on.
        task: The images; only those with a known class are used.
        base: What all stages have in common.
        mode: ncd hides classes; gcd hides half of the other images' labels as well.
        folder: Where finished trials are kept, so that a stopped run does none twice.
        options: Of the mode's method, beside the strength.
        start: Where its classes start: at `clusters`, or anywhere.
    """

    trunk: FrozenEncoder
    task: DiscoveryTask
    base: TrainConfig
    mode: Mode
    folder: Path
    options: Mapping[str, Value]
    start: str

    def run(self, strengths: Sequence[float]) -> Iterator[Trial]:
        """Every strength in every fold."""
        for fold, hidden in enumerate(folds(self.task.num_known, self.base.seed)):
            task, truth = self._hide(hidden)
            start = None
            for strength in strengths:
                path = self.folder / f"{self.mode}-{fold}-{strength:g}.npz"
                if not path.exists():
                    start = start or self._begin(task)
                    self._try(task, truth, *start, strength, path)
                probability, correct = _kept(path, task)
                yield Trial(fold, strength, float(correct.mean()), probability, correct)

    def _hide(
        self, hidden: Int64[np.ndarray, " hidden"]
    ) -> tuple[DiscoveryTask, Int64[np.ndarray, " images"]]:
        """The task of finding some known classes, and the truth: the hidden ones come last."""
        old, count = self.task.label, self.task.num_known
        rest = np.setdiff1d(np.arange(count), hidden)
        number = np.full(count + 1, UNKNOWN)
        number[np.concatenate([rest, hidden])] = np.arange(count)
        truth, label = number[old], number[old]
        label[truth >= len(rest)] = UNKNOWN
        if self.mode == "gcd":
            chosen = permutation(self.base.seed, 1, len(label)) % 2 == 0
            label[chosen] = UNKNOWN
        return DiscoveryTask(label, self.task.labeled, len(rest), len(hidden)), truth

    def _begin(self, task: DiscoveryTask) -> StageInit:
        """What all strengths of a fold start from."""
        stage = known_stage(self.trunk, task, replace(self.base, epochs="auto"))
        stage.try_out()
        return begun(self.trunk, stage.method, task, self.base.seed, self.start)

    def _try(
        self,
        task: DiscoveryTask,
        truth: np.ndarray,
        known: Method[Any],
        start: Start | None,
        strength: float,
        path: Path,
    ) -> None:
        options = dict(self.options) | strength_options(self.mode, strength, task.num_novel)
        stage = class_stage(
            self.trunk, task, self.base, known, MODE_METHOD[self.mode], options, start
        )
        stage.try_out(SHORT)
        layer, heads = still(stage.method.backbone), still(heads_of(stage.method))
        with torch.inference_mode():
            rows = torch.from_numpy(task.unlabeled)
            features = apply_layer(layer, self.trunk.kept.center[rows])
            disjoint = self.mode == "ncd"
            found = class_probability(heads, features, task.num_known, disjoint)
        probability = found.numpy()
        y, x = truth[task.unlabeled], probability.argmax(axis=1)
        match = novel_match if self.mode == "ncd" else joint_match
        correct = right(y, x, match(y, x, task.num_known))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp.npz")
        np.savez(partial, probability=probability, correct=correct)
        partial.replace(path)


def _kept(path: Path, task: DiscoveryTask) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and whether they are right, from the file of a trial."""
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
    """The strength with the highest mean accuracy over the folds; of equals, the smallest."""
    strengths = sorted({trial.strength for trial in trials})
    return max(strengths, key=lambda strength: mean_accuracy(trials, strength))


def mean_accuracy(trials: Sequence[Trial], strength: float) -> float:
    """Over the folds."""
    return fmean(trial.accuracy for trial in trials if trial.strength == strength)
