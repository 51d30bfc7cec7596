"""Convolutions with a stride that are trained without threads that spin.

In bfloat16 on a CPU, threads of oneDNN 3.13 that compute the gradient of the weights of such a
convolution meet for each image, and spin until all are there. If another process has the core of
one of them, each meeting takes a turn of the scheduler, and a step many times as long. Here each
thread takes a part of the images, and they meet once.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input, conv2d_weight
from typing_extensions import override

Pair = tuple[int, ...]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads each of which computes alone."""

    def alone() -> None:
        torch.get_num_threads()  # torch sets it when a thread first asks, and not again
        threadpool_limits(1, user_api="openmp")  # of this thread only

    return ThreadPoolExecutor(threads, "weight gradient", alone)


def weight_gradient(
    x: Float[Tensor, "n fan_in _ _"],
    weight: Float[Tensor, "fan_out fan_in _ _"],
    grad: Float[Tensor, "n fan_out _ _"],
    stride: Pair,
    padding: Pair,
) -> Float[Tensor, "fan_out fan_in _ _"]:
    """Return the gradient of a convolution's weights; of several threads, the sum in float32."""

    @torch.no_grad()
    def of(x: Tensor, grad: Tensor) -> Tensor:
        gradient: Tensor = conv2d_weight(x, list(weight.shape), grad, stride, padding)
        return gradient

    threads = min(torch.get_num_threads(), len(x))
    if threads == 1:
        return of(x, grad)
    parts = _pool(threads).map(of, x.tensor_split(threads), grad.tensor_split(threads))
    return torch.stack([part.float() for part in parts]).sum(dim=0).to(weight.dtype)


class _Strided(torch.autograd.Function):
    """A convolution with another way to the same gradient of its weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.at = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, weight), by_input, by_weight = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            by_input = conv2d_input(list(x.shape), weight, grad, *ctx.at)
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(x, weight, grad, *ctx.at)
        return by_input, by_weight, None, None


class StridedConv(nn.Conv2d):
    """The same convolution; trained in bfloat16 on a CPU, its threads do not spin."""

    @override
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = torch.bfloat16
        is_half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == half
        spins = input.device.type == "cpu" and is_half and torch.is_grad_enabled()
        if not spins or torch.compiler.is_compiling():
            plain: Tensor = super()._conv_forward(input, weight, bias)
            return plain
        y: Tensor = _Strided.apply(input.to(half), weight.to(half), self.stride, self.padding)
        return y if bias is None else y + bias.to(half)[:, None, None]


def without_spinning(network: nn.Module) -> None:
    """Turn the convolutions of a network that have a stride into `StridedConv`, in place."""
    for module in network.modules():
        if type(module) is not nn.Conv2d or max(module.stride) == 1:
            continue
        plain = module.groups == max(module.dilation) == 1 and module.padding_mode == "zeros"
        if plain and not isinstance(module.padding, str):
            module.__class__ = StridedConv
