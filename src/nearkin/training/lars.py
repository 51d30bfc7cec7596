"""LARS: momentum SGD whose step in each layer is proportional to the layer's weights.

You, Gitman, Ginsburg. Large batch training of convolutional networks. arXiv:1708.03888, in the
form that SimCLR and BYOL train with: the learning rate outside of the momentum, and biases and
norm parameters treated as in plain SGD.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import override

EPSILON = 1e-8  # Keeps the trust ratio finite where a layer's gradient and weight decay vanish


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling.

    With weights `w` and gradient `g` of one layer, each step is

        ratio = eta |w| / (|g| + weight_decay |w|)
        v <- momentum v + ratio (g + weight_decay w)
        w <- w - lr v

    Where `|w|` or `|g|` is zero the ratio is 1. Parameters of one dimension or none (biases,
    norms) take `v <- momentum v + g`: neither weight decay nor adaptation, unless `vectors`.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        momentum: Momentum coefficient.
        weight_decay: Weight decay.
        eta: Trust coefficient: the step's share of the layer's norm, at learning rate 1.
        clip: Never let a layer move faster than plain SGD would (LARC): the ratio becomes
            `min(ratio / lr, 1)`.
        vectors: Treat biases and norms as layers too, as SwAV does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        clip: bool = False,
        vectors: bool = False,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(params, defaults | dict(eta=eta, clip=clip, vectors=vectors))

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("vectors", False)  # older checkpoints have no such option

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            self._move([p for p in trained if p.ndim <= 1 and not group["vectors"]], group, False)
            self._move([p for p in trained if p.ndim > 1 or group["vectors"]], group, True)
        return loss

    def _move(self, params: list[Tensor], group: dict[str, Any], adapted: bool) -> None:
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p]["velocity"] = torch.zeros_like(p)
        velocities = [self.state[p]["velocity"] for p in params]
        gradients = [p.grad for p in params if p.grad is not None]
        torch._foreach_mul_(velocities, group["momentum"])
        if adapted:  # without a copy of any layer: clearing its memory takes longer than the sums
            ratios = _ratios(params, gradients, group)
            torch._foreach_addcmul_(velocities, gradients, list(ratios))
            torch._foreach_addcmul_(velocities, params, list(ratios * group["weight_decay"]))
        else:
            torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(params, velocities, alpha=-group["lr"])


def _ratios(layers: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Tensor:
    """Return the trust ratio of each layer."""
    w = torch.stack(torch._foreach_norm(layers))
    g = torch.stack(torch._foreach_norm(gradients))
    ratio = group["eta"] * w / (g + group["weight_decay"] * w + EPSILON)
    if group["clip"]:
        ratio = (ratio / group["lr"]).clamp(max=1)
    return torch.where((w > 0) & (g > 0), ratio, 1)
