"""Optimizers over what a method trains, with a group for every learning rate it names."""

from typing import Any, Literal

import torch
from torch.nn import Parameter

from nearkin.errors import UsageError
from nearkin.method import Method, Schedule
from nearkin.training.lars import LARS
from nearkin.training.schedules import constant


def build_optimizer(
    method: Method[Any],
    *,
    name: Literal["sgd", "lars", "adamw"],
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    eta: float = 1e-3,
    clip: bool = False,
    vectors: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer over the parameters of `method` that require gradients.

    Each prefix of `method.learning_rates` is a group of its own, which holds its `name` and
    `peak_lr`. SGD decays everything, as MoCo and SimSiam do. LARS and AdamW leave biases and
    norm parameters without weight decay, as SimCLR, BYOL and the vision transformers do; with
    `vectors`, LARS decays everything too.

    Args:
        method: What to train.
        name: Which optimizer.
        lr: Peak learning rate, which schedules then multiply.
        weight_decay: Pull of the weights towards zero.
        momentum: How much of the last step is kept; the first beta of AdamW.
        eta: Trust coefficient of LARS.
        clip: Whether LARS moves no layer faster than SGD would.
        vectors: Whether LARS adapts and decays biases and norms too.

    Raises:
        UsageError: If the method names a learning rate for parameters that it does not have.
    """
    groups: list[dict[str, Any]] = [
        {"name": prefix, "params": params, "peak_lr": lr}
        for prefix, params in _by_prefix(method).items()
        if params
    ]
    match name:
        case "sgd":
            return torch.optim.SGD(groups, lr, momentum, weight_decay=weight_decay)
        case "lars":
            return LARS(
                groups,
                lr,
                momentum=momentum,
                weight_decay=weight_decay,
                eta=eta,
                clip=clip,
                vectors=vectors,
            )
        case "adamw":
            groups = [part for group in groups for part in _by_decay(group, weight_decay)]
            return torch.optim.AdamW(groups, lr, betas=(momentum, 0.999), fused=True)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state, which may have been saved from weights that lay in memory in another order.

    Fused kernels go through memory as it lies.
    """
    optimizer.load_state_dict(state)
    for weight, found in optimizer.state.items():
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                found[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def set_learning_rates(
    optimizer: torch.optim.Optimizer, method: Method[Any], schedule: Schedule, progress: float
) -> None:
    """Give every group the learning rate that is due at this point of training."""
    rates = method.learning_rates(schedule)
    for group in optimizer.param_groups:
        due = rates.get(group["name"], schedule)
        group["lr"] = float(group["peak_lr"] * due(progress))  # checkpoints hold no numpy numbers


def _by_prefix(method: Method[Any]) -> dict[str, list[Parameter]]:
    """Trainable parameters by the most specific prefix that names them; all others under ""."""
    names = dict(method.named_parameters())
    groups: dict[str, list[Parameter]] = {}
    for prefix in sorted(method.learning_rates(constant()), key=len, reverse=True):
        under = [name for name in names if f"{name}.".startswith(f"{prefix}.")]
        if not under:
            raise UsageError(
                f"{type(method).__name__}.learning_rates names {prefix!r}, under which there are "
                "no parameters; correct the prefix"
            )
        groups[prefix] = [names.pop(name) for name in under]
    groups[""] = list(names.values())
    return {prefix: [p for p in some if p.requires_grad] for prefix, some in groups.items()}


def _by_decay(group: dict[str, Any], weight_decay: float) -> list[dict[str, Any]]:
    """The group's matrices, which are decayed, apart from its vectors, which are not."""
    matrices = [p for p in group["params"] if p.ndim > 1]
    vectors = [p for p in group["params"] if p.ndim <= 1]
    parts = ((matrices, weight_decay), (vectors, 0.0))
    return [{**group, "params": part, "weight_decay": decay} for part, decay in parts if part]
