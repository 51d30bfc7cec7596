"""Networks compiled by torch, where that pays."""

from typing import Any

from nearkin.distributed import world_size
from nearkin.errors import UsageError
from nearkin.method import Method
from nearkin.networks.branch import Branch


def compile_branches(method: Method[Any]) -> None:
    """Let torch compile every backbone and projector, when they are first run.

    Names and state stay as they are, and copies of the method are not compiled. Results are
    close to those of the same networks uncompiled, not equal.

    Args:
        method: Changed in place. Objectives, predictors and memories are left alone.

    Raises:
        UsageError: If there are several processes or chunks, whose batch statistics cross what is
            compiled.
    """
    branches = [module for module in method.modules() if isinstance(module, Branch)]
    if world_size() > 1 or any(branch.chunk_size for branch in branches):
        raise UsageError("several processes, or chunks, cannot be compiled; leave out --compile")
    for network in dict.fromkeys(part for branch in branches for part in branch.children()):
        network.compile()
