"""Classifiers from a few labeled images per class."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.metrics.probe import fit_path
from nearkin.objectives import unit

STRENGTH: Final = 1.0  # `C` of the logistic regression: too few images are left to choose it


def draw_shots(
    labels: Int[np.ndarray, " n"], shots: int, seed: int, draw: int
) -> Int[np.ndarray, " drawn"]:
    """Draw `shots` rows of each class, ascending; a class that has fewer gives all of its rows.

    The rows of more shots contain those of fewer of the same draw.
    """
    order = np.random.default_rng((seed, draw)).permutation(len(labels))
    chosen = [order[labels[order] == label][:shots] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def centered(
    features: Float[Tensor, "n dim"], mean: Float[Tensor, " dim"]
) -> Float[Tensor, "n dim"]:
    """Return unit vectors of what differs from the mean (Wang et al. 2019, SimpleShot: CL2N)."""
    return unit(features.float() - mean)


def predict_few_shot(
    x: Float[Tensor, "n dim"],
    y: Int[Tensor, " n"],
    num_classes: int,
    queries: Float[Tensor, "queries dim"],
) -> dict[str, Int[Tensor, " queries"]]:
    """Predict classes of unit vectors by the nearest class mean, and by a logistic regression.

    - `class mean`, by Euclidean distance; of equals, the first (Wang et al. SimpleShot: revisiting
      nearest-neighbor classification for few-shot learning. 2019, arXiv:1911.04623, section 3).
    - `logistic`, multinomial with `C` 1 (Tian et al. Rethinking few-shot image classification: a
      good embedding is all you need? ECCV 2020, arXiv:2003.11539).
    """
    sums = x.new_zeros(num_classes, x.shape[1]).index_add_(0, y, x)
    means = sums / y.bincount(minlength=num_classes).clamp(min=1)[:, None]
    weight, bias, _ = fit_path(x, y, num_classes, (STRENGTH,))[-1]
    return {
        "class mean": torch.cdist(queries, means).argmin(dim=1),
        "logistic": (queries @ weight + bias).argmax(dim=1),
    }
