"""Full precision for objectives, gradients that are final, and vectors of length one."""

from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SHORTEST: Final = 1e-6
"""Vectors shorter than this have no direction to speak of: they stay shorter than one."""


def full_precision(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a function with autocast off and its half-precision tensors widened to float32.

    Similarities divided by a small temperature lose their digits in bfloat16, and the largest
    of them decides the gradient.
    """

    def widen(x: object) -> object:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if half else x  # type: ignore[attr-defined]

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        device = next(x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            wide = {name: widen(x) for name, x in kwargs.items()}
            return function(*map(widen, args), **wide)  # type: ignore[arg-type]

    return run


def first_derivative(
    backward: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """Refuse to differentiate a backward pass that is computed outside of the graph.

    PyTorch's `once_differentiable` does so only where the incoming gradient has a graph: where a
    loss is differentiated itself, it would take the gradient for a constant.

    Raises:
        NotImplementedError: Where a graph of the backward pass is asked for.
    """

    @wraps(backward)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "an objective of a large batch has no second derivative; use a smaller batch, "
                "or leave out create_graph=True"
            )
        return backward(*args, **kwargs)

    return run


@full_precision
def unit(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Scale each vector to length one, whatever its length: squares cannot overflow or vanish.

    Near zero the gradient, which is one over the length, is held at `1 / SHORTEST`.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    scaled = x / largest.clamp(min=SHORTEST)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(largest < SHORTEST, length.clamp(min=1), length)
