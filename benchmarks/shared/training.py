"""A method with images, optimizer and loop as in `nearkin train`, step by step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.distributed import native_precision
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer, warmup_cosine

CPU = torch.device("cpu")


def trained(
    name: str,
    backbone: str,
    batch: int,
    total: int,
    *,
    side: int = 32,
    augment: str = "simclr_cifar",
    images: int = 0,
    views: int = 0,
    options: dict[str, Any] | None = None,
    data: Path | None = None,
    workers: int = 0,
) -> Iterator[Method[Any]]:
    """Yield training steps of a method on random or other images.

    Args:
        name: The method.
        backbone: The network.
        batch: Images per step, over all processes.
        total: Steps.
        side: Side of the images in pixels.
        augment: How views are drawn.
        images: Number of images; eight batches if 0.
        views: Views per image; the method's number if 0.
        options: Options of the method.
        data: Photos, instead of random images.
        workers: Processes that decode them.
    """
    rng = np.random.default_rng(0)
    samples = data or rng.integers(0, 256, (images or 8 * batch, side, side, 3), np.uint8)
    torch.manual_seed(0)
    kind = METHODS[name]
    method = kind(build_backbone(backbone, side), **(options or {}))
    method = method.to(memory_format=torch.channels_last)
    opened = open_images(samples)
    batches = Batches.of(
        opened,
        views_of(augment, kind.views, more=kind.more_views)[: views or None],
        image_size=side,
        sampler=RandomBatchSampler(len(opened), batch, seed=0),
        device=CPU,
        workers=workers,
    )
    for _ in steps(
        method,
        build_optimizer(method, name="sgd", lr=0.06, weight_decay=5e-4),
        batches.load(0, total),
        start=0,
        total=total,
        schedule=warmup_cosine(),
        seed=0,
        precision=native_precision(CPU),
    ):
        yield method
