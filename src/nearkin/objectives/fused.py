"""Contrastive losses over many logits, block by block: a matrix of all logits is never held.

Values and gradients are those of the plain forms in `nearkin.objectives.contrast`, which are the
reference. Two algorithms: `dictionary_logsumexp` for keys that do not learn, `strip_info_nce` for
all.
"""

import functools
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

MIN_LOGITS: Final = 2**16  # from so many logits on, the forms here are faster than the plain ones
MIN_DICTIONARY_LOGITS: Final = 2**19  # and `dictionary_logsumexp` is faster than `strip_info_nce`
DICTIONARY_BLOCK: Final = (256, 2048)  # queries and keys of a block: what a CPU's cache holds
STRIP: Final = {"cpu": 2**20}  # logits of a strip: what a CPU's cache holds
LARGE_STRIP: Final = 2**26  # logits of a strip on other devices
STRIP_ROWS: Final = 128  # minimum number of rows of a strip: products of fewer rows are slow
EXPONENT_SHARE: Final = 0.4  # of a format's exponents, for logits: sums and gradients stay normal


def should_fuse(query: Tensor, keys: Tensor) -> bool:
    """Return whether the forms here are faster than the plain ones."""
    return len(query) * len(keys) >= MIN_LOGITS


def should_attend(query: Tensor, keys: Tensor, temperature: float) -> bool:
    """Return whether `dictionary_logsumexp` takes such tensors and is faster than strips."""
    large = len(query) * len(keys) >= MIN_DICTIONARY_LOGITS and should_fuse(query, keys)
    # The gradient of keys that learn would need the exponentials a second time.
    return large and not keys.requires_grad and in_reach(query, temperature)


def in_reach(query: Tensor, temperature: float) -> bool:
    """Return whether exponentials of similarities with keys as long are normal without a shift.

    In float32, unit vectors need a temperature of at least 0.028. A GPU would have to be waited
    for to know, so there the answer is no. Keys may be many, and are not measured.
    """
    if query.device.type != "cpu":
        return False
    longest = float(torch.linalg.vector_norm(query.detach(), dim=1).amax())
    return longest**2 / temperature < EXPONENT_SHARE * math.log(torch.finfo(query.dtype).max)


class _KnownGradient(torch.autograd.Function):
    """A loss, or one of each row, whose gradients were computed together with it."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, slopes: Sequence[Tensor | None], *_inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # PyTorch's `once_differentiable` refuses only where the incoming gradient has a graph:
        # where a loss is differentiated itself, it takes the gradient for a constant.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "an objective of a large batch has no second derivative; use a smaller batch, "
                "or leave out create_graph=True"
            )
        slopes: Iterable[Tensor | None] = ctx.saved_tensors
        return None, None, *(None if x is None else grad[..., None] * x for x in slopes)


# A dictionary that does not learn


def dictionary_logsumexp(
    query: Tensor, keys: Tensor, temperature: float, ignored: Tensor | None = None
) -> Tensor:
    """Return `log sum_j exp(query . key_j / temperature)` over the keys that are not ignored.

    The gradient of the logarithm is softmax attention with keys as values, so a block of
    exponentials serves both and is then dropped (Rabe and Staats 2021, arXiv:2112.05682).
    """
    with torch.no_grad():
        scaled, keys = query.contiguous() / temperature, keys.contiguous()
        total, slope = scaled.new_zeros(len(scaled)), torch.zeros_like(scaled)
        num_rows, num_keys = DICTIONARY_BLOCK
        for x in blocks(len(query), num_rows):
            for y in blocks(len(keys), num_keys):
                block = product(scaled[x], keys[y].T).exp_()
                if ignored is not None:
                    block.masked_fill_(ignored[x, y], 0)
                total[x] += block.sum(dim=1)
                slope[x] += product(block, keys[y])
                del block  # the next block then takes its memory
        least = torch.finfo(total.dtype).tiny  # all keys ignored: no gradient, not NaN
        slope /= (temperature * total.clamp(min=least))[:, None]
    result: Tensor = _KnownGradient.apply(total.log(), [slope], query)
    return result


# Any negatives


def strip_info_nce(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    temperature: float,
    ignored: Tensor | None = None,
    own: Sequence[int] = (),
) -> Tensor:
    """Return the InfoNCE loss, computed in strips of queries.

    The loss is one number, so its gradient is known, up to a factor, as soon as the logits of a
    query are: each strip gives its loss and its gradient and is then dropped.

    Negatives at `own` do not count for the first query; those after them do not count for the
    second, and so on.
    """
    inputs = (query, key, negatives)
    with torch.no_grad():
        slopes = [torch.zeros_like(x) if x.requires_grad else None for x in inputs]
        to_query, to_key, to_negatives = slopes
        rows = max(STRIP_ROWS, STRIP.get(query.device.type, LARGE_STRIP) // len(negatives))
        losses = []
        for strip in blocks(len(query), rows):
            logits = product(query[strip] / temperature, negatives.T)
            low = torch.finfo(logits.dtype).min / 2
            for column in own:
                logits.diagonal(offset=strip.start + column).fill_(low)
            if ignored is not None:
                logits.masked_fill_(ignored[strip], low)
            positive = (query[strip] * key[strip]).sum(dim=1, keepdim=True) / temperature
            largest = logits.amax(dim=1, keepdim=True)
            weights = logits.sub_(largest).exp_()
            total = weights.sum(dim=1, keepdim=True)
            # As in `infonce_from_lse`: no difference of numbers that agree in every digit.
            behind = total.log() + largest - positive
            pull = behind.sigmoid() / (temperature * len(query))
            losses.append(torch.logaddexp(behind, torch.zeros_like(behind)))
            share = pull / total  # scales the small matrices instead of all weights
            # Queries and their keys pull each other, negatives push.
            if to_query is not None:
                to_query[strip] = product(weights, negatives).mul_(share).sub_(pull * key[strip])
            if to_key is not None:
                to_key[strip] = -pull * query[strip]
            if to_negatives is not None:
                to_negatives += product(weights.T, share * query[strip])
            del logits, weights  # the next strip then takes their memory
    loss: Tensor = _KnownGradient.apply(torch.cat(losses).mean(), slopes, *inputs)
    return loss


# Products of blocks


def blocks(count: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` consecutive rows that cover `count` rows; the last may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b`, without a gradient, by the faster library that torch is built with.

    On x86, torch multiplies float32 by MKL, which does not use all that CPUs of other makers can
    do. oneDNN, which torch has for convolutions, takes half the time there (docs/benchmarks.md).
    """
    by_onednn = a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    if not by_onednn or not _onednn_agrees():
        return a @ b
    if a.stride(0) == 1 != a.stride(1):  # oneDNN reads a transposed matrix better as the second
        return _onednn_product(b.T, a).T
    return _onednn_product(a, b.T)


def _onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer by oneDNN: a private operation of torch."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


@functools.cache
def _onednn_agrees() -> bool:
    """Whether oneDNN is there and right: a private operation may change, so it is tried once."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    try:
        with torch.inference_mode():
            a, b = torch.arange(300.0).sin_().split([100, 200])
            a, b = a.view(10, 10), b.view(10, 20)
            result = torch.cat([_onednn_product(a, b.T), _onednn_product(b.T, a).T])
            expected = torch.cat([a @ b, (b.T @ a.T).T])
            return torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
