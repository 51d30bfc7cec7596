"""The trials of each stage of the search, in the order of their choice; see docs/lab.md."""

from typing import Any

Trial = dict[str, Any]

NETWORKS = "benchmarks/search/networks.py:"
EARLY: Trial = {"backbone": NETWORKS + "early_avg"}
MUON: Trial = {"optimizer": "muon", "lr": 0.004}


def trials(base: Trial, changes: list[Trial]) -> list[Trial]:
    """Return a trial for each change of a base."""
    return [{**base, **change} for change in changes]


CIFAR: Trial = {"data": "cifar10", "method": "simclr", "average": 0.98}
COUNTED: Trial = {"steps_by": "fastest"}
"""Steps are counted by the fastest of some: since stage 2, see docs/lab.md."""

GROW: Trial = {"grow": [0.75]}

STAGES: dict[str, list[Trial]] = {
    "1": trials(
        CIFAR | {"seconds": 180},
        [
            {},
            {"grow": [0.75]},
            MUON,
            {"grow": [0.5, 0.75, 1.0]},
            {"view.scale": [0.2, 1.0]},
            EARLY,
        ],
    ),
    "2": trials(
        CIFAR | COUNTED | {"seconds": 180},
        [
            {},
            EARLY,
            EARLY | MUON,
            EARLY | MUON | {"grow": [0.75]},
            EARLY | MUON | {"lr": 0.01},
            EARLY | MUON | {"view.scale": [0.2, 1.0]},
        ],
    ),
    "3": trials(
        CIFAR | COUNTED | EARLY | MUON | GROW | {"seconds": 180},
        [
            {"grow": [0.5, 0.75]},
            {"grow": [0.5]},
            {"view.scale": [0.2, 1.0]},
            {"batch_size": 128},
            {"lr": 0.01},
            {"batch_size": 512},
            {"option.temperature": 0.1},
            {"option.temperature": 0.3},
            {"backbone": NETWORKS + "early_max"},
            {"backbone": NETWORKS + "late_avg"},
            {"backbone": NETWORKS + "early24"},
            {"backbone": NETWORKS + "early512"},
            {"weight_decay": 0.3},
            {"warmup": 0.02},
            {"option.last_norm": True},
            {"view.jitter": 0.4},
        ],
    ),
    "4": trials(
        CIFAR | COUNTED | EARLY | MUON | GROW | {"seconds": 1620, "view.scale": [0.2, 1.0]},
        [{}, {"backbone": NETWORKS + "early48"}, {"grow": [0.5, 0.75]}, {"batch_size": 128}],
    ),
}
