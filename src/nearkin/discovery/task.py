"""What everything that trains in a discovery is told: images, their known classes, no more."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.choices import MODE_METHODS
from nearkin.types import UNLABELED

Mode = Literal["gcd", "ncd"]


@dataclass(frozen=True, eq=False)
class DiscoveryTask:
    """Images to learn classes from, as seen by everything that trains.

    Images of held-out classes have no label here, whatever else is known about them.
    """

    label: Int64[np.ndarray, " images"]  # Known classes of all images, `UNLABELED` for the others
    rows: Int64[np.ndarray, " learned"]  # The images to learn from
    num_known: int
    num_novel: int
    mode: Mode = "gcd"

    @property
    def disjoint(self) -> bool:
        """Whether no unlabeled image is of a known class."""
        return self.mode == "ncd"

    @property
    def method(self) -> str:
        """The method of the last stage."""
        return MODE_METHODS[self.mode]

    @property
    def num_classes(self) -> int:
        """All classes."""
        return self.num_known + self.num_novel

    @property
    def labeled(self) -> Int64[np.ndarray, " labeled"]:
        """The rows of images with a known class."""
        return self.rows[np.flatnonzero(self.label[self.rows] != UNLABELED)]

    @property
    def unlabeled(self) -> Int64[np.ndarray, " unlabeled"]:
        """The rows of the others."""
        return self.rows[np.flatnonzero(self.label[self.rows] == UNLABELED)]

    @property
    def largest_batch(self) -> int:
        """The most images in a batch: half of it may be labeled, and no image is in it twice."""
        return len(self.unlabeled) + min(len(self.unlabeled), len(self.labeled))

    @property
    def only_novel(self) -> Bool[np.ndarray, "1 classes"]:
        """The classes that an image of a novel class cannot have: the known ones."""
        return np.arange(self.num_classes)[None] < self.num_known
