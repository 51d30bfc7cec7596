"""The tables of docs/discovery.md, from the rows beside that page.

    python -m benchmarks.discovery.tables

Seeds are the sample: a mean of few has the interval of Student's t, which a bootstrap of as many
values is too narrow for (of 5 seeds it covers 84 % where it says 95).
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

PAGE: Final = Path(__file__).parents[2] / "docs" / "discovery.md"
Row = dict[str, str]
Sample = dict[str, float]
"""A score by seed."""

NAMES: Final = {
    "digits": "digits", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10",
    "omniglot": "Omniglot", "caltech": "Caltech-99",
}  # fmt: skip
RESULTS: Final = {"gcd": "SimGCD", "ncd": "joint NCL"}
PARTS: Final = (
    ("NCL", "base"),
    ("NCL+SCL", "base"),
    ("NCL+SCL+HNG", "NCL+SCL"),
    ("NCL+SCL, clusters", "NCL+SCL"),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of the length of its 95 % interval over seeds.

    >>> "{:.3f} {:.3f}".format(*interval([0.1, 0.2, 0.3]))
    '0.200 0.248'
    """
    from scipy.stats import t

    x = np.asarray(values)
    return float(x.mean()), float(t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5)


def read(name: str) -> list[Row]:
    """Return the rows of a file beside the page."""
    with (PAGE.parent / "discovery" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sample(rows: Sequence[Row], score: str, **values: str) -> Sample:
    """Return a score by seed, of the rows that have these values."""
    chosen = (row for row in rows if values.items() <= row.items())
    return {row["seed"]: float(row[score]) for row in chosen if row[score]}


def short(value: float, sign: str = "") -> str:
    """Write a share to three digits, without the zero before the point."""
    return f"{value:{sign}.3f}".replace("0.", ".", 1)


def mean(values: Sample) -> str:
    """Write a mean and its interval."""
    return "{} ± {}".format(*map(short, interval([*values.values()])))


def difference(first: Sample, second: Sample) -> str:
    """Write the mean difference of the same seeds, and its interval."""
    value, half = interval([first[seed] - second[seed] for seed in first])
    return f"{short(value, '+')} [{short(value - half, '+')}, {short(value + half, '+')}]"


def mixed() -> Iterator[Sequence[str]]:
    """Yield the result of each set and mode beside k-means."""
    rows = read("mixed.csv")
    yield "data, mode", "all", "known", "novel", "k-means: all", "novel minus k-means"
    for mode, arm in RESULTS.items():
        for data, name in NAMES.items():
            scores = [
                sample(rows, score, mode=mode, data=data, arm=arm)
                for score in ("all", "known", "novel")
            ]
            k_means = [
                sample(rows, score, mode=mode, data=data, arm="k-means")
                for score in ("all", "novel")
            ]
            cells = [*map(mean, scores), mean(k_means[0]), difference(scores[2], k_means[1])]
            yield f"{name}, {mode}", *cells


def official() -> Iterator[Sequence[str]]:
    """Yield SimGCD minus the loss of its authors' code."""
    rows = read("mixed.csv")
    yield "data", "all", "known", "novel"
    for data, name in NAMES.items():
        cells = [
            difference(*(
                sample(rows, score, mode="gcd", data=data, arm=arm)
                for arm in ("SimGCD", "SimGCD, official")
            ))
            for score in ("all", "known", "novel")
        ]  # fmt: skip
        yield name, *cells


def parts() -> Iterator[Sequence[str]]:
    """Yield what parts of NCL add to the accuracy of novel training images."""
    yield "difference", "Fashion-MNIST", "CIFAR-10"
    for first, second in PARTS:
        cells = [
            difference(*(
                sample(read(f"{data}.csv"), "train", split="first", arm=arm)
                for arm in (first, second)
            ))
            for data in ("fashion", "cifar10")
        ]  # fmt: skip
        yield f"{first} minus {second}", *cells


TABLES: Final[dict[str, Callable[[], Iterator[Sequence[str]]]]] = {
    "mixed": mixed, "official": official, "parts": parts,
}  # fmt: skip


def written(page: str) -> str:
    """Return a page with all tables made anew, each between `<!-- NAME -->` and `<!-- end -->`."""
    for name, make in TABLES.items():
        head, *rest = ("| " + " | ".join(cells) + " |" for cells in make())
        rule = "|---" * (head.count("|") - 1) + "|"
        table = "\n".join([f"<!-- {name} -->", head, rule, *rest, "<!-- end -->"])
        page = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _: table, page, flags=re.S)  # noqa: B023
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
