"""What a discovery warns of: one sentence each, with a number, its meaning, and what to try."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.discovery.classifier import Predictions
from nearkin.evaluation.geometry import effective_rank
from nearkin.measures.neighbors import nearest
from nearkin.types import UNKNOWN

Kind = Literal["few", "dead", "tiny", "merged", "collapse", "positive rate", "hidden", "unrelated"]
Mode = Literal["gcd", "ncd"]
Labels = Int[np.ndarray, " n"]

FEW: Final = 20
"""Unlabeled images per novel class below which there are too few to learn from."""

LOOKED_AT: Final = 10_000
"""Images whose features are looked at; of more, every second, third or so."""

TINY: Final = 5
"""Images of a novel class below which there are too few to judge it."""

MERGED: Final = 3
"""Even shares above which a novel class may be several in one; takes four classes or more."""

COLLAPSED: Final = 0.9
"""Share of the unlabeled images above which one class holds nearly all."""

LEAST_RANK: Final = 1.5
"""Effective rank of features below which they differ in one direction only."""

POSITIVE: Final = 0.05, 0.9
"""Positive rates that are too low, as a part of that of even classes, and too high."""

LOST: Final = 0.05
"""Silhouette that may be lost without a warning; one k-means and the next differ by as much."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning of one kind, in words."""

    kind: Kind
    text: str


def late_findings(
    predictions: Predictions,
    *,
    mode: Mode,
    positive_rate: float | None = None,
    silhouettes: tuple[float, float] | None = None,
) -> list[Finding]:
    """All that a finished discovery should warn of, beside what was clear from the start.

    Args:
        predictions: Of all images, with and without a label.
        mode: Whether unlabeled images may be of known classes (`gcd`) or not (`ncd`).
        positive_rate: Share of the pairs of unlabeled images that training took to be of one
            class; None if it did not pair images.
        silhouettes: What `unrelated` compares; None if it was not measured.
    """
    names, num_known = predictions.classes, predictions.num_known
    features, unlabeled = predictions.features, predictions.label == UNKNOWN
    num_novel, cluster = len(names) - num_known, predictions.cluster[unlabeled]
    found = [
        *_sizes(np.bincount(cluster, minlength=len(names)), names, num_known, mode),
        _one_direction(features[unlabeled]),
        None if positive_rate is None else _pairs(positive_rate, num_novel),
        None if silhouettes is None else unrelated(*silhouettes),
    ]
    return [finding for finding in found if finding is not None]


def unrelated(before: float, after: float) -> Finding | None:
    """Whether learning the known classes blurred the groups of the unlabeled images.

    A sign of what was found by Li, Otholt, Dai, Hu, Meinel, Yang. Supervised knowledge may hurt
    novel class discovery performance. TMLR 2023, arXiv:2306.03648. `before` and `after` are mean
    silhouettes of clusters of the unlabeled images, in features that knew no label and in
    features that learned the known classes.
    """
    if after >= before - LOST:
        return None
    return Finding(
        "unrelated",
        "learning the known classes lowered the silhouette of clusters of unlabeled images from "
        f"{before:.2f} to {after:.2f}, so the two may have little in common; label classes more "
        "like the novel ones, or learn the known ones for fewer epochs",
    )


def _sizes(sizes: Labels, names: Sequence[str], num_known: int, mode: Mode) -> Iterator[Finding]:
    """Whether one class took nearly all, or else which novel classes have few or many."""
    total, largest = int(sizes.sum()), int(sizes.argmax())
    possible = len(names) - (num_known if mode == "ncd" else 0)
    if possible > 1 and sizes[largest] > COLLAPSED * total:
        yield Finding(
            "collapse",
            f"{sizes[largest]} of {total} unlabeled images are in one class, {names[largest]}, "
            "so they were not told apart; try another --seed, or train the encoder longer",
        )
    else:
        yield from _novel_sizes(names[num_known:], sizes[num_known:])


def _novel_sizes(names: Sequence[str], sizes: Labels) -> Iterator[Finding]:
    """Novel classes without images, with few, and with many times their even share."""
    total, times = sizes.sum(), sizes * len(sizes) / max(sizes.sum(), 1)
    dead = [names[row] for row in np.flatnonzero(sizes == 0).tolist()]
    tiny = [names[row] for row in np.flatnonzero((sizes > 0) & (sizes < TINY)).tolist()]
    if dead:
        yield Finding(
            "dead",
            f"no image is in {len(dead)} of {len(names)} novel classes ({listed(dead)}), so "
            "there may be fewer; try fewer --classes, or another --seed",
        )
    if tiny:
        yield Finding(
            "tiny",
            f"fewer than {TINY} images are in {len(tiny)} of {len(names)} novel classes "
            f"({listed(tiny)}), too few to judge these; look at them, or try fewer --classes",
        )
    for row in np.flatnonzero(times > MERGED).tolist():
        yield Finding(
            "merged",
            f"{sizes[row]} of {total} images in novel classes are in {names[row]}, "
            f"{times[row]:.1f} times an even share, so it may be several classes in one; look at "
            "it, or try more --classes",
        )


