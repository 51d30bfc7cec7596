"""Momentum encoders: copies that follow what is trained, slowly (He et al. 2020, eq. 2)."""

import copy
import math
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def frozen_copy(module: Module) -> Module:
    """A copy no gradient reaches: the starting point of a momentum encoder."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Move the target's parameters towards the online ones: t <- m t + (1 - m) o.

    Parameters only: batch-norm statistics are the target's own, as in the papers' code.
    """
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1 - momentum)


def rising(momentum: float, progress: float) -> float:
    """A momentum that rises along half a cosine to one: the target slows to a halt.

    Grill et al. 2020, section 3.2: `1 - (1 - momentum) (cos(pi k / K) + 1) / 2` at step k of K.

    >>> [rising(0.5, progress) for progress in (0.0, 0.5, 1.0)]
    [0.5, 0.75, 1.0]
    """
    return 1 - (1 - momentum) * (math.cos(math.pi * progress) + 1) / 2
