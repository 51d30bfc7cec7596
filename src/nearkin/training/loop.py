"""The training loop. It yields after every step; what to log or save is its caller's business."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from nearkin.distributed import wrap
from nearkin.errors import DivergedError
from nearkin.method import Method, Schedule
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.training.allocation import memory_kept
from nearkin.training.optimizer import set_learning_rates
from nearkin.types import Batch, Step


def fold(seed: int, step: int) -> int:
    """A seed for one step, so that randomness needs no state and resuming needs no generator.

    >>> fold(seed=0, step=7), fold(seed=2, step=7)
    (7, 2000013)
    """
    return (seed * 1_000_003 + step) % 2**63


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch draw from this seed within a `with` block, and go on as if it had not, after it.

    Args:
        seed: Of what is drawn.
        device: Where; the processor is always included.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cpu":  # all generators would be more than are brought back
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def refuse_not_finite(method: Method[Any], loss: Tensor, step: int) -> None:
    """Stop before a loss or a gradient that is not finite reaches anything that lasts.

    Raises:
        DivergedError: Naming the first parameter with such a gradient.
    """
    what = f"the loss is {loss.item()}"
    if loss.isfinite():
        graded = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
        if get_total_norm(graded.values()).isfinite():
            return
        norms = {name: get_total_norm([grad]) for name, grad in graded.items()}
        name = next((name for name, norm in norms.items() if not norm.isfinite()), "")
        what = f"the gradient of {name or 'all parameters together'} is not finite"
    raise DivergedError(
        f"{what} at step {step}; nothing was written since the step before. Try a smaller --lr"
    )


def release_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients of groups whose learning rate is zero, which would gather as momentum."""
    for group in optimizer.param_groups:
        if group["lr"] == 0:
            for parameter in group["params"]:
                parameter.grad = None


def steps(
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    start: int,
    total: int,
    schedule: Schedule,
    seed: int,
    precision: torch.dtype = torch.float32,
) -> Iterator[tuple[int, Step[Any]]]:
    """Train from step `start` to step `total`, yielding the number of steps done and the last.

    Args:
        method: What to train. It is left in training mode.
        optimizer: Over the method's parameters, from `build_optimizer`.
        batches: The batches of the steps from `start` on.
        start: Steps that are already done.
        total: Steps of the whole training; progress is `step / total`.
        schedule: The learning rate relative to its peak, as a function of progress.
        seed: Decides what methods draw.
        precision: Arithmetic of the networks; objectives and memories keep float32.

    Raises:
        DivergedError: If the loss or a gradient is not finite, before anything is written.
    """
    normalize_in_groups(method, groups=1)
    model = wrap(method.train())
    device = next(method.parameters()).device
    with memory_kept():
        for step, batch in zip(range(start, total), batches, strict=False):
            progress = step / total
            set_learning_rates(optimizer, method, schedule, progress)
            with seeded(fold(seed, step), device):
                with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                    found: Step[Any] = model(batch, progress)
                optimizer.zero_grad(set_to_none=True)
                found.loss.backward()
                refuse_not_finite(method, found.loss, step)
                release_frozen(optimizer)
                optimizer.step()
                method.commit(found.memo, progress)
            yield step + 1, found
