"""What a method is: a forward pass that only reads, and a commit that does all the writing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal

import torch
from torch import nn

from nearkin.config import Value
from nearkin.data.views import View
from nearkin.networks.backbone import Backbone
from nearkin.networks.branch import Branch
from nearkin.types import Batch, Memo, Step

Schedule = Callable[[float], float]
"""A value as a function of progress, which runs from 0 at the start of training to 1."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What `auto` means for a method: how `nearkin train` trains it where nothing else is given.

    SimCLR's were chosen on images held out of the training part of CIFAR-10; see docs/results.md.
    Those of the other methods are their papers', with smaller networks and memories for short
    trainings, and were not searched.
    """

    optimizer: Literal["sgd", "lars", "adamw"] = "adamw"
    lr: float = 2e-3
    """Peak learning rate for a batch of 256; it grows with the batch."""
    weight_decay: float = 0.05
    augment: str = "simclr"
    """Augmentation of images of 64 px and more."""
    augment_small: str = "simclr_cifar"
    """Augmentation of smaller images."""
    options: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """Options of the constructor whose default, the paper's, is for longer trainings."""


class Method(nn.Module, ABC, Generic[Memo]):
    """A self-supervised objective, the networks it trains and everything it remembers.

    A method's constructor is its configuration. All it remembers is parameters and buffers,
    so `state_dict` is a whole checkpoint. One training step is:

        step = method(batch, progress)        # reads; writes nothing
        step.loss.backward(); optimizer.step()
        method.commit(step.memo, progress)    # writes: momentum encoders, queues, banks
    """

    views: ClassVar[tuple[str | View, ...]] = ("strong", "strong")
    """Views it needs of each image: kinds of views of the augmentation ("strong", "weak", "small",
    "gray", or a name that the augmentation gives to one of its own), or a `View` as a value."""
    more_views: ClassVar[bool] = False
    """Whether it uses all further views that the augmentation has (multi-crop)."""
    defaults: ClassVar[Defaults] = Defaults()
    """What `auto` means for it."""
    uses_labels: ClassVar[bool] = False
    """Whether it learns from labels, where there are any."""
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
