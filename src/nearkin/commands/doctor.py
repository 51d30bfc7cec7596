"""`nearkin doctor`: what is installed here, and where a training diverged."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from nearkin.commands.arguments import PathLike, command
from nearkin.commands.sources import source_of
from nearkin.data.batches import growing
from nearkin.distributed import available_cpus, choose_device, device_name, native_precision
from nearkin.errors import DivergedError, UsageError
from nearkin.method import Method
from nearkin.networks.branch import hooked
from nearkin.pace import count
from nearkin.result import Result
from nearkin.run.data import note_data, open_split
from nearkin.run.folder import RunFolder
from nearkin.run.opening import sources_of
from nearkin.text import abridged, aligned
from nearkin.training import checkpoint
from nearkin.training.anchor import Anchor
from nearkin.training.checkpoint import not_finite
from nearkin.training.fit import optimizer_for, training_steps
from nearkin.training.session import build
from nearkin.training.teacher import open_teacher, parts_of
from nearkin.version import __version__

NAMED: Final = 5  # Images of the batch, or tensors of the state, whose names are given


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """What was found, by name."""

    found: Mapping[str, str]

    @override
    def to_dict(self) -> Mapping[str, str]:
        return self.found

    @override
    def lines(self) -> list[str]:
        return aligned([*self.found.items()])


@command
def doctor(
    run: PathLike = "",
    data: Any = None,
    *,
    backbone: nn.Module | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
) -> Diagnosis:
    """Tell versions, device, precision and threads; or where a training diverged.

    Of a run that has diverged, the step at which it did is repeated. Nothing in the run changes.

    Args:
        run: The run that has diverged.
        data: Its images, if they are no longer where they were.
        backbone: The run's network, if it was given one from Python; untrained.
        trust_remote_code: Whether to run code that files of the run name.
        device: Where to compute.

    Returns:
        Versions and device; or what happened at that step, which weights and memories were not
        finite before it, which layer was the first with an output that is not, and the batch.

    Raises:
        UsageError: If the run has not diverged, or names code that is not trusted.
        CheckpointError: If the images are not those of the run.
    """
    if not os.fspath(run):
        return Diagnosis(_machine(device))
    return Diagnosis(_replay(RunFolder(Path(run)), data, backbone, trust_remote_code, device))


def _machine(name: str) -> dict[str, str]:
    device = choose_device(name)
    packages = ("torch", "torchvision", "timm", "numpy", "Pillow", "scikit-learn")
    threads = count(torch.get_num_threads(), "thread")
    return {
        "nearkin": __version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        **{name: version(name) for name in packages},
        "device": device_name(device),
        "precision": f"{str(native_precision(device)).removeprefix('torch.')} is native here",
        "CPUs": f"{available_cpus()} may be used; torch uses {threads}",
    }


def _replay(
    folder: RunFolder, data: Any, backbone: nn.Module | None, trust: bool, device: str
) -> dict[str, str]:
    config, _ = folder.settings()
    data = source_of(folder, data, trust, **vars(config))
    config = replace(config, trust_remote_code=trust)
    if checkpoint.latest(folder.diverged) is None:
        raise UsageError(f"{folder.path} has not diverged, so there is nothing to look into")
    split = open_split(data, config, resumed=folder)
    warnings = note_data(folder, split, sources_of(config))
    teacher = open_teacher(folder, config, split.images)
    where = choose_device(device)
    method, batches = build(config, split.train, where, backbone, teacher, folder)
    optimizer, anchor = optimizer_for(method, config), Anchor.at(method, config.anchor)
    step = checkpoint.load(folder.diverged, method, optimizer).step
    before = ", ".join(islice(not_finite(method.state_dict()), NAMED)) or "nothing"
    total = max(int(config.epochs) * batches.sampler.steps_per_epoch, step + 1)
    batch = next(growing(parts_of(folder, config, batches, teacher), step, step + 1, total))
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
    names = abridged([repr(split.train.names[row]) for row in batch.index.tolist()], NAMED)
    changed = "; ".join(each.removeprefix("warning: ") for each in warnings)
    return ({"warning": changed} if changed else {}) | {
        f"step {step}, once more": happened,
        "before it, not finite": before,
        "first output that is not finite": next(iter(places), "none"),
        "batch": f"{count(len(batch.index), 'image')}, pixels from {low:.2f} to {high:.2f}: "
        f"{', '.join(names)}",
    }


@contextmanager
def _watched(method: Method[Any]) -> Iterator[list[str]]:
    """Collect layers in the order in which their outputs stop being finite."""
    places = list[str]()
    leaves = {m: name for name, m in method.named_modules() if not list(m.children())}

    def check(module: nn.Module, _inputs: Any, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            places.append(leaves[module])

    with hooked(leaves, check):
        yield places
