"""Rows normalized together by several processes, in as few passes over them as one needs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from nearkin.distributed import gather, part


@torch.no_grad()
def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of what this process has, at least in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    moved = torch.zeros(2, x.shape[1], dtype=wide, device=x.device)  # decides the precision
    mean, var = torch.batch_norm_update_stats(x, moved[0], moved[1], 0.0)
    return mean, var


class Normalized(torch.autograd.Function):
    """Rows normalized by the statistics of a group that several processes share.

    Every pass over the rows is one of torch's own kernels, in the rows' precision, with sums in
    that of the statistics; the gradient is that of Ioffe and Szegedy 2015, section 3, with its two
    means taken over all processes of the group.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.groups = groups
        by = scale if weight is None else scale * weight
        shift = -mean * by if bias is None else bias - mean * by
        return _scaled(x, by, shift)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=_layout(x))
        _, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, torch.ones_like(mean), None, None, mean, scale, True, 0.0, [False, True, True]
        )
        sums = gather(torch.stack([for_weight, for_bias])[None]).unflatten(0, (ctx.groups, -1))
        rows = x.numel() // x.shape[1] * sums.shape[1]
        along, plain = sums.sum(dim=1)[part(ctx.groups)] / rows
        by = scale if weight is None else scale * weight
        across = by * scale * along
        for_x = _scaled(grad, by, across * mean - by * plain).add_(
            _scaled(x, -across, torch.zeros_like(mean))
        )
        affine = (None, None) if weight is None else (for_weight, for_bias)
        return for_x, *affine, None, None, None


def _scaled(x: Tensor, by: Tensor, shift: Tensor) -> Tensor:
    """`x * by + shift`, channel by channel, in one pass."""
    mean, half = torch.zeros_like(by), torch.full_like(by, 0.5)  # torch 2.11 wants an eps
    return F.batch_norm(x, mean, half, by, shift, training=False, eps=0.5)


def _layout(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
