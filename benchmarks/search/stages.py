"""The trials of each stage of the search, in the order of their choice; see docs/lab.md.

What stages 1 to 4 compared has been taken over; they are in the history, at the commits of their
rows. Settings are those of `TrainConfig`; `option.X` is an option of the method, and `view.X` a
field of all views.
"""

from typing import Any

Trial = dict[str, Any]

NETWORKS = "benchmarks/search/networks.py:"


def trials(base: Trial, changes: list[Trial]) -> list[Trial]:
    """Return a trial for each change of a base."""
    return [{**base, **change} for change in changes]


SHORT: Trial = {"seconds": 180}
CIFAR: Trial = SHORT | {"data": "cifar10"}
FASHION: Trial = SHORT | {"data": "fashion", "method": "simclr"}
CALTECH: Trial = {"seconds": 540, "data": "caltech99", "method": "simclr"}
MUON: Trial = {"optimizer": "muon", "lr": 0.004}
CROP: Trial = {"augment": "simsiam_cifar"}
TAKEN: Trial = MUON | CROP  # What SimCLR gained from

STAGES: dict[str, list[Trial]] = {
    "moco": trials(
        CIFAR | {"method": "moco"},
        [
            {},
            TAKEN,
            TAKEN | {"option.momentum": 0.99},
            TAKEN | {"option.momentum": 0.99, "option.symmetric": True},
            TAKEN | {"option.momentum": 0.99, "option.queue_size": 4096},
            TAKEN | {"option.momentum": 0.99, "option.temperature": 0.1},
        ],
    ),
    "byol": trials(
        CIFAR | {"method": "byol"},
        [
            {},
            MUON,
            TAKEN,
            TAKEN | {"lr": 0.01},
            TAKEN | {"lr": 0.002},
            TAKEN | {"option.momentum": 0.97},
        ],
    ),
    "simsiam": trials(
        CIFAR | {"method": "simsiam"},
        [{}, TAKEN, TAKEN | {"lr": 0.01}, TAKEN | {"lr": 0.002}, TAKEN | {"option.dim": 256}],
    ),
    "nnclr": trials(
        CIFAR | {"method": "nnclr"},
        [
            {},
            MUON,
            TAKEN,
            TAKEN | {"option.hidden_dim": 512, "option.predictor_dim": 512},
        ],
    ),
    "swav": trials(
        CIFAR | {"method": "swav"},
        [
            {},
            MUON,
            TAKEN,
            TAKEN | {"lr": 0.01},
            TAKEN | {"option.hidden_dim": 512},
        ],
    ),
    "instdisc": trials(
        CIFAR | {"method": "instdisc"},
        [
            {},
            MUON,
            TAKEN,
            TAKEN | {"option.temperature": 0.2},
            TAKEN | {"option.momentum": 0.0},
        ],
    ),
    "simclr": trials(
        CIFAR | {"method": "simclr"},
        [
            {},
            {"lr": 0.01},
            {"option.temperature": 0.1},
            {"batch_size": 128},
            {"batch_size": 128, "lr": 0.01},
            {"view_sizes": "16,24"},
        ],
    ),
    "byol, smaller": trials(
        CIFAR | {"method": "byol"} | TAKEN | {"lr": 0.01},
        [
            {"option.momentum": 0.97, "option.hidden_dim": 512},
            {"option.momentum": 0.95, "option.hidden_dim": 256},
        ],
    ),
    "simsiam, smaller": trials(
        CIFAR | {"method": "simsiam"} | TAKEN | {"lr": 0.01},
        [
            {"option.dim": 256, "option.predictor_dim": 64},
            {"option.dim": 512, "option.predictor_dim": 128},
        ],
    ),
    "fashion": trials(
        FASHION,
        [
            {},
            CROP,
            CROP | {"view.scale": [0.4, 1.0]},
            CROP | {"view.scale": [0.4, 1.0], "view.flip": 0.0},
            {"augment": "simclr_cifar"},
            {"view_sizes": "28"},
        ],
    ),
    "caltech": trials(
        CALTECH,
        [
            {"image_size": 64, "view_sizes": "48", "backbone": "small"},
            {"image_size": 64, "view_sizes": "64", "backbone": NETWORKS + "photo3"},
            {"image_size": 96, "view_sizes": "64", "backbone": NETWORKS + "photo4"},
            {"image_size": 64, "view_sizes": "48", "backbone": NETWORKS + "small4"},
            {},
        ],
    ),
    "longer": trials(
        {"data": "cifar10", "seconds": 900} | TAKEN,
        [
            {"method": "byol", "lr": 0.01, "option.momentum": 0.97, "option.hidden_dim": 256},
            {"method": "byol", "lr": 0.01, "option.momentum": 0.99, "option.hidden_dim": 256},
            {"method": "simsiam", "lr": 0.01, "option.dim": 256, "option.predictor_dim": 64},
            {"method": "swav", "lr": 0.01, "option.hidden_dim": 256},
            {"method": "moco", "option.momentum": 0.99, "option.temperature": 0.1},
            {"method": "nnclr", "option.hidden_dim": 256, "option.predictor_dim": 256},
            {"method": "instdisc"},
            {"method": "nnclr", "lr": 0.01, "option.hidden_dim": 256, "option.predictor_dim": 256},
            {"method": "moco", "option.momentum": 0.996, "option.temperature": 0.1},
        ],
    ),
    "fashion, longer": trials(
        FASHION | {"seconds": 900},
        [
            {},
            CROP | {"view.scale": [0.4, 1.0], "view.flip": 0.0},
            {"augment": "characters", "view.scale": [0.4, 1.0]},
            CROP,
        ],
    ),
    "others": [
        CIFAR | {"method": method} | change
        for method in (
            "moco_end_to_end",
            "moco_memory_bank",
            "instdisc_parametric",
            "moco_v3",
            "barlow_twins",
            "vicreg",
            "dino",
        )
        for change in ({}, TAKEN)
    ],
}
