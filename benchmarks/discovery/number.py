"""How well the number of novel classes is estimated: tasks whose number is known.

    python benchmarks/discovery/number.py FOLDER -o docs/discovery/number.csv

FOLDER is that of compare.py: the data, and an encoder of each in runs/NAME. Features are computed
once, of images as they are. A row is written once its task is done, so a stopped benchmark goes on
where it was. `--part design` has the tasks that the estimate was built on, `--part report` those
that docs/discovery.md reports; they share no classes. On the first tasks of each data set, the
three rules of rules.py are beside the estimate. Protocol: docs/discovery.md.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
import rules
import torch
from compare import CPU, SETS
from jaxtyping import Float, Int

from nearkin.data.opening import open_images
from nearkin.discovery.features import Extraction, ViewSettings
from nearkin.discovery.number import number_of_novel_classes
from nearkin.encoders.encoder import load
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNKNOWN

Part = Literal["design", "report"]
SOURCES: dict[Part, dict[str, int]] = {
    "design": {"digits": 10, "cifar10": 10, "caltech": 10},
    "report": {"fashion": 20, "caltech": 20, "omniglot": 20},
}
"""Data sets of each part, and tasks of each; half of them in either mode."""
THREE_RULES = 8  # Tasks of each data set to which these are applied; they take long
PER_CLASS = 1200  # Images of each class whose features are computed, at most
MOST_NOVEL, FEWEST_KNOWN = 120, 4
FEWEST, MOST = 10, 1000  # Images of a class, of the largest ones if classes are unequal
FEWEST_LABELED = 8
TAIL = 10  # Images of the largest class for one of the smallest, in unequal tasks
SMALLEST = 4  # Images that a class has at least
COLUMNS = (
    "part", "data", "mode", "tail", "task", "known", "labeled", "images", "true", "estimate",
    "low", "high", "linkage", "silhouette", "seconds", "three_rules", "three_low", "three_high",
    "three_silhouette", "three_dtc", "three_gcd", "three_seconds",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class DataSet:
    """Features of a data set, and its classes."""

    x: Float[np.ndarray, "n dim"]
    label: Int[np.ndarray, " n"]
    names: Sequence[str]

    def classes(self, name: str, part: Part) -> Int[np.ndarray, " some"]:
        """Return the classes that a part takes; where both have the data set, half of them."""
        every = np.arange(len(self.names))
        if name == "caltech":
            half = np.random.default_rng(99).permutation(every)
            return half[:49] if part == "design" else half[49:]
        return every


def features(folder: Path, name: str) -> DataSet:
    """Return the features in a file, or compute them."""
    path = folder / "features" / f"{name}-number.npz"
    if not path.exists():
        images = open_images(str(folder / SETS[name].data) if name != "digits" else name)
        rng = np.random.default_rng(0)
        rows = [
            rng.permutation(np.flatnonzero(images.labels == number))[:PER_CLASS]
            for number in range(len(images.classes))
        ]
        images = images.subset(np.sort(np.concatenate(rows)))
        encoder, no_views = load(folder / "runs" / name), ViewSettings("simclr", 0, 0)
        cached, _ = Extraction(encoder, images, no_views, CPU, 0).compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=cached.center.numpy(), label=images.labels, names=images.classes)
    with np.load(path) as stored:
        return DataSet(stored["x"], stored["label"], stored["names"].tolist())


@dataclass(frozen=True, eq=False)
class Task:
    """Images of known and novel classes."""

    x: Float[np.ndarray, "n dim"]
    label: Int[np.ndarray, " n"]  # `UNKNOWN` for unlabeled images
    true: int  # Novel classes
    known: int


def _draw_number(rng: np.random.Generator, low: int, high: int) -> int:
    """All orders of magnitude are as likely."""
    return round(exp(rng.uniform(log(low), log(max(low, high)))))


def draw_task(data: DataSet, name: str, part: Part, mode: str, tail: bool, seed: int) -> Task:
    """Draw numbers of classes and of images, then classes and images.

    How many images of a known class are labeled says nothing of how many a novel one has.
    """
    rng = np.random.default_rng(seed)
    classes = data.classes(name, part)
    novel = _draw_number(rng, 3, min(MOST_NOVEL, len(classes) - FEWEST_KNOWN))
    known = _draw_number(rng, FEWEST_KNOWN, len(classes) - novel)
    most = int(np.bincount(data.label)[classes].min())
    images = _draw_number(rng, FEWEST, min(MOST, most - FEWEST_LABELED))
    labeled = _draw_number(
        rng, FEWEST_LABELED, min(MOST, most - images if mode == "gcd" else most)
    )
    drawn = rng.permutation(classes)[: novel + known]
    place = rng.permutation(len(drawn)) / (len(drawn) - 1)
    share = float(TAIL) ** -place if tail else np.ones(len(drawn))
    rows, label = [], []
    for number, (of, part_of) in enumerate(zip(drawn, share, strict=True)):
        left = rng.permutation(np.flatnonzero(data.label == of))
        if number >= novel:
            count = max(SMALLEST, round(labeled * part_of))
            rows.append(left[:count])
            label.append(np.full(count, number - novel))
            left = left[count:]
        if number < novel or mode == "gcd":
            rows.append(left[: max(SMALLEST, round(images * part_of))])
            label.append(np.full(len(rows[-1]), UNKNOWN))
    order = rng.permutation(sum(map(len, rows)))
    every = np.concatenate(rows)[order]
    return Task(data.x[every], np.concatenate(label)[order], novel, known)


def run(task: Task, mode: str, seed: int, three: bool) -> Row:
    """Estimate the number in a task."""
    disjoint = mode == "ncd"
    started = time.process_time()
    found = number_of_novel_classes(task.x, task.label, disjoint=disjoint, seed=seed)
    row: Row = {
        "known": task.known,
        "labeled": int((task.label != UNKNOWN).sum()),
        "images": len(task.x),
        "true": task.true,
        "estimate": found.chosen,
        "low": found.low,
        "high": found.high,
        **found.estimates,
        "seconds": round(time.process_time() - started, 1),
    }
    if three:
        started = time.process_time()
        old = rules.three_rules(task.x, task.label, disjoint=disjoint, seed=seed)
        row |= {"three_rules": old.chosen, "three_low": old.low, "three_high": old.high}
        row |= {f"three_{rule}": value for rule, value in old.estimates.items()}
        row["three_seconds"] = round(time.process_time() - started, 1)
    return row


def tasks(part: Part, sets: Sequence[str]) -> Iterator[Row]:
    """Name the tasks of a part. Half of them are unequal; task seeds are never shared."""
    for name in sets:
        for number in range(SOURCES[part][name]):
            seed = number + (4000 if part == "report" else 0)
            mode, tail = ("ncd", "gcd")[number % 2], number // 2 % 2
            yield {"part": part, "data": name, "mode": mode, "tail": tail, "task": seed}


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table by data set and mode, then one beside the three rules."""
    yield "| | tasks | median error | log error | within |"
    yield "|" + " --- |" * 5
    for name in ("", *dict.fromkeys(row["data"] for row in rows)):
        for mode in ("ncd", "gcd"):
            of = [r for r in rows if r["mode"] == mode and name in ("", r["data"])]
            yield f"| {name or 'all'}, {mode} | {_cells(of)} |"
    for tail, word in ((0, "equal"), (1, "unequal")):
        yield f"| {word} | {_cells([row for row in rows if int(row['tail']) == tail])} |"
    yield f"| all | {_cells(rows)} |"
    both = [row for row in rows if row.get("three_rules")]
    for mode in ("ncd", "gcd"):
        of = [row for row in both if row["mode"] == mode]
        yield f"| {mode}, beside the three rules | {_cells(of)} |"
        yield f"| {mode}, their median | {_cells(of, 'three_rules', 'three_')} |"
        for rule in ("silhouette", "dtc", "gcd"):
            yield f"| {mode}, {rule} | {_cells(of, f'three_{rule}', 'three_')} |"


