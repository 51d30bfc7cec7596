"""Batches of a data set, as trainings load them."""

import torch

from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.images import Images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.types import Batch


def batches(images: Images, batch_size: int = 4, size: int = 32, **options) -> Batches:
    """Views of this size on the CPU, by seed 0; more options of `Batches`, such as `workers`."""
    order, kinds = RandomBatchSampler(len(images), batch_size, 0), views_of("simclr_cifar")
    where = {"image_size": size, "device": torch.device("cpu")}
    return Batches.of(images, kinds, sampler=order, **where, **options)


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are equal to the bit."""
    return torch.equal(a.index, b.index) and all(map(torch.equal, a.views, b.views))
