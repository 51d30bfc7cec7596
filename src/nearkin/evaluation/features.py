"""Tables of features and what is known about their rows."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.errors import DivergedError
from nearkin.types import UNKNOWN


@dataclass(frozen=True, slots=True)
class Features:
    """A row per image. Measures read nothing else."""

    vectors: Float[Tensor, "n d"]
    labels: Int[np.ndarray, " n"]
    """The class of each image, or `UNKNOWN`."""
    groups: Int[np.ndarray, " n"] | None = None
    """Images of one group (a person, a film) are never split when something is chosen."""
    other_view: Float[Tensor, "seen d"] | None = None
    """Features of a second view of some of the images."""
    seen: Int[np.ndarray, " seen"] | None = None
    """The rows of these images."""

    def __post_init__(self) -> None:
        """Refuse what would make every measure meaningless."""
        for table in (self.vectors, self.other_view):
            if table is not None and not table.isfinite().all():
                row = int((~table.isfinite()).any(dim=1).nonzero()[0])
                raise DivergedError(
                    f"the features of image {row} are not finite numbers; "
                    "go back to an encoder from before its training diverged"
                )


def known(labels: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Which images have a label."""
    return np.asarray(labels != UNKNOWN)


def unseen(train: Int[np.ndarray, " train"], test: Int[np.ndarray, " test"]) -> str:
    """A remark for protocols, empty if every class of the test images is among the others."""
    missing = len(np.setdiff1d(test, train))
    return f", {missing} test classes without any training image count as wrong" if missing else ""
