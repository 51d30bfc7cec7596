"""Networks compiled by torch, where that saves time."""

import shutil
from importlib.util import find_spec
from typing import Final

import torch
from torch import nn

from nearkin.distributed import world_size
from nearkin.errors import UsageError
from nearkin.networks.branch import Branch

MIN_STEPS: Final = 5000
"""Steps that repay a minute or two of compiling."""


def should_compile(device: torch.device, steps: int) -> bool:
    """Return whether compiling is possible here and saves time over that many steps.

    On CPUs it was measured not to (docs/benchmarks.md).
    """
    able = find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang")))
    return device.type == "cuda" and steps >= MIN_STEPS and bool(able)


def compile_branches(method: nn.Module, *, graphs: bool = False) -> None:
    """Let torch compile every backbone and projector when they are first run.

    Names and state stay as they are, and copies of the method are not compiled. Results are
    close to those of the same networks uncompiled, not equal.

    Args:
        method: Changed in place. Objectives, predictors and memories are left alone.
        graphs: Whether to use CUDA graphs.

    Raises:
        UsageError: If there are several processes or chunks, whose batch statistics cross what is
            compiled.
    """
    branches = [module for module in method.modules() if isinstance(module, Branch)]
    if world_size() > 1 or any(branch.chunk_size for branch in branches):
        raise UsageError("several processes, or chunks, cannot be compiled; leave out --compile")
    for network in dict.fromkeys(part for branch in branches for part in branch.children()):
        network.compile(mode="reduce-overhead" if graphs else "default")
