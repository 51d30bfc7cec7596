"""What can be warned of before anything is learned from labels."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int

from nearkin.discovery.findings import FEW, LOOKED_AT, Finding, Mode
from nearkin.measures.neighbors import nearest
from nearkin.types import UNKNOWN

HIDDEN: Final = 0.1
"""Share of the unlabeled pictures that may seem to be of known classes without a warning."""

NEIGHBORS: Final = 10
"""Nearest pictures that tell where a picture lies."""


def doubts(
    features: Float[np.ndarray, "pictures dim"],
    label: Int[np.ndarray, " pictures"],
    known: Sequence[str],
    *,
    num_novel: int,
    mode: Mode,
) -> list[Finding]:
    """All that can be warned of before anything is learned from labels.

    Args:
        features: Of all pictures that are learned from; no label has touched them.
        label: Numbers of known classes, or `UNKNOWN`.
        known: Names of the known classes.
        num_novel: Novel classes to look for.
        mode: Whether unlabeled pictures may be of known classes (`gcd`) or not (`ncd`).
    """
    found = [
        few_pictures(int((label == UNKNOWN).sum()), num_novel),
        hidden(features, label, known) if mode == "ncd" else None,
    ]
    return [finding for finding in found if finding is not None]


def few_pictures(num_unlabeled: int, num_novel: int) -> Finding | None:
    """Whether there are too few unlabeled pictures for so many novel classes."""
    if num_unlabeled >= FEW * num_novel:
        return None
    return Finding(
        "few",
        f"{num_unlabeled} unlabeled pictures are {num_unlabeled / num_novel:.3g} for each novel "
        f"class, and under {FEW} are too few to learn from; add pictures, or try fewer --classes",
    )


def hidden(
    features: Float[np.ndarray, "pictures dim"],
    label: Int[np.ndarray, " pictures"],
    known: Sequence[str],
) -> Finding | None:
    """Whether pictures of known classes are among the unlabeled ones, where `ncd` wants none.

    An unlabeled picture passes for one of a known class if as many of its nearest pictures are
    labeled ones of it as for the best quarter of these. How many pass, divided by the share of
    labeled ones that do, estimates how many are of the class (Garg et al. Mixture proportion
    estimation and PU learning. NeurIPS 2021, arXiv:2111.00980): too many where a novel class lies
    amid a known one. If features do not even tell the known classes apart, there is no warning.

    Args:
        features: Of all pictures, of any length.
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
        f"about {min(share, 1):.0%} of the unlabeled pictures lie among those of known classes "
        f"(most of all {', '.join(likeliest[:3])}), but --mode ncd takes all to be novel; look at "
        "them, and if they are of known classes, use --mode gcd",
    )


def _pass(
    labeled: Int[np.ndarray, "labeled known"],
    label: Int[np.ndarray, " labeled"],
    unlabeled: Int[np.ndarray, "unlabeled known"],
) -> tuple[Int[np.ndarray, " passed"], float]:
    """The known classes that unlabeled pictures pass for, and how many are of them, as a share.

    Both tables hold how many neighbors of a picture are labeled ones of each known class.
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
