"""Momentum encoders: copies that follow what is trained, slowly (He et al. 2020, eq. 2)."""

import copy
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
