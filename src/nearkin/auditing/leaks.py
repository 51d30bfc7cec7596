"""Test images that are in the training part, too: as the same bytes, by pixels, or by features.

Features have no threshold that is right for all data. Here it is the lowest one at which the
estimated share of false finds is small enough, by the target-decoy method of proteomics (Elias &
Gygi. Target-decoy search strategy for increased confidence in large-scale protein
identifications by mass spectrometry. Nature Methods 2007): images without a duplicate on the
other side are as similar to their nearest training image as training images are to theirs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.auditing.data import Audited
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
    cosine: Float[np.ndarray, " test"]  # Of each test image and its nearest training image
    threshold: float | None  # On the cosine; None if none has the precision
    precision: float  # The estimated share of duplicates among images that features alone find;
    # without a threshold, the highest that any has
    decoys: int  # Training images that the estimate is made with

    def sentences(self, num_test: int) -> list[str]:
        """What was found, by kind, and the threshold."""
        kinds = ", ".join(f"{n:,} {why}" for why, n in Counter(x.why for x in self.found).items())
        share, of = len(self.found) / num_test, f"{num_test:,} test images"
        first = f"{len(self.found):,} of {of} ({share:.1%}) are training images, too"
        by = f"none by features: the highest precision of a threshold is {self.precision:.3f}"
        if self.threshold is not None:
            by = f"cosines from {self.threshold:.4f} on: estimated precision {self.precision:.3f}"
        tail = f", from {count(self.decoys, 'training image')} without a duplicate"
        return [first + (f": {kinds}" if kinds else ""), by + tail]


def find_leaks(audited: Audited, precision: float, seed: int, progress: ProgressCallback) -> Leaks:
    """Find test images that are training images, too.

    An image and its nearest training images are compared by pixels as in `near_groups`, and also
    mirrored, and shifted. What remains is judged by its cosine.

    Args:
        audited: Both parts.
        precision: The least share of duplicates among those that features alone find.
        seed: Decides which training images are decoys.
        progress: Receives progress.

    Raises:
        UsageError: If every test image is a training image.
    """
    vectors = torch.from_numpy(audited.embeddings.vectors)
    test, train, known = audited.test_rows, audited.train_rows, None
    groups = np.arange(len(audited))
    if audited.images is not None:
        known = signatures(audited.images, progress)
        groups = near_groups(known, under("duplicates", progress))
    progress(0, 2, "nearest training images")
    of_test = _Neighbors.among(vectors, test, train, groups, known)
    progress(1, 2, "training images among themselves")
    drawn = np.random.default_rng(seed).permutation(train)[:DECOYS]
    of_train = _Neighbors.among(vectors, np.sort(drawn), train, groups, known)
    left = np.flatnonzero(~of_test.same.any(axis=1) & ~np.isin(groups[test], groups[train]))
    decoys = of_train.cosine[~of_train.same.any(axis=1), :1].ravel()  # one image has no other
    threshold, reached = _threshold(of_test.cosine[left, 0], decoys, precision)
    found = {leak.test: leak for leak in _found(of_test, known)}
    found = {leak.test: leak for leak in _grouped(vectors, test, train, groups)} | found
    if threshold is not None:
        alike = left[of_test.cosine[left, 0] >= threshold]
        rows, cosines = of_test.index[alike, 0].tolist(), of_test.cosine[alike, 0].tolist()
        for own, other, cosine in zip(test[alike].tolist(), rows, cosines, strict=True):
            found[own] = Leak(own, other, cosine, "similar features")
    if len(found) == len(test):
        raise UsageError(
            f"all {len(test)} test images are training images, too; give a test part of others"
        )
    pairs = np.array([(x.test, x.train) for x in found.values()], np.int64).reshape(-1, 2)
    groups = merged(groups, pairs)
    surest = sorted(found.values(), key=lambda leak: (-leak.cosine, leak.test))
    return Leaks(tuple(surest), groups, of_test.cosine[:, 0], threshold, reached, len(decoys))


@dataclass(frozen=True, eq=False)
class _Neighbors:
    """The nearest training images of some images, and which of them are the same image."""

    rows: Int[np.ndarray, " n"]
    index: Int[np.ndarray, "n k"]  # Rows of training images
    cosine: Float[np.ndarray, "n k"]
    same: Bool[np.ndarray, "n k"]  # By contents or pixels; without images, by equal vectors

    @classmethod
    def among(
        cls,
        vectors: Float[Tensor, "images dim"],
        rows: Int[np.ndarray, " n"],
        train: Int[np.ndarray, " train"],
        groups: Groups,
        known: Signatures | None,
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
            return cls(rows, index, cosine, cosine >= SAME)
        same = groups[index] == groups[rows][:, None]
        pairs = np.stack([np.broadcast_to(rows[:, None], shape), index], axis=2).reshape(-1, 2)
        alike = similarity(known["features"], pairs) > 0
        turned = np.concatenate([known["features"], mirrored(known["features"])])
        alike |= similarity(turned, pairs + np.array([len(known), 0])) > 0
        alike |= shifted(known["features"], pairs) > 0
        return cls(rows, index, cosine, same | alike.reshape(shape))


def _threshold(
    cosine: Float[np.ndarray, " test"], decoys: Float[np.ndarray, " decoys"], precision: float
) -> tuple[float | None, float]:
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


def _found(of_test: _Neighbors, known: Signatures | None) -> Iterator[Leak]:
    """Yield the most similar training image of each test image that is the same image."""
    exact = None if known is None else exact_groups(known)
    has = np.flatnonzero(of_test.same.any(axis=1))
    for at, place in zip(has.tolist(), of_test.same[has].argmax(axis=1).tolist(), strict=True):
        test, train = int(of_test.rows[at]), int(of_test.index[at, place])
        why = "same vector" if exact is None else "near-duplicate"
        if exact is not None and exact[test] == exact[train]:
            why = "same bytes"
        yield Leak(test, train, float(of_test.cosine[at, place]), why)


def _grouped(
    vectors: Float[Tensor, "images dim"],
    test: Int[np.ndarray, " test"],
    train: Int[np.ndarray, " train"],
    groups: Groups,
) -> Iterator[Leak]:
    """Yield a training image of each test image that is in one group of duplicates with some."""
    first = dict(zip(groups[train][::-1].tolist(), train[::-1].tolist(), strict=True))
    for row in test[np.isin(groups[test], groups[train])].tolist():
        other = first[int(groups[row])]
        yield Leak(row, other, float(vectors[row] @ vectors[other]), "near-duplicate")
