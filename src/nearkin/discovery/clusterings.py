"""Classes of all images by heads, and by k-means, which they are compared with."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.classifier.classifier import class_probability, frozen_copy, heads_of
from nearkin.discovery.features import DiscoveryEncoder, top_features
from nearkin.discovery.task import DiscoveryTask
from nearkin.method import Method
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.types import UNLABELED


@dataclass(frozen=True, eq=False)
class Clustering:
    """The classes that one approach finds, for all images."""

    joint: Int64[np.ndarray, " images"]  # Among all classes, known and novel
    novel: Int64[np.ndarray, " images"]
    """Among the novel classes, numbered as in `joint`; `joint` where there is no novel class."""

    def of(self, task: DiscoveryTask) -> Int64[np.ndarray, " images"]:
        """Return the classes that a task lets unlabeled images be in."""
        return self.novel if task.disjoint else self.joint


def head_clustering(
    encoder: DiscoveryEncoder, method: Method[Any], task: DiscoveryTask
) -> Clustering:
    """Return the most probable classes by a method's heads."""
    features, heads = top_features(encoder, method), frozen_copy(heads_of(method))
    with torch.inference_mode():
        joint, novel = (
            class_probability(heads, features, impossible).argmax(dim=1).numpy()
            for impossible in (None, task.only_novel if task.num_novel else None)
        )
    return Clustering(joint, novel)


def kmeans_clustering(
    features: Float[Tensor, "images dim"], task: DiscoveryTask, seed: int
) -> Clustering:
    """Cluster the images to learn from by k-means; others go to the nearest center.

    `joint` clusters all of them, with labeled images fixed in their class (semi-supervised
    k-means, Vaze et al. 2022, section 3.2). `novel` is the nearest of its novel centers or, if
    unlabeled images are disjoint from the known classes, by k-means of these alone.
    """
    from sklearn.metrics import pairwise_distances_argmin

    x = compact(features).astype(np.float64)
    joint = constrained_kmeans(x[task.rows], task.label[task.rows], task.num_classes, seed=seed)
    nearest = pairwise_distances_argmin(x, joint.centers)
    if not task.num_novel:
        return Clustering(nearest, nearest)
    centers = joint.centers[task.num_known :]
    if task.disjoint:
        no_labels = np.full(len(task.unlabeled), UNLABELED)
        rows = x[task.unlabeled]
        centers = constrained_kmeans(rows, no_labels, task.num_novel, seed=seed).centers
    return Clustering(nearest, task.num_known + pairwise_distances_argmin(x, centers))
