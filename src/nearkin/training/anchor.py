"""An anchor: a backbone that goes on learning still sees a batch as its frozen start does.

    loss = method's loss + weight * gram(features, features of the start)

The start sees the very images that the backbone is given, in evaluation mode and at the same size.
It is added to the loss of any method, which does not know of it, and is part of no checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from nearkin.distributed import gather, mean_over_rows
from nearkin.method import Method
from nearkin.networks.branch import Backbone, frozen_copy, hooked, trained_backbones
from nearkin.objectives import gram, unit
from nearkin.objectives.numerics import dividing_rows
from nearkin.schema import Auto
from nearkin.types import Batch, Step

ANCHOR: Final = "anchor"
"""The metric of a step, and the column of metrics.csv: the distance from the start."""
Forward = Callable[[Batch, float], Step[Any]]


@dataclass(frozen=True, eq=False)
class Anchor:
    """The frozen start of a training, and the weight of the distance from it."""

    start: Backbone
    weight: float

    @classmethod
    def at(cls, method: Method[Any], weight: float | Auto) -> "Anchor | None":
        """Anchor a method where it is now, before its first step; None without a weight."""
        if weight in ("auto", 0):  # `auto` stays where no training is continued
            return None
        return cls(frozen_copy(method.backbone).eval(), float(weight))

    @contextmanager
    def holding(self, method: Method[Any], forward: Forward) -> Iterator[Forward]:
        """Give a forward pass of the method whose loss has the distance, for a `with` block."""
        seen: list[tuple[Tensor, Tensor]] = []
        passing = False  # while gradients are computed, blocks may run again

        def note(_: nn.Module, images: tuple[Tensor], features: Tensor) -> None:
            if passing and features.requires_grad:  # a frozen backbone is where it was
                seen.append((images[0], features))

        def anchored(batch: Batch, progress: float) -> Step[Any]:
            nonlocal passing
            passing = True
            step = forward(batch, progress)
            passing = False
            distance = self._distance(seen) if seen else torch.zeros_like(step.loss)
            seen.clear()
            metrics = {**step.metrics, ANCHOR: distance}
            return replace(step, loss=step.loss + self.weight * distance, metrics=metrics)

        with hooked(trained_backbones(method), torch.compiler.disable(note)):
            yield anchored

    def _distance(self, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the distance of the whole batch, from this process's share of it."""
        with torch.no_grad():
            before = torch.cat([self.start(images) for images, _ in seen])
        features = torch.cat([features for _, features in seen])
        with dividing_rows(mean_over_rows):
            return gram(unit(gather(features)), unit(gather(before)))
