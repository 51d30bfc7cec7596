"""What a method is: networks that encode, a loss that only reads, and a commit that writes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from nearkin.data.views import View
from nearkin.distributed import gather_all, mean_over_rows
from nearkin.networks.branch import Backbone, Branch, set_share
from nearkin.objectives.numerics import dividing_rows, full_precision
from nearkin.schema import Value
from nearkin.types import Batch, Encoded, Memo, Step

Schedule = Callable[[float], float]
"""A value as a function of progress, which runs from 0 at the start of training to 1."""


def half_cosine(first: float, last: float) -> Schedule:
    """Return a schedule from `first` to `last` along half a cosine.

    >>> schedule = half_cosine(0.04, 0.4)
    >>> [round(schedule(progress), 2) for progress in (0.0, 0.5, 1.0)]
    [0.04, 0.22, 0.4]
    """
    return lambda progress: last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


def line(first: float, last: float, until: float) -> Schedule:
    """Return a schedule from `first` to `last` along a line, which ends at `until`.

    >>> [round(line(0.04, 0.07, until=0.3)(progress), 3) for progress in (0.0, 0.15, 0.3, 1.0)]
    [0.04, 0.055, 0.07, 0.07]
    """
    return lambda p: first + (last - first) * (min(p / until, 1.0) if until > 0 else 1.0)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What `auto` means for a method: its paper's values, with smaller networks and memories."""

    optimizer: Literal["sgd", "lars", "adamw", "muon"] = "adamw"
    lr: float = 2e-3
    """Peak learning rate for a batch of 256; it grows with the batch."""
    weight_decay: float = 0.05
    epochs: int = 200
    """Length of the paper's main training, which `auto` takes on a GPU."""
    augment: str | tuple[View, ...] = "simclr"
    augment_small: str | tuple[View, ...] = "simclr_cifar"
    """Augmentations of images of 64 px and more, and of smaller ones."""
    options: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """Options of the constructor whose default, the paper's, is for longer trainings."""


@dataclass(frozen=True, kw_only=True)
class HealthBounds:
    """Bounds that the embeddings of different images keep as long as they have not collapsed."""

    min_rank: float = 0.08
    """Effective rank, as a share of the possible directions."""
    min_std: float = 0.65
    """Standard deviation, relative to that of vectors spread evenly over the sphere."""
    max_cosine: float = 0.55
    """Mean cosine between different images."""


class Method(nn.Module, ABC, Generic[Memo]):
    """A self-supervised method: the networks it trains, its loss, and all it remembers.

    Its constructor is its configuration: `backbone`, the network to train, and the options. Its
    `state_dict` is a whole checkpoint. A training step:

        step = method(batch, progress)     # reads; writes nothing but batch-norm statistics
        step.loss.backward(); optimizer.step()
        method.commit(step.memo, progress) # writes: momentum encoders, queues, banks

    Several processes give the losses, gradients and memories of one with the whole batch: each
    encodes its share, and `forward` gathers the results. A method keeps three rules for that:

    - Networks run in `encode`: batch norm there takes its statistics over all processes.
    - Every tensor that `encode` returns has one row per image, in the order of the batch.
    - Random numbers are drawn in `compute_loss` or by `shuffle_bn`: all processes draw alike.
    """

    views: ClassVar[tuple[str | View, ...]] = ("strong", "strong")
    """Kinds of views: "strong", those of `DERIVED`, the augmentation's own, or a `View`."""
    more_views: ClassVar[bool] = False
    """Whether it uses further views: all of the augmentation, or as many as are asked for."""
    defaults: ClassVar[Defaults] = Defaults()
    uses_labels: ClassVar[bool] = False  # learns from labels, where there are any
    uses_teacher: ClassVar[bool] = False
    """Whether it learns from the features of another encoder, its teacher.

    Then its constructor takes their dimension as `teacher_dim`, and every batch has them in
    `Batch.teacher`. The teacher itself is not part of the method.
    """
    health_bounds: ClassVar[HealthBounds] = HealthBounds()
    metrics: ClassVar[tuple[str, ...]] = ()
    """Keys of `Step.metrics` that `metrics.csv` has a column for."""
    online: Branch  # the trained backbone and its projector

    @override
    def forward(self, batch: Batch, progress: float) -> Step[Memo]:
        """Return the loss, and the memo for `commit`, from this process's share of a batch."""
        _check_batch(self, batch)
        set_share(self, len(batch.index))
        encoded = tuple(self.encode(batch))
        index, label, *others = gather_all([batch.index, batch.label, *batch.teacher, *encoded])
        taught = len(batch.teacher)
        whole = Batch((), index, label, tuple(others[:taught]))
        compute = full_precision(lambda *encoded: self.compute_loss(encoded, whole, progress))
        with dividing_rows(mean_over_rows):
            return compute(*others[taught:])

    def encode(self, batch: Batch, /) -> Sequence[Tensor]:
        """Run the networks on the views; return tensors with one row per image.

        By default these are the online embeddings of each view.
        """
        return tuple(self.online(view) for view in batch.views)

    @abstractmethod
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float, /) -> Step[Memo]:
        """Compute the loss of the whole batch in at least float32, and leave the state as it is.

        `batch` has no views; a teacher's features are in it. `progress` is the share of training
        that is done, from 0 to 1.
        """

    @torch.no_grad()
    def commit(self, memo: Memo, progress: float, /) -> None:
        """Write to the memories after the optimizer step. Writes nothing by default."""

    def learning_rates(self, _schedule: Schedule, /) -> Mapping[str, Schedule]:
        """Return the learning rates that depart from the schedule, by parameter-name prefix."""
        return {}

    @property
    def backbone(self) -> Backbone:
        """The network that training is for."""
        return self.online.backbone


def _check_batch(method: Method[Any], batch: Batch) -> None:
    """Refuse a batch whose number of views, or the length of one, does not fit the method."""
    needed, actual = len(method.views), len(batch.views)
    if actual < needed or (actual > needed and not method.more_views):
        raise ValueError(f"{type(method).__name__} takes {needed} views, the batch has {actual}")
    taught = len(batch.teacher)
    if method.uses_teacher and taught != actual:
        raise ValueError(
            f"{type(method).__name__} takes a teacher's features of {actual} views, the batch "
            f"has them of {taught}"
        )
    shapes = [tuple(view.shape) for view in batch.views]
    rows = {len(batch.index), len(batch.label), *(shape[0] for shape in shapes)}
    rows |= {len(features) for features in batch.teacher}
    if len(rows) > 1 or any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            f"the batch has {len(batch.index)} indices, {len(batch.label)} labels and views "
            f"of shapes {shapes}; expected (batch, channel, height, width) with one batch size"
        )
