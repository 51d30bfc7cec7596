"""The tables of docs/discovery.md, from the rows beside that page.

    python -m benchmarks.discovery.tables

Seeds are the sample, and intervals are Student's.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.shared.seeds import interval

PAGE: Final = Path(__file__).parents[2] / "docs" / "discovery.md"
Row = dict[str, str]
Sample = dict[str, float]
"""A score by seed."""

NAMES: Final = {
    "digits": "digits", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10",
    "omniglot": "Omniglot", "caltech": "Caltech-99", "trash": "TrashNet", "flowers": "flowers",
}  # fmt: skip
PARTS: Final = (
    ("NCL", "base"),
    ("NCL+SCL", "base"),
    ("NCL+SCL+HNG", "NCL+SCL"),
    ("NCL+SCL, clusters", "NCL+SCL"),
)


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
    value, half = interval([first[seed] - second[seed] for seed in first if seed in second])
    return f"{short(value, '+')} [{short(value - half, '+')}, {short(value + half, '+')}]"


def result(file: str, arm: str, **values: str) -> Iterator[Sequence[str]]:
    """Yield what an arm has on each set beside k-means."""
    rows = read(file)
    yield "data", "seeds", "all", "known", "novel", "k-means: all", "novel minus k-means"
    for data, name in NAMES.items():
        scores = [
            sample(rows, score, data=data, arm=arm, **values)
            for score in ("all", "known", "novel")
        ]
        k_means = [
            sample(rows, score, data=data, arm="k-means", **values) for score in ("all", "novel")
        ]
        if scores[0]:
            cells = [*map(mean, scores), mean(k_means[0]), difference(scores[2], k_means[1])]
            yield name, str(len(scores[0])), *cells


WIDE: Final = ("caltech", "trash", "flowers")
"""Sets with features that are wider than the layer, which starts at their components there."""


def simgcd() -> Iterator[Sequence[str]]:
    """Yield SimGCD from the start that it takes, beside k-means and the authors' code."""
    rows = read("start.csv")
    yield (
        "data", "seeds", "all", "known", "novel", "k-means: all", "novel minus k-means",
        "all, minus official",
    )  # fmt: skip
    for data, name in NAMES.items():
        arm = "components" if data in WIDE else "known classes first"
        scores = [sample(rows, score, data=data, arm=arm) for score in ("all", "known", "novel")]
        k_means, novel = (
            sample(rows, score, data=data, arm="k-means") for score in ("all", "novel")
        )
        official = sample(rows, "all", data=data, arm="official")
        if scores[0] and official:
            cells = [*map(mean, scores), mean(k_means), difference(scores[2], novel)]
            yield name, str(len(scores[0])), *cells, difference(scores[0], official)


def starts() -> Iterator[Sequence[str]]:
    """Yield the difference between the two starts."""
    rows, arms = read("start.csv"), ("components", "known classes first")
    yield "components minus known classes first", "all", "known", "novel"
    for data, name in NAMES.items():
        both = [
            [sample(rows, score, data=data, arm=arm) for arm in arms]
            for score in ("all", "known", "novel")
        ]
        if both[0][0] and both[0][1]:
            yield name, *(difference(*pair) for pair in both)


def tails() -> Iterator[Sequence[str]]:
    """Yield SimGCD from both starts beside k-means, where classes differ in size."""
    rows, arms = read("tails.csv"), ("known classes first", "components")
    columns = (f"{arm}: {score}" for arm in ("k-means", *arms) for score in ("all", "novel"))
    yield "data", *columns, "all, the start that is taken minus k-means"
    for data, name in NAMES.items():
        found = {
            arm: [sample(rows, score, data=data, arm=arm) for score in ("all", "novel")]
            for arm in ("k-means", *arms)
        }
        taken = arms[data in WIDE]
        if found[taken][0]:
            cells = [mean(each) for arm in found for each in found[arm]]
            yield name, *cells, difference(found[taken][0], found["k-means"][0])


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
    "gcd": simgcd,
    "starts": starts,
    "ncd": partial(result, "mixed.csv", "joint NCL", mode="ncd"),
    "parts": parts,
    "tails": tails,
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
