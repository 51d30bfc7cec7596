"""What a discovery can be told, with its defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from nearkin.config.values import ANY, Auto, Value, refuse_drops, refuse_misfits

RANGES: Final = {
    **dict.fromkeys(("epochs", "known_epochs", "num_seeds"), (1, ANY)),
    "classes": (2, ANY),
    "batch_size": (4, ANY),
    "num_views": (2, 64),
    "workers": (0, ANY),
    "strength": (0, ANY),
    "devices": (1, 1024),
    "val": (0, 0.9),
    "max_bad": (0, 1),
    "seed": (0, 2**32 - 1),
}
"""Smallest and largest value of each number."""


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
    """Settings of a discovery. `auto` is replaced by what the pictures call for."""

    labeled: str = ""
    """Pictures of known classes: class folders, or a table with the columns path and label."""
    known: str = ""
    """Instead: names, after commas, of classes whose labels in the data count."""
    classes: int | Auto = "auto"
    """Novel classes to find; auto estimates how many there are."""
    mode: Literal["gcd", "ncd"] = "gcd"
    """Whether unlabeled pictures may be of known classes (gcd), or are all of novel ones (ncd)."""
    from_run: str = ""
    """A run whose encoder to stand on, instead of training one."""
    method: str = "simclr"
    """What to train an encoder by, without labels."""
    trained: str = "top"
    """What learns from labels: a layer on `top` of the encoder, `all` of it, or named parts."""
    epochs: int | Auto = "auto"
    """Passes over the unlabeled pictures in the last stage."""
    known_epochs: int | Auto = "auto"
    """Passes over the labeled pictures in the stage before it."""
    drops: str = ""
    """Shares of the last stage, after commas, at which the learning rate drops to a tenth."""
    batch_size: int | Auto = "auto"
    """Pictures per step, half of them labeled."""
    start: Literal["clusters", "random"] = "clusters"
    """Where classes start in the last stage: at clusters of the features, or anywhere."""
    strength: float | Auto = "auto"
    """Of positive pairs (ncd) or of entropy (gcd); auto hides known classes to choose it."""
    num_seeds: int | Auto = "auto"
    """How often the last stage is trained, to see which classes are found again."""
    baselines: bool = True
    """Whether to train what the result is compared with."""
    augment: str = "auto"
    """How views are drawn."""
    num_views: int = 8
    """Views kept of each picture, where the encoder stays as it is."""
    truth: str = ""
    """For scoring only: `data` for the data's own labels, or a table or folders."""
    copy_to: str = ""
    """A new folder to sort the pictures into, by class."""
    accept: str = ""
    """An earlier discovery, whose named classes become known ones."""
    val: float = 0.1
    """Share of the pictures held out for scoring, where the data name no test part."""
    seed: int = 0
    """Decides everything that is drawn."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""
    devices: int = 1
    """Processes on this machine that share the batches of networks; torchrun starts its own."""
    workers: int | Auto = "auto"
    """Processes that decode photographs."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where photographs that a network learns from are kept once they are decoded."""
    scan: Literal["headers", "full"] = "headers"
    """What is looked at before training: the header of every file, or every picture decoded."""
    max_bad: float = 0.1
    """Largest share of unreadable pictures to go on with."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options of the last stage's method: of ncl (ncd) or simgcd (gcd)."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out, before anything is read."""
        refuse_misfits(self, RANGES)
        refuse_drops(self.drops)
