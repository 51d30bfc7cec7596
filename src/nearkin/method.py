"""What a method is: networks that encode, a loss that only reads, and a commit that writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from nearkin.config import Value
from nearkin.data.views import View
from nearkin.distributed import gather, mean_over_rows
from nearkin.networks.backbone import Backbone
from nearkin.networks.branch import Branch
from nearkin.objectives.rows import dividing_rows
from nearkin.types import Batch, Encoded, Memo, Step

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
    augment: str | tuple[View, ...] = "simclr"
    """Augmentation of images of 64 px and more."""
    augment_small: str | tuple[View, ...] = "simclr_cifar"
    """Augmentation of smaller images."""
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

    Its constructor is its configuration. All it remembers is parameters and buffers, so
    `state_dict` is a whole checkpoint. A method writes three functions, as for one device:

        encode(batch) -> tensors           run the networks on the views
        compute_loss(tensors, ...) -> Step compute the loss from the result, and a memo
        commit(memo, progress)             write: momentum encoders, queues, banks

    One training step is:

        step = method(batch, progress)     # reads, and writes nothing but batch-norm statistics
        step.loss.backward(); optimizer.step()
        method.commit(step.memo, progress)

    *Several processes.* Each encodes its share of the batch. `forward` gathers what `encode`
    returns, with gradients, so `compute_loss` has the whole batch in every process and nothing in
    a method mentions ranks. W processes with B/W images each then give the losses, gradients and
    memories of one process with B. Three rules make this so:

    - Networks run in `encode`: batch norm there takes its statistics over all processes.
    - Every tensor that `encode` returns has one row per image, in the order of the batch.
    - Random numbers are drawn in `compute_loss`, where all processes draw alike (or in `encode`
      by `shuffle_bn`).

    Objectives that are means over rows (`info_nce`, `nt_xent`, ...) divide the rows among the
    processes by themselves. A term of your own is computed by all of them, or divided by
    `nearkin.objectives.mean_over_rows`.
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
    health_bounds: ClassVar[HealthBounds | None] = None
    """Bounds of healthy embeddings; None means those of `nearkin.training.health`."""
    online: Branch
    """The trained backbone and its projector."""

    @override
    def forward(self, batch: Batch, progress: float) -> Step[Memo]:
        """Return the loss of a batch, and the memo for `commit`.

        Args:
            batch: This process's share of the batch.
            progress: Share of training that is done, from 0 to 1.
        """
        self._check(batch)
        encoded = tuple(gather(rows) for rows in self.encode(batch))
        whole = Batch((), gather(batch.index), gather(batch.label))
        with dividing_rows(mean_over_rows):
            return self.compute_loss(encoded, whole, progress)

    def _check(self, batch: Batch) -> None:
        """Refuse a batch that the method cannot take.

        Raises:
            ValueError: If the number of views or the length of one does not fit.
        """
        needed, given = len(self.views), len(batch.views)
        if given < needed or (given > needed and not self.more_views):
            raise ValueError(f"{type(self).__name__} takes {needed} views, the batch has {given}")
        shapes = [tuple(view.shape) for view in batch.views]
        rows = {len(batch.index), len(batch.label), *(shape[0] for shape in shapes)}
        if len(rows) > 1 or any(len(shape) != 4 for shape in shapes):
            raise ValueError(
                f"the batch has {len(batch.index)} indices, {len(batch.label)} labels and views "
                f"of shapes {shapes}; expected (batch, channel, height, width) with one batch size"
            )

    @abstractmethod
    def encode(self, batch: Batch, /) -> Sequence[Tensor]:
        """Run the networks on the views; return tensors with one row per image."""

    @abstractmethod
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float, /) -> Step[Memo]:
        """Compute the loss. Must leave the state as it is.

        Args:
            encoded: What `encode` returns, of the whole batch.
            batch: Index and label of every image of the whole batch; there are no views.
            progress: Share of training that is done, from 0 to 1.
        """

    @torch.no_grad()
    def commit(self, memo: Memo, progress: float, /) -> None:
        """Write to the memories after the optimizer step. Writes nothing by default."""

    def learning_rates(self, schedule: Schedule, /) -> Mapping[str, Schedule]:
        """Return the learning rates that depart from `schedule`, by parameter-name prefix."""
        del schedule
        return {}

    @property
    def backbone(self) -> Backbone:
        """The network that training is for."""
        return self.online.backbone
