"""Warnings of a discovery: one sentence each, with a number, its meaning, and what to try."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.classifier.classifier import Predictions
from nearkin.discovery.task import DiscoveryTask
from nearkin.encoders.encoder import Encoder
from nearkin.methods import METHODS
from nearkin.metrics.geometry import effective_rank
from nearkin.metrics.neighbors import nearest
from nearkin.types import UNLABELED

Labels = Int[np.ndarray, " n"]
Features = Float[np.ndarray, "n dim"]

MANY: Final = 100  # Classes from which the images that are looked at may show too few
FEW: Final = 20  # Unlabeled images per novel class below which there are too few to learn from
MAX_IMAGES: Final = 10_000  # Whose features are compared; of more, every second, third or so
TINY: Final = 5  # Images of a novel class below which there are too few to judge it
MERGED: Final = 3  # Even shares above which a novel class may be several; of four or more classes
COLLAPSED: Final = 0.9  # Share of the unlabeled images above which one class holds nearly all
MIN_RANK: Final = 1.5  # Effective rank of features below which they differ in one direction only
UNLABELED_KNOWN: Final = 0.1  # Share of unlabeled images that may seem to be of known classes
NEIGHBORS: Final = 10  # Nearest images that tell where an image lies
TORCHVISION: Final = ("torchvision:", "https://download.pytorch.org/models/")
"""How names and addresses of torchvision's weights begin. A name without a tag is of a file's."""
# In timm's tags: sets of ImageNet, and methods that learn from images alone
LABELED: Final = re.compile(r"(^|_)inw?\d+k(_|$)")
UNLABELED_METHOD: Final = re.compile(r"mae|mim|dino|jepa")


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning."""

    kind: str
    text: str


def early_findings(
    features: Float[Tensor, "images dim"], task: DiscoveryTask, known: Sequence[str]
) -> Iterator[Finding]:
    """Yield the warnings on images and their features by an encoder that has seen no label."""
    yield from few_images(len(task.unlabeled), task.num_novel)
    if task.disjoint:
        x = features[torch.from_numpy(task.rows)].numpy()
        yield from unlabeled_known(x, task.label[task.rows], known)


def labels_seen(encoder: Encoder) -> Iterator[Finding]:
    """Warn if an encoder has learned from labels, as far as its file says.

    If these are of the known classes, those that are held out are separated before they are
    searched for.
    """
    details = encoder.details
    method, how = str(details.get("method", "")), ""
    if method in METHODS and METHODS[method].uses_labels:
        how = f"it was trained by {method}"
    if weights := next(filter(learned_labels, _weights(details)), ""):
        how = f"its weights are {weights}"
    if layers := details.get("fine_tuned"):
        how = f"its layers {layers} were fine-tuned"
    if how:
        yield Finding(
            "labels seen",
            f"the encoder has learned from labels ({how}): if they are of the known classes, the "
            "accuracy on held-out ones, the calibration and the number of novel classes are too "
            "good; give an encoder that was trained without labels",
        )


