"""The two values that travel between the layers: a `Batch` goes in, a `Step` comes out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

Memo = TypeVar("Memo")
"""What a method's forward pass hands to its commit: tensors without gradient, or None."""

Encoded = tuple[Tensor, ...]
"""What a method's networks give: tensors with one row per image, in the order of the batch."""

UNKNOWN: Final = -1
"""The label of an image whose class is not known."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Several views of the same images, and which images they are.

    Views may differ in size (multi-crop), never in their number of images.
    """

    views: tuple[Float[Tensor, "batch channel _ _"], ...]
    index: Int[Tensor, " batch"]
    """The image's position in its data set."""
    label: Int[Tensor, " batch"]
    """The image's class, or `UNKNOWN`."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return Batch(tuple(map(move, self.views)), move(self.index), move(self.label))


@dataclass(frozen=True, slots=True)
class Step(Generic[Memo]):
    """What one forward pass found: a loss to descend, and a memo of what to remember."""

    loss: Float[Tensor, ""]
    memo: Memo
    """What `commit` is to write; the same on every rank."""
    metrics: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict[str, Tensor])
