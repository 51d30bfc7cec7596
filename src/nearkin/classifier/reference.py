"""The images that a classifier learned from, by which it judges others: neighbors and outliers.

What is said of an image depends on the image and on these alone, never on which others are asked
about with it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.metrics.neighbors import nearest
from nearkin.metrics.selection import ROUNDING, balanced
from nearkin.objectives import unit
from nearkin.types import UNLABELED

BANK: Final = 20_000  # Images that are kept, at the most
MIN_IMAGES: Final = 20  # Labeled images from which they say what an outlier is
VARIANCE: Final = 0.99  # Share of it that lies in the subspace of labeled images
HELD_OUT: Final = 10  # Times that some classes are held out for the threshold, at the most
WITHIN: Final = 0.95  # Share of the images of held-out classes that are no outliers
NEAR: Final = 0.99  # Share of the images that were learned from that are near enough to others
LARGEST: Final = 4.0  # More than any distance: nothing is an outlier
LEAST: Final = 1e-6  # A distance between rows that are equal, as numbers are rounded
LEARNED: Final = ("features", "cluster", "labeled", "sizes")
THRESHOLDS: Final = ("k", "max_neighbor", "max_left")
"""Fields of a `Reference`, as a file has them: tensors and numbers."""
K: Final = 10  # The neighbor whose distance counts; fewer where classes are smaller

Bank = Float[Tensor, "bank dim"]
Features = Float[Tensor, "n dim"]
Clusters = Int[np.ndarray, " n"]
Labeled = Bool[np.ndarray, " n"]
Numbers = Float[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Reference:
    """Images that were learned from; of many, some of each class."""

    features: Float[Tensor, "bank dim"]  # By the encoder
    cluster: Int[np.ndarray, " bank"]  # The label of each, or the class it was assigned to
    labeled: Bool[np.ndarray, " bank"]
    sizes: Int[np.ndarray, " classes"]  # Images without a label that the run put in each class
    k: int
    max_neighbor: float
    """The cosine distance to the k-th nearest of the others that 99 % of these do not exceed."""
    max_left: float
    """The distance to the subspace of the known classes that 95 % of the images of others keep."""

    @cached_property
    def _subspace(self) -> "Subspace":
        return Subspace.of(_powers(self.features[torch.from_numpy(self.labeled)]))

    def distance(self, features: Features) -> Numbers:
        """Return the distance of each image to the subspace of the labeled ones.

        The error of reconstruction by principal components (Wang, Li, Feng, Zhang. ViM:
        out-of-distribution with virtual-logit matching. CVPR 2022, arXiv:2203.10807, section 3),
        of the square roots of features (Perronnin, Sanchez, Mensink. Improving the Fisher kernel
        for large-scale image classification. ECCV 2010). Images without a label have no say: any
        of these may be an outlier itself.
        """
        return self._subspace.distance(_powers(features))

    def outliers(self, features: Features) -> Bool[np.ndarray, " n"]:
        """Whether images are too far from the labeled ones, or from all.

        The distance to the k-th nearest of all (Sun, Ming, Zhu, Li. Out-of-distribution detection
        with deep nearest neighbors. ICML 2022, arXiv:2204.06507) finds more of what was not
        learned from, and nothing of what was and is alike.
        """
        near = _neighbor(self.features, features, self.k)
        return (self.distance(features) > self.max_left) | (near > self.max_neighbor)

    def fits(self, num_classes: int, dim: int) -> bool:
        """Whether it is of so many classes and features, as a file may say otherwise."""
        size = len(self.features)
        return (
            self.features.shape == (size, dim)
            and size > 1  # each has a neighbor
            and self.sizes.shape == (num_classes,)
            and self.cluster.shape == self.labeled.shape == (size,)
            and bool(np.isin(self.cluster, np.arange(num_classes)).all() and self.labeled.any())
            and 1 <= self.k <= K
            and all(0 < each <= LARGEST for each in (self.max_neighbor, self.max_left))
        )


class Subspace(NamedTuple):
    """The mean of some rows, and the fewest principal components with 99 % of their variance."""

    mean: Float[Tensor, " dim"]
    components: Float[Tensor, "dim kept"]

    @classmethod
    def of(cls, x: Features) -> "Subspace":
        """Fit it to rows, of which there is one at least."""
        mean = x.mean(dim=0)
        variance, components = torch.linalg.eigh((x - mean).T @ (x - mean))
        # Ascending: the first ones, whose variances sum to less than the rest, are left out.
        outside = variance.clamp(min=0).cumsum(0) <= (1 - VARIANCE) * variance.clamp(min=0).sum()
        return cls(mean, components[:, ~outside])

    def distance(self, x: Features) -> Numbers:
        """Return the Euclidean distance of rows to it."""
        left = x - self.mean
        inside = (left @ self.components).square().sum(dim=1)
        return np.asarray((left.square().sum(dim=1) - inside).clamp(min=0).sqrt().numpy())


def _powers(features: Features) -> Features:
    """Return the roots of unit features: few large numbers say less, many small ones more."""
    return unit(features.sign() * features.abs().sqrt())


def reference_of(
    features: Features, cluster: Clusters, labeled: Labeled, num_classes: int
) -> Reference:
    """Return what tells how unlike the images that were learned from another one is.

    `cluster` is the class of each: its label where it is `labeled`, as one is, or else the one
    that it was assigned to.
    """
    share = BANK // 2 if not labeled.all() else BANK
    parts = (np.flatnonzero(own) for own in (labeled, ~labeled))
    kept = [own[balanced(cluster[own], share)] for own in parts]
    rows = np.sort(np.concatenate(kept))
    bank = features[torch.from_numpy(rows)].contiguous()
    own = labeled[rows]
    left = _max_left(bank[torch.from_numpy(own)], cluster[rows][own])
    counts = np.bincount(cluster[rows])
    k = int(np.clip(np.median(counts[counts > 0]) - 1, 1, K))
    near = LARGEST
    if len(rows) >= MIN_IMAGES:
        near = max(LEAST, float(np.quantile(_neighbor(bank, bank, k), NEAR)))
    sizes = np.bincount(cluster[~labeled], minlength=num_classes)
    return Reference(bank, cluster[rows], own, sizes, k, near, left)


def _neighbor(bank: Bank, features: Features, k: int) -> Numbers:
    return np.asarray(1 - neighbors(bank, features, k).similarity[:, -1])


def _max_left(features: Features, label: Clusters) -> float:
    """Return the distance to the subspace from which images are outliers.

    Some classes in turn are held out as if they were novel, since images of novel classes are
    no outliers, and lie farther from the known ones than images of these.
    """
    classes, number = np.unique(label, return_inverse=True)
    if len(label) < MIN_IMAGES or len(classes) < 2:
        return LARGEST
    x, turn = _powers(features), number % HELD_OUT
    held_out = [torch.from_numpy(turn == each) for each in range(turn.max() + 1)]
    distances = [Subspace.of(x[~out]).distance(x[out]) for out in held_out]
    return max(LEAST, float(np.quantile(np.concatenate(distances), WITHIN)))


class Neighbors(NamedTuple):
    """The nearest images of each image, most similar first, without itself."""

    similarity: Float[np.ndarray, "n k"]  # Cosines
    rows: Int[np.ndarray, "n k"]  # Their rows in the bank
    own: Int[np.ndarray, " n"]  # The image's own row in the bank; -1 where it has none


def neighbors(bank: Bank, features: Features, k: int) -> Neighbors:
    """Return the k most similar images of a bank; fewer if it has no more than k.

    An image of the bank is known by its features, so that it is judged by the others alike,
    whether it is asked about by the run that learned from it or later.
    """
    if not len(features):
        empty = np.zeros((0, k))
        return Neighbors(empty, empty.astype(np.int64), np.zeros(0, np.int64))
    similarity, index = (each.numpy() for each in nearest(bank, features, k + 1))
    is_own = similarity[:, 0] >= 1 - ROUNDING
    columns = np.arange(similarity.shape[1] - 1) + is_own[:, None]
    own = np.where(is_own, index[:, 0], -1)
    rows = np.arange(len(features))[:, None]
    return Neighbors(similarity[rows, columns], index[rows, columns], own)


def class_sums(
    features: Features, cluster: Clusters, num_classes: int
) -> Float[Tensor, "num_classes dim"]:
    """Return the sum of the features of each class; zeros for a class without images."""
    sums = features.new_zeros((num_classes, features.shape[1]))
    return sums.index_add_(0, torch.from_numpy(cluster), features)


def nearest_known(reference: Reference, features: Features) -> tuple[Clusters, Numbers]:
    """Return the known class with the most similar mean feature, and the cosine to that mean.

    Means are of labeled images, with unit features in the same space. `UNLABELED` and NaN where
    no image has a label.
    """
    labeled, count = reference.labeled, len(reference.sizes)
    known = np.unique(reference.cluster[labeled])
    if not len(known):
        return np.full(len(features), UNLABELED), np.full(len(features), np.nan)
    bank = reference.features[torch.from_numpy(labeled)]
    sums = class_sums(bank, reference.cluster[labeled], count)
    similarity, position = (features @ unit(sums[torch.from_numpy(known)]).T).max(dim=1)
    return known[position.numpy()], similarity.numpy()


def own_similarity(
    reference: Reference, features: Features, cluster: Clusters, own: Int[np.ndarray, " n"]
) -> Numbers:
    """Return the cosine of images to the mean of the others of their class; 0 without any.

    A mean leaves out the image's `own` row of the reference (-1 where there is none): a mean with
    the image in it is too similar, the more so the fewer there are.
    """
    sums = class_sums(reference.features, reference.cluster, len(reference.sizes))
    is_own = torch.from_numpy((own >= 0) & (reference.cluster[own] == cluster))
    others = unit(sums[torch.from_numpy(cluster)] - is_own[:, None] * features)
    return np.asarray((features * others).sum(dim=1).numpy())
