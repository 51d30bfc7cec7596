"""How well the number of novel classes is estimated, on tasks whose number is known.

    python -m benchmarks number --data FOLDER [--part report] [--beside OTHER.py]

FOLDER has the data and an encoder of each set; see benchmarks/discovery/sets.py. Tasks of `design`
are those that the estimate was built on; those of `report` have other seeds and other classes.
OTHER.py is the number.py of another commit, whose estimates stand beside. docs/discovery.md has
the protocol and what came of it.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from runpy import run_path
from statistics import fmean, median
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import ttest_1samp

from benchmarks.discovery.sets import CPU, SETS, Bench
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.discovery.number import NumberOfClasses, number_of_novel_classes
from nearkin.encoders.encoder import load
from nearkin.types import UNLABELED

Part = Literal["design", "report"]
SOURCES: Final[dict[Part, tuple[str, ...]]] = {
    "design": ("digits", "cifar10", "caltech", "omniglot"),
    "report": ("fashion", "caltech", "omniglot"),
}
FIRST: Final[dict[Part, int]] = {"design": 0, "report": 6000}
"""The seed of the first task; no seed below was used in any earlier choice or report."""
MOST_NOVEL, FEWEST_KNOWN = 120, 4
FEWEST, FEWEST_LABELED, MOST = 10, 8, 1000  # Images of a class, of the largest if they differ
TAIL, SMALLEST = 10, 4  # Then, images of the largest for one of the smallest, which has as many
MANY = 7  # From so many classes on, the error counts in percent; below, in classes
OPTIONS: Final = (
    Option("part", "report", "which tasks", choices=tuple(SOURCES), quick="design"),
    Option("sets", sorted({*sum(SOURCES.values(), ())}), "those of the part", quick=["digits"]),
    Option("tasks", 40, "tasks of each data set, half of them in either mode", quick=2),
    Option("beside", "", "number.py of another commit"),
)


@dataclass(frozen=True, eq=False)
class Task:
    """Images of known and novel classes."""

    name: str
    mode: Literal["ncd", "gcd"]
    seed: int
    x: Float[np.ndarray, "n dim"]
    label: Int[np.ndarray, " n"]  # `UNLABELED` for unlabeled images
    true: int  # Novel classes
    known: int


@dataclass(frozen=True, eq=False)
class Estimated:
    """A task, and what an estimate says."""

    task: Task
    chosen: int
    low: int
    high: int
    seconds: float

    @property
    def log_error(self) -> float:
        """Of the logarithm of the number."""
        return abs(log(self.chosen / self.task.true))

    def row(self, who: str) -> Row:
        """Return the row of this task."""
        task, more = self.task, dict[str, float](true=self.task.true, known=self.task.known)
        more |= {"low": self.low, "high": self.high, "seconds": self.seconds}
        case = f"{task.name}, {task.mode}, {task.seed}, {who}"
        return Row(case, self.chosen, "classes", more=more)


def features(name: str, folder: Path) -> tuple[Float[np.ndarray, "n dim"], Int[np.ndarray, " n"]]:
    """Return features of images as they are, kept in the user's cache folder, and the classes."""
    images = Bench(name, 0, folder).images
    encoder = load(SETS[name].encoder.format(folder=folder, data=name))
    extracted = Extraction(encoder, images, UNTOUCHED, CPU, 0).compute()
    return extracted.features.center.numpy(), images.labels


