"""Augmentations that remove what distinguishes the classes, found before any training."""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from nearkin.data.augmentations import Augment, measured_view
from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.views import from_zero_to_one
from nearkin.evaluation.metrics import predict
from nearkin.types import UNLABELED

MAX_THUMBNAILS: Final = 2_000  # Sampled images


def augmentation_warnings(images: Images, augment: Augment) -> list[str]:
    """Warn of augmentations that remove what distinguishes the classes, by kNN of thumbnails.

    That is color, where the mean color alone predicts the class, and orientation, where mirrored
    images are not recognized. Without labels there are no warnings.
    """
    view = measured_view(augment)
    sample = images.subset(np.flatnonzero(images.labels != UNLABELED)).spread(MAX_THUMBNAILS)
    if len(sample) < 2:
        return []
    small = from_zero_to_one(torch.cat(list(CenterCrops(sample, 16))))
    color = torch.cat([small.mean(dim=(2, 3)), small.std(dim=(2, 3))], dim=1)

    def accuracy(bank: Tensor, queries: Tensor) -> float:
        """Of every second image, by kNN among the others."""
        mean = bank.flatten(1).mean(dim=0)
        bank, queries = (x.flatten(1) - mean for x in (bank, queries))
        predicted = predict(bank[::2], sample.labels[::2], queries[1::2])
        return float((predicted == sample.labels[1::2]).mean())

    chance = np.bincount(sample.labels).max() / len(sample)
    by_color, straight = accuracy(color, color), accuracy(small, small)
    mirrored = accuracy(small, small.flip(3))
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