def _one_direction(features: Float[np.ndarray, "images dim"]) -> Finding | None:
    """Whether features of unlabeled images differ in one direction at the most."""
    if len(features) < FEW:
        return None
    some = features[:: len(features) // LOOKED_AT + 1]
    rank = float(effective_rank(torch.from_numpy(some)))
    if rank >= LEAST_RANK:
        return None
    return Finding(
        "collapse",
        f"the features of the unlabeled images have an effective rank of {rank:.1f}, too low to "
        "tell classes apart; train the encoder longer, or with stronger augmentations",
    )


def _pairs(rate: float, num_novel: int) -> Finding | None:
    """Whether training took hardly any pairs of images to be of one class, or nearly all."""
    least, most = POSITIVE
    if num_novel < 2 or least / num_novel <= rate <= most:
        return None
    much = rate > most
    return Finding(
        "positive rate",
        f"{rate:.1%} of the pairs of unlabeled images were taken to be of one class, "
        f"where even classes have {1 / num_novel:.1%}, so the pairs taught "
        f"{'that all are alike' if much else 'almost nothing'}; "
        f"try a {'smaller' if much else 'larger'} positive_rate",
    )


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join([*names[:3], *[f"{len(names) - 3} more"] * (len(names) > 3)])


HIDDEN: Final = 0.1
"""Share of the unlabeled images that may seem to be of known classes without a warning."""

NEIGHBORS: Final = 10
"""Nearest images that tell where an image lies."""


def early_findings(
    features: Float[np.ndarray, "images dim"],
    label: Int[np.ndarray, " images"],
    known: Sequence[str],
    *,
    num_novel: int,
    mode: Mode,
) -> list[Finding]:
    """All that can be warned of before anything is learned from labels.

    Args:
        features: Of all images that are learned from; no label has touched them.
        label: Numbers of known classes, or `UNKNOWN`.
        known: Names of the known classes.
        num_novel: Novel classes to look for.
        mode: Whether unlabeled images may be of known classes (`gcd`) or not (`ncd`).
    """
    found = [
        few_images(int((label == UNKNOWN).sum()), num_novel),
        hidden(features, label, known) if mode == "ncd" else None,
    ]
    return [finding for finding in found if finding is not None]


def few_images(num_unlabeled: int, num_novel: int) -> Finding | None:
    """Whether there are too few unlabeled images for so many novel classes."""
    if num_unlabeled >= FEW * num_novel:
        return None
    return Finding(
        "few",
        f"{num_unlabeled} unlabeled images are {num_unlabeled / num_novel:.3g} for each novel "
        f"class, and under {FEW} are too few to learn from; add images, or try fewer --classes",
    )


def hidden(
    features: Float[np.ndarray, "images dim"],
    label: Int[np.ndarray, " images"],
    known: Sequence[str],
) -> Finding | None:
    """Whether images of known classes are among the unlabeled ones, where `ncd` wants none.

    An unlabeled image passes for one of a known class if as many of its nearest images are
    labeled ones of it as for the best quarter of these. How many pass, divided by the share of
    labeled ones that do, estimates how many are of the class (Garg et al. Mixture proportion
    estimation and PU learning. NeurIPS 2021, arXiv:2111.00980): too many where a novel class lies
    amid a known one. If features do not even tell the known classes apart, there is no warning.

    Args:
        features: Of all images, of any length.
        label: Numbers of known classes, or `UNKNOWN`.
        known: Names of the known classes.
    """
    every = len(label) // LOOKED_AT + 1
    x, label = torch.from_numpy(features[::every]), label[::every]
    ours = label != UNKNOWN
    if ours.all() or not ours.any():
        return None
    near = label[nearest(x, x, NEIGHBORS, exclude_self=True)[1].numpy()]
    around = np.stack([(near == number).sum(axis=1) for number in range(len(known))], axis=1)
    passed, share = _pass(around[ours], label[ours], around[~ours])
    if share <= HIDDEN:
        return None
    counts = np.bincount(passed, minlength=len(known))
    likeliest = [known[number] for number in np.argsort(-counts, kind="stable") if counts[number]]
    return Finding(
        "hidden",
        f"about {min(share, 1):.0%} of the unlabeled images lie among those of known classes "
        f"(most of all {', '.join(likeliest[:3])}), but --mode ncd takes all to be novel; look at "
        "them, and if they are of known classes, use --mode gcd",
    )


def _pass(
    labeled: Int[np.ndarray, "labeled known"],
    label: Int[np.ndarray, " labeled"],
    unlabeled: Int[np.ndarray, "unlabeled known"],
) -> tuple[Int[np.ndarray, " passed"], float]:
    """The known classes that unlabeled images pass for, and how many are of them, as a share.

    Both tables hold how many neighbors of an image are labeled ones of each known class.
    """
    own, met = labeled[np.arange(len(label)), label], labeled.any(axis=1)
    right, guess = (labeled.argmax(axis=1) == label)[met], np.bincount(label).max() / len(label)
    if not met.any() or right.mean() < (1 + guess) / 2:  # known classes are not told apart
        return label[:0], 0.0
    bound, usual = np.full(labeled.shape[1], np.inf), np.ones(labeled.shape[1])
    for number in np.unique(label[own > 0]):
        bound[number] = max(np.quantile(own[label == number], 0.75), 1)
        usual[number] = np.mean(own[label == number] >= bound[number])
    closest = unlabeled.argmax(axis=1)
    passed = closest[unlabeled.max(axis=1) >= bound[closest]]
    return passed, float(np.sum(1 / usual[passed]) / len(unlabeled))
