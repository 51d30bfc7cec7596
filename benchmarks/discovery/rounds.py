"""Measure what a person's labels bring to a discovery, round by round.

    python benchmarks/discovery/rounds.py FOLDER -o docs/discovery/rounds.csv

In each of five rounds, ten images are labeled: those that the page of the discovery puts first, or
ten at random. Beside that, one round in which every novel class is named. After each round all
is learned again from all labels, by the stages of `nearkin discover`. FOLDER is that of
compare.py. Protocol: docs/discovery.md.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from compare import VIEWS, Bench, Row, cell
from jaxtyping import Int64

from nearkin.discovery.assignments import Assignments, assign, label_first
from nearkin.discovery.classifier import Classifier, Predictions, frozen_copy, heads_of
from nearkin.discovery.data import DiscoveryTask, Mode
from nearkin.discovery.features import ViewSettings
from nearkin.discovery.scores import joint_match
from nearkin.discovery.stages import class_stage, known_stage, stage_init
from nearkin.discovery.trials import OBJECTIVES, Candidate, shorter
from nearkin.measures.matching import right
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNKNOWN

ROUNDS = 5
LABELS = 10  # In each round
OBJECTIVE = {"gcd": "simgcd", "ncd": "joint_ncl"}
COLUMNS = (
    "mode", "data", "seed", "arm", "round", "labels", "classes", "all", "known", "novel",
    "seconds",
)  # fmt: skip
Labels = Int64[np.ndarray, " images"]
"""The class of each image as in `Bench.truth`, `UNKNOWN` where nobody has labeled it."""


@dataclass(frozen=True, eq=False)
class Round:
    """A discovery from the labels that are there."""

    bench: Bench
    mode: Mode
    label: Labels

    @cached_property
    def order(self) -> list[int]:
        """All classes: those that were known at first, those with a label since, then others."""
        first, every = self.bench.task(self.mode).num_known, int(self.bench.truth.max()) + 1
        labeled = set(self.label.tolist())
        return sorted(range(every), key=lambda number: (number >= first, number not in labeled))

    @cached_property
    def task(self) -> DiscoveryTask:
        """As many novel classes are searched as are without a label."""
        start, labeled = self.bench.task(self.mode), set(self.label.tolist())
        known = [n for n in self.order if n < start.num_known or n in labeled]
        number = np.append(np.argsort(self.order), UNKNOWN)  # the last entry is that of UNKNOWN
        count = len(self.order) - len(known)
        return DiscoveryTask(number[self.label], start.rows, len(known), count)

    @cached_property
    def classifier(self) -> Classifier:
        """What the stages learn, in half the steps of a usual discovery."""
        bench, task = self.bench, self.task
        known = known_stage(bench.encoder, task, bench.base)
        shorter(known, "known")
        init = stage_init(bench.encoder, known.method, task, bench.seed, "clusters")
        objective = OBJECTIVE[self.mode]
        candidate = Candidate(objective, OBJECTIVES[objective].default)
        options = candidate.options(self.mode, task.num_novel)
        stage = class_stage(bench.encoder, task, bench.base, init, candidate.method, options)
        shorter(stage, "class")
        return Classifier(
            layer=frozen_copy(stage.method.backbone),
            heads=frozen_copy(heads_of(stage.method)),
            classes=tuple(map(str, range(task.num_known + task.num_novel))),
            num_known=task.num_known,
            disjoint=self.mode == "ncd",
            calibration=None,
            drawn=ViewSettings(bench.base.augment, VIEWS, bench.seed),
        )

    def predictions(self, classifier: Classifier) -> Predictions:
        """Classify all images."""
        paths = tuple(map(str, self.bench.images.names))
        return classifier.predict(self.bench.encoder.cached, paths, self.task.label)

    @cached_property
    def assignments(self) -> Assignments:
        """What assignments.csv has: all images without a label, those held out too."""
        return assign(self.predictions(self.classifier))

    @cached_property
    def scores(self) -> dict[str, float]:
        """Score images held out, all classes possible, under one match of all classes."""
        held_out, num_first = self.bench.held_out, self.bench.task(self.mode).num_known
        y = self.bench.truth[held_out]
        x = self.predictions(replace(self.classifier, disjoint=False)).cluster[held_out]
        correct, known = right(y, x, joint_match(y, x, num_first)), y < num_first
        return {
            "all": correct.mean(),
            "known": correct[known].mean(),
            "novel": correct[~known].mean(),
        }

    def labeled(self, rows: np.ndarray) -> "Round":
        """Return the next round, in which these images have their true label."""
        label = self.label.copy()
        label[rows] = self.bench.truth[rows]
        # Other images of what is now a known class have no label yet.
        return Round(self.bench, "gcd", label)

    def put_first(self) -> np.ndarray:
        """Return the images that the page puts first."""
        first = label_first(self.assignments, self.task.rows)[:LABELS]
        return np.asarray(self.assignments.rows[first])

    def at_random(self, number: int) -> np.ndarray:
        """Return images at random."""
        rng = np.random.default_rng([self.bench.seed, number])
        return rng.permutation(self.task.unlabeled)[:LABELS]

    def named(self) -> "Round":
        """Return the next round, after a person has named each novel class.

        The name is the true class of most of its core images, which are labeled so.
        """
        found, label = self.assignments, self.label.copy()
        core = np.array([flag == "core" for flag in found.flag])
        core &= np.isin(found.rows, self.task.rows)
        for cluster in range(self.task.num_known, len(found.classes)):
            rows = found.rows[core & (found.cluster == cluster)]
            if len(rows):
                label[rows] = np.bincount(self.bench.truth[rows]).argmax()
        return Round(self.bench, "gcd", label)


def rounds_of(bench: Bench, mode: Mode) -> Iterator[Row]:
    """Run all rounds of a data set and seed."""
    label = np.where(bench.task(mode).label == UNKNOWN, UNKNOWN, bench.truth)
    start = Round(bench, mode, label)
    yield from _row(start, mode, "start", 0)
    yield from _row(start.named(), mode, "classes named", 1)
    for arm in ("put first", "random"):
        now = start
        for number in range(1, ROUNDS + 1):
            rows = now.put_first() if arm == "put first" else now.at_random(number)
            now = now.labeled(rows)
            yield from _row(now, mode, arm, number)


def _row(now: Round, mode: Mode, arm: str, number: int) -> Iterator[Row]:
    started = time.process_time()
    scores = now.scores
    yield {
        "mode": mode,
        "data": now.bench.name,
        "seed": now.bench.seed,
        "arm": arm,
        "round": number,
        "labels": len(now.task.labeled),
        "classes": now.task.num_known,
        "seconds": round(time.process_time() - started, 1),
        **scores,
    }


def main() -> None:
    """Run what is missing in a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["digits", "cifar10"])
    parser.add_argument("--modes", nargs="+", choices=list(OBJECTIVE), default=list(OBJECTIVE))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options = parser.parse_args()
    rows: list[Row] = []
    if options.output.exists():
        rows = [dict(row) for row in read_csv(options.output)]
    for seed in options.seeds:
        for name in options.sets:
            for mode in options.modes:
                key = mode, name, str(seed)
                done = [r for r in rows if (r["mode"], r["data"], str(r["seed"])) == key]
                if len(done) == 2 + 2 * ROUNDS:
                    continue
                rows = [row for row in rows if row not in done]  # rounds build on one another
                for row in rounds_of(Bench(name, seed, options.folder), mode):
                    print({key: cell(value) for key, value in row.items()}, flush=True)
                    rows.append(row)
                    cells = [[cell(one.get(column, "")) for column in COLUMNS] for one in rows]
                    write_csv(options.output, COLUMNS, cells)


if __name__ == "__main__":
    main()
