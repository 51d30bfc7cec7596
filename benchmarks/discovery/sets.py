"""Tasks of discovery: the images that a seed draws, their features, and what is known of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Int64

from nearkin.classifier.features import CachedFeatures, Extraction, ViewSettings
from nearkin.config import TrainConfig
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.discovery.features import FrozenEncoder
from nearkin.discovery.task import DiscoveryTask, Mode
from nearkin.encoders.encoder import load
from nearkin.run.auto import resolve
from nearkin.types import UNLABELED

CPU: Final = torch.device("cpu")
VIEWS: Final = 8
LITE0: Final = "timm:tf_efficientnet_lite0.in1k@{folder}/tf_efficientnet_lite0.pth"
"""EfficientNet-Lite0 as examples/data/lite0_weights.py makes it; trained on ImageNet's labels."""


def half(names: Sequence[str], rng: np.random.Generator) -> Sequence[int]:
    """Half of the classes, at random."""
    chosen: list[int] = np.sort(rng.permutation(len(names))[: len(names) // 2]).tolist()
    return chosen


def thirty(names: Sequence[str], rng: np.random.Generator) -> Sequence[int]:
    """Thirty classes at random."""
    chosen: list[int] = np.sort(rng.permutation(len(names))[:30]).tolist()
    return chosen


def alphabets(names: Sequence[str], rng: np.random.Generator) -> Sequence[int]:
    """The characters of three alphabets at random."""
    of = np.array([name.rsplit("-", 1)[0] for name in names])
    chosen = rng.permutation(np.unique(of))[:3]
    return np.flatnonzero(np.isin(of, chosen)).tolist()


@dataclass(frozen=True)
class DataSet:
    """What to open below the folder, by which encoder, and which classes are novel."""

    data: str
    novel: Callable[[Sequence[str], np.random.Generator], Sequence[int]]
    per_class: int = 0
    """Images of each class, the same for every seed, whose features are then the same; 0: all."""
    encoder: str = "{folder}/runs/{data}"


SETS: Final[dict[str, DataSet]] = {
    "digits": DataSet("digits", half),
    "fashion": DataSet("fashion_mnist.npz", half, 1200),
    "cifar10": DataSet("cifar10.npz", half, 1200),
    "omniglot": DataSet("omniglot", alphabets),
    "caltech": DataSet("caltech99.tar", thirty, encoder=LITE0),
    "trash": DataSet("trash", half, 0, LITE0),
    "flowers": DataSet("flowers", half, 400, LITE0),
}


@dataclass(frozen=True, eq=False)
class Bench:
    """A task of one seed, which decides on novel classes, held-out images and labels."""

    name: str
    seed: int
    folder: Path

    @cached_property
    def images(self) -> Images:
        """All images, with all labels: known ones for training, novel ones for scoring."""
        source, count = SETS[self.name].data, SETS[self.name].per_class
        path = self.folder / source
        every = open_images(str(path) if path.exists() else source)
        if not count:
            return every
        rng = np.random.default_rng(0)
        of = (np.flatnonzero(every.labels == number) for number in range(len(every.classes)))
        return every.subset(
            np.sort(np.concatenate([rng.permutation(rows)[:count] for rows in of]))
        )

    @cached_property
    def held_out(self) -> Bool[np.ndarray, " images"]:
        """Which images are scored and not learned from: a fifth of each class."""
        rng, out = np.random.default_rng(self.seed), np.zeros(len(self.images), bool)
        for number in range(len(self.images.classes)):
            rows = rng.permutation(np.flatnonzero(self.images.labels == number))
            out[rows[: round(len(rows) / 5)]] = True
        return out

    @cached_property
    def novel(self) -> Sequence[int]:
        """The novel classes."""
        return SETS[self.name].novel(self.images.classes, np.random.default_rng(self.seed))

    @cached_property
    def truth(self) -> Int64[np.ndarray, " images"]:
        """The classes, known ones first."""
        every = range(len(self.images.classes))
        order = [number for number in every if number not in self.novel] + list(self.novel)
        return np.asarray(np.argsort(order)[self.images.labels], np.int64)

    @cached_property
    def encoder(self) -> FrozenEncoder:
        """The frozen encoder with its features, which the user's cache folder keeps."""
        place = SETS[self.name].encoder.format(folder=self.folder, data=self.name)
        # Views have one seed: features of an image are then the same for every seed of the task.
        drawn = ViewSettings(self.base.augment, VIEWS, seed=0)
        every = Extraction(load(place), self.images, drawn, CPU, 0).compute()
        return FrozenEncoder(CachedFeatures(*every.features), CPU)

    @cached_property
    def base(self) -> TrainConfig:
        """The settings that all stages share."""
        requested = TrainConfig(
            method="ncl", backbone="small", image_size=32, batch_size=128, seed=self.seed,
            precision="fp32",
        )  # fmt: skip
        return replace(resolve(requested, self.images, CPU), epochs="auto", options={})

    def task(self, mode: Mode) -> DiscoveryTask:
        """The task: novel classes are unlabeled, in mode gcd half of the known ones too."""
        label, num_known = self.truth.copy(), len(self.images.classes) - len(self.novel)
        label[label >= num_known] = UNLABELED
        if mode == "gcd":
            label[np.random.default_rng(self.seed).permutation(len(label)) % 2 == 0] = UNLABELED
        label[self.held_out] = UNLABELED
        rows = np.flatnonzero(~self.held_out)
        return DiscoveryTask(label, rows, num_known, len(self.novel), mode)