def _cells(rows: Sequence[Row], chosen: str = "estimate", prefix: str = "") -> str:
    columns = chosen, f"{prefix}low", f"{prefix}high", "true"
    of = [[float(row[column]) for column in columns] for row in rows]
    if not of:
        return "0 | | | "
    error = median(abs(x - true) / true for x, _, _, true in of)
    logs = fmean(abs(log(x / true)) for x, _, _, true in of)
    within = fmean(low <= true <= high for _, low, high, true in of)
    return f"{len(of)} | {error:.0%} | {logs:.2f} | {within:.0%}"


def main() -> None:
    """Run what is missing in a table, and print the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--part", choices=list(SOURCES), default="report")
    parser.add_argument("--sets", nargs="+", choices=list(SETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    if options.output.exists():
        rows = [dict(row) for row in read_csv(options.output)]
    done = {tuple(str(row[c]) for c in COLUMNS[:5]) for row in rows}
    sets = {}
    for task in tasks(options.part, options.sets or list(SOURCES[options.part])):
        if tuple(map(str, task.values())) in done:
            continue
        name, seed = task["data"], task["task"]
        if name not in sets:
            sets[name] = features(options.folder, name)
        drawn = draw_task(sets[name], name, options.part, task["mode"], task["tail"] == 1, seed)
        three = seed % 1000 < THREE_RULES
        rows.append(task | run(drawn, task["mode"], seed, three))
        print({key: value for key, value in rows[-1].items() if key != "part"}, flush=True)
        write_csv(options.output, COLUMNS, [[row.get(c, "") for c in COLUMNS] for row in rows])
    for line in summary([row for row in rows if row["part"] == options.part]):
        print(line)


if __name__ == "__main__":
    main()
