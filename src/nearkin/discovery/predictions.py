"""What a classifier of known and novel classes says about pictures."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per picture. The known classes come first, in their order, then the novel ones."""

    paths: tuple[str, ...]
    """The pictures' names."""
    probability: Float[np.ndarray, "pictures classes"]
    """The classifier's softmax, averaged over the views; rows sum to 1. A class that a picture
    cannot have, such as a known one where all known classes are ruled out, has 0."""
    by_view: Int[np.ndarray, "views pictures"]
    """The most probable class in each of several augmented views."""
    features: Float[np.ndarray, "pictures dim"]
    """Unit vectors of what the classifier stands on."""
    label: Int[np.ndarray, " pictures"]
    """The number of the known class of a picture that came with one, `UNKNOWN` for the rest."""
    classes: tuple[str, ...]
    """Names of all classes: those of the known ones, then new-1, new-2, ..."""
    num_known: int
    """How many of the classes are known."""

    @property
    def cluster(self) -> Int[np.ndarray, " pictures"]:
        """The number of the most probable class of each picture."""
        return np.asarray(self.probability.argmax(axis=1))