def classes_of(name: str, count: int, part: Part) -> Int[np.ndarray, " some"]:
    """Return the classes that a part takes: half of them, where both parts have the data set."""
    if not all(name in sets for sets in SOURCES.values()):
        return np.arange(count)
    order = np.random.default_rng(99).permutation(count)
    return order[: count // 2] if part == "design" else order[count // 2 :]


def draw_number(rng: np.random.Generator, low: int, high: int) -> int:
    """All orders of magnitude are as likely."""
    return round(exp(rng.uniform(log(low), log(max(low, high)))))


def draw_task(
    name: str,
    x: Float[np.ndarray, "n dim"],
    label: Int[np.ndarray, " n"],
    classes: Int[np.ndarray, " some"],
    seed: int,
) -> Task:
    """Draw numbers of classes and of images, then classes and images.

    How many images of a known class are labeled says nothing of how many a novel one has. Modes
    take turns, and in half of the tasks of each the sizes of classes differ.
    """
    rng, gcd, tail = np.random.default_rng(seed), seed % 2 == 1, seed // 2 % 2 == 1
    novel = draw_number(rng, 3, min(MOST_NOVEL, len(classes) - FEWEST_KNOWN))
    known = draw_number(rng, FEWEST_KNOWN, len(classes) - novel)
    most = int(np.bincount(label)[classes].min())
    images = draw_number(rng, FEWEST, min(MOST, most - FEWEST_LABELED))
    labeled = draw_number(rng, FEWEST_LABELED, min(MOST, most - images if gcd else most))
    drawn = rng.permutation(classes)[: novel + known]
    place = rng.permutation(len(drawn)) / (len(drawn) - 1)
    share = float(TAIL) ** -place if tail else np.ones(len(drawn))
    rows, given = [], []
    for order, (of, part_of) in enumerate(zip(drawn, share, strict=True)):
        left = rng.permutation(np.flatnonzero(label == of))
        if order >= novel:
            count = max(SMALLEST, round(labeled * part_of))
            rows.append(left[:count])
            given.append(np.full(count, order - novel))
            left = left[count:]
        if order < novel or gcd:
            rows.append(left[: max(SMALLEST, round(images * part_of))])
            given.append(np.full(len(rows[-1]), UNLABELED))
    every, known_label = np.concatenate(rows), np.concatenate(given)
    return Task(name, "gcd" if gcd else "ncd", seed, x[every], known_label, novel, known)


def estimated(task: Task, count: Callable[..., NumberOfClasses]) -> Estimated:
    """Estimate the number in a task."""
    started = time.process_time()
    found = count(task.x, task.label, disjoint=task.mode == "ncd", seed=task.seed)
    return Estimated(task, found.chosen, found.low, found.high, time.process_time() - started)


def figures(every: Sequence[Estimated]) -> dict[str, Any]:
    """Summarize some estimates."""
    errors = [abs(each.chosen - each.task.true) for each in every]
    many = [e / x.task.true for e, x in zip(errors, every, strict=True) if x.task.true >= MANY]
    few = [e <= 1 for e, each in zip(errors, every, strict=True) if each.task.true < MANY]
    return {
        "tasks": len(every),
        "median_error_of_many": median(many) if many else np.nan,
        "few_at_most_one_off": fmean(few) if few else np.nan,
        "within": fmean(each.low <= each.task.true <= each.high for each in every),
        "width": median(each.high / each.low for each in every),
        "seconds": median(each.seconds for each in every),
    }


def summary(found: dict[str, list[Estimated]]) -> Iterator[Row]:
    """Yield figures of each data set and mode, and how much the estimates differ."""
    names = dict.fromkeys(each.task.name for each in found["now"])
    for name, mode, who in product(("", *names), ("ncd", "gcd", ""), found):
        every = [each for each in found[who] if name in ("", each.task.name)]
        some = [each for each in every if mode in ("", each.task.mode)]
        if some:
            case = f"{name or 'all'}, {mode or 'both'}, {who}"
            yield Row(case, fmean(each.log_error for each in some), "|log|", more=figures(some))
    if "beside" in found and len(found["now"]) > 1:
        pairs = zip(found["beside"], found["now"], strict=True)
        gain = np.array([other.log_error - now.log_error for other, now in pairs])
        interval = tuple(ttest_1samp(gain, 0).confidence_interval())
        yield Row("|log| beside minus now", float(gain.mean()), "", interval=interval)


def run(options: Namespace) -> Iterator[Row]:
    """Estimate the number in each task."""
    count = number_of_novel_classes
    counts: dict[str, Callable[..., NumberOfClasses]] = {"now": count}
    if options.beside:
        counts["beside"] = run_path(options.beside, run_name="beside")[count.__name__]
    found: dict[str, list[Estimated]] = {who: [] for who in counts}
    for name in (each for each in SOURCES[options.part] if each in options.sets):
        x, label = features(name, Path(options.data))
        classes = classes_of(name, int(label.max()) + 1, options.part)
        for seed in range(FIRST[options.part], FIRST[options.part] + options.tasks):
            task = draw_task(name, x, label, classes, seed)
            for who, by in counts.items():
                each = estimated(task, by)
                found[who].append(each)
                yield each.row(who)
    yield from summary(found)
