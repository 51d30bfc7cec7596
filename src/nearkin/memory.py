"""Dictionaries that outlive a batch. Plain buffers, so a checkpoint holds all of them."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nearkin.objectives import unit
from nearkin.types import UNKNOWN


def same_image_mask(
    index: Int[Tensor, " batch"], entries: Int[Tensor, " keys"]
) -> Bool[Tensor, "batch keys"]:
    """Which entries of a memory show the image that a query shows.

    >>> same_image_mask(torch.tensor([4, 7]), torch.tensor([7, UNKNOWN, 4]))
    tensor([[False, False,  True],
            [ True, False, False]])
    """
    return index[:, None] == entries[None, :]


class KeyUpdate(NamedTuple):
    """What a step leaves for a memory to write: images, by index, and the keys they were given."""

    images: Int[Tensor, " batch"]
    keys: Float[Tensor, "batch dim"]


class Queue(nn.Module):
    """The latest `size` keys, oldest overwritten first (He et al. 2020, section 3.2).

    Starts full of random unit vectors that belong to no image, as the papers do.

    Args:
        size: How many keys there are.
        dim: Numbers in a key.
        labeled: Whether the class of each key's image is kept as well.
    """

    keys: Tensor
    index: Tensor
    label: Tensor
    cursor: Tensor

    def __init__(self, size: int, dim: int, *, labeled: bool = False) -> None:
        super().__init__()
        self.register_buffer("keys", unit(torch.randn(size, dim)))
        self.register_buffer("index", torch.full((size,), UNKNOWN))
        self.register_buffer("label", torch.full((size if labeled else 0,), UNKNOWN))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.long))

    @property
    def filled(self) -> Bool[Tensor, " size"]:
        """Which keys show an image, and are not what the queue started with."""
        return self.index != UNKNOWN

    @torch.no_grad()
    def enqueue(
        self,
        keys: Float[Tensor, "batch dim"],
        index: Int[Tensor, " batch"],
        label: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Overwrite the oldest keys with these, which show the images `index`."""
        size = len(self.keys)
        written = len(keys)
        slots = (self.cursor + torch.arange(written, device=keys.device)) % size
        slots, keys, index = slots[-size:], keys[-size:], index[-size:]
        self.keys[slots] = keys
        self.index[slots] = index
        if label is not None:
            self.label[slots] = label[-size:]
        self.cursor.copy_((self.cursor + written) % size)


class MemoryBank(nn.Module):
    """One key per training image, moved a little at each visit (Wu et al. 2018, section 3.1).

    Starts as random unit vectors.
    """

    keys: Tensor

    def __init__(self, num_images: int, dim: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("keys", unit(torch.randn(num_images, dim)))

    def sample(self, count: int) -> Int[Tensor, " count"]:
        """Rows of the bank drawn uniformly, with replacement."""
        return torch.randint(len(self.keys), (count,), device=self.keys.device)

    @torch.no_grad()
    def write(self, index: Int[Tensor, " batch"], keys: Float[Tensor, "batch dim"]) -> None:
        """Move the keys of these images towards the given ones."""
        self.keys[index] = unit(self.keys[index].lerp(keys, 1 - self.momentum))
