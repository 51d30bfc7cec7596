"""Numerics that the objectives share: full precision, sums of exponentials."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearkin.types import checked

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def full_precision(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a function with autocast off and its half-precision tensors widened to float32.

    Shapes and kinds of tensors are checked by their annotations; see `nearkin.types.checked`.
    Similarities divided by a small temperature lose their digits in bfloat16, and the largest
    of them decides the gradient.
    """

    def widen(x: object) -> object:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if half else x  # type: ignore[attr-defined]

    @checked
    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            wide = {name: widen(x) for name, x in kwargs.items()}
            return function(*map(widen, args), **wide)  # type: ignore[arg-type]

    return run


def masked_logsumexp(
    logits: Float[Tensor, "batch keys"], ignored: Bool[Tensor, "batch keys"] | None = None
) -> Float[Tensor, " batch"]:
    """Return the logarithm of the sum of exponentials of the logits that are not ignored."""
    if ignored is not None:
        # Not -inf: the logsumexp of nothing but -inf has no gradient.
        logits = logits.masked_fill(ignored, torch.finfo(logits.dtype).min / 2)
    return logits.logsumexp(dim=1)


def infonce_from_lse(
    positive: Float[Tensor, " batch"], total: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Return the mean InfoNCE, from positive logits and the logsumexp of the negative ones.

    With `d = total - positive` it is `log(1 + exp(d))`. A softmax over all of them would
    subtract two numbers that agree in every digit once the positive wins by far.
    """
    behind = total - positive
    return torch.logaddexp(behind, torch.zeros_like(behind)).mean()
