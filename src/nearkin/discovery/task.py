"""What a discovery is about: pictures, known classes, and how many novel ones to find."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Task:
    """Pictures to learn classes from.

    A hidden class is unlabeled here, whatever else is known about it.
    """

    label: Int64[np.ndarray, " images"]
    """Known classes of all pictures, `UNKNOWN` for the others."""
    rows: Int64[np.ndarray, " learned"]
    """The pictures to learn from."""
    num_known: int
    num_novel: int

    @property
    def labeled(self) -> Int64[np.ndarray, " labeled"]:
        """The rows of pictures with a known class."""
        return self.rows[np.flatnonzero(self.label[self.rows] != UNKNOWN)]

    @property
    def unlabeled(self) -> Int64[np.ndarray, " unlabeled"]:
        """The rows of the others."""
        return self.rows[np.flatnonzero(self.label[self.rows] == UNKNOWN)]
