"""What a method is: a forward pass that only reads, and a commit that does all the writing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Generic

import torch
from torch import nn

from nearkin.networks.backbone import Backbone
from nearkin.networks.branch import Branch
from nearkin.types import Batch, Memo, Step

Schedule = Callable[[float], float]
"""A value as a function of progress, which runs from 0 at the start of training to 1."""


class Method(nn.Module, ABC, Generic[Memo]):
    """A self-supervised objective, the networks it trains and everything it remembers.

    A method's constructor is its configuration. All it remembers is parameters and buffers,
    so `state_dict` is a whole checkpoint. One training step is:

        step = method(batch, progress)        # reads; writes nothing
        step.loss.backward(); optimizer.step()
        method.commit(step.memo, progress)    # writes: momentum encoders, queues, banks
    """

    num_views: ClassVar[int] = 2
    """Views it needs of each image."""
    more_views: ClassVar[bool] = False
    """Whether it makes use of more, smaller ones (multi-crop), where the augmentation has them."""
    uses_labels: ClassVar[bool] = False
    """Whether it learns from labels, where there are any."""
    memory_sizes: ClassVar[tuple[str, ...]] = ()
    """Options that cannot exceed half of the images; left alone, they shrink to fit."""
    least_rank: ClassVar[float] = 0.08
    """Effective rank of healthy embeddings, at least, as a part of the directions there could be;
    this and the next two were measured (docs/health.md)."""
    least_std: ClassVar[float] = 0.65
    """Their standard deviation, at least, as a part of that of evenly spread vectors."""
    most_cosine: ClassVar[float] = 0.55
    """Mean cosine between those of different images, at most."""
    online: Branch

    @abstractmethod
    def forward(self, batch: Batch, progress: float) -> Step[Memo]:
        """Compute the loss. Must leave the state as it found it (batch-norm statistics aside)."""

    @torch.no_grad()
    def commit(self, memo: Memo, progress: float, /) -> None:
        """Write what the step taught, once the weights have moved. Nothing, by default."""

    def learning_rates(self, schedule: Schedule, /) -> Mapping[str, Schedule]:
        """Learning rates that depart from the run's `schedule`, by parameter-name prefix."""
        del schedule
        return {}

    @property
    def backbone(self) -> Backbone:
        """What training is for."""
        return self.online.backbone
