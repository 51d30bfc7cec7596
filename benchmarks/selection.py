"""What rules of `nearkin select` are worth: accuracy of a probe on what they select.

    python benchmarks/selection.py RUN [RUN ...] [--counts 10,50,100,500] [--seeds 5] [-o FILE.csv]

RUN has embeddings of labeled images of which some are held out as test images. The pool are at
most 5,000 other images, drawn by the seed. A rule selects in rounds: with the images selected so
far as labeled ones, it fills them up to each count in turn, and a linear probe, that of `nearkin
evaluate`, learns from them. The rules see no label; `uncertain`, and `mixture` from the second
round on, see the probe of the round before, whose first images are random, and those of `mixture`
typical and diverse. Printed is the accuracy on all test images, the mean over the seeds and the
standard deviation between them; * marks a paired difference from `random` whose 95 % interval over
the seeds excludes 0.
"""

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

import numpy as np

from nearkin.config import Rule
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import read_all
from nearkin.measures.intervals import mean_interval
from nearkin.measures.probe import LinearProbe, train_probe
from nearkin.measures.selection import ranked
from nearkin.run.folder import RunFolder
from nearkin.types import UNKNOWN

POOL: Final = 5_000
RULES: Final[tuple[Rule, ...]] = get_args(Rule)


def accuracies(
    pool: Embeddings, test: Embeddings, rule: Rule, counts: list[int], seed: int
) -> Iterator[float]:
    """Yield the accuracy on test images after each round."""
    chosen, probe = np.zeros(0, np.int64), None  # type: np.ndarray, LinearProbe | None
    for count in counts:
        first = "random" if rule == "uncertain" else rule
        known = {} if probe is None else margins(probe, pool)
        order = ranked(
            first if probe is None else rule,
            pool.tensor,
            chosen,
            count - len(chosen),
            seed=seed,
            **known,
        )
        chosen = np.concatenate([chosen, order[: count - len(chosen)]])
        labels = np.full(len(pool), UNKNOWN)
        labels[chosen] = pool.labels[chosen]
        if len(np.unique(pool.labels[chosen])) < 2:  # nothing to tell apart yet
            yield float((test.labels == pool.labels[chosen[0]]).mean())
            continue
        probe = train_probe(pool.tensor, labels, seed=seed)
        yield float((probe.predict(test.tensor) == test.labels).mean())


def margins(probe: LinearProbe, pool: Embeddings) -> dict[str, np.ndarray]:
    """Return the margin of the probabilities of each image, and its most likely class."""
    probability = probe.logits(pool.tensor).softmax(dim=1).numpy()
    second, first = np.sort(probability, axis=1)[:, -2:].T
    return {"margin": first - second, "cluster": probability.argmax(axis=1)}


def results(run: Path, counts: list[int], seeds: int) -> dict[Rule, np.ndarray]:
    """Return the accuracy of each rule, seed and count."""
    embeddings = read_all(RunFolder(run).embeddings).labeled()
    test = embeddings.subset(np.flatnonzero(embeddings.splits == "test"))
    rest = np.flatnonzero(embeddings.splits != "test")
    values: dict[Rule, list[list[float]]] = {rule: [] for rule in RULES}
    for seed in range(seeds):
        drawn = np.random.default_rng(seed).permutation(rest)[:POOL]
        pool = embeddings.subset(np.sort(drawn))
        for rule in RULES:
            values[rule].append(list(accuracies(pool, test, rule, counts, seed)))
    return {rule: np.array(of) for rule, of in values.items()}


def main() -> None:
    """Measure every run, and print a table of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--counts", default="10,50,100,500")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    typed = parser.parse_args()
    counts, rows = [int(count) for count in typed.counts.split(",")], list[list[object]]()
    for run in typed.runs:
        start, values = time.process_time(), results(run, counts, typed.seeds)
        print(f"{run.name}, {time.process_time() - start:.0f} s of CPU time")
        print(f"{'rule':10}", *(f"{count:>16}" for count in counts))
        for rule, of in values.items():
            cells = []
            for place in range(len(counts)):
                low, high = mean_interval(of[:, place] - values["random"][:, place])
                mark = "*" if low > 0 or high < 0 else " "
                cells.append(f"{of[:, place].mean():.3f} +- {of[:, place].std(ddof=1):.3f}{mark}")
            print(f"{rule:10}", *(f"{cell:>16}" for cell in cells), flush=True)
            rows += [
                [run.name, rule, count, seed, f"{of[seed, place]:.4f}"]
                for seed in range(typed.seeds)
                for place, count in enumerate(counts)
            ]
    if typed.output is not None:
        with typed.output.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [("run", "rule", "labels", "seed", "accuracy"), *rows]
            )


if __name__ == "__main__":
    main()
