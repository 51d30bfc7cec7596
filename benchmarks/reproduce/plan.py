"""Which runs there are: pairs of nearkin and lightly, floors, and trainings of a given time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

METHODS: Final = ("simclr", "moco", "byol", "simsiam", "nnclr", "swav")
FLOORS: Final = ("pixels", "untrained")
SEEDED: Final = ("simclr", "moco", "byol")  # with three seeds, and at equal epochs
SEEDS: Final = (0, 1, 2)
DATA: Final = ("cifar10", "fashion")
SIDES: Final = ("nearkin", "lightly")
SMALL, LARGE = "small", "resnet18"

SECONDS: Final = 600.0  # of one core, for each run
EPOCHS: Final = 4  # where runs are compared at equal epochs

RECIPE: Final = ("--config", "recipe:cifar10/simclr", "--epochs", "auto", "--image-size", "auto")
ARMS: Final = {
    "auto": (),
    "published": RECIPE,
    "published, same network": (*RECIPE, "--backbone", "auto"),
}
MEASURES: Final = ("kNN top-1", "linear probe", "cluster accuracy")
HELD_OUT: Final = {"digits": ("--val", "0.2"), "omniglot": ("--val", "0.2")}
"""Options of data that have no test part."""

Unit = Literal["s", "epochs"]


@dataclass(frozen=True)
class Run:
    """A training of one side, or a floor."""

    side: str  # nearkin, lightly, or floor
    network: str
    method: str  # or pixels or untrained, for a floor
    data: str
    seed: int
    budget: float  # 0 for a floor
    unit: Unit = "s"

    @property
    def name(self) -> str:
        """A name for files, and the key of its row.

        >>> Run("lightly", "small", "moco", "cifar10", 1, 600.0).name
        'cifar10-moco-small-600s-1-lightly'
        """
        parts = (self.data, self.method, self.network, f"{self.budget:g}{self.unit}", self.seed)
        return "-".join(map(str, (*parts, self.side)))


Pair = tuple[Run, ...]
"""Runs that are made at the same time, one core each."""


def pair(network: str, method: str, data: str, seed: int, budget: float, unit: Unit = "s") -> Pair:
    """Return the run of each side."""
    return tuple(Run(side, network, method, data, seed, budget, unit) for side in SIDES)


def floors(data: str) -> Iterator[Pair]:
    """Yield what every number of a data set has to beat."""
    untrained = [Run("floor", network, "untrained", data, 0, 0.0) for network in (SMALL, LARGE)]
    yield Run("floor", "none", "pixels", data, 0, 0.0), untrained[0]
    yield (untrained[1],)


def plan(seconds: float = SECONDS, epochs: int = EPOCHS) -> list[Pair]:
    """Return all pairs, the most important first."""
    pairs = [next(floors(data)) for data in DATA]
    for method in METHODS:
        pairs += [pair(SMALL, method, data, 0, seconds) for data in DATA]
    for seed in SEEDS[1:]:
        pairs += [pair(SMALL, method, DATA[0], seed, seconds) for method in SEEDED]
    pairs += [pair(SMALL, method, DATA[0], 0, epochs, "epochs") for method in SEEDED]
    for data in DATA:
        pairs += [pair(LARGE, "simclr", data, 0, seconds), *list(floors(data))[1:]]
    return pairs


@dataclass(frozen=True)
class Timed:
    """A training of a given time."""

    data: str
    method: str
    minutes: int
    threads: int
    seed: int = 0
    arm: str = "auto"

    @property
    def name(self) -> str:
        """A name for files, and the key of its row.

        >>> Timed("digits", "simclr", 2, 1, 0, "published, same network").name
        'digits-simclr-2m-1t-0-published-same-network'
        """
        arm = self.arm.replace(",", "").replace(" ", "-")
        return f"{self.data}-{self.method}-{self.minutes}m-{self.threads}t-{self.seed}-{arm}"

    @property
    def options(self) -> list[str]:
        """Those of `nearkin train`."""
        method = ["--method", self.method] if self.method != "simclr" else []
        length = ["--max-time", f"{self.minutes}m", "--seed", str(self.seed)]
        return [*method, *length, *HELD_OUT.get(self.data, ()), *ARMS[self.arm]]


def timed_plan() -> list[Timed]:
    """Return all trainings of a given time, the most important first."""
    runs = [Timed("cifar10", "simclr", 15, 2)]
    runs += [Timed("cifar10", method, 30, 1) for method in ("byol", "nnclr")]
    runs += [Timed("cifar10", "simclr", 45, 1), Timed("cifar10", "instdisc", 30, 1)]
    for data, minutes in (("digits", 2), ("omniglot", 3)):
        runs += [Timed(data, "simclr", minutes, 1, seed, arm) for seed in SEEDS for arm in ARMS]
    runs += [Timed("caltech", "simclr", 30, 2)]
    runs += [Timed("fashion10k", "simclr", 15, 1, seed) for seed in SEEDS]
    runs += [Timed("cifar10", "simclr", 15, 2, seed) for seed in SEEDS[1:]]
    runs += [Timed("cifar10", "simclr", 45, 1, seed) for seed in SEEDS[1:]]
    return runs


def rows(results: Path) -> list[dict[str, Any]]:
    """Read what is measured so far."""
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    return [json.loads(line) for line in text.splitlines()]
