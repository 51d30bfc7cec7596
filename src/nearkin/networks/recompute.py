"""Gradient checkpointing: the activations of blocks are computed again instead of kept."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from nearkin.errors import UsageError
from nearkin.networks.blocks import network_parts


class _Recomputed:
    """Placed before the class of a block: keeps the block's input alone for its gradients."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*inputs, **named)
        # What `views_of_batch` has said holds for the second run too.
        again = copy_context()
        return checkpoint(
            partial(again.run, run),
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _keeping_statistics(self)),
            **named,
        )


@contextmanager
def _keeping_statistics(block: Any) -> Iterator[None]:
    """Let no batch norm of a block move its running statistics: the first run has done that."""
    norms = [norm for norm in block.modules() if isinstance(norm, _BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, num_batches in before:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if num_batches is None else num_batches.clone()
    try:
        yield
    finally:
        for norm, momentum, num_batches in before:
            norm.momentum, norm.num_batches_tracked = momentum, num_batches


def recompute_blocks(body: nn.Module, name: str) -> None:
    """Let every block of a network keep its input alone for its gradients, in place.

    The memory of activations shrinks to that of one block, for a second forward pass (Chen et al.
    2016, Training deep nets with sublinear memory cost, arXiv:1604.06174). Results are the same,
    state and names stay.

    Raises:
        UsageError: If the network has no blocks.
    """
    blocks = [body.get_submodule(part.name) for part in network_parts(body) if part.is_block]
    if not blocks:
        raise UsageError(f"backbone {name} has no blocks; leave --grad-checkpointing out")
    for block in blocks:
        kind = type(block)
        block.__class__ = type(kind.__name__, (_Recomputed, kind), {"__module__": kind.__module__})
