"""Muon: steps along the nearest orthogonal matrix, for all weights in few operations."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import override

from nearkin.distributed import native_precision

MOMENTUM: Final = 0.95  # Of matrices
POLYNOMIALS: Final = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Odd ones of degree five, which bring singular values near 1 in five steps.

Cesista 2025, leloykun.github.io/ponder/muon-opt-coeffs.
"""
STEP_SIZE: Final = 0.2  # Root mean square of a step at learning rate 1, as usual with AdamW
MIN_SIDE: Final = 4
MAX_ASPECT: Final = 128
TILE: Final = 256  # Rows by which matrices are padded together on a GPU


class Muon(Optimizer):
    """Momentum whose steps are orthogonal matrices; NAdamW for vectors and thin matrices.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon, with steps as long as those of AdamW
    (Liu et al. 2025, arXiv:2502.16982, eq. 4). With gradient `G` of weights `W` of m x n, the
    weights of a convolution being a matrix with a row per output channel,

        V <- .95 V + .05 G
        W <- (1 - lr weight_decay) W - lr .2 sqrt(max(m, n)) orthogonal(.95 V + .05 G)

    where `orthogonal` sets all singular values to about 1, by five polynomials (Newton-Schulz).
    They are computed in bfloat16 where the device multiplies it natively, in float32 elsewhere.
    Matrices with a side of one channel or below 4, or longer than 128 times their width, take
    the steps of NAdamW (Dozat 2016, with decoupled weight decay), and so do vectors. `betas` are
    the EMA coefficients of NAdamW.
    """

    _prepared: dict[Tensor, tuple[Tensor, Tensor]] | None = None
    """The gradients' average and the step of each matrix, between `prepare` and `step`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the steps of matrices from their gradients, and change nothing yet.

        A GPU does so while it is not yet known whether the gradients are finite; `step` then only
        writes. It prepares what was not.
        """
        # Matrices of all groups together: the fewer the products, the better for a GPU.
        chosen = [
            (p, group["lr"])
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and is_matrix(p)
        ]
        self._prepared = {}
        if not chosen:
            return
        matrices = [p for p, _ in chosen]
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [p.grad for p in matrices if p.grad is not None]
        buffers = [self.state[p]["momentum_buffer"] for p in matrices]
        averages = torch._foreach_lerp(buffers, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, averages, MOMENTUM)
        device = matrices[0].device
        steps = orthogonal(ahead, native_precision(device), padded=device.type != "cpu")
        torch._foreach_copy_(ahead, steps)
        torch._foreach_mul_(ahead, [-lr * STEP_SIZE * max(_sides(p)) ** 0.5 for p, lr in chosen])
        self._prepared = dict(zip(matrices, zip(averages, ahead, strict=True), strict=True))

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._prepared is None:
            self.prepare()
        prepared, self._prepared = self._prepared or {}, None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                self._adapt([p for p in params if p not in prepared], group)
        for p, (average, _) in prepared.items():
            self.state[p]["momentum_buffer"] = average
        if prepared:
            torch._foreach_add_(list(prepared), [step for _, step in prepared.values()])
        return loss

    def _adapt(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Take a step of NAdamW, without its weight decay."""
        if not params:
            return
        for p in params:
            if not self.state[p]:
                averages = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p] |= {"step": 0, **averages}
            self.state[p]["step"] += 1
        states = [self.state[p] for p in params]
        means, squares = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        ahead = torch._foreach_lerp(means, gradients, 1 - beta1)
        deviations = torch._foreach_sqrt(squares)
        torch._foreach_div_(deviations, [math.sqrt(1 - beta2 ** s["step"]) for s in states])
        torch._foreach_add_(deviations, 1e-8)
        rates = [-group["lr"] / (1 - beta1 ** s["step"]) for s in states]
        torch._foreach_addcdiv_(params, ahead, deviations, rates)


def is_matrix(weights: Tensor) -> bool:
    """Return whether Muon moves weights as a matrix."""
    if weights.ndim < 2 or 1 in weights.shape[:2]:
        return False
    short, long = sorted(_sides(weights))
    return short >= MIN_SIDE and long <= MAX_ASPECT * short


def _sides(weights: Tensor) -> tuple[int, int]:
    return len(weights), weights[0].numel()


def orthogonal(
    tensors: Sequence[Tensor], dtype: torch.dtype, *, padded: bool = False
) -> list[Tensor]:
    """Return about the nearest orthogonal matrix of each tensor, in its shape and in `dtype`.

    Tensors of more dimensions have a row for each place of the first one. Matrices may be `padded`
    with zeros to a few common sizes, as pays on a GPU, where launches count. It changes nothing:
    rows and columns of zeros remain zero.
    """
    batches = dict[tuple[int, ...], list[int]]()
    for i, tensor in enumerate(tensors):
        short, long = sorted(_sides(tensor))
        size = (math.ceil(short / TILE),) if padded else (short, long)
        batches.setdefault(size, []).append(i)
    results = dict[int, Tensor]()
    for members in batches.values():
        own = [tensors[i] for i in members]
        shape = (len(own), *map(max, zip(*(sorted(_sides(x)) for x in own), strict=True)))
        batch = torch.zeros(shape, dtype=dtype, device=own[0].device)
        torch._foreach_copy_(_parts(batch, own), own)
        results |= zip(members, _parts(newton_schulz(batch), own), strict=True)
    return [results[i] for i in range(len(tensors))]


def _parts(matrices: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each wide matrix that holds the numbers of a tensor, in its shape: views.

    Columns are in the order of the tensor's memory, in which copies are fastest.
    """
    parts, (_, *strides) = list[Tensor](), matrices.stride()
    for number, tensor in enumerate(like):
        rows, columns = _sides(tensor)
        of_row, of_column = reversed(strides) if rows > columns else strides
        places = [of_row] + [0] * (tensor.ndim - 1)
        for dim in sorted(range(1, tensor.ndim), key=tensor.stride):
            places[dim], of_column = of_column, of_column * tensor.shape[dim]
        offset = matrices.storage_offset() + number * matrices.stride(0)
        parts.append(matrices.as_strided(tensor.shape, places, offset))
    return parts


def newton_schulz(batch: Float[Tensor, "batch short long"]) -> Float[Tensor, "batch short long"]:
    """Return matrices of the same singular vectors, with singular values of about 1."""
    x = batch.div_(torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True).clamp_(min=1e-7))
    for a, b, c in POLYNOMIALS:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x
