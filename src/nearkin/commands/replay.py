"""`nearkin replay`: repeat the step at which a training diverged, and find where it began."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from nearkin.distributed import choose_device
from nearkin.errors import DivergedError, UsageError
from nearkin.extensions import check_trusted
from nearkin.method import Method
from nearkin.run.data import note_data, open_split
from nearkin.run.folder import RunFolder
from nearkin.run.opening import sources_of
from nearkin.training import checkpoint
from nearkin.training.checkpoint import not_finite
from nearkin.training.fit import anchor_for, optimizer_for, training_steps
from nearkin.training.session import build
from nearkin.training.teacher import open_teacher, with_teacher

NAMED: Final = 5  # Images of the batch, or tensors of the state, whose names are given


def replay(
    run: str | Path,
    data: Any = None,
    *,
    backbone: nn.Module | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
) -> list[str]:
    """Repeat the step at which a run diverged. Nothing in the run changes.

    Args:
        run: A run folder.
        data: The images of the run, if they are no longer where they were.
        backbone: The run's network, if it was given one from Python; untrained.
        trust_remote_code: Whether to run code that files of the run name.
        device: Where to compute.

    Returns:
        Lines: a warning if the file of a method or backbone of one's own has changed; what
        happened, which weights and memories were not finite before it, which layer was the first
        with an output that is not, and the batch.

    Raises:
        UsageError: If the run has not diverged, or names code that is not trusted.
        CheckpointError: If the images are not those of the run.
    """
    folder = RunFolder(Path(run))
    config, stored = folder.settings()
    named = {**vars(config), "data": stored if data is None else ""}
    check_trusted(named, folder.config, trust_remote_code)
    config = replace(config, trust_remote_code=trust_remote_code)
    if checkpoint.latest(folder.diverged) is None:
        raise UsageError(f"{run} has not diverged, so there is nothing to replay")
    split = open_split(stored if data is None else data, config, resumed=folder)
    warnings = note_data(folder, split, sources_of(config))
    teacher = open_teacher(folder, config)
    where = choose_device(device)
    method, batches = build(config, split.train, where, backbone, teacher, folder)
    optimizer, anchor = optimizer_for(method, config), anchor_for(method, config)
    step = checkpoint.load(folder.diverged, method, optimizer).step
    before = ", ".join(islice(not_finite(method.state_dict()), NAMED)) or "nothing"
    batch = next(with_teacher(folder, config, batches, teacher).load(step, step + 1))
    total = int(config.epochs) * batches.sampler.steps_per_epoch
    total = max(total, step + 1)
    with _watched(method) as places:
        try:
            taken = training_steps(
                config, method, optimizer, [batch], start=step, total=total, anchor=anchor
            )
            happened = f"the loss is {next(taken)[1].loss.item()}, and its gradient is finite"
        except DivergedError as error:
            happened = str(error).partition(" at step")[0]
    low = min(view.min().item() for view in batch.views)
    high = max(view.max().item() for view in batch.views)
    names = ", ".join(repr(split.train.names[row]) for row in batch.index[:NAMED].tolist())
    return [
        *warnings,
        f"step {step}, once more: {happened}",
        f"before it, not finite: {before}",
        f"first output that is not finite: {next(iter(places), 'none')}",
        f"batch: {len(batch.index)} images, pixels from {low:.2f} to {high:.2f}: {names}, ...",
    ]


@contextmanager
def _watched(method: Method[Any]) -> Iterator[list[str]]:
    """Collect layers in the order in which their outputs stop being finite."""
    places: list[str] = []

    def check(name: str, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            places.append(name)

    leaves = {name: m for name, m in method.named_modules() if not list(m.children())}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: check(name, output))
        for name, module in leaves.items()
    ]
    try:
        yield places
    finally:
        for hook in hooks:
            hook.remove()
