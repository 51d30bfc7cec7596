"""The training loop: a generator of steps that keeps no state but the method's and optimizer's."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import register_pytree_node

from nearkin.data.rng import seeded
from nearkin.distributed import data_parallel, fixed_shapes, has_amx, is_sharded, to_host_async
from nearkin.distributed.allocation import keep_freed_memory
from nearkin.errors import DivergedError
from nearkin.method import Method, Schedule
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.branch import freeze_backbones
from nearkin.networks.convolution import multiply_small_maps
from nearkin.training.anchor import Anchor
from nearkin.training.muon import Muon
from nearkin.training.optimizer import set_learning_rates, set_weight_decay
from nearkin.types import Batch, Step

# So that several processes find the loss in a step.
register_pytree_node(
    Step, lambda step: ([step.loss, step.memo, step.metrics], None), lambda parts, _: Step(*parts)
)


def _prepared(method: Method[Any], multiply: bool) -> nn.Module:
    """Return what runs the steps of all processes; the method is changed in place."""
    normalize_in_groups(method, groups=1)
    if multiply:
        multiply_small_maps(method)
    return data_parallel(method.train())


def fold(seed: int, step: int) -> int:
    """Derive the seed of one step, so that resuming needs no state of a generator.

    >>> fold(seed=0, step=7), fold(seed=2, step=7)
    (7, 2000013)
    """
    return (seed * 1_000_003 + step) % 2**63


def gradients(method: Method[Any]) -> dict[str, Tensor]:
    """Return the gradients of all parameters that have one, by name."""
    return {name: p.grad for name, p in method.named_parameters() if p.grad is not None}


def total_norm(method: Method[Any], of: Iterable[Tensor]) -> Tensor:
    """Return the norm of these gradients together, the same in all processes."""
    norm: Any = get_total_norm(of)
    whole: Tensor = norm.full_tensor() if is_sharded(method) else norm
    return whole


def check_finite(method: Method[Any], loss: Tensor, norm: Tensor, step: int) -> None:
    """Refuse a loss or a gradient that is not finite before anything is written.

    Raises:
        DivergedError: Naming the first parameter with such a gradient.
    """
    if loss.isfinite() and norm.isfinite():
        return
    what = f"the loss is {loss.item()}"
    if loss.isfinite():
        norms = {name: total_norm(method, [grad]) for name, grad in gradients(method).items()}
        name = next((name for name, norm in norms.items() if not norm.isfinite()), "")
        what = f"the gradient of {name or 'all parameters together'} is not finite"
    raise DivergedError(
        f"{what} at step {step}; nothing was written since the step before. Try a lower learning "
        "rate"
    )


def prepare_update(
    method: Method[Any], optimizer: torch.optim.Optimizer, clip_norm: float
) -> None:
    """Do what the optimizer's step needs of gradients alone: no state is written.

    What is frozen takes no part in the norm: only several processes have all of its gradients.
    """
    for group in optimizer.param_groups:
        if group["lr"] == 0:  # its gradients would enter momentum
            for parameter in group["params"]:
                parameter.grad = None
    if clip_norm and (moving := gradients(method)):  # none at the start of a warm-up
        norm = total_norm(method, moving.values())
        # A norm that is not finite scales nothing: `check_finite` names where it comes from.
        clip_grads_with_norm_(method.parameters(), clip_norm, norm.where(norm.isfinite(), 0.0))
    if isinstance(optimizer, Muon):
        optimizer.prepare()


def steps(
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    start: int,
    total: int,
    schedule: Schedule,
    seed: int,
    weight_decay: Schedule | None = None,
    clip_norm: float = 0.0,
    precision: torch.dtype = torch.float32,
    frozen: float = 0.0,
    anchor: Anchor | None = None,
) -> Iterator[tuple[int, Step[Any]]]:
    """Train from step `start` to step `total`, yielding the number of steps done and the last.

    While a GPU computes gradients, it is given the next views, and what Muon makes of gradients.
    Of the whole step, only its loss, metrics and the norm of its gradients are waited for, and
    these are on the CPU then. That is before the optimizer's step: undoing one that diverged would
    take a copy of the whole state. While the GPU does what it was given, it is given the update.

    Args:
        method: What to train. It is left in training mode.
        optimizer: Over the method's parameters, from `build_optimizer`.
        batches: The batches of the steps from `start` on.
        start: Steps that are already done.
        total: Steps of the whole training; progress is `step / total`.
        schedule: The learning rate relative to its peak, as a function of progress.
        seed: Decides what methods draw.
        weight_decay: As a function of progress; None leaves it as the optimizer has it.
        clip_norm: Largest norm together of all gradients of what is not frozen; 0: none.
        precision: Arithmetic of the networks; objectives and memories keep float32.
        frozen: The first share of training, in which the backbone stays as it is. The optimizer
            must have groups of its own for it.
        anchor: What holds the backbone near its start, if anything does.

    Raises:
        DivergedError: If the loss or a gradient is not finite, before anything is written.
    """
    device = next(method.parameters()).device
    model = _prepared(method, precision == torch.bfloat16 and has_amx(device))
    upcoming = islice(batches, max(0, total - start))
    batch = next(upcoming, None)
    held: Any = anchor.holding(method, model) if anchor else nullcontext(model)
    with keep_freed_memory(), held as forward:
        for step in range(start, total):
            if batch is None:
                return
            progress = step / total
            set_learning_rates(optimizer, method, schedule, progress, frozen)
            if weight_decay:
                set_weight_decay(optimizer, weight_decay(progress))
            if frozen:
                freeze_backbones(method, progress < frozen)
            with seeded(fold(seed, step), device), fixed_shapes():
                with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                    result: Step[Any] = forward(batch, progress)
                optimizer.zero_grad(set_to_none=True)
                result.loss.backward()
            norm = total_norm(method, gradients(method).values())
            read = to_host_async(
                torch.stack([result.loss, norm, *result.metrics.values()]).detach()
            )
            prepare_update(method, optimizer, clip_norm)
            batch = next(upcoming, None)
            loss, norm, *metrics = read()
            check_finite(method, loss, norm, step)
            optimizer.step()
            method.commit(result.memo, progress)
            named = dict(zip(result.metrics, metrics, strict=True))
            yield step + 1, replace(result, loss=loss, metrics=named)
