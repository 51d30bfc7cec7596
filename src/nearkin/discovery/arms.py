"""What a discovery is compared with: k-means, rank statistics, and the base loss alone."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.config import Value
from nearkin.discovery.classifier import class_probability, heads_of, on_top, still
from nearkin.discovery.data import DiscoveryTask
from nearkin.discovery.trunk import Trunk
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.method import Method
from nearkin.types import UNKNOWN

ALONE: Final[dict[str, Value]] = {"novel_weight": 0.0, "known_weight": 0.0}
"""NCL without its contrastive terms."""
BASELINES: Final[dict[str, dict[str, Value]]] = {
    "base loss": ALONE,
    "rank statistics": ALONE | {"pseudo_labels": "ranks"},
}
"""Options of NCL: its own base loss, and AutoNovel's (Han et al. 2020)."""


@dataclass(frozen=True, eq=False)
class Arm:
    """The classes that one way of looking for them finds, for all images."""

    joint: Int64[np.ndarray, " images"]
    """Of all classes, known and novel."""
    novel: Int64[np.ndarray, " images"]
    """Of the novel classes alone, numbered like those of `joint`."""


def trained_arm(trunk: Trunk, method: Method[Any], num_known: int) -> Arm:
    """The most probable classes by a method's heads."""
    looks, layer = trunk.seen(method)
    heads = still(heads_of(method))
    with torch.inference_mode():
        features = on_top(still(layer), looks.center)
        joint, novel = (
            class_probability(heads, features, num_known, disjoint).argmax(dim=1).numpy()
            for disjoint in (False, True)
        )
    return Arm(joint, novel)


def clustered_arm(features: Float[Tensor, "images dim"], task: DiscoveryTask, seed: int) -> Arm:
    """K-means on features that no label has touched, fitted to what is learned from.

    All classes: labeled images stay in their class. Novel classes: unlabeled images alone.
    Other images go to the nearest center.
    """
    x = compact(features).astype(np.float64)
    nothing = np.full(len(task.unlabeled), UNKNOWN)
    joint = constrained_kmeans(
        x[task.rows], task.label[task.rows], task.num_known + task.num_novel, seed=seed
    )
    novel = constrained_kmeans(x[task.unlabeled], nothing, task.num_novel, seed=seed)
    return Arm(_closest(x, joint.centers), task.num_known + _closest(x, novel.centers))


def _closest(
    x: Float[np.ndarray, "images dim"], centers: Float[np.ndarray, "k dim"]
) -> Int64[np.ndarray, " images"]:
    distance: np.ndarray = (centers**2).sum(axis=1) - 2 * x @ centers.T
    return np.asarray(distance.argmin(axis=1), np.int64)
