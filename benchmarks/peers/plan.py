"""Which runs there are: pairs of nearkin and lightly, and baselines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

METHODS: Final = ("simclr", "moco", "byol", "simsiam", "nnclr", "swav")
BASELINES: Final = ("pixels", "untrained")
SEEDED: Final = ("simclr", "moco", "byol")  # with three seeds, and at equal epochs
SEEDS: Final = (0, 1, 2)
DATA: Final = ("cifar10", "fashion")
SIDES: Final = ("nearkin", "lightly")
SMALL, LARGE = "small", "resnet18"

SECONDS: Final = 600.0  # of one core, for each run
EPOCHS: Final = 4  # where runs are compared at equal epochs

Unit = Literal["s", "epochs"]


@dataclass(frozen=True)
class Run:
    """A training of one side, or a baseline."""

    side: str  # nearkin, lightly, or baseline
    network: str
    method: str  # or pixels or untrained, for a baseline
    data: str
    seed: int
    budget: float  # 0 for a baseline
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


def baselines(data: str) -> Iterator[Pair]:
    """Yield what every number of a data set has to beat."""
    untrained = [Run("baseline", network, "untrained", data, 0, 0.0) for network in (SMALL, LARGE)]
    yield Run("baseline", "none", "pixels", data, 0, 0.0), untrained[0]
    yield (untrained[1],)


def plan(seconds: float = SECONDS, epochs: int = EPOCHS) -> list[Pair]:
    """Return all pairs, the most important first."""
    pairs = [next(baselines(data)) for data in DATA]
    for method in METHODS:
        pairs += [pair(SMALL, method, data, 0, seconds) for data in DATA]
    for seed in SEEDS[1:]:
        pairs += [pair(SMALL, method, DATA[0], seed, seconds) for method in SEEDED]
    pairs += [pair(SMALL, method, DATA[0], 0, epochs, "epochs") for method in SEEDED]
    for data in DATA:
        pairs += [pair(LARGE, "simclr", data, 0, seconds), *list(baselines(data))[1:]]
    return pairs


def rows(results: Path) -> list[dict[str, Any]]:
    """Read what is measured so far."""
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    return [json.loads(line) for line in text.splitlines()]
