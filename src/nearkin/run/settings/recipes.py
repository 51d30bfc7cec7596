"""What `auto` means: how each method is trained where the user does not say.

SimCLR's were chosen on images held out of the training part of CIFAR-10, without its test part;
see docs/results.md. Those of the others are their papers', narrowed for short runs, not searched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nearkin.config import Value


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a method is trained."""

    optimizer: Literal["sgd", "lars", "adamw"] = "adamw"
    lr: float = 2e-3
    """Peak learning rate for a batch of 256; it grows with the batch."""
    weight_decay: float = 0.05
    augment: str = "simclr"
    """How views of photographs are drawn."""
    augment_small: str = "simclr_cifar"
    """How views of images below 64 px are drawn."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the method that differ from its paper's: trainings here are far shorter."""


RECIPES: dict[str, Recipe] = {
    "moco": Recipe(augment="moco_v2", augment_small="moco_cifar"),
    "moco_memory_bank": Recipe(augment="moco_v2", augment_small="moco_cifar"),
    "moco_end_to_end": Recipe(augment="moco_v2", augment_small="moco_cifar"),
    "simclr": Recipe(options={"temperature": 0.2}),
    "moco_v3": Recipe(
        augment="moco_v3",
        augment_small="asymmetric_cifar",
        options={"temperature": 0.2, "hidden_dim": 1024},
    ),
    "byol": Recipe(
        augment="byol",
        augment_small="asymmetric_cifar",
        options={"momentum": 0.99, "hidden_dim": 1024},
    ),
    "simsiam": Recipe(
        augment="simsiam", augment_small="simsiam_cifar", options={"dim": 1024, "num_layers": 2}
    ),
    "nnclr": Recipe(
        augment="byol",
        augment_small="asymmetric_cifar",
        options={"temperature": 0.2, "hidden_dim": 1024, "predictor_dim": 1024},
    ),
    "swav": Recipe(
        augment="swav",
        augment_small="swav_cifar",
        options={"hidden_dim": 1024, "num_prototypes": 300, "queue_size": 1024},
    ),
    "dino": Recipe(
        augment="dino",
        options={
            "hidden_dim": 1024,
            "projector_norm": True,
            "num_prototypes": 1024,
            "momentum": 0.99,
        },
    ),
    "barlow_twins": Recipe(
        augment="byol", augment_small="asymmetric_cifar", options={"dim": 1024, "scale": 0.1}
    ),
    "vicreg": Recipe(augment="byol", augment_small="asymmetric_cifar", options={"dim": 1024}),
    "instdisc": Recipe(  # few visits to few images leave NCE's one estimate of Z far off
        augment="moco_v1",
        augment_small="moco_cifar",
        options={"loss": "softmax", "temperature": 0.1},
    ),
    "instdisc_parametric": Recipe(augment="moco_v1", augment_small="moco_cifar"),
    **dict.fromkeys(
        ("rotnet", "supervised", "ncl", "simgcd"), Recipe(augment="ncl", augment_small="ncl_cifar")
    ),
}
"""A method without an entry is trained by `Recipe()`."""


def recipe(method: str) -> Recipe:
    """How a method is trained by default."""
    return RECIPES.get(method, Recipe())