def _weights(details: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names and addresses of the weights that an encoder is or comes from, as it says.

    Of an architecture that began with random weights, its name says nothing.
    """
    if origin := details.get("origin"):
        if "start" in details or "method" not in details:
            yield str(details.get("backbone", ""))
        yield from str(origin["source"]).split()  # "distilled from ... into ..."


def learned_labels(weights: str) -> bool:
    """Whether weights of timm or torchvision have learned from labels, by their name or address.

    All of torchvision have. A tag of timm names a labeled set, such as `in1k`. Its labels were
    used unless the tag also names a method without labels, and no fine-tuning.

    >>> [learned_labels(f"timm:vit_base_patch16_224.{tag}") for tag in ("augreg_in21k", "mae")]
    [True, False]
    """
    name, _, tag = weights.partition("?")[0].rpartition(".")
    if weights.startswith(TORCHVISION):
        return "://" in weights or bool(name)
    return bool(LABELED.search(tag)) and ("ft_in" in tag or not UNLABELED_METHOD.search(tag))


def number_capped(high: int, most: int) -> Iterator[Finding]:
    """Warn if the interval of the number of classes reaches what the counted images can show."""
    if high >= most >= MANY:
        yield Finding(
            "number capped",
            f"there may be more novel classes than can be counted: the images that are looked at "
            f"show at most {most}; give the number with --classes",
        )


def late_findings(predictions: Predictions, *, disjoint: bool) -> Iterator[Finding]:
    """Yield the warnings of a finished discovery, beside the early ones.

    With `disjoint` classes, no unlabeled image is of a known one.
    """
    names, num_known = predictions.classes, predictions.num_known
    unlabeled = predictions.label == UNLABELED
    sizes = np.bincount(predictions.cluster[unlabeled], minlength=len(names))
    total, largest = int(sizes.sum()), int(sizes.argmax())
    possible = len(names) - (num_known if disjoint else 0)
    if possible > 1 and sizes[largest] > COLLAPSED * total:
        yield Finding(
            "collapse",
            f"{sizes[largest]} of {total} unlabeled images are in one class, {names[largest]}, "
            "so they were not separated; try another --seed, or train the encoder longer",
        )
    else:
        yield from _novel_sizes(names[num_known:], sizes[num_known:])
    yield from _one_direction(predictions.features[unlabeled])


def few_images(num_unlabeled: int, num_novel: int) -> Iterator[Finding]:
    """Warn if there are too few unlabeled images per novel class."""
    if num_unlabeled < FEW * num_novel:
        yield Finding(
            "few",
            f"{num_unlabeled} unlabeled images are {num_unlabeled / num_novel:.3g} for each novel "
            f"class, and under {FEW} are too few to learn from; add images, or try fewer "
            "--classes",
        )


def _novel_sizes(names: Sequence[str], sizes: Labels) -> Iterator[Finding]:
    """Warn of novel classes without images, with few, and with many times their even share."""
    total, times = sizes.sum(), sizes * len(sizes) / max(sizes.sum(), 1)
    dead = [name for name, size in zip(names, sizes, strict=True) if size == 0]
    tiny = [name for name, size in zip(names, sizes, strict=True) if 0 < size < TINY]
    if dead:
        yield Finding(
            "dead",
            f"no image is in {len(dead)} of {len(names)} novel classes ({_listed(dead)}), so "
            "there may be fewer; try fewer --classes, or another --seed",
        )
    if tiny:
        yield Finding(
            "tiny",
            f"fewer than {TINY} images are in {len(tiny)} of {len(names)} novel classes "
            f"({_listed(tiny)}), too few to judge these; look at them, or try fewer --classes",
        )
    for row in np.flatnonzero(times > MERGED).tolist():
        yield Finding(
            "merged",
            f"{sizes[row]} of {total} images in novel classes are in {names[row]}, "
            f"{times[row]:.1f} times an even share, so it may be several classes in one; look at "
            "it, or try more --classes",
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join([*names[:3], *[f"{len(names) - 3} more"] * (len(names) > 3)])


def _one_direction(features: Features) -> Iterator[Finding]:
    """Warn if the features of unlabeled images differ in one direction at most."""
    if len(features) < FEW:
        return
    some = features[:: len(features) // MAX_IMAGES + 1]
    rank = float(effective_rank(torch.from_numpy(some)))
    if rank < MIN_RANK:
        yield Finding(
            "collapse",
            f"the features of the unlabeled images have an effective rank of {rank:.1f}, too low "
            "to separate classes; train the encoder longer, or with stronger augmentations",
        )


def unlabeled_known(features: Features, label: Labels, known: Sequence[str]) -> Iterator[Finding]:
    """Warn if unlabeled images seem to be of known classes, where `ncd` wants none.

    An unlabeled image passes for one of a known class if as many of its nearest images are
    labeled ones of it as for the best quarter of these. How many pass, divided by the share of
    labeled ones that do, estimates how many are of the class (Garg et al. Mixture proportion
    estimation and PU learning. NeurIPS 2021, arXiv:2111.00980): too many where a novel class lies
    amid a known one. If features do not even separate the known classes, there is no warning.
    """
    every = len(label) // MAX_IMAGES + 1
    x, label = torch.from_numpy(features[::every]), label[::every]
    ours = label != UNLABELED
    if ours.all() or not ours.any():
        return
    near = label[nearest(x, x, NEIGHBORS, exclude_self=True)[1].numpy()]
    around = np.stack([(near == number).sum(axis=1) for number in range(len(known))], axis=1)
    passed, share = _pass(around[ours], label[ours], around[~ours])
    counts = np.bincount(passed, minlength=len(known))
    likeliest = [known[number] for number in np.argsort(-counts, kind="stable") if counts[number]]
    if share > UNLABELED_KNOWN:
        yield Finding(
            "unlabeled-known",
            f"about {min(share, 1):.0%} of the unlabeled images lie among those of known classes "
            f"(most of all {', '.join(likeliest[:3])}), but --mode ncd takes all to be novel; "
            "look at them, and if they are of known classes, use --mode gcd",
        )


def _pass(
    labeled: Int[np.ndarray, "labeled known"],
    label: Int[np.ndarray, " labeled"],
    unlabeled: Int[np.ndarray, "unlabeled known"],
) -> tuple[Int[np.ndarray, " passed"], float]:
    """Return the known classes that unlabeled images pass for, and the estimated share of these.

    Both tables count the neighbors of an image that are labeled ones of each known class.
    """
    own, met = labeled[np.arange(len(label)), label], labeled.any(axis=1)
    right, guess = (labeled.argmax(axis=1) == label)[met], np.bincount(label).max() / len(label)
    if not met.any() or right.mean() < (1 + guess) / 2:  # known classes are not separated
        return label[:0], 0.0
    bound, usual = np.full(labeled.shape[1], np.inf), np.ones(labeled.shape[1])
    for number in np.unique(label[own > 0]):
        bound[number] = max(np.quantile(own[label == number], 0.75), 1)
        usual[number] = np.mean(own[label == number] >= bound[number])
    closest = unlabeled.argmax(axis=1)
    passed = closest[unlabeled.max(axis=1) >= bound[closest]]
    return passed, float(np.sum(1 / usual[passed]) / len(unlabeled))
