"""Test images that are in the training part, too: as the same bytes, by pixels, or by features.

Features have no threshold that is right for all data. Here it is the lowest one at which the
estimated share of false finds is small enough, by the target-decoy method of proteomics (Elias &
Gygi. Target-decoy search strategy for increased confidence in large-scale protein
identifications by mass spectrometry. Nature Methods 2007): images without a duplicate on the
other side are as similar to their nearest training image as training images are to theirs.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.auditing.data import Audited, Rows
from nearkin.data.duplicates import (
    Groups,
    Signatures,
    exact_groups,
    merged,
    mirrored,
    near_groups,
    shifted,
    signatures,
    similarity,
)
from nearkin.errors import UsageError
from nearkin.metrics.neighbors import nearest
from nearkin.pace import ProgressCallback, count, under

CANDIDATES: Final = 5  # Nearest training images of each image that are compared by their pixels
DECOYS: Final = 10_000  # Training images that tell how similar images are without a duplicate
SAME: Final = 1 - 1e-5  # Cosine of vectors that are equal but for rounding

Cosines = Float[np.ndarray, " _"]
Vectors = Float[Tensor, "images dim"]


class Leak(NamedTuple):
    """A test image and the training image that it is, or is nearly."""

    test: int  # Rows of the audited images
    train: int
    cosine: float
    why: str  # same bytes, near-duplicate (maybe mirrored), same vector or similar features


@dataclass(frozen=True, eq=False)
class Leaks:
    """Leaks into the test part, and what is needed to judge them."""

    found: tuple[Leak, ...]  # The surest one of each test image that has some
    groups: Groups  # Of all images: duplicates, also within a part
    cosine: Cosines  # Of each test image and its nearest training image
    threshold: float | None  # On the cosine; None if none has the precision
    precision: float  # The estimated share of duplicates among images that features alone find;
    # without a threshold, the highest that any has
    decoys: int  # Training images that the estimate is made with

    def sentences(self) -> list[str]:
        """What was found, by kind, and the threshold."""
        kinds = ", ".join(f"{n:,} {why}" for why, n in Counter(x.why for x in self.found).items())
        share, of = len(self.found) / len(self.cosine), f"{len(self.cosine):,} test images"
        first = f"{len(self.found):,} of {of} ({share:.1%}) are training images, too"
        by = f"none by features: the highest precision of a threshold is {self.precision:.3f}"
        if self.threshold is not None:
            by = f"cosines from {self.threshold:.4f} on: estimated precision {self.precision:.3f}"
        tail = f", from {count(self.decoys, 'training image')} without a duplicate"
        return [first + (f": {kinds}" if kinds else ""), by + tail]


def find_leaks(audited: Audited, precision: float, seed: int, progress: ProgressCallback) -> Leaks:
    """Find test images that are training images, too.

    An image and its nearest training images are compared by pixels as in `near_groups`, and also
    mirrored, and shifted. What remains is judged by its cosine: of those that features alone
    find, the share of duplicates is at least `precision`. The seed draws the decoys. A UsageError
    if every test image is a training image.
    """
    vectors = torch.from_numpy(audited.embeddings.vectors)
    test, train, known = audited.test_rows, audited.train_rows, None
    groups = exact = np.arange(len(audited))
    if audited.images is not None:
        known = signatures(audited.images, progress)
        groups, exact = near_groups(known, under("duplicates", progress)), exact_groups(known)
    progress(0, 2, "nearest training images")
    of_test = _Neighbors.among(vectors, test, train, groups, known)
    progress(1, 2, "training images among themselves")
    drawn = np.random.default_rng(seed).permutation(train)[:DECOYS]
    of_train = _Neighbors.among(vectors, np.sort(drawn), train, groups, known)
    is_same, is_linked = of_test.same.any(axis=1), np.isin(groups[test], groups[train])
    nearest_cosine, left = of_test.cosine[:, 0], ~is_same & ~is_linked
    decoys = of_train.cosine[~of_train.same.any(axis=1), :1].ravel()  # one image has no other
    threshold, reached = _threshold(nearest_cosine[left], decoys, precision)
    other, cosine = _partners(of_test, vectors, test, train, groups)
    is_exact, least = exact[test] == exact[other], np.inf if threshold is None else threshold
    kinds = [is_same & is_exact, is_same, is_linked, left & (nearest_cosine >= least)]
    same = "same vector" if known is None else "near-duplicate"
    reasons = ["same bytes", same, "near-duplicate", "similar features"]
    why = np.select(kinds, reasons, default="")
    found = np.flatnonzero(why != "")
    if len(found) == len(test):
        raise UsageError(
            f"all {len(test)} test images are training images, too; give a test part of others"
        )
    groups = merged(groups, np.stack([test[found], other[found]], axis=1))
    columns = (each[found].tolist() for each in (test, other, cosine, why))
    leaks = (Leak(*row) for row in zip(*columns, strict=True))
    surest = sorted(leaks, key=lambda leak: (-leak.cosine, leak.test))
    return Leaks(tuple(surest), groups, nearest_cosine, threshold, reached, len(decoys))


@dataclass(frozen=True, eq=False)
class _Neighbors:
    """The nearest training images of some images, and which of them are the same image."""

    index: Int[np.ndarray, "n k"]  # Rows of training images
    cosine: Float[np.ndarray, "n k"]
    same: Bool[np.ndarray, "n k"]  # By contents or pixels; without images, by equal vectors

    @classmethod
    def among(
        cls, vectors: Vectors, rows: Rows, train: Rows, groups: Groups, known: Signatures | None
    ) -> "_Neighbors":
        own = bool(np.isin(rows, train).any())  # each finds itself
        num = CANDIDATES + own
        cosine, place = (x.numpy() for x in nearest(vectors[train], vectors[rows], num))
        index = train[place]
        itself = index == rows[:, None]
        itself[:, -1] |= own & ~itself.any(axis=1)  # where it is not among them, the last one goes
        shape = len(rows), itself.shape[1] - own
        index, cosine = (x[~itself].reshape(shape) for x in (index, cosine))
        if known is None:
            return cls(index, cosine, cosine >= SAME)
        same = groups[index] == groups[rows][:, None]
        pairs = np.stack([np.broadcast_to(rows[:, None], shape), index], axis=2).reshape(-1, 2)
        alike = similarity(known["features"], pairs) > 0
        turned = np.concatenate([known["features"], mirrored(known["features"])])
        alike |= similarity(turned, pairs + np.array([len(known), 0])) > 0
        alike |= shifted(known["features"], pairs) > 0
        return cls(index, cosine, same | alike.reshape(shape))


def _partners(
    near: _Neighbors, vectors: Vectors, test: Rows, train: Rows, groups: Groups
) -> tuple[Rows, Cosines]:
    """Return a training image beside each test image, and the cosine.

    It is the nearest that is the same image, or else one of its group, or else the nearest.
    """
    place = np.arange(len(test)), near.same.argmax(axis=1)
    other, cosine = near.index[place], near.cosine[place]
    numbers, first = np.unique(groups[train], return_index=True)
    by_group = np.isin(groups[test], numbers) & ~near.same.any(axis=1)
    for at in np.flatnonzero(by_group).tolist():
        other[at] = train[first[np.searchsorted(numbers, groups[test[at]])]]
        cosine[at] = float(vectors[test[at]] @ vectors[other[at]])
    return other, cosine


def _threshold(cosine: Cosines, decoys: Cosines, precision: float) -> tuple[float | None, float]:
    """Return the lowest threshold with this precision, None if there is none, and the precision.

    Of `n` decoys one more counts as above than there are, so that few images are not certain.
    """
    if not len(cosine) or not len(decoys):
        return None, 0.0
    levels = np.sort(cosine)
    above = len(levels) - np.arange(len(levels))
    false = len(decoys) - np.searchsorted(np.sort(decoys), levels) + 1
    estimated = 1 - false / (len(decoys) + 1) * len(levels) / above
    reached = np.flatnonzero(estimated >= precision)
    if not len(reached):
        return None, max(0.0, float(estimated.max()))
    return float(levels[reached[0]]), float(estimated[reached[0]])
