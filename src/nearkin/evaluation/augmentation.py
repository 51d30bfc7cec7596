"""Augmentations that remove what distinguishes the classes, found before any training."""

from typing import Final

import numpy as np
import torch

from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import CenterCrops, from_zero_to_one
from nearkin.data.images import Images
from nearkin.errors import NearkinError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn

MAX_THUMBNAILS: Final = 2_000  # Sampled images


def augmentation_warnings(images: Images, augment: Augment) -> list[str]:
    """Warn of augmentations that remove what distinguishes the classes, by kNN of thumbnails.

    That is color, where the mean color alone predicts the class, and orientation, where mirrored
    images are not recognized. Without labels there are no warnings.
    """
    view = views_of(augment, ("strong",))[0]
    sample = images.spread(MAX_THUMBNAILS)
    small = from_zero_to_one(torch.cat(list(CenterCrops(sample, 16))))
    color = torch.cat([small.mean(dim=(2, 3)), small.std(dim=(2, 3))], dim=1)
    known = sample.labels[sample.labels >= 0]
    chance = np.bincount(known).max() / len(known) if len(known) else 1.0
    by_color = _accuracy(color, color, sample.labels)
    straight = _accuracy(small, small, sample.labels)
    mirrored = _accuracy(small, small.flip(3), sample.labels)
    warnings = []
    recolors = sample.num_channels == 3 and (
        view.jitter * (view.hue + view.saturation) or view.gray
    )
    if recolors and by_color > (1 + chance) / 2:
        warnings.append(
            f"mean color alone predicts {by_color:.0%} of the labels, and augmentation {augment} "
            "changes it; try --augment characters"
        )
    if view.flip and mirrored < straight - 0.3:
        warnings.append(
            f"kNN on thumbnails predicts {straight:.0%} of the labels, but {mirrored:.0%} of "
            f"mirrored ones, as in writing, and augmentation {augment} flips; try --augment "
            "characters"
        )
    return warnings


def _accuracy(bank: torch.Tensor, queries: torch.Tensor, labels: np.ndarray) -> float:
    """Return the kNN accuracy of every second image by the others; 0 without labels."""
    mean = bank.flatten(1).mean(dim=0)
    train = Embeddings((bank.flatten(1)[::2] - mean).numpy(), labels[::2])
    test = Embeddings((queries.flatten(1)[1::2] - mean).numpy(), labels[1::2])
    try:
        return knn(train, test)[0].value
    except NearkinError:
        return 0.0
