"""Convolutions of small maps, whose weights' gradients are faster as products of matrices."""

from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

POSITIONS: Final = 0.2
"""Positions of a map for each output channel, up to which products of matrices are faster."""


def multiply_small_maps(network: nn.Module) -> None:
    """Let convolutions in bfloat16 take their weights' gradients by products, if maps are small.

    oneDNN sums over one row of a map at a time, and AMX over 32 numbers: a row of four positions
    takes as long as one of 32. A product for each place of the kernel sums over all images
    instead, in a fourth of the time (docs/benchmarks.md). The network is changed in place;
    parameters and their names stay.
    """
    for module in network.modules():
        if type(module) is nn.Conv2d and _is_plain(module):
            module.__class__ = _Conv2d


def _is_plain(module: nn.Conv2d) -> bool:
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return zeros and module.bias is None and module.groups == 1 and module.dilation == (1, 1)


class _Conv2d(nn.Conv2d):
    """A convolution that looks at the size of its maps."""

    @override
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        positions = input.shape[-2] // self.stride[0] * (input.shape[-1] // self.stride[1])
        result: Tensor
        if positions <= POSITIONS * self.out_channels and _trains_in_bfloat16(input, weight):
            halves = input.bfloat16(), weight.bfloat16()
            result = _Convolution.apply(*halves, self.stride, self.padding)
        else:
            result = super()._conv_forward(input, weight, bias)
        return result


def _trains_in_bfloat16(x: Tensor, weight: Tensor) -> bool:
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    in_bfloat16 = x.device.type == "cpu" and (autocast or x.dtype) == torch.bfloat16
    return in_bfloat16 and weight.requires_grad and torch.is_grad_enabled()


class _Convolution(torch.autograd.Function):
    """A convolution with `weight_gradient`."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,), for_x = grads, None
        if ctx.needs_input_grad[0]:
            for_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1,
                (True, False, False),
            )[0]  # fmt: skip
        for_weight = weight_gradient(x, grad, weight.shape[2:], ctx.stride, ctx.padding)
        # In the memory layout of the weights, as optimizers and buckets of gradients want it.
        return for_x, torch.empty_like(weight).copy_(for_weight), None, None


def weight_gradient(
    x: Float[Tensor, "batch fan_in _ _"],
    grad: Float[Tensor, "batch fan_out rows columns"],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Float[Tensor, "fan_out fan_in _ _"]:
    """Return the gradient of a convolution's weights, a product for each place of the kernel.

    Place (i, j) of output channel o and input channel c has the sum over images and positions
    (u, v) of `grad[o, u, v] * x[c, u * stride + i, v * stride + j]`, of images padded with zeros;
    `grad` is the gradient of the result. Sizes of the kernel are its height and width.
    """
    rows, columns = (size * step for size, step in zip(grad.shape[2:], stride, strict=True))
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).movedim(1, -1)
    by_channel = grad.movedim(1, -1).flatten(0, 2).T.contiguous()
    places = [
        by_channel @ padded[:, i : i + rows : stride[0], j : j + columns : stride[1]].flatten(0, 2)
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    gradient: Tensor = torch.stack(places, dim=1).unflatten(1, kernel)
    return gradient.movedim(-1, 1)
