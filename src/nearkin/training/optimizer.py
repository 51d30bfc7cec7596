"""LARS, optimizers with a group for every learning rate a method names, and schedules."""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import override

from nearkin.errors import UsageError
from nearkin.method import Method, Schedule, half_cosine
from nearkin.networks.blocks import layer_depths
from nearkin.networks.branch import trained_backbones
from nearkin.training.muon import Muon

MOMENTUM = 0.9  # Of SGD and LARS
BETAS = (0.9, 0.999)  # Of AdamW, and of Muon for what is no matrix
LARS_FORMS: Mapping[str, Mapping[str, Any]] = {
    "you": {},
    "simclr": {"joint": True, "inside": True},
    "byol": {"joint": True},
    "swav": {"vectors": True},
    "solo-learn": {"eta": 0.02, "clip": True},
}
"""Arguments of `LARS` in the paper and in codes of others.

That of BYOL is the form of Barlow Twins, VICReg, MoCo v3 and DINO too, that of SwAV is LARC.
"""
EPSILON = 1e-8  # Keeps the trust ratio finite where a layer's gradient and weight decay vanish


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling: momentum SGD with a step in proportion to the weights.

    You, Gitman, Ginsburg. Large batch training of convolutional networks. arXiv:1708.03888. With
    weights `w` and gradient `g` of one layer, each step is

        ratio = eta |w| / (|g| + weight_decay |w|),     of SwAV (LARC) and solo-learn, or
                eta |w| / |g + weight_decay w|          if `joint`, of SimCLR, BYOL, Barlow Twins,
                                                        VICReg, MoCo v3 and DINO
        v <- momentum v + ratio (g + weight_decay w)
        w <- w - lr v

    In SimCLR's code the rate is `inside` the momentum, `v <- momentum v + lr ratio (...)` and
    `w <- w - v`: what has been gathered keeps its rate while the schedule moves on.

    With `clip` a layer never moves faster than plain SGD would let it (LARC): the ratio becomes
    `min(ratio / lr, 1)`. Where a norm that is part of it is zero the ratio is 1. Parameters of one
    dimension or none (biases, norms) take `g` alone, with neither weight decay nor adaptation,
    unless `vectors`: then they are layers too, as in SwAV's code.
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
        joint: bool = False,
        inside: bool = False,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta)
        forms = dict(clip=clip, vectors=vectors, joint=joint, inside=inside)
        super().__init__(params, defaults | forms)

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
        inner, outer = (group["lr"], 1.0) if group["inside"] else (1.0, group["lr"])
        torch._foreach_mul_(velocities, group["momentum"])
        if adapted:  # without a copy of any layer: clearing its memory takes longer than the sums
            ratios = inner * _ratios(params, gradients, group)
            torch._foreach_addcmul_(velocities, gradients, list(ratios))
            torch._foreach_addcmul_(velocities, params, list(ratios * group["weight_decay"]))
        else:
            torch._foreach_add_(velocities, gradients, alpha=inner)
        torch._foreach_add_(params, velocities, alpha=-outer)


