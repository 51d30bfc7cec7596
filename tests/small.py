"""Every method, small enough to test: the same code as at full size, nothing mocked."""

import torch
from torch import nn

from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.backbone import Backbone
from nearkin.types import UNKNOWN, Batch

NUM_IMAGES, BATCH, SIDE = 64, 16, 8

SMALL: dict[str, dict[str, object]] = {
    "moco": dict(dim=8, hidden_dim=16, queue_size=40, momentum=0.9),
    "moco_end_to_end": dict(dim=8, hidden_dim=16),
    "moco_memory_bank": dict(dim=8, hidden_dim=16, num_images=NUM_IMAGES, num_negatives=32),
    "simclr": dict(dim=8, hidden_dim=16),
}


def small(name: str, **options: object) -> Method:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 24), nn.ReLU())
    return METHODS[name](Backbone(body, 24), **SMALL[name] | options)


def without_batch_norm(method: Method) -> Method:
    for module in method.modules():
        for child_name, child in module.named_children():
            if isinstance(child, nn.BatchNorm1d):
                setattr(module, child_name, nn.Identity())
    return method


def batch_at(step: int, num_views: int = 2) -> Batch:
    """A batch that depends on the step alone."""
    g = torch.Generator().manual_seed(step)
    index = torch.randperm(NUM_IMAGES, generator=g)[:BATCH]
    images = torch.randn(NUM_IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    views = tuple(
        images[index] + 0.3 * torch.randn(BATCH, 3, SIDE, SIDE, generator=g)
        for _ in range(num_views)
    )
    return Batch(views, index, torch.full_like(index, UNKNOWN))


def as_double(batch: Batch) -> Batch:
    return Batch(tuple(v.double() for v in batch.views), batch.index, batch.label)


def shard(batch: Batch, rank: int, world: int) -> Batch:
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return Batch(tuple(v[rows] for v in batch.views), batch.index[rows], batch.label[rows])
