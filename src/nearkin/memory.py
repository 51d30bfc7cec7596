"""Dictionaries that outlive a batch. They are buffers, so a checkpoint holds all of them."""

from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nearkin.objectives import unit
from nearkin.types import UNLABELED, checked

EMPTY: Final = -1
"""The image of an entry that has none yet."""


@checked
def same_image_mask(
    index: Int[Tensor, " batch"], entries: Int[Tensor, " keys"]
) -> Bool[Tensor, "batch keys"]:
    """Return which entries of a memory belong to the image of each query.

    >>> same_image_mask(torch.tensor([4, 7]), torch.tensor([7, EMPTY, 4]))
    tensor([[False, False,  True],
            [ True, False, False]])
    """
    return index[:, None] == entries[None, :]


def _check_dim(keys: Tensor, memory: Tensor) -> None:
    if keys.shape[1] != memory.shape[1]:
        raise ValueError(f"keys have shape {tuple(keys.shape)}, the memory {tuple(memory.shape)}")


class KeyUpdate(NamedTuple):
    """What a step writes to a memory: the index of images, their new keys, and their classes."""

    images: Int[Tensor, " batch"]
    keys: Float[Tensor, "batch dim"]
    label: Int[Tensor, " batch"] | None = None


class Queue(nn.Module):
    """The latest `size` keys; the oldest are overwritten first (He et al. 2020, section 3.2).

    It starts full of random unit vectors that belong to no image. If `labeled`, it also stores
    the class of each key's image, which is `UNLABELED` unless it is given.
    """

    keys: Tensor
    index: Tensor
    label: Tensor
    cursor: Tensor

    def __init__(self, size: int, dim: int, *, labeled: bool = False) -> None:
        super().__init__()
        self.register_buffer("keys", unit(torch.randn(size, dim)))
        self.register_buffer("index", torch.full((size,), EMPTY))
        self.register_buffer("label", torch.full((size if labeled else 0,), UNLABELED))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.long))

    @property
    def filled(self) -> Bool[Tensor, " size"]:
        """Which keys belong to an image, and are not the random ones of the start."""
        return self.index != EMPTY

    @checked
    @torch.no_grad()
    def enqueue(
        self,
        keys: Float[Tensor, "batch dim"],
        index: Int[Tensor, " batch"],
        label: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Overwrite the oldest keys with these, which belong to the images `index`.

        Raises:
            ValueError: If shapes do not fit, or classes are given to a queue that stores none.
        """
        size, written = len(self.keys), len(keys)
        _check_dim(keys, self.keys)
        if label is None:
            label = torch.full_like(index, UNLABELED)
        elif not len(self.label):
            raise ValueError("enqueue: label is given, and the queue is not labeled=True")
        slots = (self.cursor + torch.arange(written, device=keys.device)) % size
        # More keys than slots: only the last ones stay, and no slot is written twice.
        slots = slots[-size:]
        self.keys[slots] = keys[-size:]
        self.index[slots] = index[-size:].long()
        if len(self.label):
            self.label[slots] = label[-size:].long()
        self.cursor.copy_((self.cursor + written) % size)


class MemoryBank(nn.Module):
    """One key per training image, moved a little at each visit (Wu et al. 2018, section 3.1).

    Args:
        num_images: Number of keys, which start as random unit vectors.
        dim: Dimension of a key.
        momentum: EMA coefficient of a key at each visit.
    """

    keys: Tensor

    def __init__(self, num_images: int, dim: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("keys", unit(torch.randn(num_images, dim)))

    def sample(self, count: int) -> Int[Tensor, " count"]:
        """Draw rows of the bank uniformly, with replacement."""
        return torch.randint(len(self.keys), (count,), device=self.keys.device)

    @checked
    @torch.no_grad()
    def write(self, index: Int[Tensor, " batch"], keys: Float[Tensor, "batch dim"]) -> None:
        """Move the keys of these images towards the given ones."""
        _check_dim(keys, self.keys)
        self.keys[index] = unit(self.keys[index].lerp(keys, 1 - self.momentum))