def _ratios(layers: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Tensor:
    """Return the trust ratio of each layer."""
    w = torch.stack(torch._foreach_norm(layers))
    if group["joint"]:
        gradients = list(torch._foreach_add(gradients, layers, alpha=group["weight_decay"]))
    g = torch.stack(torch._foreach_norm(gradients))
    norm = g if group["joint"] else g + group["weight_decay"] * w
    ratio = group["eta"] * w / (norm + EPSILON)
    if group["clip"]:
        ratio = (ratio / group["lr"]).clamp(max=1)
    return torch.where((w > 0) & (g > 0), ratio, 1)


def warmup_cosine(warmup: float = 0.0, final: float = 0.0, start: float = 0.0) -> Schedule:
    """Return a linear warm-up to the peak, then half a cosine down to `final`.

    The cosine is that of Loshchilov & Hutter (2017, eq. 5) without restarts, the warm-up that of
    Goyal et al. (2017, section 2.2).

    Args:
        warmup: How much of training the rise takes; at least 0 and less than 1.
        final: What is left of the peak at the end, between 0 and 1.
        start: What there is of the peak at the beginning, between 0 and 1.

    >>> schedule = warmup_cosine(warmup=0.5, final=0.2)
    >>> [round(schedule(progress), 3) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]
    [0.0, 0.5, 1.0, 0.6, 0.2]
    """
    cosine = half_cosine(1.0, final)
    return _risen(warmup, start, lambda progress: cosine((progress - warmup) / (1 - warmup)))


def warmup_milestones(
    milestones: Sequence[float], warmup: float = 0.0, start: float = 0.0
) -> Schedule:
    """Return a linear warm-up as above, then drops to a tenth at these shares of training.

    The schedule of InstDisc and MoCo v1 (Wu et al. 2018, section 4.3).

    >>> schedule = warmup_milestones([0.6, 0.8])
    >>> [round(schedule(progress), 3) for progress in (0.0, 0.59, 0.6, 0.8, 1.0)]
    [1.0, 1.0, 0.1, 0.01, 0.01]
    """

    def steps(progress: float) -> float:
        return float(0.1 ** sum(progress >= milestone for milestone in milestones))

    return _risen(warmup, start, steps)


def _risen(warmup: float, start: float, fall: Schedule) -> Schedule:
    """Return a line from `start` to 1, followed by a schedule."""

    def schedule(progress: float) -> float:
        if progress < warmup:
            return start + (1 - start) * progress / warmup
        return fall(progress)

    return schedule


def build_optimizer(
    method: Method[Any],
    *,
    name: Literal["sgd", "lars", "adamw", "muon"],
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    separate_backbone: bool = False,
    lars_form: str = "you",
) -> Optimizer:
    """Build an optimizer over the parameters of `method` that require gradients.

    Each prefix of `method.learning_rates` is a group of its own, which holds its `name` and
    `peak_lr`. SGD decays everything, as MoCo and SimSiam do. The others leave biases and norm
    parameters without weight decay, as SimCLR, BYOL and the vision transformers do; with
    `vectors`, as in SwAV's form, LARS decays everything too.

    `Muon` needs whole matrices, which FSDP divides. On a GPU its steps are computed in bfloat16:
    another number of processes changes them by up to a percent, where it changes other
    optimizers' steps by rounding in float32.

    With `layer_decay` below 1, layers of the backbone learn the more slowly the lower they are:
    those at the top at `lr`, each below at `layer_decay` times the rate of the one above it, as
    pretrained transformers are fine-tuned (Bao et al. 2022, BEiT, arXiv:2106.08254, appendix H;
    He et al. 2022, MAE, arXiv:2111.06377, table 9, where the heads are a layer above).
    With `separate_backbone` the backbone has groups of its own, which can be frozen.

    Raises:
        UsageError: If the method names a learning rate for parameters that it does not have.
    """
    scales: dict[Parameter, float] = {}
    if layer_decay < 1 or separate_backbone:
        for part in trained_backbones(method):
            scales |= _rate_scales(part.body, layer_decay)
    spared = name in ("adamw", "muon")  # LARS spares vectors by itself
    groups = _groups(method, lr, weight_decay, scales, spared)
    match name:
        case "sgd":
            return torch.optim.SGD(groups, lr, MOMENTUM)
        case "lars":
            return LARS(groups, lr, momentum=MOMENTUM, **LARS_FORMS[lars_form])
        case "adamw":
            return torch.optim.AdamW(groups, lr, betas=BETAS, fused=True)
        case "muon":
            return Muon(groups, lr, betas=BETAS)


def _groups(
    method: Method[Any],
    lr: float,
    weight_decay: float,
    scales: Mapping[Parameter, float],
    spared: bool,
) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters that have the same rate and weight decay.

    The most specific prefix that names a parameter gives its group's name, else "". Of a prefix,
    what is not of the backbone comes first, then the backbone's layers from the top, and of each
    matrices before vectors. Checkpoints number parameters in this order.
    """
    rates = method.learning_rates(half_cosine(1.0, 1.0))
    prefixes = [*sorted(rates, key=len, reverse=True), ""]
    named, groups = {""}, dict[tuple[int, float, bool], dict[str, Any]]()
    for name, parameter in method.named_parameters():
        prefix = next((each for each in prefixes if f"{name}.".startswith(f"{each}.")), "")
        named.add(prefix)
        if not parameter.requires_grad:
            continue
        is_spared, scale = spared and parameter.ndim <= 1, scales.get(parameter, math.inf)
        place = prefixes.index(prefix), -scale, is_spared
        new: dict[str, Any] = {"name": prefix, "params": [], "peak_lr": lr}
        new["weight_decay"] = 0.0 if is_spared else weight_decay
        if parameter in scales:
            new |= {"peak_lr": lr * scale, "backbone": True}
        groups.setdefault(place, new)["params"].append(parameter)
    if unused := [prefix for prefix in prefixes if prefix not in named]:
        raise UsageError(
            f"{type(method).__name__}.learning_rates names {unused[0]!r}, under which there are "
            "no parameters; correct the prefix"
        )
    return [groups[place] for place in sorted(groups)]


def _rate_scales(body: nn.Module, layer_decay: float) -> dict[Parameter, float]:
    """Return the rate of each parameter of a backbone, as a share of that of its top layer."""
    depths, names = layer_depths(body), dict(body.named_parameters())
    top = max(depths.values(), default=0)
    return {names[name]: layer_decay ** (top - depth) for name, depth in depths.items()}


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state in the memory layout of the weights, which fused kernels rely on."""
    optimizer.load_state_dict(state)
    for weight, tensors in optimizer.state.items():
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                tensors[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def set_learning_rates(
    optimizer: Optimizer,
    method: Method[Any],
    schedule: Schedule,
    progress: float,
    frozen: float = 0.0,
) -> None:
    """Set the learning rate of every group at this point of training.

    That of the backbone is zero in a first share of it, `frozen`. Then the backbone has its whole
    schedule, warm-up included, in what is left: at the full rate of heads that have warmed up,
    its first steps would be the largest of all.
    """
    rates = method.learning_rates(schedule)
    for group in optimizer.param_groups:
        due = rates.get(group["name"], schedule)
        if group.get("backbone"):
            due = delayed(due, frozen)
        group["lr"] = float(group["peak_lr"] * due(progress))  # checkpoints hold no numpy numbers


def main_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of what no prefix names: of heads, where the backbone's differs."""
    rate: float = min(optimizer.param_groups, key=itemgetter("name"))["lr"]
    return rate


def set_weight_decay(optimizer: Optimizer, weight_decay: float) -> None:
    """Set the weight decay of every group that has any."""
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            group["weight_decay"] = weight_decay


def delayed(schedule: Schedule, frozen: float) -> Schedule:
    """Return a schedule that is zero in a first share of training, and whole in the rest of it.

    >>> schedule = delayed(warmup_cosine(warmup=0.5), frozen=0.2)
    >>> [round(schedule(progress), 3) for progress in (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)]
    [0.0, 0.0, 0.0, 0.5, 1.0, 0.0]
    """
    if not frozen:
        return schedule
    return lambda p: 0.0 if p < frozen else schedule(min(1.0, (p - frozen) / (1 - frozen)))
