"""The sum over a long dictionary in one pass of fused attention, and never a matrix of logits."""

import functools
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.objectives import lookup
from nearkin.objectives.lookup import look_up
from nearkin.objectives.precision import first_derivative

SMALLEST: Final = 2**19
"""Logits from which on it is faster than the plain form."""

PARTS: Final = 16
"""Parts of the dictionary that are attended to at once, whatever the number of threads."""

ALIGNED: Final = 16
"""The length of a part is a multiple of it, as kernels want it."""


def pays(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "keys dim"],
    ignored: Bool[Tensor, "batch keys"] | None = None,
) -> bool:
    """Whether `log_total` takes such tensors, and is faster than the plain form.

    It is not where the keys learn: their gradient would need the logits again. Nor where another
    device than the processor would have to be waited for, to know which keys are ignored.
    """
    if ignored is not None and ignored.device.type != "cpu":
        return False
    if len(query) * len(keys) < SMALLEST or len(keys) < 2 * PARTS * ALIGNED or keys.requires_grad:
        return False
    return query.dtype == keys.dtype and _agrees(query.device.type, query.dtype)


def log_total(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "keys dim"],
    temperature: float,
    ignored: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, " batch"]:
    """`log sum_j exp(query . key_j / temperature)` over the keys that are not ignored.

    Softmax attention to keys that are values, too, is the gradient of that logarithm; a fused
    kernel gives both and holds a few rows of logits at a time (Rabe and Staats 2021,
    arXiv:2112.05682). Keys that any query ignores, and those left over by equal parts, are
    matched plainly and added: subtracting them afterwards would cancel.

    It has no second derivative, and none of `torch.func`.
    """
    fused = len(keys) // (PARTS * ALIGNED) * (PARTS * ALIGNED)
    apart = torch.arange(len(keys), device=keys.device) >= fused
    if ignored is not None:
        apart |= ignored.view(torch.uint8).amax(dim=0).bool()  # `any` is ten times as slow
    few = apart.nonzero().flatten()
    if 2 * len(few) > len(keys):
        return lookup.log_total(look_up(query, keys, temperature), ignored)
    hidden = apart[:fused] if len(few) > len(keys) - fused else None
    total: Tensor = _LogTotal.apply(query, keys[:fused], 1 / temperature, hidden)
    if len(few) == 0:
        return total
    of_few = None if ignored is None else ignored[:, few]
    return torch.logaddexp(total, lookup.log_total(look_up(query, keys[few], temperature), of_few))


class _LogTotal(torch.autograd.Function):
    """Logarithms of sums over all keys that are not hidden, as functions of the queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, scale: float, hidden: Tensor | None
    ) -> Tensor:
        total, mean = _attend(query, keys, scale, hidden)
        ctx.scale = scale
        ctx.save_for_backward(mean)
        return total

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mean,) = ctx.saved_tensors
        return ctx.scale * grad[:, None] * mean, None, None, None


def _attend(
    query: Tensor, keys: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For each query the logarithm of its sum, and the softmax mean of the keys."""
    query, keys = query.contiguous(), keys.contiguous()  # some kernels insist
    parts = keys.view(1, PARTS, -1, keys.shape[1])
    bias = None
    if hidden is not None:  # not -inf: a part may be hidden altogether
        bias = torch.zeros_like(hidden, dtype=query.dtype)
        bias = bias.masked_fill_(hidden, torch.finfo(query.dtype).min / 2).view(1, PARTS, 1, -1)
    means, totals = _kernel(query.expand(1, PARTS, -1, -1), parts, scale, bias)
    total = totals[0].logsumexp(dim=0)
    shares = (totals[0] - total).exp_()[..., None]
    mean = torch.mul(means[0, 0], shares[0])
    for part in range(1, PARTS):
        mean.addcmul_(means[0, part], shares[part])
    return total, mean


def _kernel(
    query: Tensor, keys: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Torch's fused attention, where it also returns the logsumexp: private operations."""
    if query.device.type == "cpu":
        means, totals = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, keys, attn_mask=bias, scale=scale
        )
        return means, totals
    rows, dim = query.shape[2:]
    query, keys = (F.pad(x, (0, -dim % 8)) for x in (query, keys))  # loads of several numbers
    bias = None if bias is None else bias.expand(-1, -1, rows, -1)
    means, totals, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, keys, bias, True, scale=scale
    )
    return means[..., :dim], totals[..., :rows]


@functools.cache
def _agrees(device: str, dtype: torch.dtype) -> bool:
    """Whether the kernel is there and right: private operations are believed after a trial."""
    try:
        with torch.inference_mode():
            count = 2 * PARTS * ALIGNED
            numbers = torch.arange((5 + count) * 7, device=device).to(dtype).sin_().view(-1, 7)
            query, keys = numbers.split([5, count])
            hidden = torch.arange(count, device=device) % 3 == 0
            total, mean = _attend(query, keys, 2.0, hidden)
            logits = (2 * query @ keys.T).masked_fill(hidden, -torch.inf)
            right = torch.allclose(total, logits.logsumexp(dim=1), rtol=1e-4, atol=1e-5)
            return right and torch.allclose(mean, logits.softmax(dim=1) @ keys, 1e-4, 1e-5)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
